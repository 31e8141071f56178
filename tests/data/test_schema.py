"""A schema says what columns are, holds no sample, and refuses a file that differs by the name of the column."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from atoll.cli import app
from atoll.data import own
from atoll.data.schema import Schema
from atoll.data.task import Task
from atoll.kernel.errors import AtollError, DataError
from atoll.kernel.randomness import generator

HEADER = "age,sex,smoker,code,readmitted"
ULM = ["40.5,F,true,7,yes", "51.25,M,false,8,no", "62,F,true,8,no", "33,M,true,7,yes", "47,F,false,7,no"]
PORTO = ["70,M,true,8,no", "71.5,M,true,8,no", "72,M,false,8,yes", "69,M,true,8,no"]  # nobody F, no ward 7
KNOWN = {"target": "readmitted", "categorical": ["code"]}


@pytest.fixture
def files(tmp_path):
    for name, rows in (("Ulm", ULM), ("Porto", PORTO)):
        (tmp_path / f"{name}.csv").write_text("\n".join([HEADER, *rows]))
    return tmp_path


@pytest.fixture
def schema(files):
    return own.find_schema_of(files / "Ulm.csv", **KNOWN)


def test_a_schema_survives_its_file_and_holds_no_number_of_a_sample(schema, files):
    schema.save(files / "schema.json")
    assert Schema.load(files / "schema.json") == schema
    text = (files / "schema.json").read_text()
    assert [number for number in ("40.5", "51.25", "62", "33", "47") if number in text] == []
    assert schema.columns == ("age", "sex=F", "sex=M", "smoker", "code=7", "code=8")
    assert schema.classes == ("no", "yes")


def test_sites_with_one_schema_have_the_numbers_of_one_federation(schema, files):
    together = Task.own({name: files / f"{name}.csv" for name in ("Ulm", "Porto")}, **KNOWN)
    for name in ("Ulm", "Porto"):
        alone = Task.of_site(files / f"{name}.csv", schema)
        assert alone.names == (name,)
        assert alone.network.layout == together.network.layout
        assert {*alone.network.initial} == {*together.network.initial}
        assert alone.classes == together.classes == 2
    one = together.of(np.array([0]))
    assert torch.equal(Task.of_site(files / "Ulm.csv", schema).x, one.x[:5])  # the first client's draws are the same


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "age,sex",
            "years,sex",
            "Column `age` must be there, as the schema says. There is none in Porto.csv.",
        ),
        (
            "readmitted",
            "readmited",
            "Column `readmitted` must be there, as the schema says. There is none in Porto.csv.",
        ),
        ("70,M", "unknown,M", "Column `age` must be numbers or text throughout. Got 'unknown' among numbers"),
        ("71.5,M", "71.5,X", "Column `sex` must hold one of F, M. Got 'X' in line 3"),
        (",true,", ",1,", "Column `smoker` must be numbers or text throughout"),
        ("69,M,true,8,no", "69,M,true,9,no", "Column `code` must hold one of 7, 8. Got '9'"),
        ("yes", "Yes", "Column `readmitted` must be one of the 2 classes. Got 'Yes'"),
    ],
)
def test_a_file_that_differs_is_refused_by_the_name_of_its_column(schema, files, before, after, message):
    path = files / "Porto.csv"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(AtollError) as raised:
        Task.of_site(path, schema)
    assert message in str(raised.value)


def test_a_column_of_another_type_is_refused(schema):
    frame = {
        "age": ["old", "young"],
        "sex": ["F", "M"],
        "smoker": [True, False],
        "code": ["7", "8"],
        "readmitted": ["no", "yes"],
    }
    with pytest.raises(DataError, match="Column `age` must hold numbers, as the schema says. It holds text"):
        Task.of_site(frame, schema, name="Lund")
    with pytest.raises(DataError, match="Column `smoker` must hold flags, as the schema says. It holds numbers"):
        Task.of_site({**frame, "age": [1.0, 2.0], "smoker": [1, 0]}, schema, name="Lund")


def test_more_columns_are_left_out_and_named(schema, files, caplog):
    path = files / "Porto.csv"
    path.write_text(
        "\n".join(f"{line},{extra}" for line, extra in zip(path.read_text().splitlines(), ("id", *"1234"), strict=True))
    )
    task = Task.of_site(path, schema)
    assert "left out, because the schema does not name them: id" in caplog.text
    assert task.x.shape[1] == 6


def test_windows_and_pictures_have_a_schema():
    draw = generator(0, "schema")
    windows = own.find_schema_of({"a": (draw.normal(size=(6, 3, 16)), [0, 1] * 3)})
    assert Schema.of_json(json.loads(json.dumps(windows.as_json()))) == windows
    with pytest.raises(DataError, match=r"Column `x` must hold arrays of shape \(3, 16\), as the schema says"):
        Task.of_site((draw.normal(size=(6, 3, 15)), [0, 1] * 3), windows, name="b")
    tokens = own.find_schema_of({"a": (draw.integers(7, size=(4, 9)), None)}, kind="tokens")
    assert (tokens.outputs, tokens.target) == (7, None)
    assert Task.of_site((draw.integers(5, size=(4, 9)), None), tokens, name="b").classes == 7


def test_what_a_site_cannot_know_is_refused(schema, files):
    with pytest.raises(AtollError, match="so `target` must be left out"):
        Task.of_site(files / "Ulm.csv", schema, target="readmitted")
    pooled = own.find_schema_of(files / "Ulm.csv", standardise="global", **KNOWN)
    with pytest.raises(AtollError, match="must be client or none. Got global"):
        Task.of_site(files / "Ulm.csv", pooled)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "nonsense", '{"form": "atoll-schema-1", "features": [], "classes": []}']
)
def test_a_file_that_is_no_schema_is_refused(tmp_path, content):
    (tmp_path / "schema.json").write_text(content)
    with pytest.raises(DataError, match="A schema must be"):
        Schema.load(tmp_path / "schema.json")


def test_the_command_writes_a_schema(files, monkeypatch):
    monkeypatch.chdir(files)
    words = ["--target", "readmitted", "--categorical", "code", "-o", "agreed.json"]
    done = CliRunner().invoke(app, ["data", "schema", "Ulm.csv", *words])
    assert done.exit_code == 0, done.output
    assert Schema.load("agreed.json") == own.find_schema_of(Path("Ulm.csv"), **KNOWN)
    wrong = CliRunner().invoke(app, ["data", "schema", "Ulm.csv", "--target", "readmited"])
    assert wrong.exit_code == 2
    assert "Did you mean: readmitted?" in wrong.stderr
    assert "digits" in CliRunner().invoke(app, ["data"]).stdout
    assert "digits" in CliRunner().invoke(app, ["data", "digits"]).stdout
