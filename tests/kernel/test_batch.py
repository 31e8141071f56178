from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from atoll.kernel.batch import Batch
from atoll.kernel.errors import CohortError, ModelError
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params
from atoll.kernel.randomness import Keys, default_generator
from atoll.models import MLP


def batch_of(module, samples=6, mask=None, vectorised=False, train=True):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=draw, dtype=torch.float64)
    y = torch.arange(samples) % 3
    network = Network(module.double())
    network.module(Variant(train=train))  # made ahead, as a scan does: inside a transform it cannot be
    return Batch(x, y, mask, None, network, Variant(train=train), vectorised), network.initial


def mlp():
    with default_generator(0):
        return MLP((4,), 3, hidden=(5,))


@pytest.mark.parametrize("vectorised", [False, True])
def test_the_gradient_is_autograds(vectorised):
    module = mlp().double()
    batch, w = batch_of(module, vectorised=vectorised)
    g, after, loss = batch.gradient(w)
    expected = nn.functional.cross_entropy(module(batch.x), batch.y)
    expected.backward()
    assert torch.allclose(loss, expected.detach(), atol=1e-14)
    for name, parameter in module.named_parameters():
        assert torch.allclose(g[name], parameter.grad, atol=1e-14)
    assert all(torch.equal(after[name], w[name]) for name in w)


@pytest.mark.parametrize("vectorised", [False, True])
def test_padding_counts_for_nothing(vectorised):
    module = mlp()
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    padded, w = batch_of(module, mask=mask, vectorised=vectorised)
    short = Batch(padded.x[:4], padded.y[:4], None, None, padded.network, padded.variant, vectorised)
    (g, _, loss), (g_short, _, loss_short) = padded.gradient(w), short.gradient(w)
    assert padded.count.item() == short.count.item() == 4
    assert torch.allclose(loss, loss_short, atol=1e-15)
    assert all(torch.allclose(g[name], g_short[name], atol=1e-15) for name in g)


def test_totals_and_means_leave_padding_out():
    batch, _ = batch_of(mlp(), samples=3, mask=torch.tensor([1.0, 1.0, 0.0]))
    values = torch.tensor([1.0, 2.0, 100.0])
    assert batch.total(values).item() == 3.0
    assert batch.mean(values).item() == 1.5


@pytest.mark.parametrize("vectorised", [False, True])
def test_the_gradient_of_a_part_has_its_leaves_only(vectorised):
    batch, w = batch_of(mlp(), vectorised=vectorised)
    whole, _, _ = batch.gradient(w)
    head, _, _ = batch.gradient(w, only=w.layout.part("head"))
    assert set(head) == {"head.weight", "head.bias"}
    assert all(torch.allclose(head[name], whole[name], atol=1e-15) for name in head)
    nothing, after, loss = batch.gradient(w, only=())
    assert not nothing
    assert set(after) == set(w)
    assert loss.item() > 0


@pytest.mark.parametrize("vectorised", [False, True])
def test_statistics_of_layers_that_are_not_trained_stay(vectorised):
    batch, w = batch_of(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), vectorised=vectorised)
    _, moved, _ = batch.gradient(w)
    _, still, _ = batch.gradient(w, only=["1.weight", "1.bias"])
    assert not torch.equal(moved["0.running_mean"], w["0.running_mean"])
    assert moved["0.num_batches_tracked"].item() == 1
    assert all(torch.equal(still[name], w[name]) for name in w)


def test_neither_parameters_nor_buffers_are_written_in_place():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.head(x)

    batch, w = batch_of(Counts())
    for _ in range(2):
        _, after, _ = batch.gradient(w)
        assert after["calls"].item() == 1
        assert w["calls"].item() == 0


def test_differentiate_returns_the_second_value_untouched():
    batch, _ = batch_of(mlp())
    at = Params.of(a=torch.tensor(3.0))
    g, extra = batch.differentiate(lambda p: (p["a"] ** 2, {"twice": 2 * p["a"], "note": "kept"}), at)
    assert g["a"].item() == 6.0  # d a^2 / da = 2a
    assert extra["twice"].item() == 6.0
    assert extra["note"] == "kept"
    assert not extra["twice"].requires_grad


def test_a_parameter_that_is_not_used_has_gradient_zero():
    batch, _ = batch_of(mlp())
    g, _ = batch.differentiate(lambda p: (p["a"] ** 2, None), Params.of(a=1.0, b=2.0))
    assert (g["a"].item(), g["b"].item()) == (2.0, 0.0)


def test_features_enter_the_head():
    module = mlp().double()
    batch, w = batch_of(module)
    features = batch.features(w)
    assert features.shape == (6, 5)
    assert torch.allclose(module.head(features), batch.outputs(w), atol=1e-15)


def test_a_model_without_features_says_what_it_needs():
    batch, w = batch_of(nn.Linear(4, 3))
    with pytest.raises(
        ModelError, match=r"Linear must have a method `features\(x\)` for this algorithm.\nhint: let it"
    ):
        batch.features(w)


def test_evaluation_uses_running_statistics():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    batch, w = batch_of(module, train=False)
    assert torch.allclose(batch.outputs(w), module.eval()(batch.x), atol=1e-14)


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_gradient_inside_a_gradient_is_differentiated_too(vectorised):
    # A step on x^2 from p: p - 0.25 * 2p = p / 2. Of its square, p^2 / 4, the derivative is p / 2; a gradient that
    # were a constant would give 2 (p / 2) = p.
    batch, _ = batch_of(mlp(), vectorised=vectorised)

    def after_a_step(p):
        g, _ = batch.differentiate(lambda q: (q["a"] ** 2, None), p)
        return p.moved(g, -0.25)["a"] ** 2, None

    g, _ = batch.differentiate(after_a_step, Params.of(a=3.0))
    assert g["a"].item() == 1.5
    assert not g["a"].requires_grad


@pytest.mark.parametrize("vectorised", [False, True])
def test_an_inner_gradient_may_depend_on_the_outer_point_by_capture(vectorised):
    # d/dq (p q) = p wherever q is; of p^2 the derivative is 2p.
    batch, _ = batch_of(mlp(), vectorised=vectorised)

    def outer(p):
        g, _ = batch.differentiate(lambda q: (p["a"] * q["b"], None), Params.of(b=1.0))
        return g["b"] ** 2, None

    assert batch.differentiate(outer, Params.of(a=3.0))[0]["a"].item() == 6.0


def test_a_batch_splits_into_the_batches_that_lie_in_it():
    batch, _ = batch_of(mlp(), mask=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    keys = Keys(torch.tensor(5), torch.tensor(7))
    first, second = replace(batch, keys=keys).split(2)
    assert torch.equal(torch.cat([first.x, second.x]), batch.x)
    assert torch.equal(torch.cat([first.y, second.y]), batch.y)
    assert first.count.item() == second.count.item() == 2
    assert first.keys == keys
    assert second.keys.low != keys.low


def test_the_head_answers_to_features_of_any_number():
    batch, w = batch_of(mlp(), mask=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    features = batch.features(w)
    torch.testing.assert_close(batch.head(w, features), batch.outputs(w))
    torch.testing.assert_close(batch.head(w.part("head"), features[:2]), batch.outputs(w)[:2])


def test_a_model_without_a_head_says_what_it_needs():
    class Headless(nn.Linear):
        def features(self, x):
            return x

    batch, w = batch_of(Headless(3, 2))
    with pytest.raises(ModelError, match="Headless must have a submodule or a method `head`"):
        batch.head(w, batch.x)


def drawing(seed=5):
    return replace(batch_of(mlp())[0], keys=Keys(torch.tensor(seed), torch.tensor(7)))


def test_draws_are_uniform_or_normal():
    uniform, normal = drawing().uniform("a", 4000), drawing().normal("a", 2000, 2)
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 3 * (1 / 12 / 4000) ** 0.5
    assert normal.shape == (2000, 2)
    assert abs(normal.mean()) < 3 / 4000**0.5
    assert abs(normal.square().mean() - 1) < 3 * (2 / 4000) ** 0.5
    assert abs((normal.abs() < 1).double().mean() - 0.6827) < 0.03
    assert abs((normal[:, 0] * normal[:, 1]).mean()) < 3 / 2000**0.5
    assert uniform.dtype == normal.dtype == torch.float64  # the network's


def test_normal_draws_that_come_of_the_same_two_numbers_are_independent():
    first, second = drawing().normal("a", 4000).chunk(2)
    assert abs((first * second).mean()) < 3 / 2000**0.5
    assert abs(((first.square() - 1) * (second.square() - 1)).mean()) < 3 * 2 / 2000**0.5
    assert drawing().normal("a", 3, 3).shape == (3, 3)
    assert drawing().normal("a", 0).shape == (0,)


def test_draws_depend_on_the_purpose_and_the_keys_alone():
    assert torch.equal(drawing().normal("a", 9), drawing().normal("a", 9))
    assert not torch.equal(drawing().normal("a", 9), drawing().normal("b", 9))
    assert not torch.equal(drawing().normal("a", 9), drawing(6).normal("a", 9))


def test_draws_must_be_announced():
    with pytest.raises(CohortError, match=r"draw only in a scan that says so.*\n.*draws=True"):
        batch_of(mlp())[0].normal("a", 3)


def test_a_deployed_model_uses_its_statistics_and_drops_nothing():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    module[1].running_mean += 1.0
    batch, w = batch_of(module)
    keyed = replace(batch, keys=Keys(torch.tensor(1), torch.tensor(2)))
    outputs, after = keyed.deployed.forward(w)
    torch.testing.assert_close(outputs, module.double().eval()(batch.x).detach())
    assert all(torch.equal(after[name], w[name]) for name in w)
    assert not torch.equal(keyed.outputs(w), outputs)


@dataclass(frozen=True)
class Noise:
    """Adds what is drawn for each number of each sample."""

    def __call__(self, x, keys):
        return x + keys.bits(torch.arange(x.numel()).reshape(x.shape)).to(x.dtype) / 2**32

    def check(self, shape):
        pass


MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def test_every_view_starts_from_the_samples_as_they_are():
    raw = replace(drawing(), augment=Noise(), mask=MASK)
    first, second = raw.view(0), raw.view(1)
    assert not torch.equal(first.x, second.x)
    assert not torch.equal(first.x, raw.x)
    assert torch.equal(first.view(1).x, second.x)
    assert torch.equal(second.view(0).x, first.x)
    assert first.view() is first  # a step sees it already


@pytest.mark.parametrize("seen", [0, 1, None])
def test_views_are_one_batch_view_after_view(seen):
    raw = replace(drawing(), augment=Noise(), mask=MASK)
    batch = raw if seen is None else raw.view(seen)
    both = batch.views(2)
    assert torch.equal(both.x, torch.cat([raw.view(0).x, raw.view(1).x]))
    assert torch.equal(both.y, torch.cat([raw.y, raw.y]))
    assert torch.equal(both.mask, torch.cat([MASK, MASK]))
    assert both.count.item() == 8
    assert torch.equal(torch.cat([part.x for part in both.split(2)]), both.x)
    assert torch.equal(both.view(3).x, both.x)  # of views there are no others


def test_views_without_a_rule_are_copies():
    batch, _ = batch_of(mlp())
    three = batch.views(3)
    assert torch.equal(three.x, batch.x.repeat(3, 1))
    assert torch.equal(three.y, batch.y.repeat(3))
    assert three.mask is None


def test_the_parts_of_a_view_are_views_of_their_own_samples():
    raw = replace(drawing(), augment=Noise())
    part = raw.view(0).split(2)[1]
    assert torch.equal(part.x, raw.view(0).x[3:])
    added = part.view(1).x - raw.x[3:]
    assert 0 <= added.min() < added.max() < 1


@pytest.mark.parametrize("seen", [0, 1, None])
def test_chosen_rows_are_seen_anew(seen):
    raw = replace(drawing(), augment=Noise(), mask=MASK)
    chosen = torch.tensor([3, 0, 3, 4, 1, 1])
    found = (raw if seen is None else raw.view(seen)).rows(chosen)
    assert torch.equal(found.y, raw.y[chosen])
    assert torch.equal(found.mask, MASK)
    again = replace(raw, x=raw.x[chosen], y=raw.y[chosen])
    assert torch.equal(found.x, again.x if seen is None else again.view(seen).x)
    assert torch.equal(found.views(2).x, again.views(2).x)
    if seen is not None:
        assert not torch.equal(found.x[0], found.x[2])  # one sample, two looks


def test_two_views_drop_different_units():
    batch, w = batch_of(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    first, second = replace(batch, keys=Keys(torch.tensor(1), torch.tensor(2))).views(2).outputs(w).chunk(2)
    assert not torch.equal(first == 0, second == 0)
