import json
import logging
import resource
import shutil
import threading

import numpy as np
import pytest
import safetensors.torch
import torch

from atoll import create, federate
from atoll.federation.report import Report
from atoll.kernel.errors import RunError
from atoll.kernel.params import Params
from atoll.records.checkpoints import write_tensors
from atoll.records.files import write_record, writing
from atoll.records.runs import Run
from atoll.records.writer import Writer
from atoll.runtime.serialise import pack

CPU = torch.device("cpu")


@pytest.fixture
def writer():
    made = Writer(CPU)
    yield made
    made.close(error=Exception())


# -- the thread --------------------------------------------------------------------------------------------------------


def test_everything_is_written_in_order_beside_the_work(writer):
    open_gate, written = threading.Event(), []
    writer.put(open_gate.wait)
    for number in range(5):
        writer.put(lambda number=number: written.append((number, threading.current_thread().name)))
    assert written == []
    open_gate.set()
    writer.wait()
    assert written == [(number, "atoll-writer") for number in range(5)]


def test_nothing_is_written_after_a_failure_and_the_run_ends_with_it(writer):
    def fail():
        raise RunError("The disk is full.")

    written, gate = [], threading.Event()
    writer.put(gate.wait)
    writer.put(fail)
    writer.put(lambda: written.append("more"))
    gate.set()
    for end in (writer.wait, lambda: writer.put(written.clear), writer.close):
        with pytest.raises(RunError, match="The disk is full"):
            end()
    assert written == []


def test_a_run_that_ends_with_an_error_of_its_own_keeps_it(caplog):
    writer = Writer(CPU)
    writer.put(lambda: 1 / 0)
    with caplog.at_level(logging.ERROR, "atoll.run"):
        writer.close(error=KeyboardInterrupt())
    assert "the run could not be written: division by zero" in caplog.text


class Impatient(threading.Thread):
    """Whoever waits for it is interrupted once; then the gate opens."""

    def __init__(self, thread, gate):
        super().__init__()
        self.thread, self.gate, self.interrupted = thread, gate, False

    def is_alive(self):
        return self.thread.is_alive()

    def join(self):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.gate.set()
        self.thread.join()


def test_an_interruption_at_the_end_leaves_the_file_under_way_whole_and_begins_no_other():
    writer, gate, begun, written = Writer(CPU), threading.Event(), threading.Event(), []

    def write():
        begun.set()
        gate.wait(60)
        written.append("whole")

    writer.put(write)
    writer.put(lambda: written.append("another"))
    assert begun.wait(60)
    writer._thread = Impatient(writer._thread, gate)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert not writer._thread.is_alive()
    assert written == ["whole"]


def test_a_writer_that_was_given_nothing_has_no_thread():
    before = threading.active_count()
    Writer(CPU).close()
    assert threading.active_count() == before


# -- in a run ----------------------------------------------------------------------------------------------------------

METHODS = ["ditto", "scaffold", "ditto+gate", "ditto+sam", "fedper@ifca:cluster_rounds=1", "fedora", "local"]
PARTIAL = {"rounds": 4, "eval_every": 2, "cohort": 1, "late": 0.4, "seed": 2}  # somebody new in the third round


class Crash(Exception):
    pass


def files_of(folder):
    return {path.name: path.read_bytes() for path in (folder / "checkpoints").glob("*.safetensors")}


def crash_in_round_3(line, gate=None):
    if line.round == 3:
        if gate:
            gate.set()
        raise Crash


@pytest.mark.parametrize("method", METHODS)
def test_the_loop_goes_on_while_a_checkpoint_is_written_of_what_was(make_task, tmp_path, monkeypatch, method):
    task = make_task(sizes=(12, 8, 5, 9), shares=(0.6, 0.2, 0.2), dtype=torch.float64)
    federate(task, create(method), folder=tmp_path / "whole", **PARTIAL)
    with pytest.raises(Crash):
        federate(task, create(method), folder=tmp_path / "quick", on_round=crash_in_round_3, **PARTIAL)
    gate, waited, save = threading.Event(), [], Run.save

    def save_slowly(run, rounds, *given, **more):
        waited.append(gate.wait(60))
        save(run, rounds, *given, **more)

    asked = {"folder": tmp_path / "slow", "on_round": lambda line: crash_in_round_3(line, gate), **PARTIAL}
    monkeypatch.setattr(Run, "save", save_slowly)  # not before the third round is done
    with pytest.raises(Crash):
        federate(task, create(method), **asked)
    monkeypatch.undo()
    assert waited == [True]
    assert [line.round for line in Run(tmp_path / "slow").metrics()] == [1, 2, 3]
    assert files_of(tmp_path / "slow") == files_of(tmp_path / "quick")
    federate(task, create(method), folder=tmp_path / "slow", resume=True, **PARTIAL)
    assert files_of(tmp_path / "slow") == files_of(tmp_path / "whole")


def test_after_a_checkpoint_a_rounds_lines_are_in_the_folder_and_its_outcomes(make_task, tmp_path):
    seen = []

    def look(line):
        run = Run(tmp_path / "run")
        seen.append((line.round, len(run.metrics()), run.outcomes() is not None))

    federate(make_task(shares=(0.6, 0.2, 0.2)), "ditto", folder=tmp_path / "run", on_round=look, **PARTIAL)
    assert seen[0] == (1, 1, False)  # trackers begin with the folder
    assert seen[1] == (2, 2, False)
    assert seen[3] == (4, 4, True)


def test_a_failure_to_write_ends_the_run_though_the_loop_is_further(make_task, tmp_path, monkeypatch):
    def save(*_given, **_more):
        raise RunError("The disk is full.")

    rounds = []
    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(RunError, match="The disk is full"):
        federate(
            make_task(), "ditto", rounds=9, eval_every=2, evaluation="all", folder=tmp_path / "run",
            on_round=lambda line: rounds.append(line.round),
        )  # fmt: skip
    assert rounds in ([1, 2], [1, 2, 3])  # at the next record, or at the next checkpoint at the latest
    assert [thread.name for thread in threading.enumerate()].count("atoll-writer") == 0


# -- what clients keep -------------------------------------------------------------------------------------------------


def listed(folder, rounds):
    return [one.round for one in Run(folder)._facts(rounds).segments]


@pytest.fixture
def few(make_task, tmp_path):
    """A run in which one client trains in a round; the same again with a stop after three of five rounds."""
    task, asked = make_task(shares=(0.6, 0.2, 0.2)), {"rounds": 5, "eval_every": 1, "cohort": 1, "seed": 2}
    report = federate(task, "ditto+gate", folder=tmp_path / "whole", **asked)
    with pytest.raises(Crash):
        federate(task, "ditto+gate", folder=tmp_path / "run", on_round=crash_in_round_3, **asked)
    return lambda: federate(task, "ditto+gate", folder=tmp_path / "run", resume=True, **asked), tmp_path / "run", report


def test_who_kept_nothing_new_is_not_written_again(few):
    _, folder, whole = few
    assert [listed(folder, 2), listed(folder, 3)] == [[1, 2], [1, 2, 3]]
    for rounds in (1, 2, 3):
        path = folder / "checkpoints" / f"kept-{rounds:06d}.safetensors"
        structure = json.loads(safetensors.safe_open(path, "pt").metadata()["structure"])
        assert structure["names"] == ["whole", "clients", "kept", "beside"]
        asked = next(entry.clients for entry in whole.ledger.entries if entry.round == rounds - 1)
        assert safetensors.torch.load_file(path)["0"].tolist() == list(asked)


def test_files_of_what_is_superseded_are_removed(few, tmp_path):
    _, _, whole = few
    there = {path.name for path in (tmp_path / "whole" / "checkpoints").glob("kept-*")}
    needed = {rounds for last in (4, 5) for rounds in listed(tmp_path / "whole", last)}
    assert there == {f"kept-{rounds:06d}.safetensors" for rounds in needed}
    kept = whole.population.memory.save(round=5)
    everything = sum(len(one["clients"]) for one in (kept, *kept["beside"].values()))
    rows = [safetensors.torch.load_file(tmp_path / "whole" / "checkpoints" / f"kept-{rounds:06d}.safetensors")
            for rounds in listed(tmp_path / "whole", 5)]  # fmt: skip
    assert sum(len(tensors["0"]) for tensors in rows) < 2 * everything


def test_what_clients_kept_is_put_together_again(few, tmp_path):
    resume, folder, whole = few
    resumed = resume()
    assert files_of(folder) == files_of(tmp_path / "whole")
    mine, theirs = (pack(one.population.memory.save(round=5))[0] for one in (resumed, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_damaged_file_of_what_clients_kept_is_noticed(few, tmp_path, damaged):
    """The newest one leaves the checkpoint before; an older one is part of both."""
    resume, folder, _ = few
    path = folder / "checkpoints" / f"kept-{damaged:06d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    resume()
    log = (folder / "run.log").read_text()
    assert f"Checkpoint round-000003.safetensors cannot be read: kept-{damaged:06d}.safetensors is damaged" in log
    assert f"resumed after round {2 if damaged == 3 else 0}" in log
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_finished_run_has_all_files_of_what_clients_kept(few, tmp_path):
    folder = tmp_path / "whole"
    assert Report.read(folder).finished
    (folder / "checkpoints" / f"kept-{listed(folder, 5)[0]:06d}.safetensors").unlink()
    assert not Report.read(folder).finished


def test_a_list_of_files_that_was_changed_and_sealed_again_is_noticed(few, tmp_path):
    resume, folder, _ = few
    path = folder / "checkpoints" / "round-000003.json"
    content = json.loads(path.read_text())
    del content["seal"], content["segments"][1]
    write_record(path, content)
    resume()
    assert "Its JSON file must list the files" in (folder / "run.log").read_text()
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_checkpoint_with_all_that_clients_keep_inside_is_resumed(make_task, tmp_path):
    """As it was before what clients keep had files of its own."""
    task, asked = make_task(shares=(0.6, 0.2, 0.2)), {"rounds": 4, "eval_every": 2, "cohort": 2}
    whole = federate(task, "ditto", folder=tmp_path / "whole", **asked)
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        federate(task, "ditto", folder=folder, on_round=crash_in_round_3, **asked)
    layouts, path = task.layouts, folder / "checkpoints" / "round-000002"
    (kept,) = (state := Run(folder).load(layouts, CPU)[1])["memory"]
    del state["segments"], kept["whole"]
    size, digest = write_tensors(path.with_suffix(".safetensors"), {**state, "memory": kept}, layouts)
    (folder / "checkpoints" / "kept-000002.safetensors").unlink()
    facts = json.loads(path.with_suffix(".json").read_text())
    del facts["seal"], facts["segments"]
    write_record(path.with_suffix(".json"), {**facts, "bytes": size, "sha256": digest})
    resumed = federate(task, "ditto", folder=folder, resume=True, **asked)
    assert "resumed after round 2" in (folder / "run.log").read_text()
    np.testing.assert_array_equal(resumed.scores(), whole.scores())
    assert listed(folder, 4) == [4]  # all of it, as no older file has any
    assert Run(folder).load(layouts, CPU)[1]["memory"][0]["whole"]


def test_a_file_of_tensors_that_does_not_fit_on_the_disk_is_an_error_to_write(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(RunError, match="must be writable: .*File too large"), writing(tmp_path):
            write_tensors(tmp_path / "tensors", Params.of(w=torch.zeros(10_000)), ())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []


def test_a_run_whose_checkpoints_are_gone_begins_again(tmp_path, make_task):
    task = make_task(shares=(0.6, 0.2, 0.2))
    first = federate(task, create("ditto"), rounds=2, folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = federate(task, create("ditto"), rounds=2, folder=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(again.scores(), first.scores())
    assert [line.round for line in again.history] == [1, 2]
    assert list((tmp_path / "run" / "checkpoints").glob("round-000002.json"))


def test_a_run_whose_model_is_not_described_any_more_is_refused(tmp_path, make_task):
    task = make_task(shares=(0.6, 0.2, 0.2))
    federate(task, create("ditto"), rounds=1, folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["computes"]["digest"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError):
        federate(task, create("ditto"), rounds=1, folder=tmp_path / "run", resume=True)
