"""What a process has measured is found by the next one; here, by the next engine, which remembers nothing itself."""

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import needs_compiler
from samples import Sloped, Work

from atoll import LocalEngine, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.job import Job, Local
from atoll.kernel.params import flatten
from atoll.models import MLP
from atoll.runtime.engines import figures, planning
from atoll.runtime.engines.figures import Figures, Measured, describe_work
from atoll.runtime.engines.parts import parts_of
from atoll.runtime.engines.plan import Plan
from atoll.runtime.files import cache_folder
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.testing.first_round import time_first_round

ROUNDS = 8


@pytest.fixture
def measured(monkeypatch):
    """The plans that are measured, in a run that is worth it."""
    monkeypatch.setattr(planning, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(planning, "WORTH_COMPILING", float("inf"))
    measure, plans = LocalEngine._measure, []

    def counted(self, plan, part, calls):
        plans.append((part.job.phase.name, str(plan)))
        return measure(self, plan, part, calls)

    monkeypatch.setattr(LocalEngine, "_measure", counted)
    return plans


def part_of(task, method=None, phase=None, **options):
    clients = np.arange(task.clients)
    population, method = Population(task, RamMemory(task.clients), 0), method or FedAvg()
    server = method.start(population.facts)
    (part,) = parts_of(Job(phase or Local(), method, server, clients, 0, usual=len(clients), **options), population)
    return part


def run(task, method="fedavg", **options):
    engine = LocalEngine(device="cpu", dtype=torch.float64, **{"compile": False, **options})
    report = federate(task, method, rounds=ROUNDS, eval_every=ROUNDS, engine=engine)
    return engine, flatten(report.server)[0], report.scores()


def files():
    return sorted((cache_folder() / "plans").glob("*"))


@pytest.fixture
def task(make_task):
    return make_task(shares=(0.6, 0.2, 0.2), sizes=(20, 30, 10), dtype=torch.float64)


# -- found again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "strategy"),
    [("fedavg", "auto"), ("ditto+sam", "chunk:2"), ("fedper@ifca:clusters=2,cluster_rounds=2", "whole")],
)
def test_the_next_process_measures_nothing_and_gives_the_same_bits(task, measured, method, strategy):
    first, w, scores = run(task, method, strategy=strategy)
    assert ("local", str(next(plan for key, plan in first.plans.items() if key[0] == "local"))) in measured
    measured.clear()
    second, again, rescored = run(task, method, strategy=strategy)
    assert {phase for phase, _ in measured} <= {"prepare -1", "finish"}  # in which a hybrid's clients take no steps
    assert second.plans == first.plans
    assert all(torch.equal(one, other) for one, other in zip(w, again, strict=True))
    np.testing.assert_array_equal(scores, rescored)


def test_the_programs_of_a_better_plan_that_is_found_are_made_however_seldom_they_are_called(task, measured):
    part = part_of(task, calls=2)
    first, second = (LocalEngine(device="cpu", dtype=torch.float64, strategy="whole", compile=False) for _ in range(2))
    key = Figures(describe_work(part, first.device, first.threads), 1.0)
    for plan in (first._first_plan(part), *first._candidates(part, Measured(first._first_plan(part), 1.0, 1.0))):
        key.add(Measured(plan, 1e-6 if str(plan) == "whole traced fp32" else 1e-3, 100.0))
    key.save()
    assert str(second._plan(part)) == "whole traced fp32"
    assert measured == []
    assert [mode for mode, _ in second.programs._made] == ["traced"]


def test_another_grouping_takes_what_is_known_and_measures_the_rest(task, measured):
    run(task)
    known = set(measured)
    measured.clear()
    engine, *_ = run(task, strategy="loop")
    assert all(plan.strategy == "loop" for plan in engine.plans.values())
    assert measured
    assert not known.intersection(measured)
    measured.clear()
    run(task, strategy="loop")
    run(task)
    assert measured == []  # what either has measured is kept


def test_a_plan_that_is_spelled_out_reads_and_writes_nothing(task, measured):
    run(task, strategy="whole traced", compile=None)
    assert measured == []
    assert files() == []


def test_an_engine_that_does_not_remember_measures_again_and_keeps_nothing(task, measured):
    for _ in range(2):
        measured.clear()
        run(task, strategy="whole", remember=False)
        assert measured
    assert files() == []


def test_a_short_run_keeps_nothing(task, monkeypatch):
    run(task)  # `WORTH_MEASURING` is far away
    assert files() == []


def test_the_plans_of_a_resumed_run_come_first(task, measured, tmp_path):
    options = {"rounds": ROUNDS, "eval_every": 1, "folder": tmp_path / "run"}
    run(task, "ditto")

    def stop(line):
        if line["round"] == 2:
            raise InterruptedError

    def engine():
        return LocalEngine(device="cpu", dtype=torch.float64, compile=False)

    first, second, facts = engine(), engine(), task.public_facts()
    imported = {"phase": "local", "clients": 3, "plan": asdict(Plan("chunk", 2, "traced"))}
    first.import_plans([imported], Ditto(), facts)
    with pytest.raises(InterruptedError):
        federate(task, Ditto(), engine=first, on_round=stop, **options)
    measured.clear()
    federate(task, Ditto(), engine=second, resume=True, **options)
    (kept,) = [plan for key, plan in second.plans.items() if key[0] == "local"]
    assert kept == Plan("chunk", 2, "traced")
    assert "local" not in [phase for phase, _ in measured]


# -- decisions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "there", "same_folder", "mode"), [
    (100, True, True, "compiled"),  # 10 s and more ahead: loading pays
    (100, False, True, "traced"),  # torch's programs were removed: compiling would not pay
    (100, True, False, "traced"),  # torch now looks elsewhere
    (10, True, True, "traced"),  # too short even to load
    (1000, False, True, "compiled"),  # 100 s ahead: compiling pays
])  # fmt: skip
def test_a_run_compiles_if_it_pays_not_because_a_longer_one_did(
    task, monkeypatch, tmp_path, calls, there, same_folder, mode
):
    for worth, seconds in (("WORTH_MEASURING", 0.0), ("WORTH_LOADING", 10.0), ("WORTH_COMPILING", 60.0)):
        monkeypatch.setattr(planning, worth, seconds)
    monkeypatch.setattr(LocalEngine, "_measure", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(LocalEngine, "_make_programs", lambda *_: None)
    monkeypatch.setenv(figures.TORCH_FOLDER, str(tmp_path if same_folder else tmp_path / "other"))
    part, engine = part_of(task, calls=calls), LocalEngine(device="cpu", dtype=torch.float64, strategy="whole")
    first, kept = engine._first_plan(part), Figures(describe_work(part, engine.device, engine.threads), 1.0)
    fastest = Plan("whole", mode="traced", one_core=True)
    for plan in [first, *engine._candidates(part, Measured(first, 1.0, 1.0))]:
        kept.add(Measured(plan, 2e-3 if plan == fastest else 3e-3, 100.0 / 6))
    kept.add(Measured(replace(fastest, mode="compiled"), 1e-3, 100.0 / 6, took=20.0, programs=str(tmp_path)))
    kept.save()
    if not there:
        next((tmp_path / "atoll").iterdir()).unlink()
    assert engine._plan(replace(part, clients=part.clients)).mode == mode


def test_a_rough_figure_does_not_decide_a_longer_run(task, measured):
    engine, part = LocalEngine(device="cpu", dtype=torch.float64, compile=False), part_of(task, calls=1000)
    first, kept = engine._first_plan(part), Figures(describe_work(part, engine.device, engine.threads), 1.0)
    kept.add(Measured(first, 1e-9, 100.0, rough=True))
    kept.save()
    engine._calibrate(part)
    assert measured[0] == ("local", str(first))


# -- files that are no use ---------------------------------------------------------------------------------------------


def spoil(change):
    def edit(file: Path):
        found = json.loads(file.read_text())
        change(found)
        file.write_text(json.dumps(found))

    return edit


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:100]),
    lambda file: file.write_bytes(b"\xff\xfe"),
    lambda file: file.write_text("[]"),
    spoil(lambda found: found.pop("figures")),
    spoil(lambda found: found["work"].update(torch="1.0")),
    spoil(lambda found: found["figures"][0].update(seconds=-1.0)),
    spoil(lambda found: found["figures"][0].update(steps=float("nan"))),
    spoil(lambda found: found["figures"][0]["plan"].update(speed="high")),
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_said_and_not_used(caplog, damage):
    plan, kept = Plan("loop"), Figures({"torch": "2.0"}, 1.0)
    kept.add(Measured(plan, 1.0, 1.0))
    kept.save()
    (file,) = files()
    assert Figures({"torch": "2.0"}, 1.0).get(plan) == Measured(plan, 1.0, 1.0)
    damage(file)
    again = Figures({"torch": "2.0"}, 1.0)
    assert again.get(plan) is None
    assert "is not used and its plans are measured again" in caplog.text
    again.add(Measured(plan, 2.0, 1.0))
    again.save()
    assert Figures({"torch": "2.0"}, 1.0).get(plan) == Measured(plan, 2.0, 1.0)  # the file is whole again


def test_after_damage_a_run_measures_again_and_gives_the_same_bits(task, measured):
    _, w, _ = run(task, strategy="whole")
    expected = {*measured}
    for file in files():
        file.write_bytes(file.read_bytes()[:100])
    measured.clear()
    _, again, _ = run(task, strategy="whole")
    assert {*measured} == expected
    assert all(torch.equal(one, other) for one, other in zip(w, again, strict=True))


def test_an_old_file_is_said_and_measured_again(task, measured, caplog):
    run(task, strategy="whole")
    old = time.time() - figures.KEPT_SECONDS - 1
    for file in files():
        os.utime(file, (old, old))
    measured.clear()
    with caplog.at_level(logging.INFO, "atoll.engine"):
        run(task, strategy="whole")
    assert measured
    assert "is old: its plans are measured again" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_run(task, measured, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "atoll.engine"):
        run(task)
    assert "what was measured cannot be kept in" in caplog.text


def test_work_whose_code_cannot_be_known_is_not_kept(task, caplog):
    captured = torch.ones(1)
    engine = LocalEngine(device="cpu", dtype=torch.float64)
    with caplog.at_level(logging.INFO, "atoll.engine"):
        kept = engine._figures(part_of(task, phase=Work(lambda cohort: captured, "local")))
    kept.add(Measured(Plan(), 1.0, 1.0))
    kept.save()
    assert "what is measured is not kept (it captures a Tensor" in caplog.text
    assert files() == []


def test_the_oldest_files_are_removed(task, monkeypatch):
    monkeypatch.setattr(figures, "MOST", 3)
    for number in range(5):
        kept = Figures({"number": number}, 1.0)
        kept.add(Measured(Plan(), 1.0, 1.0))
        kept.save()
        os.utime(kept._file, (time.time() - 100 + number,) * 2)
    numbers = sorted(json.loads(file.read_text())["work"]["number"] for file in files())
    assert numbers == [2, 3, 4]


@pytest.mark.slow
def test_two_processes_may_write_at_once():
    """Whoever is last has what both measured, or its own: the file is whole, and nothing else is left behind."""
    script = (
        "import sys\n"
        "from atoll.runtime.engines.figures import Figures, Measured\n"
        "from atoll.runtime.engines.plan import Plan\n"
        "for number in range(1, 20):\n"
        "    kept = Figures({'work': 1}, 1.0)\n"
        "    kept.add(Measured(Plan('chunk', number * int(sys.argv[1])), 1.0, 1.0))\n"
        "    kept.save()\n"
    )
    both = [subprocess.Popen([sys.executable, "-W", "error", "-c", script, sign]) for sign in ("1", "-1")]
    assert [process.wait() for process in both] == [0, 0]
    (file,) = files()
    found = {one["plan"]["chunk"] for one in json.loads(file.read_text())["figures"]}
    assert found & {19, -19}
    assert len(found) >= 19


# -- what counts -------------------------------------------------------------------------------------------------------


def test_everything_that_speed_depends_on_counts(make_task, monkeypatch):
    task, cpu = make_task(), torch.device("cpu")

    def describe(task=task, method=None, threads=2):
        return json.dumps(describe_work(part_of(task, method), cpu, threads))

    plain = describe()
    assert describe(make_task()) == plain
    assert describe(make_task(lr=0.1)) == plain
    others = [
        describe(threads=3), describe(method=FedAvg(epochs=2)), describe(method=Ditto()),
        describe(make_task(batch_size=5)), describe(make_task(momentum=0.9)), describe(make_task(dtype=torch.float64)),
        describe(make_task(sizes=(5, 5, 5, 5))), describe(make_task(sizes=(5, 1, 12))),
        describe(make_task(lambda: MLP((4,), 3, hidden=(7,)))), describe(make_task(lambda: Sloped(1.0))),
        describe(make_task(lambda: Sloped(2.0))),
    ]  # fmt: skip
    monkeypatch.setattr(torch, "__version__", "1.0")
    others.append(describe())
    monkeypatch.setattr(figures, "_processor", lambda: "another one")
    others.append(describe())
    monkeypatch.setattr(figures, "code_digest", lambda: "edited")
    others.append(describe())
    assert len({plain, *others}) == 1 + len(others)


def test_the_device_counts(make_task, monkeypatch):
    part = part_of(make_task())
    names = iter(["NVIDIA H200", "NVIDIA H100"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))  # there is no GPU here
    one, other = (describe_work(part, torch.device("cuda"), 2) for _ in range(2))
    assert one != other
    assert one["device"] == "NVIDIA H200"


@pytest.mark.slow
@needs_compiler
def test_the_next_process_neither_measures_nor_compiles():
    recipe = {"clients": 3, "model": "mlp:4", "samples": 60}
    cold, warm = time_first_round("fedavg", recipe, rounds=20, device="cpu", strategy="whole", compile=True)
    assert cold.measured
    assert cold.compiled
    assert warm.measured == []
    assert warm.compiled == 0
