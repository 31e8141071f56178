"""Long local training is done once, and a longer one goes on where it ended."""

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from atoll import Task, Training, federate
from atoll.data.augment import CropAndFlip
from atoll.kernel.algorithm import Algorithm, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Tree
from atoll.kernel.randomness import default_generator, generator
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.workbench import Workbench
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Sum(Algorithm):
    """Clients train by themselves; the server keeps all models."""

    epochs: int = 3
    scale: float = 1.0  # of the server only

    one_shot: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"model": "model"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Plain training."""
        return Update(send={"model": sgd(cohort, start=w, epochs=self.epochs)})

    def aggregate(self, server: Tree, replies: Replies) -> Tree:
        """Every client's model, in a row."""
        return {"models": replies.stack("model") * self.scale}


def images(sizes: tuple[int, ...] = (5, 12, 9)) -> Task:
    """Clients of uneven sizes, with dropout and augmentation, whose draws depend on the number of a step."""
    draw = generator(0, "images")
    data = {f"{k}": (draw.normal(size=(n, 1, 6, 6)), draw.integers(2, size=n)) for k, n in enumerate(sizes)}
    with default_generator(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4),
                              nn.Linear(8, 2))  # fmt: skip
    training = Training(lr=0.1, batch_size=4, momentum=0.9)
    task = Task.of_clients(data, model.double(), classes=2, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, augment=CropAndFlip(padding=2))


def models(folder: Path | None, algorithm: Sum, strategy: str = "whole", task: Task | None = None) -> Tree:
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy=strategy)
    return federate(task or images(), algorithm, rounds=1, engine=engine, evaluation="none", trained=folder).server[
        "models"
    ]


def same(one: Tree, other: Tree) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", ["whole", "loop", "chunk:2"])
def test_a_longer_training_goes_on_where_a_shorter_one_ended(tmp_path: Path, strategy: str) -> None:
    models(tmp_path, Sum(epochs=1), strategy)
    models(tmp_path, Sum(epochs=3), strategy)
    assert same(models(tmp_path, Sum(epochs=5), strategy), models(None, Sum(epochs=5), strategy))


def test_what_was_trained_is_found_by_a_method_with_another_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll.engine")
    first = models(tmp_path, Sum())
    assert "done before" not in caplog.text
    other = models(tmp_path, Sum(scale=2.0), strategy="loop")
    assert caplog.text.count("3 of 3 epochs of local training were done before") == 3  # clients, one at a time
    assert same(other, first * 2.0)


def test_gradients_count_as_if_they_had_been_taken(tmp_path: Path) -> None:
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False)
    counts = [
        federate(images(), Sum(), rounds=1, engine=engine, evaluation="none", trained=tmp_path).history[0]["gradients"]
        for _ in range(2)
    ]
    assert counts[0] == counts[1] == 3 * (2 + 3 + 3)


def test_the_seconds_of_what_is_found_are_known(tmp_path: Path) -> None:
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False)
    lines = [
        federate(images(), Sum(epochs=epochs), rounds=1, engine=engine, evaluation="none", trained=tmp_path).history[0]
        for epochs in (2, 2, 4, 4)
    ]
    first, again, longer, last = (line["seconds"] for line in lines)
    assert "found" not in first
    assert 0 < again["found"] < first["round"]  # all of it but the server's part
    assert longer["found"] == again["found"]
    assert again["found"] < last["found"] < again["found"] + longer["round"]


@dataclass(frozen=True, kw_only=True)
class Taught(Sum):
    """Clients begin with what the server has learnt from public samples."""

    def equip(self, server: Tree, workbench: Workbench) -> Tree:
        """Two epochs on the public samples."""
        return sgd(workbench.cohort(*workbench.public), start=server, epochs=2).client(0)


def test_what_a_server_learns_before_is_found_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # On a GPU a second training differs in its last bits, so that clients who begin with it would not be found.
    caplog.set_level(logging.INFO, "atoll.engine")
    draw, epochs = generator(1, "public"), list[tuple[int, int, int]]()
    public = torch.from_numpy(draw.normal(size=(7, 1, 6, 6))), torch.from_numpy(draw.integers(2, size=7))
    task = replace(images(), public=public)
    first = models(tmp_path, Taught(), task=task)
    assert "done before" not in caplog.text
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    again = federate(
        task, Taught(), rounds=1, engine=engine, evaluation="none", trained=tmp_path,
        on_epoch=lambda *one: epochs.append(one),
    )  # fmt: skip
    assert "2 of 2 epochs" in caplog.text
    assert "3 of 3 epochs" in caplog.text
    assert same(again.server["models"], first)
    assert not epochs  # nobody trained, and a server's epochs are nobody's anyway
    assert same(first, models(None, Taught(), task=task))


def test_other_data_are_trained_anew(tmp_path: Path) -> None:
    models(tmp_path, Sum())
    before = {file.name for file in tmp_path.iterdir()}
    other = images()
    other = replace(other, y=1 - other.y)
    assert same(models(tmp_path, Sum(), task=other), models(None, Sum(), task=other))
    assert len(list(tmp_path.iterdir())) == 2 * len(before) == 6


def test_an_interrupted_training_is_kept_and_continued(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match="epoch 1 of 4"):
        federate(images(), Sum(epochs=4), rounds=1, engine=engine, evaluation="none", folder=folder, stop=stop)
    again = federate(images(), Sum(epochs=4), rounds=1, engine=engine, evaluation="none", folder=folder, resume=True)
    assert same(again.server["models"], models(None, Sum(epochs=4)))
    points = sorted(file.name for file in (folder / "trained").rglob("*.safetensors"))
    assert points == ["4.safetensors"] * 3
