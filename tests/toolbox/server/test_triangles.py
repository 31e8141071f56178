import torch

from atoll.toolbox.server.triangles import symmetric, triangle


def test_a_symmetric_matrix_comes_back_from_its_upper_triangle() -> None:
    matrix = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    assert triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric(triangle(matrix)), matrix)


def test_several_at_once() -> None:
    roots = torch.arange(18.0).reshape(2, 3, 3)
    matrices = roots + roots.mT
    assert triangle(matrices).shape == (2, 6)
    assert torch.equal(symmetric(triangle(matrices)), matrices)


def test_one_number_is_a_matrix_as_well() -> None:
    assert symmetric(torch.tensor([7.0])).tolist() == [[7.0]]
