"""What was trained is found again only where everything that decides it is the same."""

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Task, Training, federate
from atoll.compose import create
from atoll.kernel.params import Tree
from atoll.kernel.randomness import default_generator, generator
from atoll.runtime.engines.local import LocalEngine

METHOD = """
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import helpers
from atoll.kernel.algorithm import Algorithm, Update
from atoll.toolbox.client import sgd

FACTORS = {"half": lambda g: 0.5 * g}


def scaled(g):
    return 1.0 * g


@dataclass(frozen=True)
class Rule:
    def turned(self, g):
        return 1.0 * g


def along(rule, w, batch):
    g, after, loss = batch.gradient(w)
    return FACTORS["half"](helpers.longer(rule.turned(scaled(g)))), after, loss


@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    one_shot: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"model": "model"}

    def local(self, w, cohort):
        return Update(send={"model": sgd(cohort, start=w, epochs=2, gradient=partial(along, Rule()))})

    def aggregate(self, server, replies):
        return {"models": 1.0 * replies.stack("model")}
"""
HELPERS = "from deeper import FACTOR\n\n\ndef longer(g):\n    return FACTOR * g\n"
DEEPER = "FACTOR = 1.0\n"
NETWORK = """
from torch import nn


def bent(x):
    return x.relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.outer(bent(self.inner(x)))
"""


def samples(model: nn.Module, sizes: tuple[int, ...] = (5, 12)) -> Task:
    draw = generator(0, "samples")
    data = {f"{k}": (draw.normal(size=(n, 3)), draw.integers(2, size=n)) for k, n in enumerate(sizes)}
    training = Training(lr=0.1, batch_size=max(4, max(sizes) // 4))
    return Task.of_clients(data, model.double(), classes=2, training=training, shares=(1.0, 0.0, 0.0))


def made(build) -> nn.Module:
    with default_generator(0):
        return build()


def linear() -> nn.Module:
    return made(lambda: nn.Linear(3, 2))


def models(method: str, task: Task, folder: Path | None, engine: LocalEngine | None = None) -> Tree:
    """What clients train to; user's files are read anew, as another process would."""
    engine = engine or LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    return federate(task, create(method), rounds=1, engine=engine, evaluation="none", trained=folder).server["models"]


def same(one: Tree, other: Tree) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of a user's own: a method with files beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in {"mine": METHOD, "helpers": HELPERS, "deeper": DEEPER, "network": NETWORK}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    forget()


def forget() -> None:
    """Users' modules are read again when they are next imported, as in a new process."""
    for name in ("helpers", "deeper", "network"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    forget()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mine", "def scaled(g):\n    return 1.0 * g", "def scaled(g):\n    return 3.0 * g"),
        ("mine", "def turned(self, g):\n        return 1.0 * g", "def turned(self, g):\n        return 3.0 * g"),
        ("mine", '"half": lambda g: 0.5 * g', '"half": lambda g: 1.5 * g'),
        ("helpers", "FACTOR * g", "FACTOR * 3.0 * g"),
        ("deeper", "FACTOR = 1.0", "FACTOR = 3.0"),
    ],
)
def test_an_edit_of_what_a_step_calls_is_seen(project, tmp_path, name, old, new):
    method, kept, task = str(project / "mine.py"), tmp_path / "kept", samples(linear())
    before = models(method, task, kept)
    assert same(models(method, task, kept), before)
    edit(project / f"{name}.py", old, new)
    truth = models(method, task, None)
    assert not same(truth, before)
    assert same(models(method, task, kept), truth)


def test_an_edit_where_no_step_leads_keeps_what_was_trained(project, tmp_path, caplog):
    caplog.set_level("INFO", "atoll.engine")
    method, kept, task = str(project / "mine.py"), tmp_path / "kept", samples(linear())
    models(method, task, kept)
    (project / "another.py").write_text("FACTOR = 3.0\n")
    (project / "network.py").write_text("nobody imports it")
    models(method, task, kept)
    assert "2 of 2 epochs of local training were done before" in caplog.text


def test_a_relative_import_is_followed(tmp_path):
    from atoll.kernel.sources import file_digest

    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    files = {
        "../__init__": "",
        "__init__": "",
        "a": "from . import b\nfrom ..c import d",
        "b": "X = 1",
        "../c": "d = 1",
    }
    digests = set()
    for changed in (None, "b", "../c", "__init__", "../__init__"):
        for name, text in files.items():
            (package / f"{name}.py").write_text(text + ("\nY = 2" if name == changed else ""))
        digests.add(file_digest(package / "a.py"))
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("old", "new"), [("x.relu()", "x.tanh()"), ("self.outer(bent", "2 * self.outer(bent")], ids=["helper", "forward"]
)
def test_an_edit_of_a_model_is_seen(project, tmp_path, old, new):
    kept = tmp_path / "kept"

    def trained(folder):
        return models(str(project / "mine.py"), samples(made(importlib.import_module("network").Net)), folder)

    before = trained(kept)
    edit(project / "network.py", old, new)
    truth = trained(None)
    assert not same(truth, before)
    assert same(trained(kept), truth)


class Sloped(nn.Module):
    """Its slope is shown nowhere."""

    def __init__(self, slope):
        super().__init__()
        self.slope, self.inner = slope, nn.Linear(3, 2)

    def forward(self, x):
        slope = self.slope["of"] if isinstance(self.slope, dict) else self.slope
        return self.inner(x) * (slope(1.0) if callable(slope) else slope)


def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 3.0),
        ({"of": 1.0}, {"of": 3.0}),
        (torch.tensor(1.0).double(), torch.tensor(3.0).double()),
        (twice, thrice),
        (np.float64(1.0), np.float64(3.0)),
    ],
    ids=["number", "dictionary", "tensor", "function", "numpy"],
)
def test_an_attribute_that_a_model_does_not_show_is_seen(project, tmp_path, one, other):
    method, kept = str(project / "mine.py"), tmp_path / "kept"
    before = models(method, samples(made(lambda: Sloped(one))), kept)
    changed = samples(made(lambda: Sloped(other)))
    truth = models(method, changed, None)
    assert not same(truth, before)
    assert same(models(method, changed, kept), truth)


def test_what_is_frozen_is_seen(project, tmp_path):
    method, kept = str(project / "mine.py"), tmp_path / "kept"
    models(method, samples(linear()), kept)
    part = linear()
    part.bias.requires_grad_(False)
    assert same(models(method, samples(part), kept), models(method, samples(part), None))


def test_hooks_and_a_loss_with_weights_are_seen(project, tmp_path):
    method, kept = str(project / "mine.py"), tmp_path / "kept"
    before = models(method, samples(linear()), kept)
    hooked = linear()
    hooked.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    truth = models(method, samples(hooked), None)
    assert not same(truth, before)
    assert same(models(method, samples(hooked), kept), truth)

    def weighted(weight):
        task = samples(linear())
        return replace(task, network=task.network.with_loss(nn.CrossEntropyLoss(weight.double(), reduction="none")))

    models(method, weighted(torch.tensor([1.0, 2.0])), kept)
    other = weighted(torch.tensor([2.0, 1.0]))
    assert same(models(method, other, kept), models(method, other, None))


@pytest.mark.parametrize("row", [0, 1, 4500, 4501, 8997, 8999])
@pytest.mark.parametrize("part", ["x", "y"])
def test_every_sample_is_seen(row, part):
    task = samples(linear(), sizes=(4500, 4500))
    changed = getattr(task, part).clone()
    changed[row] = 1 - changed[row]
    other = replace(task, **{part: changed})
    assert other.samples != task.samples
    assert other.fingerprint != task.fingerprint


def test_one_changed_sample_is_trained_anew(project, tmp_path):
    method, kept, task = str(project / "mine.py"), tmp_path / "kept", samples(linear(), sizes=(4500, 4500))
    before = models(method, task, kept)
    with torch.no_grad():
        task.x[4501] += 100.0  # in place, after the task was asked for its fingerprint
    truth = models(method, task, None)
    assert not same(truth, before)
    assert same(models(method, task, kept), truth)


def test_other_public_samples_keep_what_was_trained_and_are_other_data():
    task = samples(linear())
    draw = generator(1, "public")
    one, other = (task.with_public(draw.normal(size=(4, 3)), draw.integers(2, size=4)) for _ in range(2))
    assert one.samples == other.samples == task.samples
    assert len({one.fingerprint, other.fingerprint, task.fingerprint}) == 3
    central = replace(task, central=(task.x[:2], task.y[:2]))
    assert central.samples == task.samples
    assert central.fingerprint != task.fingerprint
    held = samples(linear(), sizes=(5, 6, 7)).hold_out(0.34)
    assert held.fingerprint != replace(held, unseen=None).fingerprint


OPTIONS = argparse.Namespace(factor=1.0)


def guided(w, batch):
    g, after, loss = batch.gradient(w)
    return OPTIONS.factor * g, after, loss


def test_an_option_that_a_step_reads_from_outside_is_seen(tmp_path, monkeypatch):
    from dataclasses import dataclass
    from typing import ClassVar

    from atoll.kernel.algorithm import Algorithm, Update
    from atoll.toolbox.client import sgd

    @dataclass(frozen=True, kw_only=True)
    class Guided(Algorithm):
        one_shot: ClassVar[bool] = True
        sums_suffice: ClassVar[bool] = False
        sends: ClassVar[dict[str, str]] = {"model": "model"}

        def local(self, w, cohort):
            return Update(send={"model": sgd(cohort, start=w, epochs=2, gradient=guided)})

        def aggregate(self, server, replies):
            return {"models": 1.0 * replies.stack("model")}

    engine = LocalEngine(device="cpu", dtype=torch.float64, strategy="whole traced")

    def trained(folder, engine=None):
        engine = engine or LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
        done = federate(samples(linear()), Guided(), rounds=1, engine=engine, evaluation="none", trained=folder)
        return done.server["models"]

    before = trained(tmp_path)
    traced = trained(None, engine)
    monkeypatch.setattr(OPTIONS, "factor", 3.0)
    truth = trained(None)
    assert not same(truth, before)
    assert same(trained(tmp_path), truth)
    assert not same(trained(None, engine), traced)
    assert same(
        trained(None, engine), trained(None, LocalEngine(device="cpu", dtype=torch.float64, strategy="whole traced"))
    )
