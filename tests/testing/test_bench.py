"""The benchmark: one table whatever is measured, and a peer's code on the same clients from the same values."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from atoll.data.datasets import Dataset
from atoll.data.recipe import Recipe
from atoll.data.task import Training
from atoll.kernel.errors import RunError, UnknownName
from atoll.kernel.randomness import generator
from atoll.testing import bench
from atoll.testing.bench.comparisons import Whole
from atoll.testing.bench.peers import Duel, duels
from atoll.testing.bench.steps import Workload
from atoll.testing.bench.table import Row

TINY = (
    Workload("mlp", (1, 4, 4), 3, 2, target=1e-9, steps=2, compile=False),
    Workload("mlp", (1, 4, 4), 3, 2, target=1e-9, steps=2, compile=False, skewed=True, seeds=2),
)

# A stand-in with PFLlib's names: it reads the clients' files as PFLlib does, and answers with what it found.
SERVER = """
import time
import numpy as np

class FedAvg:
    def __init__(self, args, times):
        self.args, self.Budget, self.rs_test_acc = args, [], []

    def train(self):
        print("much talk")
        total = 0.0
        for client in range(self.args.num_clients):
            with open(f"../dataset/{self.args.dataset}/train/{client}.npz", "rb") as file:
                data = np.load(file, allow_pickle=True)["data"].tolist()
            total += float(data["x"].sum()) + float(data["y"].sum())
        first = next(self.args.model.parameters())
        self.rs_test_acc.append(total + float(first.sum()))
        self.Budget.append(0.5)
"""
MODELS = """
from torch import nn

def DNN(inputs, hidden, num_classes):
    return nn.Sequential(nn.Linear(64, hidden), nn.Linear(hidden, num_classes))

FedAvgCNN = DNN
"""


@dataclass(frozen=True)
class SmallDuel(Duel):
    """The same on the digits, which need no files."""

    def build(self):
        training = Training(batch_size=self.batch)
        return Recipe("digits", clients=4, samples=80, split="75/0/25", model="mlp:100", training=training).build()


@pytest.fixture
def pfllib(tmp_path: Path) -> Path:
    for file, text in {"servers/serveravg.py": SERVER, "trainmodel/models.py": MODELS}.items():
        path = tmp_path / "system/flcore" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def test_all_rows_are_in_one_table_and_in_the_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "CPU", TINY)
    file = tmp_path / "speed.json"
    assert bench.run("cpu", file=file) == 0
    found = json.loads(file.read_text())
    assert [row["workload"] for row in found["rows"]] == ["mlp-1x4x4-3x2", "mlp-1x4x4-3x2-skewed-2-seeds"]
    assert {"command", "device", "machine", "versions", "when", "rows"} == found.keys()
    for row in found["rows"]:
        assert row["first"] > 0
        assert row["ratio"] == pytest.approx(row["theirs"] / row["atoll"])
    title, heads, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("Speed on ")
    assert heads.split()[:3] == ["workload", "unit", "beside"]
    assert [line.split()[0] for line in lines] == [row["workload"] for row in found["rows"]]
    for head, cell in (("unit", "us per"), ("beside", "plain")):  # a figure stands under its head
        assert all(line.index(cell) == heads.index(head) for line in lines)


def test_a_quick_look_measures_short_workloads_without_targets(monkeypatch, tmp_path, capsys):
    slow = Workload("mlp", (1, 4, 4), 3, 2, target=1e9, steps=40)
    monkeypatch.setattr(bench, "CPU", (slow, TINY[1], Whole("demo", "local", most=0.0)))
    assert bench.run("cpu", quick=True) == 0
    out = capsys.readouterr().out
    assert "mlp-1x4x4-3x2 " in out
    assert "skewed" not in out
    assert "demo" not in out
    assert "compiled" not in out.splitlines()[2]
    assert "`atoll bench` measures all" in out


def test_several_seeds_are_timed_side_by_side(monkeypatch):
    from atoll.runtime.engines import together
    from atoll.runtime.engines.local import LocalEngine
    from atoll.testing.bench.steps import make_task, time_together

    groups, run = [], together.run_joined
    monkeypatch.setattr(together, "run_joined", lambda folds, *rest: groups.append(len(folds)) or run(folds, *rest))
    engine = LocalEngine(device="cpu", strategy="whole traced")
    first, each = time_together(make_task(TINY[0]), engine, seeds=3, rounds=2)
    assert groups == [3] * 4  # two rounds to warm up, and two that count
    assert 0 < each < first


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        ({"theirs": 4.0, "atoll": 2.0, "least": 2.0}, False),
        ({"theirs": 4.0, "atoll": 2.1, "least": 2.0}, True),
        ({"atoll": 20.0, "most": 20.0}, False),
        ({"atoll": 20.1, "most": 20.0}, True),
        ({"theirs": 50.0, "atoll": 20.1, "least": 2.0, "most": 20.0}, True),
        ({"atoll": 5.0}, False),
    ],
)
def test_a_missed_target_is_marked(row, missed):
    made = Row(workload="w", unit="s", first=1.0, **row)
    assert made.missed == missed
    assert ("missed" in " ".join(made.cells)) == missed


def test_an_unknown_workload_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(UnknownName, match="four-method"):
        bench.run("cpu", only=["four-method"])
    with pytest.raises(RunError, match="folder of the result must exist"):
        bench.run("cpu", file=tmp_path / "no" / "speed.json")


def test_workloads_of_the_other_device_can_be_asked_for():
    assert {"demo", "mlp-1x28x28-50x10-skewed"} <= bench.list_workloads("cpu", []).keys()
    names = bench.list_workloads("cuda", ["pfllib=somewhere"]).keys()
    assert {
        "cnn-3x32x32-20x10", "cnn-3x32x32-100x10", "cnn-3x32x32-100x50", "resnet18-gn-3x32x32-20x32", "pfl-cifar10",
        "cnn-1x28x28-100x10-skewed", "cnn-1x28x28-100x10-skewed-5-seeds", "four-methods", "demo",
        "pfllib-mnist-dnn-20x10-skewed", "pfllib-fashion-mnist-cnn-20x10-skewed",
    } <= names  # fmt: skip


# -- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_workload_of_pfl_research_reports_the_servers_score(monkeypatch):
    from atoll.testing.bench import pfl

    x, y = generator(0, "images").normal(size=(110, 3, 32, 32)), generator(0, "labels").integers(10, size=110)
    images, labels = torch.from_numpy(x).float(), torch.from_numpy(y)
    small = Dataset("few images", images[:100], labels[:100], 10, (images[100:], labels[100:]), "random")
    monkeypatch.setattr(pfl, "find_images", lambda _: small)
    row = pfl.PflCifar10(rounds=2, clients=50, precision="fp32").measure("cpu")
    assert row.note.startswith("2 rounds; accuracy 0.")
    assert row.first > 0


def test_a_peer_has_the_same_clients_and_initial_values(pfllib):
    duel = SmallDuel("digits", "DNN", pfllib, rounds=6)
    row = duel.measure("cpu", repeats=2)
    task = duel.build()
    rows = task.splits["train"].order
    expected = task.x[rows].sum() + task.y[rows].sum() + next(iter(task.network.initial.values())).sum()
    theirs = float(re.search("accuracy ([-.0-9]+) theirs", row.note)[1])
    assert theirs == pytest.approx(expected.item(), rel=1e-4)
    assert (row.beside, row.theirs, row.unit) == ("PFLlib", 0.5, "s per round")
    assert row.atoll > 0
    assert row.first > 0


def test_a_peer_whose_needs_are_not_met_says_so(pfllib):
    (pfllib / "system/flcore/servers/serveravg.py").write_text("import a_module_that_nobody_has")
    with pytest.raises(RunError, match="No module named 'a_module_that_nobody_has'. It needs torch, numpy, .* h5py"):
        SmallDuel("digits", "DNN", pfllib, rounds=6).measure("cpu", repeats=1)


@pytest.mark.slow
def test_a_peer_that_ends_is_an_error(pfllib, capfd):
    (pfllib / "system/flcore/trainmodel/models.py").write_text("DNN = FedAvgCNN = None")
    with pytest.raises(RunError, match="it ended"):
        SmallDuel("digits", "DNN", pfllib, rounds=6).measure("cpu", repeats=1)
    assert "TypeError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("flower=here", UnknownName, "flower"),
        ("pfllib", RunError, "NAME=PATH. Got 'pfllib'"),
        ("pfllib=", RunError, "NAME=PATH. Got 'pfllib='"),
    ],
)
def test_a_peer_is_a_name_and_a_folder(words, error, message):
    with pytest.raises(error, match=message):
        duels([words])


def test_a_folder_without_the_peers_code_is_refused(tmp_path):
    with pytest.raises(RunError, match="must be a copy of PFLlib"):
        SmallDuel("digits", "DNN", tmp_path).measure("cpu", repeats=1)


# -- whole comparisons ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_comparison_is_timed_cold_and_warm():
    words = "local fedavg --task digits --samples 60 --clients 3 --rounds 1 --seeds 1 --model linear"
    row = Whole("tiny", words, most=600.0).measure("cpu", repeats=1)
    assert row.first > 0
    assert not row.missed
    assert row.note == f"compare {words}"


@pytest.mark.slow
def test_a_comparison_that_fails_is_an_error():
    with pytest.raises(RunError, match="nobody-knows-this` failed"):
        Whole("tiny", "nobody-knows-this", most=1.0).measure("cpu", repeats=1)
