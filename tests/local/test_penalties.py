import torch

from atoll.local import linear, proximal
from atoll.params import Params

W = Params.of(a=torch.tensor([1.0, 2.0]), b=torch.tensor(3.0))
V = Params.of(a=torch.tensor([0.0, 1.0]), b=torch.tensor(1.0))


def test_proximal_is_half_the_squared_distance():
    assert proximal(0.5, center=V)(W).item() == 0.25 * (1 + 1 + 4)


def test_linear_is_the_inner_product():
    assert linear(V)(W).item() == 2 + 3


def test_penalties_add_up():
    both = linear(V) + proximal(0.5, center=V)
    assert both(W).item() == 5 + 1.5
    assert (both + linear(V))(W).item() == 5 + 1.5 + 5


def test_proximal_leaves_alone_what_its_center_does_not_have():
    assert proximal(0.5, center=V.only(["b"]))(W).item() == 0.25 * 4
    assert proximal(0.5, center=V.only([]))(W).item() == 0
