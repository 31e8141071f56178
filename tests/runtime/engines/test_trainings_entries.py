"""What was trained is read back as it was written, or trained again."""

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch
from runtime.engines.test_trainings import Sum, images, models, same

from atoll.federation.loop import federate
from atoll.runtime.engines import trainings
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.trainings import Trainings, _Damaged, _read


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("3.safetensors"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the trained clients of a run, and what they had come to."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, models(folder, Sum())


@pytest.fixture
def kept(trained, tmp_path):
    """A copy of the folder, to be damaged, and what a run that finds nothing would come to."""
    folder = tmp_path / "kept"
    shutil.copytree(trained[0], folder)
    return folder, trained[1]


def flip(file: Path, place: int, bits: int = 0xFF) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= bits
    file.write_bytes(bytes(data))


DAMAGES = {
    "length of the header": lambda file: flip(file, 0),
    "header": lambda file: flip(file, 40, 0x01),
    "first number": lambda file: flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little")),
    "last number": lambda file: flip(file, -1, 0x01),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("not an entry"),
    "of another client": lambda file: shutil.copy(entries(file.parent.parent)[0], file),
    "of fewer epochs": lambda file: shutil.copy(file.with_name("1.safetensors"), file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_and_trained_again(kept, caplog, damage):
    folder, truth = kept
    if damage == "of fewer epochs":
        models(folder, Sum(epochs=1))
    file = entries(folder)[1]
    DAMAGES[damage](file)
    assert same(models(folder, Sum()), truth)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(file) in warnings[0]
    caplog.clear()
    caplog.set_level(logging.INFO, "atoll.engine")
    assert same(models(folder, Sum()), truth)  # found again: the damaged one was replaced
    assert "3 of 3 epochs of local training were done before" in caplog.text
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_longer_training_goes_on_from_a_shorter_one_if_a_later_entry_is_damaged(kept, caplog):
    folder, truth = kept
    models(folder, Sum(epochs=2))
    flip(entries(folder)[0], -1)
    caplog.set_level(logging.INFO, "atoll.engine")
    assert same(models(folder, Sum()), truth)
    assert "2 of 3 epochs of local training were done before" in caplog.text


def test_a_flipped_byte_anywhere_is_found(kept):
    file = entries(kept[0])[0]
    data = file.read_bytes()
    name = file.parent.name
    _read(file, name, 3)
    header = 8 + int.from_bytes(data[:8], "little")
    for place in [*range(header), *range(header, len(data), 11), len(data) - 1]:
        for bits in (0x01, 0x80):
            file.write_bytes(data)
            flip(file, place, bits)
            with pytest.raises(_Damaged, match=str(file)):
                _read(file, name, 3)


@pytest.mark.parametrize("name", ["notes.txt", "notes.safetensors", "3.begun", "x.way.safetensors", ".DS_Store"])
def test_foreign_files_are_left_alone(kept, caplog, name):
    folder, truth = kept
    caplog.set_level(logging.INFO, "atoll.engine")
    places = [folder / name, *(entry.parent / name for entry in entries(folder))]
    for place in places:
        place.write_text("somebody else's")
    assert same(models(folder, Sum(), strategy="loop"), truth)
    assert caplog.text.count("3 of 3 epochs of local training were done before") == 3
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    assert {place.read_text() for place in places} == {"somebody else's"}


def test_a_folder_that_cannot_be_written_loses_nothing_but_time(kept, caplog):
    folder, truth = kept
    for entry in entries(folder):
        shutil.rmtree(entry.parent)
        entry.parent.write_text("in the way")
    assert same(models(folder, Sum()), truth)
    assert f"local training cannot be kept in {folder}" in caplog.text


def test_an_interruption_says_if_nothing_could_be_kept(tmp_path):
    (tmp_path / "kept").write_text("in the way")
    stop = threading.Event()
    stop.set()
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    with pytest.raises(KeyboardInterrupt, match="epoch 1 of 3 of local training, which could not be kept"):
        federate(
            images(), Sum(), rounds=1, engine=engine, evaluation="none", trained=tmp_path / "kept", stop=stop
        )  # fmt: skip


def test_several_writers_of_one_entry_leave_a_whole_one(kept, monkeypatch):
    """Each writes other values, so that a mixture of two would be found out."""
    folder, _ = kept
    name = entries(folder)[0].parent.name
    place, failures, done = Trainings(folder), list[Exception](), threading.Event()
    work = type("Work", (), {"gradients": [1]})()

    def write(value: float) -> None:
        try:
            for _ in range(30):
                place._save([name], 3, [torch.full((1, 500), value)], work, 0.0, last=True)
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                leaves, _ = _read(folder / name / "3.safetensors", name, 3)
                assert len(leaves["0"].unique()) <= 500
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    monkeypatch.setattr(trainings, "flush_folder", lambda folder: None)
    writers, reader = (
        [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)],
        threading.Thread(target=read),
    )
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not failures
    assert len(_read(folder / name / "3.safetensors", name, 3)[0]["0"].unique()) == 1
    assert [file.name for file in (folder / name).iterdir()] == ["3.safetensors"]


def test_an_entry_that_another_process_tidies_up_is_trained_again(kept, monkeypatch, caplog):
    folder, truth = kept
    points = Trainings._points

    def gone(self: Trainings, name: str) -> dict[int, Path]:
        found = points(self, name)
        for file in found.values():
            file.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Trainings, "_points", gone)
    assert same(models(folder, Sum()), truth)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
