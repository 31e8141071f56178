import errno
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import Sloped, with_public

from atoll import federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.federation.config import RunConfig, begin_run
from atoll.federation.report import Report
from atoll.kernel.algorithm import Update
from atoll.kernel.errors import DivergedError, RunError
from atoll.kernel.params import Layout, Params
from atoll.protect.ledger import Entry
from atoll.records.files import write_record
from atoll.records.rounds import Round
from atoll.records.runs import KEPT_CHECKPOINTS, Run
from atoll.records.schema import SCHEMA
from atoll.runtime.files import alone_in
from atoll.runtime.memory import disk
from atoll.runtime.serialise import to_bytes

CPU = torch.device("cpu")
LAYOUT = Layout({"w": "trained"})


def state(value):
    return {"server": Params({"w": torch.full((50,), float(value))}, LAYOUT), "memory": None}


CONFIG = {
    "task": {"name": "toy", "clients": 2}, "settings": {"rounds": 3}, "computes": None,
    "algorithm": {"name": "ditto", "file": None, "values": {}},
}  # fmt: skip
LINE = {"bytes": {"up": 20}, "seconds": {"round": 1.0}}


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints after 1 to 3 rounds, of which two remain."""
    run = begin_run(tmp_path / "run", CONFIG)
    for rounds in (1, 2, 3):
        run.record(Round.of_json({**LINE, "round": rounds}), [Entry("up", rounds - 1, "delta", "model", 10, (0, 1))])
        run.save(rounds, state(rounds))
    return run


def loaded(run):
    found = run.load((LAYOUT,), CPU)
    return None if found is None else (found[0], found[1]["server"]["w"][0].item())


# -- the folder ----------------------------------------------------------------------------------------------------


def test_a_folder_holds_what_is_needed_to_understand_and_continue(run):
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "checkpoints",
        "config.json",
        "ledger.jsonl",
        "metrics.jsonl",
    ]
    config = RunConfig.of_run(run)
    assert config.settings.rounds == 3
    assert config.versions["torch"] == torch.__version__
    assert config.machine["cores"] == os.cpu_count()
    assert [line["round"] for line in run.metrics()] == [1, 2, 3]
    assert run.ledger()[2] == Entry("up", 2, "delta", "model", 10, (0, 1))


def test_only_the_newest_checkpoints_stay(run):
    assert run.checkpoints() == [2, 3]
    assert len(list((run.folder / "checkpoints").iterdir())) == 2 * KEPT_CHECKPOINTS


def test_a_checkpoint_records_its_own_checksum_and_those_of_what_it_builds_on(run):
    data = (run.folder / "checkpoints" / "round-000003.safetensors").read_bytes()
    facts = json.loads((run.folder / "checkpoints" / "round-000003.json").read_text())
    files = facts.pop("files")
    assert facts.pop("schema") == SCHEMA
    assert len(facts.pop("seal")) == 64
    assert facts == {"round": 3, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert files.keys() == {"config.json", "metrics.jsonl", "ledger.jsonl"}
    config = (run.folder / "config.json").read_bytes()
    assert files["config.json"] == {"lines": len(config.splitlines()), "sha256": hashlib.sha256(config).hexdigest()}


def test_a_folder_that_holds_a_run_is_refused(run):
    with pytest.raises(RunError) as error:
        Run.create(run.folder, {})
    assert str(error.value) == (
        f"A new run must have a folder of its own. {run.folder} already holds one.\n"
        f"hint: continue it with `atoll resume {run.folder}`, or choose another folder."
    )


@pytest.mark.parametrize("left", ["metrics.jsonl", "ledger.jsonl", "checkpoints"])
def test_a_folder_with_the_remains_of_a_run_is_refused(run, left):
    for path in [*run.folder.iterdir()]:
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(RunError, match="holds (metrics.jsonl|ledger.jsonl|round-00000..json) of one without config"):
        Run.create(run.folder, CONFIG)


def test_a_folder_without_a_run_cannot_be_opened(tmp_path):
    with pytest.raises(RunError, match="A run's folder must hold config.json. .* does not."):
        Run.open(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="must be writable"):
        Run.create(tmp_path / "file" / "run", CONFIG)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_loaded(run):
    assert loaded(run) == (3, 3.0)
    assert run.load((LAYOUT,), CPU)[1]["server"].layout is LAYOUT


def spoil(run, rounds, how):
    data, facts = (run.folder / "checkpoints" / f"round-{rounds:06d}.{suffix}" for suffix in ("safetensors", "json"))
    whole = data.read_bytes()
    match how:
        case "flipped byte":
            data.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
        case "truncated":
            data.write_bytes(whole[: len(whole) // 2])
        case "empty":
            data.write_bytes(b"")
        case "no tensors":
            data.unlink()
        case "facts cut short":
            facts.write_text(facts.read_text()[:20])
        case "facts of another form":
            facts.write_text("[1, 2]")


WAYS = ["flipped byte", "truncated", "empty", "no tensors", "facts cut short", "facts of another form"]


@pytest.mark.parametrize("how", WAYS)
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(run, how, caplog):
    spoil(run, 3, how)
    with caplog.at_level(logging.WARNING, "atoll.run"):
        assert loaded(run) == (2, 2.0)
    assert "Checkpoint round-000003.safetensors" in caplog.text
    assert "The one before it is used." in caplog.text


def test_without_a_whole_checkpoint_the_run_begins_again(run, caplog):
    spoil(run, 2, "truncated")
    spoil(run, 3, "flipped byte")
    with caplog.at_level(logging.WARNING, "atoll.run"):
        assert loaded(run) is None
    assert "no checkpoint is whole: the run begins again" in caplog.text


def test_a_tensor_file_without_its_facts_does_not_count(run):
    (run.folder / "checkpoints" / "round-000009.safetensors").write_bytes(to_bytes(state(9)))
    assert loaded(run) == (3, 3.0)


# -- metrics and ledger --------------------------------------------------------------------------------------------


def test_a_line_cut_short_by_a_crash_is_left_out(run):
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    assert [line["round"] for line in run.metrics()] == [1, 2, 3]


def test_rewinding_forgets_what_came_later(run):
    (run.folder / ".config.json.123.tmp").write_text("left by a crash")
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    run.rewind(2)
    assert [line["round"] for line in run.metrics()] == [1, 2]
    assert [entry.round for entry in run.ledger()] == [0, 1]
    assert (run.folder / "metrics.jsonl").read_text().endswith("}\n")
    assert not list(run.folder.rglob("*.tmp"))
    run.rewind(0)
    assert run.metrics() == run.ledger() == []


# -- a full disk ---------------------------------------------------------------------------------------------------


def full_disk(monkeypatch, after):
    """`os.fsync` fails from call number `after` on."""
    calls, real = [], os.fsync

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_loses_nothing_before_the_last_checkpoint(run, monkeypatch):
    full_disk(monkeypatch, after=2)  # the metrics and the ledger can still be flushed, the checkpoint cannot
    with pytest.raises(RunError) as error:
        run.save(4, state(4))
    assert str(error.value).startswith(
        f"The disk with {run.folder} must have room for the run. It is full.\nhint: make room"
    )
    monkeypatch.undo()
    assert loaded(run) == (3, 3.0)
    assert not list(run.folder.rglob("*.tmp"))


def without_seconds(lines):
    return [{name: value for name, value in line.items() if name not in ("seconds", "memory")} for line in lines]


def same_run(folder: Path, other: Path):
    first, second = Run.open(folder), Run.open(other)
    np.testing.assert_equal(without_seconds(second.metrics()), without_seconds(first.metrics()))
    assert (other / "ledger.jsonl").read_bytes() == (folder / "ledger.jsonl").read_bytes()
    assert first.checkpoints() == second.checkpoints()
    last = f"checkpoints/round-{first.checkpoints()[-1]:06d}.safetensors"
    assert (other / last).read_bytes() == (folder / last).read_bytes()


OPTIONS = {"rounds": 6, "cohort": 3, "eval_every": 2, "drop": 0.2}


@pytest.fixture
def reference(make_task, tmp_path):
    task = make_task(sizes=(12, 8, 5, 9), shares=(0.6, 0.2, 0.2))
    federate(task, Ditto(), folder=tmp_path / "whole", **OPTIONS)
    return task, tmp_path / "whole"


@pytest.mark.parametrize("after", [2, 6, 9, 14])
def test_a_run_on_a_full_disk_is_resumed_bit_for_bit(reference, tmp_path, monkeypatch, after):
    task, whole = reference
    full_disk(monkeypatch, after)
    with pytest.raises(RunError, match="It is full.\nhint: make room, then continue with `atoll resume"):
        federate(task, Ditto(), folder=tmp_path / "run", **OPTIONS)
    monkeypatch.undo()
    federate(task, Ditto(), folder=tmp_path / "run", resume=True, **OPTIONS)
    same_run(whole, tmp_path / "run")


# -- resuming ------------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


def crash_after(round):
    def on_round(line):
        if line["round"] == round:
            raise Crash

    return on_round


@pytest.mark.parametrize("memory", ["ram", "disk"])
@pytest.mark.parametrize("round", [1, 3, 4, 5])
def test_a_run_that_crashed_is_resumed_bit_for_bit(make_task, tmp_path, memory, round):
    task = make_task(sizes=(12, 8, 5, 9), shares=(0.6, 0.2, 0.2))
    options = {**OPTIONS, "memory": memory}
    federate(task, Ditto(), folder=tmp_path / "whole", **options)
    with pytest.raises(Crash):
        federate(task, Ditto(), folder=tmp_path / "run", on_round=crash_after(round), **options)
    report = federate(task, Ditto(), folder=tmp_path / "run", resume=True, **options)
    same_run(tmp_path / "whole", tmp_path / "run")
    assert [line["round"] for line in report.history] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", WAYS)
def test_a_run_with_a_damaged_checkpoint_is_resumed_bit_for_bit(reference, tmp_path, how):
    task, whole = reference
    with pytest.raises(Crash):
        federate(task, Ditto(), folder=tmp_path / "run", on_round=crash_after(5), **OPTIONS)
    spoil(Run.open(tmp_path / "run"), 4, how)
    federate(task, Ditto(), folder=tmp_path / "run", resume=True, **OPTIONS)
    same_run(whole, tmp_path / "run")
    log = (tmp_path / "run" / "run.log").read_text()
    assert "Checkpoint round-000004.safetensors" in log
    assert "resumed after round 2" in log


def test_a_run_without_any_whole_checkpoint_begins_again(reference, tmp_path):
    task, whole = reference
    with pytest.raises(Crash):
        federate(task, Ditto(), folder=tmp_path / "run", on_round=crash_after(5), **OPTIONS)
    for rounds in (2, 4):
        spoil(Run.open(tmp_path / "run"), rounds, "truncated")
    federate(task, Ditto(), folder=tmp_path / "run", resume=True, **OPTIONS)
    same_run(whole, tmp_path / "run")
    assert "no checkpoint is whole: the run begins again" in (tmp_path / "run" / "run.log").read_text()


def test_resuming_a_run_that_is_finished_changes_nothing(reference):
    task, whole = reference
    files = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file() and path.suffix != ".log"}
    report = federate(task, Ditto(), folder=whole, resume=True, **OPTIONS)
    assert len(report.history) == 6
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize(
    ("algorithm", "changed", "text"),
    [
        (Ditto(lam=2.0), {}, "The algorithm differs in lam."),
        (FedAvg(), {}, "The algorithm differs in"),
        (Ditto(), {"rounds": 9, "seed": 1}, "The settings differs in rounds, seed."),
    ],
)
def test_a_run_must_be_resumed_with_what_it_was_begun_with(reference, algorithm, changed, text):
    task, whole = reference
    with pytest.raises(RunError, match=f"A run must be resumed with what it was begun with. {text}"):
        federate(task, algorithm, folder=whole, resume=True, **{**OPTIONS, **changed})


@pytest.mark.parametrize("changed", ["public", "central", "x"])
def test_a_run_must_be_resumed_with_all_the_data_that_it_was_begun_with(make_task, tmp_path, changed):
    task = replace(with_public(make_task()), central=(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)))
    federate(task, FedAvg(), rounds=1, folder=tmp_path / "run")
    other = task.x + 1 if changed == "x" else (getattr(task, changed)[0] + 1, getattr(task, changed)[1])
    with pytest.raises(RunError, match="The task differs in data"):
        federate(replace(task, **{changed: other}), FedAvg(), rounds=1, folder=tmp_path / "run", resume=True)


def test_a_run_must_be_resumed_with_the_model_that_it_was_begun_with(make_task, tmp_path):
    federate(make_task(lambda: Sloped(1.0)), FedAvg(), rounds=1, folder=tmp_path / "run")
    federate(make_task(lambda: Sloped(1.0)), FedAvg(), rounds=1, folder=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="The model computes something else: one of its attributes differs"):
        federate(make_task(lambda: Sloped(2.0)), FedAvg(), rounds=1, folder=tmp_path / "run", resume=True)


def test_a_run_is_not_overwritten_and_nothing_is_resumed_from_nowhere(reference, tmp_path):
    task, whole = reference
    with pytest.raises(RunError, match="already holds one"):
        federate(task, Ditto(), folder=whole, **OPTIONS)
    with pytest.raises(RunError, match="must hold config.json"):
        federate(task, Ditto(), folder=tmp_path / "none", resume=True, **OPTIONS)
    with pytest.raises(RunError, match="Only a run with a folder can be resumed"):
        federate(task, Ditto(), resume=True, **OPTIONS)


def test_a_run_that_diverged_stays_resumable(make_task, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Diverges(FedAvg):
        def local(self, w, cohort):
            update = super().local(w, cohort)
            if cohort.round == 3:
                cohort.observe(loss=cohort.samples * float("nan"))
            return update

    options = {"rounds": 5, "eval_every": 1}
    with pytest.raises(DivergedError) as error:
        federate(make_task(), Diverges(), folder=tmp_path / "run", **options)
    assert error.value.round == 3
    run = Run.open(tmp_path / "run")
    assert run.checkpoints() == [2, 3]
    assert [line["round"] for line in run.metrics()] == [1, 2, 3]


def test_messages_before_the_first_round_are_written_and_resumed(make_task, tmp_path):
    """A method with a light exchange before training, which also keeps something."""

    @dataclass(frozen=True, kw_only=True)
    class Prepared(Ditto):
        sends = {"delta": "model", "size": "statistic"}  # noqa: RUF012

        def prepare(self, broadcast, cohort):
            w = cohort.map(lambda v: v * 0.5, broadcast)
            return Update(send={"size": cohort.map(lambda v: Params.of(n=v.norm()), w)}, keep=w)

        def absorb(self, server, replies):
            assert replies.stack("size").clients == 4
            return server

    task, options = make_task(), {"rounds": 2, "eval_every": 1}
    whole = federate(task, Prepared(), folder=tmp_path / "whole", **options)
    prepared = [entry for entry in whole.ledger.entries if entry.round == -1]
    assert [(entry.direction, entry.field) for entry in prepared] == [("down", "broadcast"), ("up", "size")]
    for spoiled in (False, True):  # resumed after the first round, and from the very beginning
        folder = tmp_path / f"run {spoiled}"
        with pytest.raises(Crash):
            federate(task, Prepared(), folder=folder, on_round=crash_after(1), **options)
        if spoiled:
            spoil(Run.open(folder), 1, "empty")
        federate(task, Prepared(), folder=folder, resume=True, **options)
        same_run(tmp_path / "whole", folder)


# -- signals -------------------------------------------------------------------------------------------------------

SCRIPT = '''
import os, select, signal, sys, time
from pathlib import Path

import torch

from atoll import Task, Training, federate
from atoll.algorithms.ditto import Ditto
from atoll.models import MLP
from atoll.kernel.randomness import default_generator, generator, number

torch.set_num_threads(1)  # so that this process can fork


def task():
    draw = generator(0, "data")
    data = {str(k): (torch.from_numpy(draw.normal(size=(n, 4))).float(), torch.from_numpy(draw.integers(3, size=n)))
            for k, n in enumerate((12, 8, 5, 9))}
    with default_generator(0):
        return Task.of_clients(data, MLP((4,), 3, hidden=(6,)), classes=3, training=Training(batch_size=4))


def run(folder, resume=False, on_round=None):
    rounds = int(sys.argv[2])
    federate(task(), Ditto(), folder=folder, resume=resume, on_round=on_round,
             rounds=rounds, cohort=3, eval_every=1, drop=0.1, memory="disk")


def attempt(folder, on_round):
    """A child that begins or continues the run."""
    child = os.fork()
    if child == 0:
        try:
            run(folder, (Path(folder) / "config.json").exists(), on_round)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return child
'''

KILLS = (
    SCRIPT
    + """
folder, kills = sys.argv[1], 0
while True:
    reader, writer = os.pipe()
    child = attempt(folder, lambda line: (os.write(writer, b"."), time.sleep(0.01)))  # at least 10 ms a round
    os.close(writer)
    if kills == 10:
        break
    if kills % 3:  # two of three strike after a round, at any point of the next ones; the others while it starts
        select.select([reader], [], [])
    time.sleep(number(0, "delay", kills) % 1000 / 1000 * 0.06)
    os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(reader)
    assert killed, "the run ended before it was killed"
    kills += 1
assert os.waitpid(child, 0)[1] == 0
print("kills", kills)
"""
)

TERMINATED = (
    SCRIPT
    + """
child = attempt(sys.argv[1], lambda line: line["round"] == 2 and os.kill(os.getpid(), signal.SIGTERM))
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)

UNINTERRUPTED = SCRIPT + '\nrun(sys.argv[1])\nprint("ended")\n'


def play(script, folder, rounds):
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(rounds)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ten_kills_at_random_moments_change_nothing(tmp_path):
    assert "ended" in play(UNINTERRUPTED, tmp_path / "whole", 45)
    assert "kills 10" in play(KILLS, tmp_path / "killed", 45)
    same_run(tmp_path / "whole", tmp_path / "killed")
    assert (tmp_path / "killed" / "run.log").read_text().count("resumed after round") >= 5
    assert not list((tmp_path / "killed").rglob("*.tmp"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigterm_ends_after_the_round_with_a_checkpoint(tmp_path):
    out = play(TERMINATED, tmp_path / "run", 6)
    assert f"KeyboardInterrupt stopped after round 3; continue with `atoll resume {tmp_path / 'run'}`" in out
    assert "status 1" in out
    run = Run.open(tmp_path / "run")
    assert run.checkpoints()[-1] == 3
    assert [line["round"] for line in run.metrics()] == [1, 2, 3]
    assert "stopping after this round; interrupt again to stop at once" in (tmp_path / "run" / "run.log").read_text()


def test_ctrl_c_saves_the_round_and_twice_stops_at_once(make_task, tmp_path):
    task, options = make_task(), {"rounds": 6, "evaluation": "none"}
    federate(task, Ditto(), folder=tmp_path / "whole", **options)

    def interrupt(times):
        return lambda line: line["round"] == 1 and [signal.raise_signal(signal.SIGINT) for _ in range(times)]

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped after round 2"):
        federate(task, Ditto(), folder=tmp_path / "once", on_round=interrupt(1), **options)
    assert Run.open(tmp_path / "once").checkpoints() == [2]
    with pytest.raises(KeyboardInterrupt, match="^$"):
        federate(task, Ditto(), folder=tmp_path / "twice", on_round=interrupt(2), **options)
    assert Run.open(tmp_path / "twice").checkpoints() == []
    assert signal.getsignal(signal.SIGINT) is before
    for name in ("once", "twice"):
        federate(task, Ditto(), folder=tmp_path / name, resume=True, **options)
        assert Run.open(tmp_path / name).checkpoints()[-1] == 6
        assert (tmp_path / name / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()
        last = "checkpoints/round-000006.safetensors"
        assert (tmp_path / name / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.log", "metrics.jsonl", "ledger.jsonl", "memory.sqlite", "checkpoints"])
def test_nothing_is_written_through_a_link(make_task, tmp_path, name):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    folder.mkdir()
    if name == "checkpoints":
        elsewhere.mkdir()
    else:
        elsewhere.write_text("")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(RunError, match=rf"(The files of a run must lie in its folder|must not be a link). .*{name} is"):
        federate(make_task(), FedAvg(), rounds=2, folder=folder, memory="disk", evaluation="none")
    assert not [*elsewhere.iterdir()] if name == "checkpoints" else elsewhere.read_text() == ""


@pytest.mark.parametrize("name", ["config.json", "clients.json", "outcomes.npz", "report.html"])
def test_a_whole_file_takes_the_place_of_a_link(make_task, tmp_path, name):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(elsewhere)  # which is not there: nothing stands in the way of a new run
    federate(make_task(shares=(0.6, 0.2, 0.2)), FedAvg(), rounds=1, folder=folder)
    assert not elsewhere.exists()
    assert name == "report.html" or not (folder / name).is_symlink()


def test_a_resumed_run_does_not_write_through_links_either(make_task, tmp_path):
    task, folder = make_task(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        federate(task, FedAvg(), rounds=3, folder=folder, evaluation="none", on_round=_interrupt)
    (tmp_path / "elsewhere").write_text("precious")
    (folder / "run.log").unlink()
    (folder / "run.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="run.log is a link"):
        federate(task, FedAvg(), rounds=3, folder=folder, evaluation="none", resume=True)
    assert (tmp_path / "elsewhere").read_text() == "precious"


def _interrupt(line: dict) -> None:
    raise KeyboardInterrupt


# -- one writer at a time ----------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_by_name(make_task, tmp_path):
    folder, refused = tmp_path / "run", []

    def meanwhile(line):
        if line["round"] == 1:
            with pytest.raises(RunError, match=f"process {os.getpid()} on .* does") as error:
                federate(make_task(), Ditto(), rounds=3, evaluation="none", folder=folder, resume=True)
            refused.append(str(error.value))

    federate(make_task(), Ditto(), rounds=3, evaluation="none", folder=folder, on_round=meanwhile)
    assert len(refused) == 1
    assert f"One process at a time may write to {folder}." in refused[0]
    assert [line["round"] for line in Run.open(folder).metrics()] == [1, 2, 3]
    assert not (folder / ".writer").exists()


HOLDING = """
import sys
from pathlib import Path
from atoll.runtime.files import alone_in
with alone_in(Path(sys.argv[1])):
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"holding\n"
    with pytest.raises(RunError, match=f"process {holder.pid} on"), alone_in(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with alone_in(tmp_path):
        assert (tmp_path / ".writer").read_text().startswith(f"process {os.getpid()} ")


# -- files that a checkpoint builds on ---------------------------------------------------------------------------------


@pytest.fixture
def stopped(make_task, tmp_path):
    """A run of five rounds that was stopped after three, with a memory on disk."""
    asked = {"rounds": 5, "eval_every": 1, "memory": "disk", "folder": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        federate(make_task(), Ditto(), on_round=lambda line: line["round"] == 3 and stop_now(), **asked)
    return lambda **more: federate(make_task(), Ditto(), resume=True, **asked | more), tmp_path / "run"


def stop_now():
    raise KeyboardInterrupt


def edit_config(folder):
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"cites"', '"cited"').replace('"machine"', '"machinery"'))


def drop_line(name):
    def drop(folder):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:1] + lines[2:]))

    return drop


def change_digit(folder):
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"gradients": ', '"gradients": 1', 1))


@pytest.mark.parametrize(
    ("change", "name"),
    [(edit_config, "config.json"), (drop_line("metrics.jsonl"), "metrics.jsonl"),
     (drop_line("ledger.jsonl"), "ledger.jsonl"), (change_digit, "metrics.jsonl"),
     (lambda folder: (folder / "ledger.jsonl").unlink(), "ledger.jsonl")],
)  # fmt: skip
def test_a_run_is_not_resumed_from_other_files_than_it_wrote(stopped, change, name):
    resume, folder = stopped
    change(folder)
    with pytest.raises(RunError, match=f"{name} was changed after (round 3|it was written)"):
        resume()


def test_a_run_is_not_resumed_without_what_its_clients_kept(stopped):
    resume, folder = stopped
    for file in folder.glob("memory.sqlite*"):
        file.unlink()
    with pytest.raises(RunError, match="they had 4 trees in .*memory.sqlite, now there are 0"):
        resume()


def test_a_run_as_it_was_is_resumed(stopped):
    resume, folder = stopped
    resume()
    assert Report.read(folder).finished


def test_a_run_without_its_last_checkpoint_is_not_finished(make_task, tmp_path):
    asked = {"rounds": 2, "eval_every": 1, "folder": tmp_path / "run"}
    whole = federate(make_task(), Ditto(), **asked)
    last = tmp_path / "run" / "checkpoints" / "round-000002.safetensors"
    kept = last.read_bytes()
    for damage in (last.unlink, lambda: last.write_bytes(kept[:-1])):
        damage()
        assert not Report.read(tmp_path / "run").finished
        again = federate(make_task(), Ditto(), resume=True, **asked)
        np.testing.assert_array_equal(again.scores(), whole.scores())
        assert Report.read(tmp_path / "run").finished


# -- finished runs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(make_task, tmp_path):
    """A finished run, and what its report says."""
    task = make_task(sizes=(12, 8, 5, 9), shares=(0.6, 0.2, 0.2))
    report = federate(task, Ditto(), rounds=2, eval_every=1, folder=tmp_path / "run")
    return tmp_path / "run", report


def seal_again(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    del content["seal"]
    write_record(path, content)


@pytest.mark.parametrize(
    ("change", "name"),
    [(edit_config, "config.json"), (change_digit, "metrics.jsonl"), (drop_line("ledger.jsonl"), "ledger.jsonl"),
     (lambda folder: seal_again(folder / "config.json", command="another"), "config.json"),
     (lambda folder: seal_again(folder / "clients.json", samples=[1, 2, 3, 4]), "clients.json"),
     (lambda folder: (folder / "outcomes.npz").unlink(), "outcomes.npz"),
     (lambda folder: (folder / "clients.json").unlink(), "clients.json")],
)  # fmt: skip
def test_a_finished_run_that_was_changed_is_not_shown(finished, change, name):
    folder, _ = finished
    change(folder)
    with pytest.raises(RunError, match=f"{name} was changed after (round 2|it was written)"):
        Report.read(folder)


def test_a_report_is_the_same_from_memory_and_from_its_folder(finished):
    folder, report = finished
    read = Report.read(folder)
    assert read.history == report.history
    assert read.config == report.config
    assert read.ledger.entries == report.ledger.entries
    np.testing.assert_array_equal(read.outcomes["test"], report.outcomes["test"])
    assert read.statistics.as_json() == report.statistics.as_json()
    assert (read.label, read.finished, read.progress) == (report.label, True, "2 of 2 rounds")
    with pytest.raises(RunError, match="Only a run of this process has its task"):
        _ = read.server
    with pytest.raises(RunError, match="Only a run of this process"):
        _ = report.without_live().population


def test_a_last_checkpoint_with_a_flipped_byte_is_none(finished):
    folder, _ = finished
    spoil(Run.open(folder), 2, "flipped byte")
    read = Report.read(folder)
    assert not read.finished
    assert read.progress == "all 2 rounds, but its last checkpoint is missing or damaged"


def test_files_about_different_clients_are_refused(finished):
    folder, _ = finished
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    seal_again(folder / "config.json", task={**config["task"], "clients": 5})
    with pytest.raises(RunError, match="has 5 in config.json and 4 in round 1 of metrics.jsonl"):
        Report.read(folder)


# -- what clients kept -------------------------------------------------------------------------------------------------


def in_memory(folder, *statements):
    connection = sqlite3.connect(folder / "memory.sqlite")
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: in_memory(folder, "PRAGMA user_version = 2"), "is of round 2, the checkpoint of round 3"),
        (
            lambda folder: in_memory(folder, "UPDATE kept SET tree = x'00' WHERE client = 1"),
            "client 1 kept is damaged",
        ),
        (lambda folder: in_memory(folder, "UPDATE kept SET tree = NULL WHERE client = 1"), "SQLite file|is damaged"),
        (lambda folder: (folder / "memory.sqlite").write_bytes(b"no database" * 99), "must be in a whole SQLite file"),
    ],
)
def test_a_run_is_resumed_only_with_what_its_clients_kept(stopped, change, said):
    resume, folder = stopped
    change(folder)
    with pytest.raises(RunError, match=said):
        resume()


def make_older(folder, *, checksums):
    """Write what clients kept as older versions did: rows say themselves what they hold."""
    connection = sqlite3.connect(folder / "memory.sqlite")
    rows = connection.execute("SELECT client, round, leaves, tree FROM kept JOIN forms USING (form)").fetchall()
    with connection:
        for table in ("kept", "pieces", "forms"):
            connection.execute(f"DROP TABLE {table}")
        column = ", checksum TEXT" if checksums else ""
        connection.execute(
            f"CREATE TABLE kept (piece TEXT, client INTEGER, round INTEGER, tree BLOB{column}, "
            "PRIMARY KEY (piece, client, round))"
        )
        for client, round, leaves, tree in rows:
            message = to_bytes([leaf[0] for leaf in disk._Form(leaves).read([tree])])
            found = hashlib.blake2b(f"|{client}|{round}|".encode() + message, digest_size=16).hexdigest()
            row = ("", client, round, message, *([found] if checksums else []))
            connection.execute(f"INSERT INTO kept VALUES ({', '.join('?' * len(row))})", row)
        if not checksums:
            connection.execute("PRAGMA user_version = 0")
    connection.close()


@pytest.mark.parametrize("checksums", [False, True])
def test_what_clients_kept_with_an_older_version_is_taken(stopped, tmp_path, checksums):
    resume, folder = stopped
    shutil.copytree(folder, tmp_path / "other")
    make_older(folder, checksums=checksums)
    resume()
    assert Report.read(folder).finished
    straight = resume(folder=tmp_path / "other")
    np.testing.assert_equal(
        [line["evaluation"] for line in Report.read(folder).history], [line["evaluation"] for line in straight.history]
    )


def test_damage_to_what_an_older_version_kept_is_found(stopped):
    resume, folder = stopped
    make_older(folder, checksums=True)
    in_memory(folder, "UPDATE kept SET tree = x'00' WHERE client = 1")
    with pytest.raises(RunError, match="client 1 kept is damaged"):
        resume()


# -- every write point, and every kind of damage -----------------------------------------------------------------------

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "which", [["--only", "ditto disk", "--every", "16"], pytest.param(["--every", "1"], marks=pytest.mark.slow)]
)
def test_a_kill_at_a_write_point_changes_nothing(which):
    command = [sys.executable, str(BENCHMARKS / "kill_points.py"), *which]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " kills, " in done.stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_damaged_folders_end_in_sentences(tmp_path, monkeypatch):
    """Sixty kinds of damage, each met by one command; benchmarks/fuzz_runs.py has them all."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    fuzz_runs = importlib.import_module("fuzz_runs")
    found = fuzz_runs.fuzz(60, 1, tmp_path, every=False)
    assert len(found) == 60
    assert not [case for case in found if case.outcome in fuzz_runs.BAD]
    assert {case.outcome for case in found} == {"same", "refused", "said"}
