import functools
from dataclasses import dataclass

import pytest
import torch

from atoll.algorithms.ditto import Ditto
from atoll.engines.programs import WORTHWHILE_CALLS, Plan, Programs, Unstable, fingerprint
from atoll.params import Params, Stack

GLOBAL_NUMBER = 1.0
GLOBAL_TENSOR = torch.ones(1)


def make(lr, names=("a",), rule=None):
    def step(carry, batch, given):
        return lr, names, rule

    return step


def test_a_closure_made_again_has_the_same_fingerprint():
    assert fingerprint(make(0.1)) == fingerprint(make(0.1))
    assert hash(fingerprint(make(0.1, {"a": [1, (2, None)]}))) is not None


@pytest.mark.parametrize(
    "other", [make(0.2), make(0.1, ("b",)), make(0.1, ["a"]), make(1), make(True), make(0.1, rule=Ditto(lam=2.0))]
)
def test_different_captures_have_different_fingerprints(other):
    assert fingerprint(make(0.1)) != fingerprint(other)


def test_one_and_true_and_one_point_zero_are_three_things():
    assert len({fingerprint(make(value)) for value in (1, 1.0, True)}) == 3


def test_algorithms_tell_apart_by_their_hyperparameters():
    assert fingerprint(Ditto(lam=0.5)) == fingerprint(Ditto(lam=0.5))
    assert fingerprint(Ditto(lam=0.5)) != fingerprint(Ditto(lam=0.6))
    assert fingerprint(Ditto(lam=0.5).local) != fingerprint(Ditto(lam=0.6).local)


def test_defaults_and_partial_arguments_count():
    def step(carry, lr=0.1, *, lam=1.0):
        return carry

    def other(carry, lr=0.2, *, lam=1.0):
        return carry

    assert fingerprint(step) != fingerprint(other)
    assert fingerprint(functools.partial(step, lr=0.1)) != fingerprint(functools.partial(step, lr=0.2))
    assert fingerprint(functools.partial(step, lr=0.1)) == fingerprint(functools.partial(step, lr=0.1))


def test_a_global_number_counts(monkeypatch):
    def step(carry, batch, given):
        return (lambda: GLOBAL_NUMBER)()

    before = fingerprint(step)
    monkeypatch.setitem(globals(), "GLOBAL_NUMBER", 2.0)
    assert fingerprint(step) != before


@dataclass
class Mutable:
    value: float


@pytest.mark.parametrize(
    "captured",
    [torch.ones(1), Params.of(a=1.0), Stack.of(a=torch.ones(1)), {1, 2}, object(), Mutable(1.0), [torch.ones(1)]],
)
def test_what_may_change_has_no_fingerprint(captured):
    with pytest.raises(Unstable):
        fingerprint(make(captured))


def test_a_global_tensor_has_no_fingerprint():
    with pytest.raises(Unstable, match="it captures a Tensor; pass it in `given`"):
        fingerprint(lambda carry, batch, given: GLOBAL_TENSOR)


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 20, 100, 1000])
@pytest.mark.parametrize(("mode", "programs", "waste"), [("traced", 2, 1 / 3), ("compiled", 1, 1 / 2)])
def test_program_sizes_are_few_and_waste_few_rows(clients, mode, programs, waste):
    """At most so many programs for each halving, and at most this share of the rows is computed in vain."""
    sizes = Programs.sizes(mode, clients)
    assert sizes[0] == 1
    assert sizes[-1] == clients
    assert len(sizes) <= programs * clients.bit_length() + 1
    for active in range(1, clients + 1):
        size = sizes[sizes.searchsorted(active)]
        assert size >= active
        assert size - active <= size * waste


def test_eager_steps_run_for_any_number_of_clients():
    assert Programs.sizes("eager", 10) is None


def test_plans_read_as_what_they_are():
    assert str(Plan("chunk", 16, mode="compiled", columns=True)) == "chunk:16 compiled columns fp32"
    assert str(Plan("loop", plain=True, precision="bf16")) == "loop eager plain bf16"


def test_a_plan_groups_clients():
    assert Plan("whole").size(7) == 7
    assert Plan("chunk", 3).size(7) == 3
    assert Plan("chunk", 30).size(7) == 7
    assert Plan("loop").size(7) == Plan("threads").size(7) == 1


def test_compiling_must_pay_more_than_tracing():
    assert 0 == WORTHWHILE_CALLS["eager"] < WORTHWHILE_CALLS["traced"] < WORTHWHILE_CALLS["compiled"]
