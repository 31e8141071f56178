"""Sensitivities of layers: what they are blind to, and which layers they choose."""

import pytest
import torch
from torch import nn

from atoll.kernel.params import Stack
from atoll.kernel.randomness import default_generator
from atoll.toolbox.client.sensitivity import layers, minmax, most_sensitive, radii, raw, relative, sensitivities

with default_generator(0):
    BEFORE, AFTER = torch.randn(2, 4, 3, dtype=torch.float64)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 2.0), (3.0, 0.0), (0.1, -5.0)])
def test_minmax_does_not_see_a_shift_or_a_factor(factor: float, shift: float) -> None:
    moved = [factor * tensor + shift for tensor in (BEFORE, AFTER)]
    torch.testing.assert_close(minmax(*moved), minmax(BEFORE, AFTER), rtol=1e-12, atol=0)
    assert minmax(BEFORE, factor * BEFORE + shift) < 1e-28
    assert minmax(BEFORE, AFTER) > 0.01


def test_raw_grows_with_the_square_and_relative_does_not() -> None:
    torch.testing.assert_close(raw(3 * BEFORE, 3 * AFTER), 9 * raw(BEFORE, AFTER))
    torch.testing.assert_close(relative(3 * BEFORE, 3 * AFTER), relative(BEFORE, AFTER))
    torch.testing.assert_close(raw(BEFORE + 2, AFTER + 2), raw(BEFORE, AFTER))
    assert raw(torch.zeros(2), torch.tensor([1.0, 3.0])) == 5.0
    assert relative(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 9.0])) == 1.0


def test_a_constant_tensor_has_no_sensitivity_to_speak_of() -> None:
    constant = torch.full((3,), 2.0)
    assert minmax(constant, torch.tensor([1.0, 2.0, 3.0])) == 0
    assert minmax(torch.tensor([1.0, 2.0, 3.0]), constant) == 0
    assert minmax(constant, constant) == 0
    assert relative(torch.zeros(3), constant) == 0


def test_biases_and_norm_layers_are_no_layers(make_task) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    assert layers(task.network.initial) == ["0.weight", "2.weight"]


def test_every_client_has_its_own_choice() -> None:
    found = Stack.of(a=torch.tensor([3.0, 1.0, 0.0]), b=torch.tensor([1.0, 2.0, 0.0]), c=torch.tensor([2.0, 1.0, 5.0]))
    chosen = most_sensitive(found, 2)
    assert chosen["a"].tolist() == [1.0, 1.0, 0.0]  # the second client's tie goes to the first layer
    assert chosen["b"].tolist() == [0.0, 1.0, 0.0]
    assert chosen["c"].tolist() == [1.0, 0.0, 1.0]  # the third client has one layer above 0 only
    assert not any(leaf.any() for leaf in most_sensitive(found, 0).values())


def test_all_leaves_have_a_radius_and_the_chosen_ones_another(make_task) -> None:
    w = make_task(lambda: nn.Linear(4, 3)).network.initial
    found = radii(w, Stack.of(weight=torch.tensor([0.0, 1.0])), 0.1, 0.9)
    assert found["weight"].tolist() == pytest.approx([0.1, 0.9])
    assert found["bias"].tolist() == pytest.approx([0.1, 0.1])


def test_that_of_the_loss_is_the_share_of_a_layer_in_the_first_order_change(make_task, make_cohort) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), dtype=torch.float64, batch_size=100)
    cohort, w = make_cohort(task), task.network.initial
    found = sensitivities("loss", cohort, w, cohort.stacked(w))
    losses = {}
    for size in (0.0, 1e-6):  # a step along the whole gradient, of which each layer has its share
        for name in ("0.weight", "1.weight"):

            def step(carry, batch, given, name=name, size=size):
                g, _, _ = batch.gradient(given)
                return type(carry).of(loss=batch.loss(given.moved(g.only([name]) / g.norm(), size)))

            start = w.only(()).of(loss=0.0)
            losses[name, size] = cohort.scan(step, start, given=w, shuffle=False)["loss"]
    for name, value in found.items():
        change = (losses[name, 1e-6] - losses[name, 0.0]) / 1e-6
        torch.testing.assert_close(value, change, rtol=1e-4, atol=1e-6)
    assert list(cohort.notes) == ["loss/sensitivity", "sensitivity/0.weight", "sensitivity/1.weight"]
