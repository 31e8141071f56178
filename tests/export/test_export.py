"""Models out: what is exported answers as the client's model does, in every format, and without Atoll."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, Recipe, Report, Task, Training, create, federate
from atoll.export.formats import FORMATS
from atoll.export.model import pack, unpack
from atoll.kernel.errors import LabelsNeeded, ModelError, RunError, TaskError, UnknownName
from atoll.kernel.randomness import default_generator, generator

SLOW = [
    "fedavg", "fedper", "apfl", "fedpac", "ifca:clusters=2", "fedrod", "fafi:epochs=1", "oneshot-margins:epochs=1",
    "knn-per+gate", "ditto@ifca:cluster_rounds=1,clusters=2", "fafi/margins",
]  # fmt: skip
METHODS = [
    "ditto",
    "knn-per",
    "fedproto",
    "ensemble:epochs=1",
    *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW),
]
ALONE = """
import sys
sys.modules["atoll"] = None  # any import of it fails
sys.path.insert(0, sys.argv[1])
from load import load
import torch
model, classes = load()
x = torch.load(sys.argv[2], weights_only=True)
answers = model(x.numpy() if sys.argv[3] == "onnx" else x)
answers = torch.as_tensor(answers)
assert not any(name.startswith("atoll.") for name in sys.modules), "Atoll was imported"
print([classes[k] for k in answers.argmax(1).tolist()])
"""


def frame(n=48, seed=0):
    pandas = pytest.importorskip("pandas")
    draw = generator(seed, "test export")
    ward, age = draw.integers(3, size=n), draw.normal(60, 20, size=n)
    return pandas.DataFrame({
        "site": np.repeat(["Ulm", "Porto", "Lund"], n // 3), "age": age, "ward": np.array(["a", "b", "c"])[ward],
        "smoker": draw.integers(2, size=n).astype(bool),
        "outcome": np.where(age + 15 * ward > 75, "ill", "well"),
    })  # fmt: skip


@pytest.fixture(scope="module")
def task():
    return Recipe(clients=3, model="mlp:8", samples=200).build()


def run(task, method, **more):
    return federate(
        task,
        method,
        rounds=1 if create(method).one_shot else 2,
        engine=LocalEngine(strategy="loop", compile=False),
        **more,
    )


def own_samples(task, client, split="train"):
    x, y, held, place = task.splits[split].hold(task.x, task.y, np.array([client]))
    rows = held.of(place).order
    return x[rows], y[rows]


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_predictor_answers_alike_in_every_format(task, method, tmp_path):
    report = run(task, method)
    model, (x, _) = report.model(1), own_samples(task, 1)
    with torch.no_grad():
        expected = model(x)
    for name in FORMATS if method in ("fafi:epochs=1", "knn-per") else ["onnx", "safetensors"]:
        (made,) = report.export(tmp_path / name, 1, format=name)
        answers = FORMATS[name].load(made.folder)(x)
        assert (answers - expected).abs().max() < 1e-4
        assert torch.equal(FORMATS[name].load(made.folder)(x[:1]).argmax(1), expected[:1].argmax(1))
        assert made.made.difference < 1e-4


@pytest.mark.parametrize("method", ["ditto", "knn-per", "fedavg-ft"])
def test_the_score_of_the_files_is_that_of_the_run(task, method, tmp_path):
    report = run(task, method)
    for client, made in enumerate(report.export(tmp_path)):
        assert made.manifest["score"]["value"] == pytest.approx(report.scores("val")[client], abs=1e-6)
        assert made.manifest["score"]["samples"] == len(own_samples(task, client, "val")[0])


@pytest.mark.parametrize(
    ("name", "int8"),
    [
        ("safetensors", True),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [("safetensors", False), ("pt2", False), ("onnx", True)]
        ),
    ],
)
def test_the_loader_needs_no_atoll(task, name, int8, tmp_path):
    report = run(task, "ditto")
    (made,) = report.export(tmp_path / "out", 2, format=name, int8=int8)
    x = own_samples(task, 2)[0]
    torch.save(x, tmp_path / "x.pt")
    # -S and -I would hide torch as well; a module that is None cannot be imported.
    command = [sys.executable, "-c", ALONE, str(made.folder), str(tmp_path / "x.pt"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()[-1]
    expected = report.model(2).predict(x)
    agree = np.mean([mine == theirs for mine, theirs in zip(expected, eval(said), strict=True)])
    assert agree == 1 if not int8 else agree > 0.9
    assert len([line for line in (made.folder / "load.py").read_text().splitlines() if line.strip()]) <= 24


def test_a_folder_says_what_the_model_is(task, tmp_path):
    report = run(task, "fedper:epochs=2")
    (made,) = report.export(tmp_path, "1", format="safetensors")
    manifest = json.loads((made.folder / "manifest.json").read_text())
    assert manifest["method"]["name"] == "fedper"
    assert manifest["method"]["values"]["epochs"] == 2
    assert manifest["data"]["licence"] == "CC BY 4.0"
    assert manifest["client"] == {"name": "1", "number": 1, "took_part": True}
    assert manifest["output"]["classes"] == [*map(str, range(10))]
    assert {*manifest["files"]} == {"weights.safetensors", "program.pt2"}
    there = {path.name for path in made.folder.iterdir()}
    assert there == {*manifest["files"], "manifest.json", "preprocessing.json", "load.py"}
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # nothing is left over


@pytest.mark.slow
def test_8_bits_name_who_loses(task, tmp_path):
    report = run(task, "ditto")
    for name in FORMATS:
        made = report.export(tmp_path / name, format=name, int8=True)
        assert [one.client for one in made] == ["0", "1", "2"]
        for one in made:
            assert one.before is not None
            assert one.before.difference < 1e-4
            assert 1e-6 < one.made.difference < 0.1
            assert one.loses == (one.made.score < one.before.score)
            assert one.manifest["int8"]["before"]["bytes"] == one.before.bytes


def test_8_bits_hold_each_row_to_half_a_step():
    with default_generator(0):
        w = {"big": torch.randn(16, 32), "beside.member.w": torch.randn(2, 16, 32), "bias": torch.randn(16)}
    w["big"][3] *= 100  # a row of its own size
    packed = pack(w)
    assert packed["big.int8"].dtype == torch.int8
    back = unpack(packed)
    assert back["bias"] is w["bias"]
    for name in ("big", "beside.member.w"):
        step = w[name].abs().amax(-1, keepdim=True) / 127
        assert ((back[name] - w[name]).abs() <= step / 2 + 1e-6).all()


def test_a_model_comes_from_a_run_folder_alone(task, tmp_path):
    for memory in ("ram", "disk"):
        folder = tmp_path / memory
        report = run(task, "ditto", folder=folder, memory=memory)
        x = own_samples(task, 2)[0]
        expected = report.model(2)(x)
        before = sorted((path, path.stat().st_mtime_ns) for path in folder.glob("*.json*"))
        read = Report.read(folder)
        assert torch.equal(read.model(2)(x), expected)
        assert read.model("2").predict(x) == report.model(2).predict(x)
        assert sorted((path, path.stat().st_mtime_ns) for path in folder.glob("*.json*")) == before


def test_different_architectures_and_pieces_and_clusters(tmp_path):
    task = Recipe(clients=4, model="mlp:8/mlp:6,5", samples=200).build()
    report = run(task, "fedavg", folder=tmp_path / "run")
    again = Report.read(tmp_path / "run")
    for client in (0, 1):
        x = own_samples(task, client)[0]
        assert torch.equal(again.model(client)(x), report.model(client)(x))
        assert report.export(tmp_path / "out", client, format="onnx")[0].made.difference < 1e-4


class Normed(nn.Module):
    """With BatchNorm and dropout, in any mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 10)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.body(x))


def test_batchnorm_and_dropout_answer_as_deployed(tmp_path):
    with default_generator(0):
        made = Normed()
    task = Task.build(*_digits(), clients=3, model=made)
    report = run(task, "fedbn")
    x, y = own_samples(task, 0, "val")
    model = report.model(0).train()  # whatever mode it is put in
    assert model(x).argmax(1).eq(y).double().mean() == pytest.approx(report.scores("val")[0])
    for name in FORMATS:
        assert report.export(tmp_path / name, 0, format=name)[0].made.difference < 1e-4


def _digits():
    from atoll.data import datasets, partition

    return datasets.load("digits", None), partition.parse("dirichlet:0.5")


# -- own data ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospital")
    whole = frame(120)
    (folder / "data").mkdir()
    for site, rows in whole.groupby("site"):
        rows.drop(columns="site").to_csv(folder / "data" / f"{site}.csv", index=False)
    training = Training(lr=0.3)
    task = Task.own(folder / "data", target="outcome", model="tabular:16", training=training)
    federate(task, "ditto", rounds=15, folder=folder / "run")
    new = frame(30, seed=1).drop(columns="site")
    new.to_csv(folder / "new.csv", index=False)
    return folder


@pytest.mark.parametrize("name", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_raw_rows_in_class_names_out(hospital, name, tmp_path):
    report = Report.read(hospital / "run")
    model = report.model("Ulm")
    names = model.predict(hospital / "new.csv")
    assert set(names) <= {"ill", "well"}
    assert np.mean([a == b for a, b in zip(names, _truth(hospital), strict=True)]) > 0.8
    # The same as scaling by hand and asking the network itself.
    task = report.reopen().task
    scaled = task.preprocessing(task.names.index("Ulm")).encode(hospital / "new.csv")
    assert torch.allclose(model.unscale(scaled), model.number(hospital / "new.csv"), atol=1e-4)
    # The files alone: encode.py and load.py.
    (made,) = report.export(tmp_path, "Ulm", format=name, licence="ours")
    assert made.manifest["data"]["licence"] == "ours"
    assert made.manifest["input"]["columns"] == ["age", "ward=a", "ward=b", "ward=c", "smoker"]
    program = (
        "import sys, csv; sys.modules['atoll'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from load import load\nfrom encode import encode\nimport numpy as np, torch\n"
        "x = np.array(encode(csv.DictReader(open(sys.argv[2]))), dtype='float32')\n"
        "model, classes = load()\n"
        "answers = torch.as_tensor(model(x if sys.argv[3] == 'onnx' else torch.from_numpy(x)))\n"
        "print(*[classes[k] for k in answers.argmax(1)])"
    )
    command = [sys.executable, "-c", program, str(made.folder), str(hospital / "new.csv"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == names


def test_a_client_that_was_never_there(hospital):
    report = Report.read(hospital / "run")
    model = report.model_for(hospital / "new.csv")
    mine = model.preprocessing
    assert mine.mean != report.scaling.of_client(0).mean  # scaled by its own samples
    assert np.mean([a == b for a, b in zip(model.predict(hospital / "new.csv"), _truth(hospital), strict=True)]) > 0.8
    unlabelled = report.model_for(hospital / "new.csv", unlabelled=True)
    assert set(unlabelled.predict(hospital / "new.csv")) <= {"ill", "well"}


def _truth(hospital):
    with (hospital / "new.csv").open() as file:
        return [row["outcome"] for row in csv.DictReader(file)]


def test_windows_of_own_data_are_scaled_by_the_model(tmp_path):
    draw = generator(0, "test export windows")
    y = draw.integers(2, size=60)
    x = draw.normal(size=(60, 2, 12)) * np.array([[3.0], [0.1]]) + np.array([[100.0], [5.0]]) + y[:, None, None]
    task = Task.own({"a": (x[:30], y[:30]), "b": (x[30:], y[30:])}, model="gru:4")
    report = run(task, "fedper")
    assert set(report.model("a").predict(x)) <= {"0", "1"}
    for name in FORMATS:
        assert report.export(tmp_path / name, "b", format=name)[0].made.difference < 1e-4


def test_numbers_are_predicted(tmp_path):
    x = generator(0, "test export numbers").normal(size=(40, 3))
    task = Task.own({"a": (x[:20], x[:20].sum(1)), "b": (x[20:], x[20:].sum(1))}, model="mlp:8", kind="regression")
    report = run(task, "fedavg")
    model = report.model("a")
    assert model.classes is None
    assert len(model.predict(x)) == 40
    (made,) = report.export(tmp_path, "a", format="onnx")
    assert made.manifest["output"] == {"is": "numbers", "classes": None}
    assert made.manifest["score"]["value"] == pytest.approx(report.scores("val")[0], abs=1e-5)


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_an_unknown_client_and_an_unknown_format(task, hospital, tmp_path):
    with pytest.raises(UnknownName, match=r"by a number from 0 to 2. Got 7"):
        run(task, "fedavg").model(7)
    with pytest.raises(UnknownName, match=r"did you mean: Porto\?"):
        Report.read(hospital / "run").model("Proto")
    with pytest.raises(UnknownName, match=r"Unknown format 'onxx'. Did you mean: onnx\?"):
        run(task, "fedavg").export(tmp_path, 0, format="onxx")


def test_a_client_without_a_model(task):
    report = federate(task, "local", rounds=1, cohort=1, engine=LocalEngine(strategy="loop", compile=False))
    there = int(report.settings.choose(3, 0)[0])
    report.model(there)
    absent = (there + 1) % 3
    with pytest.raises(ModelError, match=f"Client {absent} has no model: it took part in no round, and local gives"):
        report.model(absent)


class Odd(nn.Module):
    """With an operation that ONNX does not have."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(torch.special.bessel_j0(x.flatten(1)))


class Stubborn(Odd):
    """With a choice that depends on values."""

    def forward(self, x):
        return self.head(x.flatten(1)) if bool(x.sum() > 0) else -self.head(x.flatten(1))


def test_an_operation_that_onnx_lacks_is_named_with_its_line(tmp_path):
    with default_generator(0):
        task = Task.build(*_digits(), clients=2, model=Odd())
    report = run(task, "fedavg")
    with pytest.raises(ModelError) as caught:
        report.export(tmp_path, 0, format="onnx")
    assert "ONNX has no operation for aten.special_bessel_j0, which this model uses in line" in str(caught.value)
    assert "test_export.py: `return self.head(torch.special.bessel_j0(x.flatten(1)))`" in str(caught.value)
    assert "choose `format=safetensors` or `format=pt2`" in str(caught.value)
    assert not [*tmp_path.iterdir()]
    assert report.export(tmp_path, 0, format="safetensors")[0].made.difference < 1e-4


def test_a_model_that_is_no_graph_is_refused(tmp_path):
    with default_generator(0):
        task = Task.build(*_digits(), clients=2, model=Stubborn())
    with pytest.raises(ModelError, match="must be one graph of tensor operations for any number of samples"):
        run(task, "fedavg").export(tmp_path, 0)


def test_folders_of_others_are_left_alone(task, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "thesis.tex").write_text("mine")
    report = run(task, "fedavg")
    with pytest.raises(RunError, match="must be written to a folder of its own"):
        report.export(tmp_path, 0)
    assert (tmp_path / "0" / "thesis.tex").read_text() == "mine"
    report.export(tmp_path, 1)
    report.export(tmp_path, 1, format="pt2")  # a model's folder is replaced
    assert (tmp_path / "1" / "model.pt2").exists()
    assert not (tmp_path / "1" / "program.pt2").exists()


def test_samples_of_another_shape_and_damaged_runs(task, hospital, tmp_path):
    with pytest.raises((TaskError, ValueError), match="shape"):
        run(task, "fedavg").model(0).predict(np.zeros((2, 5)))
    report = run(task, "ditto", folder=tmp_path / "run")
    assert report.finished
    newest = max((tmp_path / "run" / "checkpoints").glob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-4])
    with pytest.raises(RunError, match="A model can be taken from a finished run"):
        Report.read(tmp_path / "run").model(0)


def test_a_new_client_without_labels_of_a_method_that_needs_them(task):
    report = run(task, "fedrep")
    x, y = own_samples(task, 0)
    report.model_for(x, y)
    with pytest.raises(LabelsNeeded, match="fedrep needs labels to make a model for a new client"):
        report.model_for(x, unlabelled=True)
