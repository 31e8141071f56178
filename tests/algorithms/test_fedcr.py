"""FedCR, by hand: noisy features, their divergence, the product of experts, and the last fit of the heads."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import own
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from atoll import Batch, Cohort, Params, Task
from atoll.algorithms.fedcr import BIAS, SMALLEST, WEIGHT, FedCR, divergence, informed_gradient, with_spread
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import Keys, generator
from atoll.testing.conformance import personal_models, play, quadratics

CLASSES, SIZE = 3, 6


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def normal(*shape: int, purpose: str) -> Tensor:
    return torch.from_numpy(generator(0, purpose).normal(size=shape))


def test_the_divergence_is_that_of_normal_distributions() -> None:
    # catches: the two distributions swapped.
    values = [normal(5, SIZE, purpose=purpose) for purpose in "abcd"]
    one, other = Normal(values[0], values[1].exp()), Normal(values[2], values[3].exp())
    found = divergence(values[0], values[1].exp(), values[2], values[3].exp())
    torch.testing.assert_close(found, kl_divergence(one, other).sum(1))
    zero = torch.zeros(1, SIZE)
    assert divergence(zero, zero, zero, zero).item() == 0  # no sigma is smaller than SMALLEST
    assert divergence(zero, zero, zero + 1, zero).item() == pytest.approx(SIZE / 2 / SMALLEST**2)


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_by_hand(task: Task, mask: Tensor | None) -> None:
    method, x, y = FedCR(beta=0.3, draws=4, offset=0.5), task.x[:5], task.y[:5]
    batch = Batch(x, y, mask, Keys(torch.tensor(1), torch.tensor(2)), task.network, Variant())
    a, b = 0.3 * normal(SIZE, SIZE, purpose="weight"), normal(SIZE, purpose="bias")
    prior = Params.of(mean=normal(CLASSES, SIZE, purpose="m"), sigma=normal(CLASSES, SIZE, purpose="s").exp())
    w = Params({**task.network.initial, WEIGHT: a, BIAS: b}, with_spread(task.network.layout))
    g, _, loss = informed_gradient(method, "all", w, batch, prior)

    module = task.network._original.requires_grad_(True)
    a, b = a.clone().requires_grad_(True), b.clone().requires_grad_(True)
    mean = module.features(x)  # type: ignore[operator]
    sigma = F.softplus(mean @ a.T + b - 0.5)
    noise = batch.normal("features", 4, 5, SIZE)
    each = torch.ones(5, dtype=torch.float64) if mask is None else mask
    fit = sum(F.cross_entropy(module.head(mean + sigma * e), y, reduction="none") for e in noise) / 4  # type: ignore[operator]
    fit = (fit * each).sum() / each.sum()
    apart = kl_divergence(Normal(prior["mean"][y], prior["sigma"][y]), Normal(mean, sigma)).sum(1)
    total = fit + 0.3 * (apart * each).sum() / each.sum()
    expected = torch.autograd.grad(total, [*module.parameters(), a, b])
    for mine, theirs in zip(g.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss, fit.detach())
    head, _, _ = informed_gradient(method, "head", w, batch, prior)
    assert set(head) == {"head.weight", "head.bias"}
    assert all(torch.equal(head[name], g[name]) for name in head)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_multiplies_the_experts_of_all_samples(task: Task, weighting: str) -> None:
    # The released code multiplies two experts at a time, then all clients' and a standard normal one: the same product.
    report = play(task, FedCR(weighting=weighting, epochs=0, final_epochs=0))
    w, prior = task.network.initial, report.server.prior
    sigma = F.softplus(torch.zeros((), dtype=torch.float64))  # the layer of sigma begins at zero
    for label in range(CLASSES):
        mean, variance = torch.zeros(SIZE, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for k in range(task.clients):
            x, y = own(task, k)
            for z in Batch(x, y, None, None, task.network, Variant(train=False)).features(w)[y == label]:
                mean = (mean * sigma**2 + z * variance) / (sigma**2 + variance)
                variance = variance * sigma**2 / (variance + sigma**2)
        torch.testing.assert_close(prior["mean"][label], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(prior["sigma"][label], variance.sqrt().expand(SIZE), rtol=0, atol=1e-12)


def test_what_is_known_of_a_class_moves_by_the_rate_and_stays_if_nobody_has_it(task: Task) -> None:
    train = task.splits["train"]
    data = {str(k): (own(task, k)[0], torch.zeros(len(own(task, k)[1])).long()) for k in range(4)}
    lone = Task.of_clients(
        data, task.network._original, classes=CLASSES, training=task.training, shares=(1.0, 0.0, 0.0)
    )
    assert int(train.offsets[-1]) == 25
    whole, half = (play(lone, FedCR(rate=rate, final_epochs=0)).server.prior for rate in (1.0, 0.5))
    torch.testing.assert_close(half["mean"][0], whole["mean"][0] / 2)
    torch.testing.assert_close(half["sigma"][0], (1 + whole["sigma"][0]) / 2)
    for label in (1, 2):
        assert half["mean"][label].tolist() == [0.0] * SIZE
        assert half["sigma"][label].tolist() == [1.0] * SIZE


def test_sigma_is_learned_and_the_divergence_pulls(task: Task) -> None:
    strong, none = (play(task, FedCR(beta=beta), rounds=2).server for beta in (0.1, 0.0))
    assert none.w[BIAS].abs().max() > 0
    assert (strong.w[BIAS] - none.w[BIAS]).abs().max() > 1e-3


def test_heads_and_nothing_else_are_fitted_after_the_last_round(task: Task) -> None:
    fitted, not_yet = (play(task, FedCR(final_epochs=epochs), rounds=2) for epochs in (3, 0))
    assert all(torch.equal(fitted.server.w[name], not_yet.server.w[name]) for name in not_yet.server.w)
    for after, before in zip(personal_models(fitted), personal_models(not_yet), strict=True):
        assert set(after) == set(task.network.initial)
        for name in after:
            assert torch.equal(after[name], before[name]) == (name not in ("head.weight", "head.bias"))


def test_a_new_client_fits_its_head_as_one_that_never_took_part(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    report = play(task, FedCR(final_epochs=0), rounds=2, faults=lambda r, clients: clients == 1)
    absent = personal_models(report)[1]
    assert torch.equal(absent["head.bias"], task.network.initial["head.bias"])
    method = FedCR(final_epochs=2)
    new = method.welcome(report.server, make_cohort(task, clients=[1], round=2))
    assert not torch.equal(new["head.bias"][0], absent["head.bias"])
    assert torch.equal(new["body.1.weight"][0], absent["body.1.weight"])


def test_encoder_and_experts_travel_but_no_head(task: Task) -> None:
    ledger = play(task, FedCR(), rounds=2).ledger
    body = sum(leaf.numel() for leaf in task.network.initial.part("body").values())
    numbers = body + SIZE * SIZE + SIZE + 2 * CLASSES * SIZE
    for way in ("up", "down"):
        assert numbers * 8 <= ledger.bytes(way) / (2 * task.clients) < numbers * 8 + 1200
    assert {(one.direction, one.field, one.kind) for one in ledger.entries if one.field != "weight"} == {
        ("down", "broadcast", "state"), ("up", "delta", "model"), ("up", "experts", "statistic"),
    }  # fmt: skip


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="FedCR needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedCR())
