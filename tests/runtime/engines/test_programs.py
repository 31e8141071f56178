import functools
import logging
from dataclasses import dataclass

import pytest
import samples
import torch
from ratings import make_ratings
from samples import Sloped

from atoll import Recipe
from atoll.algorithms import list_methods
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.federation.loop import federate
from atoll.kernel.fingerprints import Unstable, fingerprint
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import WORTHWHILE_CALLS

LOG = logging.getLogger("atoll.tests")
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


@dataclass(frozen=True)
class Own:
    """A user's own frozen value, as a method in a file is."""

    lam: float = 1.0

    def step(self, carry, batch, given):
        return self.lam


@dataclass(frozen=True)
class OtherCode(Own):
    def step(self, carry, batch, given):
        return 2 * self.lam


def test_a_value_of_ones_own_class_is_known_by_its_fields_and_its_code():
    assert fingerprint(Own().step) == fingerprint(Own().step)
    assert len({fingerprint(one.step) for one in (Own(), Own(lam=2.0), OtherCode())}) == 3


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


# -- what programs are shared by ---------------------------------------------------------------------------------------


def traced(task, engine):
    report = federate(task, FedAvg(epochs=2), rounds=2, engine=engine, evaluation="none")
    return report.server


def engine():
    return LocalEngine(device="cpu", dtype=torch.float64, strategy="whole traced")


def test_a_model_that_was_changed_gets_programs_of_its_own(make_task):
    task, shared = make_task(lambda: Sloped(1.0)), engine()
    before = traced(task, shared)
    made = len(shared.programs._made)
    assert torch.equal(traced(task, shared)["weight"], before["weight"])
    assert len(shared.programs._made) == made  # the same model: nothing is made anew
    next(iter(task.network.submodules())).slope = 3.0
    truth = traced(task, engine())
    assert not torch.equal(truth["weight"], before["weight"])
    assert torch.equal(traced(task, shared)["weight"], truth["weight"])


def test_networks_that_are_called_the_same_share_nothing_if_they_compute_something_else():
    one, other = (Network(Sloped(slope), signature="mine") for slope in (1.0, 2.0))
    assert one.signature != other.signature
    assert one.signature == Network(Sloped(1.0), signature="mine").signature


def helper(w):
    return 1.0 * w


def test_a_helper_that_is_defined_again_counts(monkeypatch):
    def step(carry, batch, given):
        return helper(carry)

    before = fingerprint(step)
    assert fingerprint(step) == before
    monkeypatch.setitem(globals(), "helper", lambda w: 2.0 * w)
    assert fingerprint(step) != before


class Table:
    """Something that a step may read."""

    factor = 1.0
    values = torch.ones(2)

    def times(self, w):
        return self.factor * w


TABLE = Table()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (Table, "factor", 2.0),
        (Table, "values", torch.zeros(2)),
        (Table, "times", lambda self, w: w),
        (TABLE, "factor", 3.0),
        (samples, "FACTOR", 4.0),
        (samples, "Sloped", Table),
    ],
    ids=["class", "tensor of a class", "method", "object", "module", "name in a module"],
)
def test_what_a_step_reads_through_others_counts(monkeypatch, where, name, value):
    def step(carry, batch, given):
        return TABLE.times(carry) * samples.FACTOR * samples.Sloped

    before = fingerprint(step)
    assert fingerprint(step) == before
    monkeypatch.setattr(where, name, value, raising=False)
    assert fingerprint(step) != before


def test_a_log_that_a_step_writes_to_changes_nothing():
    def step(carry, batch, given):
        LOG.debug("a step")
        return carry

    before = fingerprint(step)
    LOG.extra = 1
    assert fingerprint(step) == before


def test_functions_that_call_each_other_have_a_fingerprint():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n > 0 and even(n - 1)

    assert fingerprint(even) == fingerprint(even) != fingerprint(odd)


# -- views that change nothing ---------------------------------------------------------------------------------------


def test_a_traced_program_has_no_view_that_leads_back_to_where_it_began():
    from torch.fx.experimental.proxy_tensor import make_fx

    from atoll.runtime.engines.running import VIEWS, _drop_idle_views

    def function(x, y):
        there = x.transpose(0, 1)
        back = there.transpose(0, 1).expand(2, 3).view(2, 3).detach()  # x, after five calls
        y.copy_(there.unsqueeze(0).squeeze(0) * 2)  # twice the transposed
        return back + y.transpose(0, 1)

    x, y = torch.arange(6.0).reshape(2, 3), torch.zeros(3, 2)
    graph = make_fx(function)(x, y)
    expected, written = function(x, y), y.clone()
    _drop_idle_views(graph)
    y.zero_()
    assert torch.equal(graph(x, y), expected)
    assert torch.equal(y, written)
    assert [str(node.target) for node in graph.graph.nodes if node.target in VIEWS] == ["aten.transpose.int"] * 2


@pytest.mark.parametrize("name", [name for name, method in list_methods().items() if method.items_by] + ["knn-per"])
def test_answers_of_a_methods_own_can_be_traced(name, monkeypatch, caplog):
    """Evaluation that stays eager is slow, and its warning says nothing to a user."""
    monkeypatch.setitem(WORTHWHILE_CALLS, "traced", 0)
    own = list_methods()[name].items_by
    task = make_ratings(model=own) if own else Recipe("digits", clients=3, samples=120, model="mlp:8").build()
    federate(task, name, rounds=1, engine=LocalEngine(strategy="loop traced"), progress=False)
    assert "stays eager" not in caplog.text
