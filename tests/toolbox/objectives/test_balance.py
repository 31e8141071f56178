"""Losses that do not depend on how many samples of each class a client has."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.balance import balanced_softmax, class_mean, class_weights, log_prior, resample

Y = torch.tensor([0, 1, 0, 2, 1, 0])
COUNTS = torch.tensor([30.0, 5.0, 1.0, 0.0]).double()


def outputs(purpose: str = "outputs") -> Tensor:
    return torch.from_numpy(generator(0, purpose).normal(size=(6, 4)))


def test_with_equal_counts_balanced_softmax_is_cross_entropy() -> None:
    plain = F.cross_entropy(outputs(), Y, reduction="none")
    equal = torch.full((4,), 9.0).double()
    for restricted in (False, True):
        torch.testing.assert_close(balanced_softmax(outputs(), Y, equal, restricted=restricted), plain)


def test_it_is_the_softmax_weighted_by_counts_plus_one() -> None:
    assert log_prior(COUNTS)[3] == 0
    for restricted, left in ((False, 1.0), (True, 0.5)):
        scaled = outputs() * torch.tensor([1.0, 1.0, 1.0, left]).double()
        odds = (COUNTS + 1) * scaled.exp()
        wanted = -(odds / odds.sum(1, keepdim=True)).log()[torch.arange(6), Y]
        torch.testing.assert_close(balanced_softmax(outputs(), Y, COUNTS, restricted=restricted), wanted)


def test_balanced_softmax_has_the_slope_of_finite_differences() -> None:
    answers = outputs().requires_grad_()
    assert torch.autograd.gradcheck(lambda o: balanced_softmax(o, Y, COUNTS, restricted=True).sum(), (answers,))


def test_repeating_the_samples_of_one_class_leaves_the_mean_over_classes() -> None:
    losses = F.cross_entropy(outputs(), Y, reduction="none")
    rows = torch.cat([torch.arange(6), torch.nonzero(Y == 1).flatten().repeat(5)])
    torch.testing.assert_close(class_mean(losses[rows], Y[rows], None, 4), class_mean(losses, Y, None, 4))
    assert abs(losses[rows].mean() - losses.mean()) > 0.01


def test_the_mean_over_classes_leaves_padding_and_absent_classes_out() -> None:
    losses, mask = outputs()[:, 0], torch.tensor([1.0, 1, 1, 0, 1, 0]).double()
    wanted = (losses[[0, 2]].mean() + losses[[1, 4]].mean()) / 2
    torch.testing.assert_close(class_mean(losses, Y, mask, 4), wanted)
    assert class_mean(losses, Y, torch.zeros(6).double(), 4) == 0


def test_weights_give_every_class_what_the_sampler_would() -> None:
    for q in (0.0, 0.5, 1.0):
        weights = class_weights(COUNTS, q)
        drawn = COUNTS.clamp(min=1) ** (1 - q) * (COUNTS > 0)  # how often the sampler shows a class
        torch.testing.assert_close(weights * COUNTS / COUNTS.sum(), drawn / drawn.sum())
        assert weights[3] == 0
    torch.testing.assert_close(class_weights(COUNTS, 0.0)[:3], torch.ones(3).double())
    torch.testing.assert_close(class_weights(torch.zeros(3), 1.0), torch.zeros(3))


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_resampling_has_the_frequencies_of_the_sampler(q) -> None:
    y = torch.repeat_interleave(torch.arange(3), torch.tensor([30, 5, 1]))
    draws = 3000
    uniform = torch.from_numpy(generator(0, "rows").uniform(size=draws))
    seen = torch.bincount(y[resample(uniform, class_weights(COUNTS, q)[y])], minlength=3)
    wanted = class_weights(COUNTS, q)[:3] * COUNTS[:3] / COUNTS.sum() * draws
    chi_square = ((seen - wanted).square() / wanted).sum()
    assert chi_square < 9.21  # of two degrees of freedom: exceeded once in a hundred draws
    if q == 1.0:
        torch.testing.assert_close(wanted, torch.full((3,), draws / 3).double())


def test_padding_is_never_drawn() -> None:
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    edges = torch.tensor([0.0, 0.25, 0.49, 0.5, 0.51, 1 - 2**-24])
    rows = resample(edges, torch.ones(5), mask)
    assert set(rows.tolist()) == {1, 3}
    assert rows[0] != rows[-1]


def test_clients_at_once_and_traced_are_clients_one_by_one() -> None:
    counts = torch.stack([COUNTS, COUNTS.flip(0), torch.ones(4).double()])
    answers = torch.stack([outputs(), outputs("b"), outputs("c")])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] + [0] * 5]).double()
    uniform = torch.from_numpy(generator(0, "rows").uniform(size=(3, 6)))

    def both(answers: Tensor, counts: Tensor, mask: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        losses = balanced_softmax(answers, Y, counts, restricted=True)
        return class_mean(losses, Y, mask, 4), resample(uniform, class_weights(counts, 0.5)[Y], mask)

    inputs = answers, counts, mask, uniform
    found = vmap(both)(*inputs)
    alone = [both(*row) for row in zip(*inputs, strict=True)]
    for one, wanted in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(wanted))
    for traced, wanted in zip(make_fx(vmap(both))(*inputs)(*inputs), found, strict=True):
        torch.testing.assert_close(traced, wanted)
