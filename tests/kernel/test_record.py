"""A record is a tree like others: stacked, scanned, kept, sent, saved and resumed by its fields."""

import json
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from atoll import federate
from atoll.kernel.algorithm import Algorithm, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import CohortError, RunError
from atoll.kernel.params import Params, Stack, flatten, named_leaves, rows_of, stacked_leaves, unflatten
from atoll.kernel.record import Each, is_record, record
from atoll.kernel.task import Facts
from atoll.records import checkpoints
from atoll.runtime.engines.plan import Plan
from atoll.runtime.serialise import from_bytes, pack, size_of, to_bytes, unpack
from atoll.testing.conformance import personal_models, quadratics

PLANS = [Plan("whole"), Plan("chunk", 2), Plan("loop"), Plan("loop", plain=True)]


@record
class Inner:
    n: Each


@record
class Carry:
    v: Each
    alpha: Each
    inner: Inner


@record
class State:
    w: Params
    table: Tensor
    last: Stack | None


def carry(alpha=0.1):
    return Carry(Params.of(w=torch.zeros(2)), alpha, Inner(0))


def step(before: Carry, batch, given: Inner) -> Carry:
    assert before.alpha.ndim == before.inner.n.ndim == given.n.ndim == 0  # a client sees its own
    v = before.v.map(lambda leaf: leaf + before.alpha * given.n)
    return Carry(v, before.alpha + 1, Inner(before.inner.n + 2))


def test_a_record_is_frozen_and_replaced():
    one = carry()
    assert is_record(one)
    assert not is_record(Carry)
    assert replace(one, alpha=2.0).alpha == 2.0
    with pytest.raises(FrozenInstanceError):
        one.alpha = 2.0


def test_it_is_flattened_by_its_fields_and_made_again():
    rows = torch.arange(3.0)
    tree = {"a": Carry(Stack.of(w=torch.ones(3, 2)), rows, Inner(7)), "b": State(Params.of(x=1.0), rows, None)}
    leaves, structure = flatten(tree)
    assert stacked_leaves(structure) == [True, True, False, False]  # a bare tensor has rows in a field that is `Each`
    assert [name for name, _ in named_leaves(tree)] == ["w", "", "x", ""]
    again = unflatten(structure, leaves)
    assert type(again["a"]) is Carry
    assert type(again["a"].inner) is Inner
    assert again["a"].inner.n == 7
    assert again["b"].last is None
    alone = unflatten(structure, [leaves[0][1], leaves[1][1], *leaves[2:]], one_client=True)
    assert type(alone["a"].v) is Params
    assert alone["a"].alpha.item() == 1.0
    some = rows_of(tree, torch.tensor([2, 0]))
    assert some["a"].alpha.tolist() == [2.0, 0.0]
    assert some["b"].table is rows


def test_two_records_of_the_same_fields_are_two_structures():
    @record
    class Other:
        n: Each

    assert flatten(Other(1))[1] != flatten(Inner(1))[1]
    assert flatten(Other(1))[1] != flatten({"n": 1})[1]


def test_what_is_no_record_is_no_tree():
    @dataclass(frozen=True)
    class Plain:
        n: int

    with pytest.raises(CohortError, match="records, dict, list or tuple. Got Plain.\nhint: .* @record"):
        flatten(Plain(1))


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_scan_carries_it_and_is_given_it(make_task, make_cohort, plan):
    cohort = make_cohort(make_task(dtype=torch.float64, batch_size=100), plan=plan)
    end = cohort.scan(step, carry(), given=Inner(torch.arange(1.0, 5.0).double()), epochs=2)
    assert type(end) is Carry
    assert end.alpha.tolist() == [2.1] * 4  # 0.1 in the model's precision
    assert end.inner.n.tolist() == [4] * 4
    assert end.inner.n.dtype == torch.int64
    assert end.v["w"][:, 0].tolist() == pytest.approx([1.2, 2.4, 3.6, 4.8], abs=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_a_map_returns_it(make_task, make_cohort, plan):
    cohort = make_cohort(make_task(), plan=plan)

    def function(one: Inner) -> Carry:
        return Carry(Params.of(w=one.n + 1), one.n * 2, one)

    found = cohort.map(function, Inner(torch.arange(4.0)))
    assert isinstance(found.v, Stack)
    assert found.v.value.tolist() == [1, 2, 3, 4]
    assert found.alpha.tolist() == [0, 2, 4, 6]
    assert found.inner.n.tolist() == [0, 1, 2, 3]


def test_rows_must_be_those_of_the_cohort(make_task, make_cohort):
    cohort = make_cohort(make_task())
    with pytest.raises(CohortError, match="one row per client, 4. Got 3"):
        cohort.scan(step, carry(torch.zeros(3)), given=Inner(torch.ones(4)))
    with pytest.raises(CohortError, match="one row per client, 4. Got 3"):
        cohort.scan(step, carry(), given=Inner(torch.ones(3)))
    with pytest.raises(CohortError, match="one row per client, 4. Got a single number"):
        cohort.scan(step, carry(), given=Inner(torch.tensor(1.0)))
    with pytest.raises(CohortError, match="Got a bare Tensor"):
        cohort.stacked(State(Params.of(x=1.0), torch.zeros(4), None))


def test_a_step_must_return_the_record_it_was_given(make_task, make_cohort):
    with pytest.raises(CohortError, match="made like the one it was given"):
        make_cohort(make_task()).scan(lambda one, *_: {"n": one.n}, Inner(0.0))


def test_the_only_leaf_is_the_value():
    assert Params.of(loss=3.0).value.item() == 3.0
    with pytest.raises(ValueError, match="too many"):
        _ = Params.of(loss=3.0, count=1.0).value


# -- written down ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_names_fields_and_class():
    tree = State(Params.of(x=1.0), torch.arange(2), Stack.of(v=torch.ones(2)))
    tensors, structure = pack([tree, Inner(torch.ones(3))])
    written = json.loads(structure)["parts"]
    assert written[0]["names"] == ["w", "table", "last"]
    assert written[0]["class"] == f"{__name__}.State"
    state, inner = unpack(tensors, structure, (), torch.device("cpu"))
    assert type(state) is State
    assert flatten([state, inner])[1] == flatten([tree, Inner(torch.ones(3))])[1]
    assert state.table.tolist() == [0, 1]


def test_a_message_has_the_fields_alone():
    assert to_bytes(Inner(torch.ones(3))) == to_bytes({"n": torch.ones(3)})
    assert from_bytes(to_bytes(carry(0.5)))["inner"] == {"n": 0}
    w, table = Params.of(x=1.0), torch.arange(2)
    assert to_bytes(State(w, table, None)) == to_bytes({"w": w, "table": table})  # what holds nothing is left out
    one = Carry(Stack.of(w=torch.ones(4, 2)), torch.ones(4), Inner(torch.ones(4)))
    like = {"v": Params.of(w=torch.ones(2)), "alpha": torch.ones(()), "inner": {"n": torch.ones(())}}
    assert size_of(one, each=True) == len(to_bytes(like))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry | {"class": "os.system"}, "None is called os.system"),
        (lambda entry: entry | {"names": ["m"]}, "must have the fields n. Got m"),
    ],
)
def test_a_class_that_nobody_defined_is_refused(change, message):
    tensors, structure = pack(Inner(torch.ones(3)))
    with pytest.raises(RunError, match=message):
        unpack(tensors, json.dumps(change(json.loads(structure))), (), torch.device("cpu"))


# -- a method whose states are records ---------------------------------------------------------------------------------


@record
class Server:
    w: Params
    rounds: int
    heard: Tensor


@record
class Kept:
    v: Stack
    visits: Each


@dataclass(frozen=True, kw_only=True)
class Recording(Algorithm):
    """Every client moves by how often it came, and keeps where it is."""

    sums_suffice: ClassVar[bool] = False

    def start(self, task: Facts) -> Server:
        return Server(task.network.initial, 0, torch.zeros(task.clients))

    def local(self, received: Server, cohort: Cohort) -> Update:
        kept = cohort.recall(default=Kept(cohort.stacked(received.w), cohort.each(0.0)))
        v = cohort.map(lambda v, one: v + Params.of(w=torch.ones(2) * (1 + one.n)), kept.v, Inner(kept.visits))
        return Update(send={"delta": v - received.w}, keep=Kept(v, kept.visits + 1))

    def aggregate(self, server: Server, replies: Replies) -> Server:
        heard = server.heard.index_add(0, torch.from_numpy(replies.clients), torch.ones(len(replies.clients)))
        return replace(server, w=server.w + replies.mean("delta"), rounds=server.rounds + 1, heard=heard)

    def personalize(self, server: Server, cohort: Cohort) -> Stack:
        return cohort.recall(default=Kept(cohort.stacked(server.w), cohort.each(0.0))).v


TASK = quadratics(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]))
LATE = {"rounds": 6, "cohort": 2, "late": 0.5, "delay": 2}


class Stopped(Exception):
    """Ends a run after a round."""


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_a_run_is_resumed_from_records(tmp_path, memory):
    whole = federate(TASK, Recording(), folder=tmp_path / "whole", memory=memory, **LATE)

    def stop(line):
        if line["round"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        federate(TASK, Recording(), folder=tmp_path / "run", memory=memory, on_round=stop, **LATE)
    again = federate(TASK, Recording(), folder=tmp_path / "run", memory=memory, resume=True, **LATE)
    assert type(again.server) is Server
    assert again.server.rounds == whole.server.rounds > 3
    assert torch.equal(again.server.w["w"], whole.server.w["w"])
    assert torch.equal(again.server.heard, whole.server.heard)
    models = [personal_models(report) for report in (again, whole)]
    assert all(torch.equal(one["w"], other["w"]) for one, other in zip(*models, strict=True))


def test_a_state_that_was_a_dict_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(checkpoints, "pack", partial(pack, classes=False))
        federate(TASK, Recording(), rounds=2, folder=tmp_path / "run")
    with pytest.raises(RunError, match="must be a Server record of the method. It is a dict.\nhint: an older version"):
        federate(TASK, Recording(), rounds=2, folder=tmp_path / "run", resume=True)
