"""A real Ray cluster on this machine: the same bits as one process, and workers and nodes that are killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll import Recipe, Task, advise, compare, federate, tune
from atoll.kernel.errors import EngineError
from atoll.runtime.engines.cluster.rays import RayCrew, RayEngine, import_ray
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.conformance.playing import format_metrics, gather_outcome
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import require_same

pytest.importorskip("ray", reason="needs the extra `cluster`")

PLAN = {"strategy": "whole eager", "device": "cpu", "dtype": torch.float64}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayEngine]:
    with RayEngine(workers=2, **PLAN) as engine:
        yield engine
    assert not import_ray().is_initialized()


def crew_of(engine: RayEngine) -> RayCrew:
    assert isinstance(engine.crew, RayCrew)
    return engine.crew


def require_equal_runs(task: Task, method: str, engine: RayEngine, **more: Any) -> None:
    alone = federate(task, method, engine=LocalEngine(**PLAN), eval_every=1, **{**more, "on_round": None})
    there = federate(task, method, engine=engine, eval_every=1, **more)
    require_same(gather_outcome(alone), gather_outcome(there), "A cluster must give the numbers of one machine.")
    assert format_metrics(alone) == format_metrics(there)


def test_the_same_bits_although_a_worker_is_killed(cluster: RayEngine) -> None:
    crew = crew_of(cluster)
    before = crew.processes()

    def kill(line: Any) -> None:
        if line["round"] == 1:
            os.kill(before[crew.workers[0]], signal.SIGKILL)

    require_equal_runs(build_task(), "ditto", cluster, rounds=3, on_round=kill)
    after = crew.processes()
    assert len(after) == 2
    assert len({*after.values()} & {*before.values()}) == 1


def test_what_cannot_be_sent_is_refused(cluster: RayEngine) -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 3)
            self.held = threading.Event()

        def __deepcopy__(self, memo: Any) -> "Locked":
            return self

    task = build_task()
    data = {"a": (task.x[:9], task.y[:9]), "b": (task.x[9:18], task.y[9:18])}
    with pytest.raises(EngineError, match="can be sent to workers. They cannot: .*lock"):
        federate(Task.of_clients(data, Locked().double(), classes=3), "fedavg", rounds=1, engine=cluster)


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["topk:0.2", "sign", "lowrank:1", "qsgd:8"])
def test_packed_messages_have_the_same_bits(cluster: RayEngine, compress: str) -> None:
    require_equal_runs(build_task(), "ditto", cluster, rounds=3, compress=compress)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedora", "ditto@ifca:cluster_rounds=1", "fafi/margins", "pfedhn"])
def test_methods_of_every_kind_give_the_same_bits(cluster: RayEngine, method: str) -> None:
    require_equal_runs(build_task(), method, cluster, rounds=1 if "/" in method else 3)


@pytest.mark.slow
def test_a_users_own_file_is_sent(cluster: RayEngine, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent('''
            from dataclasses import dataclass
            from atoll import Algorithm, Cohort, Params, Update
            from atoll.toolbox.client import sgd

            @dataclass(frozen=True, kw_only=True)
            class Mine(Algorithm):
                """A method of a user's own."""

                def local(self, w: Params, cohort: Cohort) -> Update:
                    return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)
        ''')
    )
    require_equal_runs(build_task(), str(file), cluster, rounds=2)


@pytest.mark.slow
def test_runs_of_a_comparison_are_spread(cluster: RayEngine, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"seeds": 2, "rounds": 2}
    recipe, methods = Recipe("digits", clients=4, samples=200), ["ditto", "fafi/margins:epochs=1"]
    lines: list[Any] = []
    there = compare(recipe, methods, engine=cluster, folder=tmp_path / "a", on_round=lines.append, **asked)
    here = compare(recipe, methods, engine=LocalEngine(**PLAN), **asked)
    assert len(lines) == 2 * (2 + 2 + 2 + 1)
    for name, runs in here.outcomes.items():
        for mine, theirs in zip(runs, there.outcomes[name], strict=True):
            assert format_metrics(mine) == format_metrics(theirs)
    again = compare(recipe, methods, engine=cluster, folder=tmp_path / "a", on_round=lines.append, **asked)
    assert len(lines) == 14
    assert {*again.outcomes} == {*there.outcomes}
    without = compare(recipe, methods, engine=cluster, **asked)
    assert [run.summary() for run in without.outcomes["ditto"]] == [run.summary() for run in here.outcomes["ditto"]]


@pytest.mark.slow
@pytest.mark.parametrize("choose", [tune, advise])
def test_runs_of_a_race_are_spread_although_a_worker_is_killed(
    cluster: RayEngine, tmp_path: Path, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"trials": 3, "chosen_by": 2, "seeds": 2, "rounds": 5, "progress": False}
    recipe, crew = Recipe("digits", clients=4, samples=200), crew_of(cluster)
    errands, do = list[int](), crew.do

    def do_and_kill(worker: int, errand: Any, item: Any) -> Iterator[Any]:
        errands.append(worker)
        number = len(errands)
        for event in do(worker, errand, item):
            if number == 5 and event is not None and worker in crew.processes():
                os.kill(crew.processes()[worker], signal.SIGKILL)
            yield event

    monkeypatch.setattr(crew, "do", do_and_kill)
    there = choose(recipe, ["ditto"], engine=cluster, folder=tmp_path, **asked)
    here = choose(recipe, ["ditto"], engine=LocalEngine(**PLAN), **asked)
    assert len({*errands}) == 3  # two, and one that came in place of the other
    assert min(errands.count(worker) for worker in crew.workers) > 2
    assert [(arm.label, arm.rungs) for arm in there.race.arms] == [(arm.label, arm.rungs) for arm in here.race.arms]
    mine, theirs = here.comparison.outcomes, there.comparison.outcomes
    assert {name: [*map(format_metrics, runs)] for name, runs in mine.items()} == {
        name: [*map(format_metrics, runs)] for name, runs in theirs.items()
    }


NODES = """
    import json, sys, torch
    from ray.cluster_utils import Cluster
    from atoll import federate
    from atoll.runtime.engines.cluster.rays import RayEngine
    from atoll.runtime.engines.local import LocalEngine
    from atoll.testing.conformance.playing import format_metrics
    from atoll.testing.conformance.tasks import build_task
    from atoll.testing.conformance.trees import require_same

    plan = dict(strategy="whole eager", device="cpu", dtype=torch.float64)
    store = 100 * 2**20
    head = dict(num_cpus=1, object_store_memory=store, include_dashboard=False)
    nodes = Cluster(initialize_head=True, head_node_args=head)
    second = nodes.add_node(num_cpus=1, object_store_memory=store)
    nodes.wait_for_nodes()
    alive = []

    def kill(line):
        alive.append(len(engine.crew.workers))
        if line["round"] == 1:
            nodes.remove_node(second, allow_graceful=False)

    with RayEngine(nodes.address, workers=2, **plan) as engine:
        there = federate(build_task(), "ditto", rounds=4, engine=engine, eval_every=1, on_round=kill)
    here = federate(build_task(), "ditto", rounds=4, engine=LocalEngine(**plan), eval_every=1)
    nodes.shutdown()
    require_same(here.server, there.server, "the server")
    assert format_metrics(here) == format_metrics(there)
    print(json.dumps({"alive": alive, "lost": [line["lost"] for line in there.history]}))
"""


@pytest.mark.slow
def test_a_node_that_is_lost_changes_no_number() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NODES)], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"alive": [2, 1, 1, 1], "lost": [{}, {}, {}, {}]}


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"A cluster needs Ray, which is not installed") as error:
        import_ray()
    assert error.value.hint == "pip install 'atoll[cluster]'."


@pytest.mark.parametrize("address", ["nowhere", "ray://host:10001", ":6379", "host:"])
def test_an_address_has_a_host_and_a_port(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_ray(), "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"must be HOST:PORT, that of its head node, or auto"):
        RayEngine(address)


def test_an_address_must_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_ray(), "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"must be reachable at 127.0.0.1:9. It is not: .*refused"):
        RayEngine("127.0.0.1:9")


def test_there_must_be_workers() -> None:
    with pytest.raises(EngineError, match=r"`workers` must be at least 1. Got 0"):
        RayEngine(workers=0)
