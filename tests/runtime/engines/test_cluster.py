"""The engine of a cluster, with workers inside this process: the same numbers as one machine, whoever dies."""

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import create, federate, tune
from atoll.data.task import Task, Training
from atoll.federation.report import Report
from atoll.kernel.errors import EngineError
from atoll.kernel.params import Params, Stack
from atoll.protect.stages import Clip
from atoll.runtime.engines.cluster.engine import ClusterEngine, WorkerLost
from atoll.runtime.engines.cluster.inside import CrewInside
from atoll.runtime.engines.cluster.messages import Outcome, pack
from atoll.runtime.engines.cluster.shards import cut_shards, cut_task
from atoll.runtime.engines.cluster.worker import Worker
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import DiskMemory, RamMemory
from atoll.testing.conformance.engines import find_engine, make_worker
from atoll.testing.conformance.methods import shorten
from atoll.testing.conformance.playing import format_metrics, gather_outcome, read_kept
from atoll.testing.conformance.tasks import NEWCOMERS, build_task
from atoll.testing.conformance.trees import require_same

KINDS = ("fedavg", "ditto", "fedora", "ifca", "ditto@ifca", "fedper+prox", "fafi/margins", "feddf", "pfedhn")


def send(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own


class Pickling(CrewInside):
    """Workers that get and give what a pickle holds, as if they were in other processes."""

    def share(self, value: Any) -> Any:
        return send(value)

    def run(self, worker: int, key: Any, order: Any, broadcast: Any) -> Iterator[Any]:
        for message in super().run(worker, key, self.share(order), broadcast):
            yield self.share(message)


class Dying(CrewInside):
    """Workers of which some die: the messages with these numbers do not arrive, nor anything else of their worker."""

    def __init__(self, workers: int, deaths: set[int]) -> None:
        super().__init__(workers, make_worker)
        self.deaths, self.messages, self.buried = deaths, 0, 0

    def run(self, worker: int, key: Any, order: Any, broadcast: Any) -> Iterator[Any]:
        if worker not in self.workers:
            raise WorkerLost("it is gone")
        for message in super().run(worker, key, order, broadcast):
            self.messages += isinstance(message, Outcome)
            if self.messages in self.deaths:
                self.deaths -= {self.messages}
                raise WorkerLost("killed by a test")
            yield message

    def replace(self, worker: int) -> int:
        self.buried += 1
        return super().replace(worker)


def engine(crew: CrewInside | None = None) -> ClusterEngine:
    return ClusterEngine(crew or CrewInside(3, make_worker), find_engine("whole"))


def play(task: Task, method: str, where: Any, **more: Any) -> Report:
    algorithm = shorten(create(method))
    more = {"rounds": 1 if algorithm.one_shot else 3, "eval_every": 1, **more}
    return federate(task, algorithm, engine=where, **more)


def require_equal(one: Report, other: Report) -> None:
    require_same(gather_outcome(one), gather_outcome(other), "A cluster must give the numbers of one machine.")
    assert format_metrics(one) == format_metrics(other)
    assert sorted(one.ledger.messages()) == sorted(other.ledger.messages())


# -- shards ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 6, 9])
def test_shards_follow_each_other_by_size_and_none_is_empty(shards: int) -> None:
    task = build_task()
    cut = cut_shards(task, shards)
    assert len(cut) == min(shards, task.clients)
    assert all(len(clients) for clients in cut)
    sizes = task.splits["train"].sizes(np.concatenate(cut))
    assert (np.diff(sizes) <= 0).all()
    assert sorted(np.concatenate(cut)) == [*range(task.clients)]


def test_shards_have_equally_much_to_do() -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    task = build_task(sizes=tuple(draw.integers(4, 40, size=50).tolist()))
    loads = [int(task.splits["train"].sizes(clients).sum()) for clients in cut_shards(task, 4)]
    assert max(loads) - min(loads) <= task.splits["train"].sizes(np.arange(50)).max()


def test_a_shard_holds_its_own_samples_only() -> None:
    task = build_task()
    mine = np.array([4, 1])
    shard = cut_task(task, mine, digest="all")
    assert len(shard.x) == sum(int(split.sizes(mine).sum()) for split in task.splits.values())
    for name, split in task.splits.items():
        for client in mine:
            there, here = (slice(one.offsets[client], one.offsets[client + 1]) for one in (split, shard.splits[name]))
            assert torch.equal(task.x[split.order[there]], shard.x[shard.splits[name].order[here]])
            assert torch.equal(task.y[split.order[there]], shard.y[shard.splits[name].order[here]])
    facts, theirs = task.public_facts(), shard.public_facts()
    assert (facts.clients, facts.largest, facts.has_public) == (theirs.clients, theirs.largest, theirs.has_public)
    assert shard.public is not None
    assert not len(shard.public[0])
    assert (shard.central, shard.unseen, shard.samples) == (None, None, "all")


def test_trees_travel_as_they_are() -> None:
    tree = {
        "model": Params.of(a=torch.randn(3, 2).t(), b=torch.ones(2, dtype=torch.bfloat16)),
        "each": Stack.of(flag=torch.tensor([True, False]), none=torch.zeros(2, 0)),
        "number": 3,
        "nothing": None,
    }
    again = send(pack(tree)).unpack(torch.device("cpu"))
    require_same(tree, again, "A tree must survive.")
    assert again["model"]["b"].dtype == torch.bfloat16


# -- the same numbers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", KINDS)
def test_workers_in_other_processes_would_give_the_same_bits(method: str) -> None:
    task = build_task()
    require_equal(play(task, method, find_engine("whole")), play(task, method, engine(Pickling(2, make_worker))))


@pytest.mark.parametrize(
    "more",
    [
        {"cohort": 3, "rounds": 4},
        {"late": 0.5, "delay": 2, "rounds": 4},
        {"drop": 0.4, "rounds": 4},
        {"participation": "random:0.6", "rounds": 4},
    ],
    ids=lambda more: next(iter(more)),
)
def test_partial_and_late_cohorts(more: dict[str, Any]) -> None:
    task = build_task()
    for method in ("ditto", "fedora"):
        require_equal(play(task, method, find_engine("whole"), **more), play(task, method, engine(), **more))


def test_batch_norm_dropout_and_newcomers() -> None:
    task = build_task("odd", sizes=(13, 9, 12, 5, 6, 8, *NEWCOMERS)).hold_out(0.4)
    require_equal(play(task, "fedbn", find_engine("whole")), play(task, "fedbn", engine()))


def test_clients_with_different_networks() -> None:
    task = build_task()
    other = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = {f"{k}": (task.x[k : k + 5], task.y[k : k + 5]) for k in range(0, 30, 5)}
    mixed = Task.of_clients(data, [nn.Linear(12, 3).double(), other], name="mixed", classes=3)
    public = mixed.with_public(*build_task().public_for("This test"))
    for method in ("fedavg", "feddf"):  # one client at a time: with one sample, torch sums those of several otherwise
        require_equal(play(public, method, find_engine("loop")), play(public, method, engine()))


def test_a_client_that_diverges_is_lost_alone_and_keeps_what_it_had() -> None:
    task = build_task()
    x = task.x.clone()
    train = task.splits["train"]
    x[train.order[train.offsets[2]]] = float("inf")
    broken = replace(task, x=x)
    one, other = (play(broken, "ditto", where, eval_every=3) for where in (find_engine("whole"), engine()))
    assert one.history[0]["lost"] == other.history[0]["lost"] == {"not finite": 1}
    require_same(
        read_kept(one.population.memory), read_kept(other.population.memory), "What clients keep must be the same."
    )
    require_same(one.server, other.server, "The server must be the same.")


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_a_run_goes_on_with_other_workers_or_none(tmp_path: Path, memory: str) -> None:
    task, stopped = build_task(), RuntimeError("stopped")

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise stopped

    straight = play(task, "ditto", find_engine("whole"))
    for name, first, then in (
        ("a", engine(), engine(CrewInside(2, make_worker))),
        ("b", engine(), find_engine("whole")),
        ("c", find_engine("whole"), engine()),
    ):
        with pytest.raises(RuntimeError, match="stopped"):
            play(task, "ditto", first, folder=tmp_path / name, memory=memory, on_round=stop)
        again = play(task, "ditto", then, folder=tmp_path / name, memory=memory, resume=True)
        assert format_metrics(straight) == format_metrics(again)
        require_same(straight.server, again.server, "A run that goes on must end as one that was not stopped.")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_copies_of_a_memory(tmp_path: Path, kind: str) -> None:
    def build(name: str) -> RamMemory | DiskMemory:
        return RamMemory(5) if kind == "ram" else DiskMemory(tmp_path / name)

    memory, other = build("one"), build("other")
    assert memory.copy(np.arange(5)) is None
    v = Stack.of(v=torch.arange(6.0, dtype=torch.float64).reshape(3, 2))
    memory.keep(np.array([0, 1, 3]), v, round=0)
    memory.beside("piece").keep(np.array([1, 4]), Stack.of(c=torch.tensor([7, 8])), round=1)
    memory.keep(np.array([1]), Stack.of(v=torch.tensor([[9.0, 9.0]], dtype=torch.float64)), round=1)
    other.put(send(pack(memory.copy(np.array([1, 2, 3])))).unpack(torch.device("cpu")))
    default = Stack.of(v=torch.zeros(5, 2, dtype=torch.float64))
    everybody = np.arange(5)
    assert other.holds(everybody, before=2).tolist() == [False, True, False, True, False]
    assert other.recall(everybody, default, before=2)["v"].tolist() == [[0, 0], [9, 9], [0, 0], [4, 5], [0, 0]]
    assert other.beside("piece").holds(everybody, before=2).tolist() == [False, True, False, False, False]
    other.put(None)


def test_long_training_is_found_again_by_one_machine(tmp_path: Path) -> None:
    task, folder = build_task(), tmp_path / "trained"
    cluster = play(task, "fafi/margins", engine(), folder=tmp_path / "a", trained=folder)
    alone = play(task, "fafi/margins", find_engine("whole"), folder=tmp_path / "b", trained=folder)
    require_same(cluster.server, alone.server, "Trained clients must be the same.")
    assert alone.history[0]["seconds"]["found"] > 0
    once_more = play(task, "fafi/margins", engine(CrewInside(2, make_worker)), folder=tmp_path / "c", trained=folder)
    assert once_more.history[0]["seconds"]["found"] > 0


def test_a_curve_is_the_same_on_a_cluster_and_needs_a_folder(tmp_path: Path) -> None:
    task, curve = build_task(), (1, 2)
    cluster = play(task, "fafi/margins:epochs=3", engine(), folder=tmp_path / "a", curve=curve)
    alone = play(task, "fafi/margins:epochs=3", find_engine("whole"), folder=tmp_path / "b", curve=curve)
    require_same(cluster.server, alone.server, "Trained clients must be the same.")
    assert str(cluster.history[0]["curve"]) == str(alone.history[0]["curve"])  # NaN is not itself
    assert [point["epoch"] for point in alone.history[0]["curve"]] == [1, 2]
    with pytest.raises(EngineError, match="a training that pauses for a curve must be kept in a folder"):
        play(task, "fafi/margins:epochs=3", engine(), curve=curve)


# -- workers that die --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["ditto", "fedora", "ditto@ifca", "fafi/margins"])
@pytest.mark.parametrize("death", [1, 2, 4, 7])
def test_a_worker_that_dies_changes_no_number(method: str, death: int) -> None:
    task, crew = build_task(), Dying(3, {death})
    require_equal(play(task, method, find_engine("whole")), play(task, method, engine(crew)))
    assert crew.buried == 1


def test_what_was_cut_off_outlives_workers_and_stops(tmp_path: Path) -> None:
    """What a client remembers of packed messages is in the run's memory, whoever did its work."""
    task, more = build_task(), {"compress": "topk:0.2", "rounds": 4}
    straight = play(task, "ditto", find_engine("whole"), **more)
    crew = Dying(3, {4})
    require_equal(straight, play(task, "ditto", engine(crew), **more))
    assert crew.buried == 1

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        play(task, "ditto", engine(), folder=tmp_path / "run", on_round=stop, **more)
    again = play(task, "ditto", engine(CrewInside(2, make_worker)), folder=tmp_path / "run", resume=True, **more)
    require_same(straight.server, again.server, "A run that goes on must end as one that was not stopped.")


def test_what_kills_two_workers_is_lost_for_the_round(caplog: pytest.LogCaptureFixture) -> None:
    crew = Dying(3, {1, 2})
    report = play(build_task(), "ditto", engine(crew), rounds=2, eval_every=2)
    first, second = report.history
    (reason,) = first["lost"]
    assert "its worker died 2 times: killed by a test" in reason
    assert first["replied"] + first["lost"][reason] == 6
    assert (second["replied"], second["lost"]) == (6, {})
    assert crew.buried == 2
    assert "is done again by another one" in caplog.text


def test_a_worker_that_is_gone_before_its_turn_is_replaced() -> None:
    crew = Dying(3, set())
    where = engine(crew)

    def kill(line: Any) -> None:
        if line["round"] == 1:
            crew._workers.pop(crew.workers[0])

    task = build_task()
    require_equal(play(task, "ditto", find_engine("whole")), play(task, "ditto", where, on_round=kill))
    assert crew.buried == 1


# -- sums --------------------------------------------------------------------------------------------------------------
class Watching(CrewInside):
    """Workers whose outcomes are counted: those that were added up, and the bytes that came."""

    summed = rows = 0

    def run(self, worker: int, key: Any, order: Any, broadcast: Any) -> Iterator[Any]:
        for message in super().run(worker, key, order, broadcast):
            if isinstance(message, Outcome) and message.is_update:
                update = message.result.unpack(torch.device("cpu"))
                self.summed += update["summed"]
                self.rows += next(iter(update["send"].values())).clients if update["send"] else 0
            yield message


def in_float32(workers: int) -> tuple[ClusterEngine, Watching]:
    options = {"device": "cpu", "strategy": "whole eager"}
    crew = Watching(workers, lambda: Worker(options, torch.float32))
    return ClusterEngine(crew, LocalEngine(**options)), crew


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper+prox", "fedbn", "local"])
def test_in_float32_workers_send_sums_where_sums_are_enough(method: str) -> None:
    task, (cluster, crew) = build_task("odd"), in_float32(2)
    alone = play(task, method, LocalEngine(device="cpu", strategy="whole eager"))
    there = play(task, method, cluster)
    require_same(gather_outcome(alone), gather_outcome(there), "Sums must be the same, to rounding.", tolerance=1e-4)
    assert sorted(alone.ledger.messages()) == sorted(there.ledger.messages())
    assert (crew.summed, crew.rows) == ((0, 0) if method == "local" else (6, 6))


@pytest.mark.parametrize(
    ("method", "more"), [("fedora", {}), ("ifca", {}), ("scaffold", {}), ("fedavg", {"late": 0.5})], ids=str
)
def test_single_replies_come_where_they_are_read(method: str, more: dict[str, Any]) -> None:
    cluster, crew = in_float32(2)
    play(build_task(), method, cluster, **more)
    assert crew.summed == 0
    assert crew.rows > 0


def test_a_stage_sees_single_replies() -> None:
    cluster, crew = in_float32(2)
    play(build_task(), "fedavg", cluster, stages=[Clip(0.1)])
    assert crew.summed == 0


def test_a_client_that_diverges_is_not_added_up() -> None:
    task = build_task()
    x = task.x.clone()
    train = task.splits["train"]
    x[train.order[train.offsets[2]]] = float("inf")
    cluster, crew = in_float32(2)
    report = play(replace(task, x=x), "fedavg", cluster, eval_every=3)
    assert [line["lost"] for line in report.history] == [{"not finite": 1}] * 3
    assert crew.summed == 3  # those of the other worker
    alone = play(replace(task, x=x), "fedavg", LocalEngine(device="cpu", strategy="whole eager"), eval_every=3)
    require_same(alone.server, report.server, "The server must be the same, to rounding.", tolerance=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {"compress": "topk:0.3"},
        {"compress": "qsgd:4"},
        {"compress": "sign", "cohort": 4, "drop": 0.2},
        {"compress": "lowrank:1", "late": 0.3},
        {"secure": "masks"},
        {"secure": "sums", "compress": "randk:0.5"},
        {"aggregate": "median"},
        {"attack": "sign-flip:0.2"},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_what_stands_between_clients_and_server_sees_single_replies(more: dict[str, Any]) -> None:
    cluster, crew = in_float32(2)
    play(build_task(), "fedavg", cluster, **more)
    assert crew.summed == 0
    task = build_task()
    require_equal(play(task, "ditto", find_engine("whole"), **more), play(task, "ditto", engine(), **more))


# -- errands -----------------------------------------------------------------------------------------------------------
def count(engine: Any, stop: threading.Event, item: int) -> Iterator[int]:
    yield from range(item)
    if item == 4:
        raise EngineError("four is too many")


class Forgetful(CrewInside):
    """Workers that die on their first errand with an item."""

    def __init__(self, dying: dict[int, int]) -> None:
        super().__init__(2, make_worker)
        self.dying = dying

    def do(self, worker: int, errand: Any, item: Any) -> Iterator[Any]:
        if self.dying.get(item, 0):
            self.dying[item] -= 1
            raise WorkerLost("killed by a test")
        yield from super().do(worker, errand, item)


def test_errands_are_spread_and_given_to_another_worker_if_one_dies() -> None:
    stop = threading.Event()
    found = [*engine(Forgetful({2: 1})).spread(count, [1, 2, 3], stop)]
    assert sorted(found) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert not stop.is_set()


def test_what_an_errand_raises_ends_the_others() -> None:
    stop = threading.Event()
    found = dict(engine().spread(count, [4], stop))
    assert str(found[0]) == "four is too many"
    assert stop.is_set()
    assert [*engine().spread(count, [3], stop)] == []


def test_an_errand_that_kills_two_workers_is_an_error() -> None:
    ((number, error),) = engine(Forgetful({7: 2})).spread(count, [7], threading.Event())
    assert number == 0
    assert isinstance(error, EngineError)
    assert "must not end it. 2 workers died" in str(error)


class Counting(CrewInside):
    """Workers whose errands are counted, and whose user stops everything at one of them."""

    errands, stop_at = 0, 0

    def do(self, worker: int, errand: Any, item: Any) -> Iterator[Any]:
        self.errands += 1
        if self.errands == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().do(worker, errand, item)


def test_the_runs_of_a_race_are_spread(tmp_path: Path) -> None:
    """Workers pause and continue runs with two seeds, some of which diverge, which stops no other."""
    asked: dict[str, Any] = {"trials": 5, "chosen_by": 2, "seeds": 1, "rounds": 5, "progress": False}
    rows = torch.linspace(-1, 1, 60)
    data = {f"c{k}": (torch.stack([rows, rows**2], 1), rows) for k in range(4)}
    task = Task.own(data, kind="regression", model="mlp:4", training=Training(lr=20.0))
    crew = Counting(3, make_worker)
    crew.stop_at = 5
    with pytest.raises(KeyboardInterrupt, match="continue with"):
        tune(task, "fedavg", engine=engine(crew), folder=tmp_path, **asked)
    there = tune(task, "fedavg", engine=engine(crew), folder=tmp_path, **asked)
    here = tune(task, "fedavg", engine=find_engine("whole"), **asked)
    assert crew.errands > 10
    found, expected = ([(arm.label, arm.rungs, arm.reason) for arm in one.race.arms] for one in (there, here))
    assert found == expected
    assert any(reason == "diverged" for *_, reason in found)
    assert there.comparison is not None
    assert here.comparison is not None
    for name, runs in here.comparison.outcomes.items():
        assert [*map(format_metrics, runs)] == [*map(format_metrics, there.comparison.outcomes[name])]
