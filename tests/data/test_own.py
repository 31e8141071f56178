"""The same small hospitals come in every form; then one test per rule of conversion and one per error."""

import csv
import io
import logging
import math
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.algorithms.fedavg import FedAvg
from atoll.data import own
from atoll.data.partition import Natural, Shifted
from atoll.data.task import Task
from atoll.federation.loop import federate
from atoll.kernel.errors import AtollError, DataError, ModelError, TaskError, UnknownName
from atoll.kernel.objective import Metric, absolute_error, accuracy, cross_entropy, squared_error
from atoll.kernel.randomness import generator

COLUMNS = ["age", "pressure", "sex", "smoker", "readmitted"]
ROWS = {
    "Ulm": [[40, 120.5, "F", True, "yes"], [50, 130.0, "M", False, "no"], [60, 125.0, "F", False, "no"]],
    "Porto": [[30, 110.0, "M", True, "yes"], [70, 150.0, "M", True, "no"]],
}
AGE = [40, 50, 60, 30, 70]
PRESSURE = [120.5, 130, 125, 110, 150]


def columns_of(rows):
    return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


def write_csv(path, rows, header=COLUMNS):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items():
        write_csv(tmp_path / f"{name}.csv", rows)
    return tmp_path


@pytest.fixture
def everybody():
    """All rows in one table with a column `hospital`, in mixed order."""
    rows = [[*row, name] for name, several in ROWS.items() for row in several]
    mixed = [rows[index] for index in (0, 3, 1, 2, 4)]
    return dict(zip([*COLUMNS, "hospital"], map(list, zip(*mixed, strict=True)), strict=True))


def check(data, order=(0, 1, 2, 3, 4)):
    """That these are the hospitals of `ROWS`, in this order."""
    order = list(order)
    assert data.columns == ("age", "pressure", "sex=F", "sex=M", "smoker")
    wanted = np.column_stack([AGE, PRESSURE, [1, 0, 1, 0, 0], [0, 1, 0, 1, 1], [1, 0, 0, 1, 1]])[order]
    torch.testing.assert_close(data.x, torch.from_numpy(wanted))  # a task scales them
    assert data.class_names == ("no", "yes")
    assert data.y.tolist() == [[1, 0, 0, 1, 0][index] for index in order]
    assert data.owner.tolist() == [[0, 0, 0, 1, 1][index] for index in order]
    assert (data.x.dtype, data.y.dtype, data.owner.dtype) == (torch.float64, torch.int64, np.int64)
    assert (data.classes, data.loss, data.metric) == (2, cross_entropy, accuracy)


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_with_a_client_column(library, everybody):
    frame = pytest.importorskip(library).DataFrame(everybody)
    data = own.read(frame, target="readmitted", client="hospital")
    assert data.owners == ("Ulm", "Porto")
    check(data, order=(0, 3, 1, 2, 4))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_dict_of_frames(library):
    frames = {name: pytest.importorskip(library).DataFrame(columns_of(rows)) for name, rows in ROWS.items()}
    check(own.read(frames, target="readmitted"))


def test_frames_with_types_of_their_own():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(columns_of(ROWS["Ulm"] + ROWS["Porto"]))
    frame = frame.astype({"age": "Int64", "sex": "category", "smoker": "boolean", "readmitted": "category"})
    check(own.read({"Ulm": frame[:3], "Porto": frame[3:]}, target="readmitted"))


def test_a_dict_of_columns(everybody):
    check(own.read(everybody, target="readmitted", client="hospital"), order=(0, 3, 1, 2, 4))
    series = pytest.importorskip("pandas").DataFrame(everybody).to_dict("series")
    check(own.read(series, target="readmitted", client="hospital"), order=(0, 3, 1, 2, 4))


def test_a_folder_of_csv(folder):
    (folder / ".hidden").write_text("not read")
    data = own.read(folder, target="readmitted")
    assert data.owners == ("Porto", "Ulm")  # sorted by name
    check(own.read({name: folder / f"{name}.csv" for name in ROWS}, target="readmitted"))
    assert torch.equal(data.x[:2], own.read(str(folder), target="readmitted").x[:2])


def test_one_csv_file(tmp_path, everybody):
    write_csv(tmp_path / "all.csv", zip(*everybody.values(), strict=True), header=everybody)
    check(own.read(tmp_path / "all.csv", target="readmitted", client="hospital"), order=(0, 3, 1, 2, 4))


def test_csv_as_spreadsheets_write_it(folder):
    text = (folder / "Ulm.csv").read_text().replace("age,", " age ,").replace("40,", " 40 ,")
    (folder / "Ulm.csv").write_bytes(b"\xef\xbb\xbf" + text.encode().replace(b"\n", b"\r\n\r\n"))
    check(own.read({name: folder / f"{name}.csv" for name in ROWS}, target="readmitted"))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_separators_and_decimal_commas_are_recognised(folder, separator):
    rows = [
        [str(cell).replace(".", ",") if isinstance(cell, float) else str(cell) for cell in row] for row in ROWS["Ulm"]
    ]
    rows[0][0] = "1.040"  # with a thousands separator
    rows[1][0] = "50,0"
    (folder / "Ulm.csv").write_text("\n".join(separator.join(row) for row in [COLUMNS, *rows]))
    data = own.read({name: folder / f"{name}.csv" for name in ROWS}, target="readmitted")
    assert data.x[:3, :2].tolist() == [[1040, 120.5], [50, 130], [60, 125]]
    assert data.class_names == ("no", "yes")


def test_commas_that_are_no_decimals_stay_text(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text('size;v;y\n"1,5 m";1.5;0\n"2 m";2.25;1\n')
    data = own.read(tmp_path)
    assert data.columns == ("size=1,5 m", "size=2 m", "v")
    assert data.x[:, 2].tolist() == [1.5, 2.25] * 2


def test_a_folder_of_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    for name, rows in ROWS.items():
        pandas.DataFrame(columns_of(rows)).to_parquet(tmp_path / f"{name}.parquet")
    check(own.read({name: tmp_path / f"{name}.parquet" for name in ROWS}, target="readmitted"))
    assert own.read(tmp_path, target="readmitted").owners == ("Porto", "Ulm")


def test_parquet_without_its_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "Ulm.parquet").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"read with pyarrow, which is not installed(.|\n)*pip install 'atoll\[frames\]'"
    ):
        own.read(tmp_path, target="readmitted")


def test_a_folder_of_npz(tmp_path):
    x = np.arange(12.0).reshape(4, 3)
    np.savez(tmp_path / "b.npz", x=x, y=[0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x=x[:2] + 20, y=[1, 0])
    data = own.read(tmp_path)
    assert data.owners == ("a", "b")
    assert torch.equal(data.x, torch.from_numpy(np.concatenate([x[:2] + 20, x])).float())  # as they are
    assert data.y.tolist() == [1, 0, 0, 1, 0, 1]
    assert data.columns == ()


@pytest.mark.parametrize("form", [tuple, lambda pair: dict(zip("xy", pair, strict=True))], ids=["pair", "dict"])
@pytest.mark.parametrize("array", [np.asarray, torch.tensor, list], ids=["numpy", "torch", "list"])
def test_a_dict_of_arrays(form, array):
    clients = {name: form((array([[1.0, 2], [3, 4]]), array([3, 5]))) for name in "ab"}
    data = own.read(clients)
    assert data.x.tolist() == [[1, 2], [3, 4]] * 2
    assert data.y.tolist() == [0, 1] * 2
    assert (data.owners, data.class_names) == (("a", "b"), ("3", "5"))
    assert len(repr(data)) < 100


class Photos(torch.utils.data.Dataset):
    """As torchvision's data sets without a transform: pictures and labels."""

    def __init__(self, sizes=((4, 3), (4, 3)), mode="RGB"):
        self.sizes, self.mode = sizes, mode

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return Image.new(self.mode, self.sizes[index], (255, 0, 51) if self.mode == "RGB" else 255), index


def test_torch_data_sets():
    tensors = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0]))
    data = own.read([tensors, tensors])
    assert data.owners == ("0", "1")
    assert data.x.tolist() == [[0, 1, 2], [3, 4, 5]] * 2
    assert data.y.tolist() == [1, 0, 1, 0]


def test_pictures():
    data = own.read({"a": Photos(), "b": Photos()})
    assert data.x.shape == (4, 3, 3, 4)
    torch.testing.assert_close(data.x[0, :, 0, 0], torch.tensor([1, -1, -0.6]))
    assert own.read({"a": Photos(mode="L"), "b": Photos(mode="1")}).x.unique().tolist() == [1]


def test_bytes_of_three_axes_are_pictures():
    x = np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1)
    assert own.read({"a": (x, [0, 1])}).x.flatten().tolist() == [-1, 1]


def test_hugging_face_with_a_client_column(everybody):
    hugging_face = pytest.importorskip("datasets")
    dataset = hugging_face.Dataset.from_dict(everybody).class_encode_column("readmitted")
    check(own.read(dataset, target="readmitted", client="hospital"), order=(0, 3, 1, 2, 4))
    chosen = dataset.select([4, 0]).with_format("torch")
    assert own.read(chosen, target="readmitted", client="hospital", min_samples=1).x[:, 0].tolist() == [70, 40]


def test_hugging_face_with_a_data_set_per_client():
    hugging_face = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (4, 3), (255, 0, 51)) for _ in range(2)]
    features = hugging_face.Features(
        {"image": hugging_face.Image(), "label": hugging_face.ClassLabel(names=["dog", "cat"])}
    )
    one = hugging_face.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features)
    data = own.read(hugging_face.DatasetDict({"a": one, "b": one}), target="label")
    torch.testing.assert_close(data.x[0, :, 0, 0], torch.tensor([1, -1, -0.6]))
    assert (data.class_names, data.y.tolist()) == (("cat", "dog"), [1, 0] * 2)


def test_hugging_face_lists_become_arrays():
    hugging_face = pytest.importorskip("datasets")
    dataset = hugging_face.Dataset.from_dict({"x": [[0.5, 1], [2, 3]], "y": [0, 1], "who": ["a", "b"]})
    assert own.read(dataset, client="who", min_samples=1).x.tolist() == [[0.5, 1], [2, 3]]


# -- conversions -------------------------------------------------------------------------------------------------------


def table(**columns):
    """Two clients with the same four rows."""
    columns = {"y": [0, 1, 0, 1], **columns}
    return {"a": columns, "b": columns}


def test_categories_are_those_of_all_clients():
    clients = {"a": {"ward": ["east", "west"], "y": [0, 1]}, "b": {"ward": ["north", "west"], "y": [0, 1]}}
    data = own.read(clients)
    assert data.columns == ("ward=east", "ward=north", "ward=west")
    assert data.x.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]


def test_numbers_can_be_categories(tmp_path):
    write_csv(tmp_path / "a.csv", [["250", 0], ["V12", 1], ["250", 1]], header=["code", "y"])
    assert own.read(tmp_path, categorical=["code"]).columns == ("code=250", "code=V12")
    data = own.read(table(ward=[7, 10, 7, 10]), categorical=["ward"])
    assert data.columns == ("ward=7", "ward=10")
    assert data.x[0].tolist() == [1, 0]


def test_whole_numbers_of_csv_are_classes_and_serial_numbers_text(tmp_path):
    write_csv(tmp_path / "a.csv", [["1_0", 0], ["2_0", 1]], header=["serial", "y"])
    data = own.read(tmp_path)
    assert (data.columns, data.class_names) == (("serial=1_0", "serial=2_0"), ("0", "1"))


def test_dates_are_no_categories():
    client = {"admitted": ["2026-01-03", "2026-02-01"], "v": [1, 2], "y": [0, 1]}
    refused("Column `admitted` must hold numbers or categories. It holds dates, as '2026-01-03'.", {"a": client})
    assert len(own.read({"a": client}, categorical=["admitted"]).columns) == 3


def test_features_can_be_listed():
    clients = {"a": {"v": [1, 2], "w": [3, 4], "y": [0, 1]}, "b": {"w": [5, 6], "y": [0, 1], "other": [0, 0]}}
    assert own.read(clients, features=["w"], standardise="none").x.tolist() == [[3], [4], [5], [6]]


def test_whole_numbers_of_arrays_stay_whole():
    """They may be tokens for an embedding."""
    assert own.read({"a": (np.array([[1, 2], [3, 4]]), [0, 1])}).x.dtype == torch.int64


def test_flags_are_classes():
    data = own.read(table(v=[1, 2, 3, 4], y=[True, False, True, True]))
    assert (data.class_names, data.y[:4].tolist()) == (("False", "True"), [1, 0, 1, 1])


def test_floats_are_amounts_unless_said_to_be_classes():
    data = own.read(table(v=[1, 2, 3, 4], y=[0.0, 1.0, 1.0, 0.0]))
    assert (data.classes, data.loss, data.metric) == (None, squared_error, absolute_error)
    assert data.y.dtype == torch.float32
    data = own.read(table(v=[1, 2, 3, 4], y=[0.0, 1.0, 1.0, 0.0]), kind="classification")
    assert (data.class_names, data.y[:4].tolist()) == (("0", "1"), [0, 1, 1, 0])


def test_whole_numbers_can_be_amounts():
    data = own.read(table(v=[1, 2, 3, 4], y=[10, 20, 30, 40]), kind="regression")
    assert (data.classes, data.y[:4].tolist()) == (None, [10, 20, 30, 40])


def test_several_amounts_per_sample():
    y = np.arange(4.0).reshape(2, 2)
    assert own.read({"a": (np.ones((2, 3)), y)}).y.tolist() == y.tolist()
    assert own.read({"a": (np.ones((2, 3)), y[:, :1])}).y.shape == (2,)


def test_classes_can_be_fixed():
    data = own.read(table(v=[1, 2, 3, 4], y=["b", "a", "b", "a"]), classes=["c", "b", "a"])
    assert (data.classes, data.class_names, data.y[:2].tolist()) == (3, ("c", "b", "a"), [1, 2])
    assert own.read(table(v=[1, 2, 3, 4], y=[2, 5, 2, 5]), classes=10).y[:2].tolist() == [2, 5]


def test_next_tokens():
    x = np.array([[1, 2, 3], [4, 5, 6]])
    data = own.read({"a": (x, None), "b": {"x": x}}, kind="tokens")
    assert (data.x[:2].tolist(), data.y[:2].tolist()) == ([[1, 2], [4, 5]], [[2, 3], [5, 6]])
    assert (data.classes, data.x.dtype, data.y.dtype) == (7, torch.int64, torch.int64)
    assert (data.loss, data.metric) == (cross_entropy, accuracy)
    last = own.read({"a": (x, np.array([7, 8]))}, kind="tokens", classes=20)
    assert (last.x.tolist(), last.y.tolist(), last.classes) == (x.tolist(), [7, 8], 20)


def test_loss_and_metric_of_ones_own():
    def within_one(outputs, targets):
        return ((outputs[:, 0] - targets).abs() < 1).float()

    def cubed(outputs, targets):
        return (outputs[:, 0] - targets).abs() ** 3

    y = [0.5, 1, 2, 3]
    data = own.read(table(v=[1, 2, 3, 4], y=y), metric=within_one, loss=cubed)
    assert (data.metric, data.loss) == (Metric("within one", within_one), cubed)
    assert own.read(table(v=[1, 2, 3, 4], y=y), metric=squared_metric).metric is squared_metric


squared_metric = Metric("squared error", squared_error, higher_is_better=False)


@pytest.mark.parametrize("kind", ["classification", "regression", "tokens"])
def test_every_kind_can_be_trained(kind):
    draw = generator(0, "test data")
    x = draw.integers(5, size=(8, 4)) if kind == "tokens" else draw.normal(size=(8, 4))
    y = {"classification": np.arange(8) % 2, "regression": x[:, 0], "tokens": None}[kind]
    data = own.read({"a": (x, y), "b": (x, y), "c": (x[:1], None if y is None else y[:1])}, kind=kind, min_samples=1)
    task = Task.build(data, Natural(min_samples=1))
    assert task.names == ("a", "b", "c")
    scores = federate(task, FedAvg(), rounds=1).scores()
    assert np.isfinite(scores[:2]).all()
    assert np.isnan(scores[2])  # one sample is for training


def test_a_label_of_one_client_alone_is_said(caplog):
    clients = {"a": {"v": [1, 2], "y": ["no", "yes"]}, "b": {"v": [1, 2], "y": ["no", "Yes"]}}
    with caplog.at_level(logging.WARNING, logger="atoll.data"):
        own.read(clients)
    assert caplog.messages == ["2 of 3 labels occur at one client alone: 'Yes' only at 'b', 'yes' only at 'a'."]
    with pytest.raises(DataError, match="Every label must occur at two clients or more. 2 of 3 labels"):
        own.read(clients, lone_labels="error")


def test_a_client_with_one_sample_can_be_kept():
    assert len(own.read({"a": {"v": [1], "y": [0]}, "b": {"v": [1, 2], "y": [0, 1]}}, min_samples=1).y) == 3


# -- errors ------------------------------------------------------------------------------------------------------------


def refused(message, source, error=DataError, **options):
    """What must be said, literally."""
    with pytest.raises(AtollError, match=re.escape(message)) as raised:
        own.read(source, **options)
    assert type(raised.value) is error


NAN = float("nan")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"v": [1, None, 3, 4]},
            "`v` must be filled in every row. Got None in row 1 of client 'a' and in 1 more of 8",
        ),
        ({"v": [1.0, 2, NAN, 4]}, "Column `v` must hold finite numbers. Got nan in row 2 of client 'a' and in 1 more"),
        ({"v": [1, 2, 3, 1e39]}, "Column `v` must hold finite numbers. Got 1e+39 in row 3"),
        ({"v": [[1, 2], [3, NAN], [5, 6], [7, 8]]}, "Column `v` must hold finite numbers. Got nan in row 1"),
        ({"v": ["a", "b", None, "c"]}, "Column `v` must be filled in every row. Got None in row 2"),
        ({"v": [1, 2, 3, 4], "y": [0, 1, None, 1]}, "Column `y` must be filled in every row. Got None in row 2"),
        ({"v": [1, "n/a", 3, 4]}, "must be of one kind throughout. Got 'n/a' among values like 1 in row 1"),
        ({"v": [[1, 2], [3], [5, 6], [7, 8]]}, "`v` has (2,) in row 0 of client 'a' and (1,) in row 1 of client 'a'"),
        (
            {"v": [["p"], ["q"], ["r"], ["s"]]},
            "numbers, text, flags, images or arrays of numbers. Got a list",
        ),
        ({"v": [b"p", b"q", b"r", b"s"]}, "must hold numbers, text, flags, images or arrays of numbers. Got a bytes"),
        ({"v": [1, 2, 3]}, "Columns of client 'a' must be of the same length. Got 4 of `y`, 3 of `v`."),
        ({"v": 7}, "A column must be an array, a tensor or a list. Got int."),
        ({"v": [1, 2, 3, 4], "x": np.ones((4, 2))}, "A column of arrays must be the only feature. Got `x` and 1 more."),
        ({"v": [1, 2, 3, 4], "y": [1, 1, 1, 1]}, "There must be at least 2 classes. All of `y` is '1'."),
        ({"v": [1, 2, 3, 4], "y": [[1, 2]] * 4}, "There must be one label per sample. `y` holds arrays of shape (2,)"),
        ({}, "There must be a feature besides target and client (y), and neither may be one. Got none."),
    ],
)
def test_bad_columns(columns, message):
    refused(message, table(**columns))


def test_gaps_in_frames(everybody):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    everybody["sex"][2] = everybody["smoker"][1] = everybody["age"][4] = None
    for frame in (pandas.DataFrame(everybody).convert_dtypes(), polars.DataFrame(everybody)):
        options = {"target": "readmitted", "client": "hospital"}
        refused("in row 4 of the table (client 'Porto')", frame, features=["age"], **options)
        refused("Column `sex` must be filled in every row. Got", frame, features=["sex"], **options)
        refused("Column `smoker` must be filled in every row. Got", frame, features=["smoker"], **options)
    everybody["hospital"][3] = None
    refused("Column `hospital` must be filled in every row. Got nan in row 3 of the table", pandas.DataFrame(everybody),
            target="readmitted", client="hospital")  # fmt: skip


def test_dates_are_refused(everybody):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(everybody | {"since": pandas.date_range("2020-01-01", periods=5)})
    refused("Column `since` must hold numbers, text, flags, images or arrays of numbers. Got a datetime64", frame,
            target="readmitted", client="hospital")  # fmt: skip


def test_columns_of_one_name():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2, 0]], columns=["v", "v", "y"])
    refused("Columns of client 'a' must have different names. Got 'v' more than once.", {"a": frame})


def test_a_lazy_frame(everybody):
    polars = pytest.importorskip("polars")
    refused("Got LazyFrame for the table.", polars.LazyFrame(everybody), target="readmitted", client="hospital")


def test_a_client_with_other_columns():
    clients = {"a": {"v": [1, 2], "glucose": [1, 2], "y": [0, 1]}, "b": {"v": [1, 2], "glukose": [1, 2], "y": [0, 1]}}
    refused("Compared with client 'a', client 'b' lacks glucose and also has glukose.", clients)


def test_a_client_with_another_shape():
    clients = {"a": (np.ones((2, 8)), [0, 1]), "b": (np.ones((2, 7)), [0, 1])}
    refused(
        "Samples must be of one shape. `x` has (8,) in row 0 of client 'a' and (7,) in row 0 of client 'b'.", clients
    )
    refused("`x` has (1, 4, 4) in row 0 of client 'a' and (1, 3, 4) in row 1",
            {"a": Photos([(4, 4), (4, 3)], mode="L")})  # fmt: skip


def test_a_client_with_another_kind():
    clients = {"a": {"v": [1, 2, 3], "y": [0, 1, 0]}, "b": {"v": ["1", "2"], "y": [0, 1]}}
    refused("must be of one kind throughout. Got '1' among values like 1 in row 0 of client 'b' and in 1 more", clients)


def test_too_few_samples():
    clients = {"a": {"v": [1], "y": [0]}, "b": {"v": [1, 2], "y": [0, 1]}, "c": {"v": [], "y": []}}
    refused("Every client must have at least 2 samples. 2 of 3 have fewer: 'a' has 1, 'c' has 0.", clients)
    refused("Every client must have at least 1 samples. 1 of 3 have fewer: 'c' has 0.", clients, min_samples=1)


def test_no_clients(tmp_path):
    refused("Data must have at least 1 client. Got an empty dict.", {})
    refused("Data must have at least 1 client. Got an empty list.", [])
    refused("Data must have at least 1 client. Got an empty folder.", tmp_path)
    refused("Data must have at least 1 client. Got a table without rows.", {"who": [], "v": [], "y": []}, client="who")


def test_columns_that_are_not_there(folder):
    refused("Unknown column 'readmited'. Did you mean: readmitted?", folder, UnknownName, target="readmited")
    refused("Unknown column 'y'", folder, UnknownName)
    refused("Unknown column 'weight'", folder, UnknownName, target="readmitted", features=["weight"])
    refused(
        "Unknown column in `categorical` 'weight'", folder, UnknownName, target="readmitted", categorical=["weight"]
    )
    refused(
        "Unknown column 'hospitl'. Did you mean: hospital?",
        {"hospital": ["a"], "y": [0]},
        UnknownName,
        client="hospitl",
    )


def test_arguments_out_of_range(folder):
    refused("Unknown `kind` 'classify'. Did you mean: classification?", folder, UnknownName, kind="classify")
    refused("Unknown `standardise` 'clients'", folder, UnknownName, standardise="clients")
    refused("Unknown `lone_labels` 'raise'", folder, UnknownName, lone_labels="raise")
    refused("neither may be one. Got age, readmitted.", folder, target="readmitted", features=["age", "readmitted"])


def test_one_table_needs_a_client_column_and_several_have_none(folder, everybody):
    pandas = pytest.importorskip("pandas")
    refused("Got DataFrame and no `client`", pandas.DataFrame(everybody), target="readmitted")
    refused("Got file and no `client`", folder / "Ulm.csv", target="readmitted")
    for source in (folder, {"a": pandas.DataFrame(everybody)}, [pandas.DataFrame(everybody)]):
        refused("Got client='hospital' with one table per client.", source, target="readmitted", client="hospital")
    refused("Column `who` must hold one name per row", {"who": [[1, 2]], "y": [0]}, client="who")


def test_names_of_clients():
    clients = {1: (np.ones((2, 1)), [0, 1]), "1": (np.ones((2, 1)), [0, 1])}
    refused("Every client must have a name of its own. Got '1' more than once.", clients)


def test_two_files_of_one_name(folder):
    write_csv(folder / "Ulm.CSV", ROWS["Ulm"])
    refused("Every client must have a name of its own. Got 'Ulm' more than once.", folder, target="readmitted")


def test_data_of_no_known_form():
    refused("Got int for client 'a'.", {"a": 7})
    refused("There is no nowhere.", "nowhere")


def test_torch_data_sets_must_have_pairs_and_a_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.zeros(2), 0

    triples = torch.utils.data.TensorDataset(*[torch.zeros(2)] * 3)
    refused("A torch Dataset must give pairs (x, y). Got tuple in row 0 of client '0'.", [triples])
    refused("client '0' is without a length.", [Stream()])


def test_deep_pictures():
    refused("Images must have 8 bits per channel. Got one of mode I;16.", {"a": Photos(mode="I;16")})


def test_unknown_hugging_face_labels():
    hugging_face = pytest.importorskip("datasets")
    features = hugging_face.Features(
        {"v": hugging_face.Value("float32"), "y": hugging_face.ClassLabel(names=["p", "q"])}
    )
    dataset = hugging_face.Dataset.from_dict({"v": [1, 2], "y": [0, -1]}, features=features)
    refused("Column `y` must be filled in every row. Got None in row 1 of client 'a'.", {"a": dataset})


def test_too_many_categories():
    clients = {"a": {"id": [f"p{number}" for number in range(51)], "y": [0, 1, 0] * 17}}
    refused("A column of text must have at most 50 different values. `id` has 51.", clients)


def test_targets_that_are_not_clear():
    clients = {"a": {"v": np.arange(51.0), "y": np.arange(51)}}
    refused("`y` has 51 different values, which may be classes or amounts.", clients)
    assert own.read(clients, kind="classification").classes == 51
    refused("The target of a regression must be numbers. `y` holds 'p'.", table(v=[1, 2, 3, 4], y=["p", "q"] * 2),
            kind="regression")  # fmt: skip
    refused("Column `y` must be one of the 2 classes. Got 'r' in row 3 of client 'a' and in 1 more",
            table(v=[1, 2, 3, 4], y=["p", "q", "p", "r"]), classes=["p", "q"])  # fmt: skip


def test_tokens_that_are_none():
    x = np.array([[1, 2, 3], [4, 5, 6]])
    rule = "Tokens must be whole numbers of shape [samples, length], of length at least 2."
    refused(f"{rule} `x` is float64 of shape [2, 3].", {"a": (x / 1.0, None)}, kind="tokens")
    refused(rule, {"a": (x[:, :1], None)}, kind="tokens")
    refused("Targets must be one token per sample or per place.", {"a": (x, x[:, 1:])}, kind="tokens")
    refused("Column `x` must hold tokens in 0 .. 5. Got 6 in row 1", {"a": (x, None)}, kind="tokens", classes=6)
    refused("Column `x` must hold tokens in 0 .. 6. Got -1 in row 0", {"a": (x - 2 * (x == 1), None)}, kind="tokens")
    refused("`classes` must be the size of the vocabulary", {"a": (x, None)}, TaskError, kind="tokens", classes=["a"])


# -- files that are not what they should be ----------------------------------------------------------------------------


def spoil(folder, old, new):
    path = folder / "Ulm.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    return folder


def test_an_empty_cell(folder):
    refused("Column `age` must be filled in every row. Got an empty cell in line 3 of Ulm.csv.",
            spoil(folder, "50,", " ,"), target="readmitted")  # fmt: skip


def test_a_cell_that_is_no_number(folder):
    refused("Column `age` must be numbers or text throughout. Got 'n/a' among numbers in line 3 of Ulm.csv.",
            spoil(folder, "50,", "n/a,"), target="readmitted")  # fmt: skip


def test_a_number_among_text(folder):
    refused("Column `sex` must be numbers or text throughout. Got '1' among text in line 2 of Ulm.csv.",
            spoil(folder, "F", "1"), target="readmitted")  # fmt: skip


def test_a_cell_that_is_not_finite(folder):
    refused("Column `age` must hold finite numbers. Got inf in line 3 of Ulm.csv.",
            spoil(folder, "50,", "inf,"), target="readmitted")  # fmt: skip


def test_lines_are_those_of_the_file(folder):
    """A cell may hold several lines."""
    path = spoil(folder, "yes", '"y\nes"') / "Ulm.csv"
    refused("Got an empty cell in line 4 of Ulm.csv", spoil(folder, "50,", ","), target="readmitted")
    assert len(path.read_text().splitlines()) == 5


def test_a_line_with_too_many_cells(folder):
    refused("Line 3 of Ulm.csv has 6, the first 5.", spoil(folder, "50,", "5,0,"), target="readmitted")


def test_an_open_quote(folder):
    refused("Ulm.csv could not be read: unexpected end of data", spoil(folder, "50,", '"50,'), target="readmitted")


def test_an_empty_file(folder):
    (folder / "Lund.csv").touch()
    refused("A CSV file must begin with the names of its columns. Lund.csv is empty.", folder, target="readmitted")


def test_a_file_with_a_header_only(folder):
    write_csv(folder / "Lund.csv", [])
    refused("1 of 3 have fewer: 'Lund' has 0.", folder, target="readmitted")


def test_two_columns_of_one_name_in_a_file(folder):
    refused("Columns of Ulm.csv must have different names. Got 'age' more than once.",
            spoil(folder, "pressure", "age"), target="readmitted")  # fmt: skip


def test_text_that_is_not_utf8(folder):
    (folder / "Ulm.csv").write_bytes("größe\n1\n".encode("latin-1"))
    refused("Ulm.csv must be UTF-8 text.", folder, target="readmitted")


def test_stray_files(folder):
    (folder / "notes.txt").touch()
    refused("also holds notes.txt.", folder, target="readmitted")
    refused("A file must end in .csv, .parquet, .npz. Got notes.txt.", {"a": folder / "notes.txt"})


def test_stray_folders(folder):
    (folder / "old.csv").mkdir()
    refused("also holds old.csv.", folder, target="readmitted")


def test_files_of_two_kinds(folder):
    np.savez(folder / "Lund.npz", x=np.ones((2, 2)), y=[0, 1])
    refused("The files of a folder must be of one kind. Got Lund.npz and Ulm.csv in", folder, target="readmitted")


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{"code": 1}, None]), y=[0, 1])
    refused("a.npz could not be read: Object arrays cannot be loaded when allow_pickle=False", tmp_path)


def test_damaged_files(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
    refused("a.npz could not be read", tmp_path)
    (tmp_path / "a.npz").rename(tmp_path / "a.parquet")
    pytest.importorskip("pyarrow")
    refused("a.parquet could not be read", tmp_path)


# -- who stays, and whole numbers --------------------------------------------------------------------------------------


def few(*sizes: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return {f"c{k}": (draw.normal(size=(size, 3)), np.arange(size) % 2) for k, size in enumerate(sizes)}


@pytest.mark.parametrize("read", [
    lambda data, **more: Task.own(data, min_samples=1, **more),
    lambda data, **more: Task.build(own.read(data, min_samples=1), Natural(), **more),
    lambda data, **more: Task.build(own.read(data, min_samples=1), Shifted(Natural(), ()), **more),
])  # fmt: skip
def test_a_client_with_one_sample_stays_if_it_is_asked_for(read):
    """catches: a partition with a minimum of its own, and shares for all that take a client's only sample."""
    data = few(12, 1, 9, 1)
    assert read(data).clients == 4
    for seed in range(5):
        task = read(data, public=0.4, central=0.2, seed=seed)
        assert task.names == ("c0", "c1", "c2", "c3")
        assert task.splits["train"].sizes(np.arange(4)).min() == 1
        assert [len(task.public[0]), len(task.central[0])] == [9, 5]
    with pytest.raises(TaskError, match="Every client must keep 1 of its samples"):
        read(data, public=0.9)


def test_a_partition_may_still_ask_for_more():
    assert Task.build(own.read(few(12, 1, 9), min_samples=1), Natural(5)).names == ("c0", "c2")


def test_whole_numbers_are_amounts_or_tokens_as_the_network_takes_them():
    """catches: "mat1 and mat2 must have the same dtype, but got Long and Float"."""
    draw = np.random.default_rng(0)
    data = {name: (draw.integers(0, 9, size=(12, 4)), np.arange(12) % 2) for name in "ab"}
    amounts = Task.own(data, central=0.2, public=0.2)
    assert {amounts.x.dtype, amounts.central[0].dtype, amounts.public[0].dtype} == {torch.float32}
    assert math.isfinite(federate(amounts, FedAvg(), rounds=1).summary()["macro"])
    embedding = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    assert Task.own(data, model=embedding).x.dtype == torch.int64
    tensors = {name: (torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in data.items()}
    assert Task.of_clients(tensors, torch.nn.Linear(4, 2).double()).x.dtype == torch.float64
    assert Task.of_clients(tensors, embedding).x.dtype == torch.int64
    few_tokens = torch.nn.Sequential(torch.nn.Embedding(1, 4), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with pytest.raises(ModelError, match="index out of range"):
        Task.own(data, model=few_tokens)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_array_that_claims_to_be_larger_than_its_file_is_refused_before_room_is_made(tmp_path, compressed):
    folder = tmp_path / "clients"
    folder.mkdir()
    write = np.savez_compressed if compressed else np.savez
    for name in "ab":
        write(folder / f"{name}.npz", x=np.zeros((6, 3)), y=np.arange(6) % 2)
    assert len(own.read(folder).y) == 12
    lying(folder / "b.npz", shape=(10**12, 3), compressed=compressed)
    with pytest.raises(DataError, match=r"b\.npz.*x\.npy says that it holds 24000000000000 bytes, and has \d+ at most"):
        own.read(folder)


def lying(path: Path, shape: tuple[int, ...], *, compressed: bool) -> None:
    """Change the shape in the header of the first array; its values stay."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    entries["x.npy"] = header.getvalue() + bytes(6 * 3 * 8)
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
