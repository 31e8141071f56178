"""FedCGS, by hand: two Gaussians on a line, and classes that nobody has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll import Params, Task
from atoll.algorithms.afl import AFL
from atoll.algorithms.answers.fedcgs import gaussian
from atoll.algorithms.fedcgs import FedCGS
from atoll.testing.conformance import play


def sums_of(*classes: list[float]) -> Params:
    """The moments of samples of one feature."""
    values = [torch.tensor(one, dtype=torch.float64) for one in classes]
    return Params.of(
        count=torch.tensor([len(one) for one in values], dtype=torch.float64),
        sum=torch.stack([one.sum() for one in values])[:, None],
        square=torch.stack([one.square().sum() for one in values]).sum()[None],
    )


def test_the_boundary_lies_in_the_middle_or_nearer_to_the_rarer_class() -> None:
    weight, bias = gaussian(sums_of([-2.0, 0.0], [2.0, 4.0]), "within", shrinkage=0.5)  # means -1 and 3, variance 1
    assert weight[:, 0].tolist() == pytest.approx([-1, 3])
    middle = torch.tensor([1.0], dtype=torch.float64)
    assert answer(weight, bias, middle).diff().item() == pytest.approx(0)
    weight, bias = gaussian(sums_of([-2.0, 0.0, -2.0, 0.0], [2.0, 4.0]), "within", shrinkage=0.5)
    assert answer(weight, bias, middle).diff().item() == pytest.approx(-torch.tensor(2.0).log().item())


def test_the_total_covariance_holds_the_distance_of_classes_as_well() -> None:
    sums = sums_of([-2.0, 0.0], [2.0, 4.0])  # variance 1 within, 5 in total
    within, total = (gaussian(sums, kind, shrinkage=1e-9)[0] for kind in ("within", "total"))
    torch.testing.assert_close(total, within / 5, rtol=1e-12, atol=0)


def test_shrinkage_goes_to_a_multiple_of_the_identity() -> None:
    sums = Params.of(
        count=torch.tensor([2.0, 2.0]),
        sum=torch.tensor([[0.0, 0.0], [4.0, 4.0]]),  # samples (-1, -3), (1, 3) and (1, -1), (3, 5)
        square=torch.tensor([12.0, 20.0, 44.0]),
    ).map(Tensor.double)
    s = torch.tensor([[1.0, 3.0], [3.0, 9.0]], dtype=torch.float64)
    for share in (1.0, 0.5):
        weight, _ = gaussian(sums, "within", shrinkage=share)
        shrunk = (1 - share) * s + share * 5 * torch.eye(2)
        expected = torch.linalg.solve(shrunk, torch.tensor([2.0, 2.0], dtype=torch.float64))
        torch.testing.assert_close(weight[1], expected, rtol=1e-12, atol=0)


def test_a_class_that_nobody_has_is_never_the_answer() -> None:
    weight, bias = gaussian(sums_of([-2.0, 0.0], [], [2.0, 4.0]), "within", shrinkage=0.5)
    for place in torch.linspace(-50, 50, 11, dtype=torch.float64):
        answers = answer(weight, bias, place[None])
        assert torch.isfinite(answers).all()
        assert int(answers.argmax()) != 1


def test_samples_that_are_all_alike_leave_a_finite_head() -> None:
    weight, bias = gaussian(sums_of([1.0], [1.0]), "within", shrinkage=0.01)
    assert torch.isfinite(weight).all()
    assert torch.isfinite(bias).all()


def test_what_travels_is_what_afl_sends(make_task: Callable[..., Task]) -> None:
    task = make_task()
    mine, theirs = (play(task, one).ledger for one in (FedCGS(), AFL()))
    assert mine.bytes("up") == theirs.bytes("up")
    assert set(mine.by_kind()) == {("up", "statistic")}


def answer(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return weight @ x + bias
