"""A folder with planted faults: every one is named, and the cleaned copy has none."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.data.check import check
from atoll.data.clean import clean
from atoll.data.task import Task
from atoll.kernel.errors import DataError
from atoll.kernel.randomness import generator

HEADER = ["age", "sex", "pressure", "admitted", "device", "readmitted"]


def atoll(*arguments):
    return CliRunner().invoke(app, list(arguments))


def write(path, rows, header=HEADER, separator=","):
    path.write_text("\n".join(separator.join(row) for row in [header, *rows]) + "\n", encoding="utf-8")


@pytest.fixture
def hospitals():
    """Four hospitals without a fault."""
    draw = generator(0, "hospitals")
    return {
        name: [
            [
                f"{draw.normal(50, 10):.2f}", str(draw.choice(["F", "M"])), f"{draw.normal(120, 15):.1f}",
                f"{draw.normal(5, 1):.2f}", str(draw.choice(["A1", "B2"])), str(draw.choice(["yes", "no"])),
            ]
            for _ in range(count)
        ]
        for name, count in (("Graz", 30), ("Lund", 70), ("Porto", 80), ("Ulm", 60))
    }  # fmt: skip


@pytest.fixture
def faulty(hospitals, tmp_path):
    """The same with ten faults planted, and where they are."""
    days = iter(range(1000))
    for rows in hospitals.values():
        for row in rows:
            row[3] = str(np.datetime64("2025-01-01") + next(days))  # dates
            row[4] = "A1"  # a constant column
    hospitals["Graz"] = hospitals["Graz"][:6]  # a tiny client
    porto, lund, ulm = (hospitals[name] for name in ("Porto", "Lund", "Ulm"))
    porto[3][2] = "1e12"  # a spike
    porto[7][0] = ""  # a missing value
    porto[9][0] = "unknown"  # text among numbers
    porto[20][5] = "maybe"  # a label that occurs once
    lund[40] = [*lund[12]]  # a near duplicate
    lund[40][2] = f"{float(lund[40][2]) + 0.01:.2f}"
    for row in ulm:  # decimal commas and semicolons
        row[0], row[2] = row[0].replace(".", ","), row[2].replace(".", ",")
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name, rows in hospitals.items():
        write(folder / f"{name}.csv", rows, separator=";" if name == "Ulm" else ",")
    return folder


PLANTED = {
    ("separator", "Ulm.csv", "", ""),
    ("decimal", "Ulm.csv", "age", ""),
    ("decimal", "Ulm.csv", "pressure", ""),
    ("missing", "Porto.csv", "age", "9"),
    ("mixed", "Porto.csv", "age", "11"),
    ("dates", "all files", "admitted", ""),
    ("spike", "Porto.csv", "pressure", "5"),
    ("constant", "all files", "device", ""),
    ("lone", "Porto.csv", "readmitted", "22"),
    ("repeat", "Lund.csv", "", "42"),
    ("tiny", "Graz.csv", "", ""),
}


def test_ten_planted_faults_are_all_named_and_nothing_else(faulty):
    found = check(faulty, target="readmitted").problems
    assert {(one.kind, one.file, one.column, one.lines) for one in found} == PLANTED
    assert len(found) == len(PLANTED)


def test_files_without_a_fault_have_none(hospitals, tmp_path):
    for name, rows in hospitals.items():
        write(tmp_path / f"{name}.csv", rows)
    assert check(tmp_path, target="readmitted").problems == []
    done = atoll("data", "check", str(tmp_path), "--target", "readmitted")
    assert done.exit_code == 0
    assert "4 files, 4 clients, 240 rows. No problems found." in " ".join(done.stdout.split())


def test_the_command_shows_a_table_and_fails(faulty):
    done = atoll("data", "check", str(faulty), "--target", "readmitted")
    assert done.exit_code == 1
    shown = " ".join(done.stdout.split())
    for said in (
        "1e12 where",
        "'unknown' among numbers",
        "decimal commas, as",
        "the label 'maybe' occurs once",
        "constant: all",
    ):
        assert said in shown
    assert "11 problems, of which --fix mends 11" in " ".join(done.stderr.split())


def test_a_cleaned_copy_has_no_fault_and_says_what_was_done(faulty, tmp_path):
    before = {path.name: path.read_bytes() for path in faulty.iterdir()}
    with pytest.raises(DataError):
        Task.own(faulty, target="readmitted")
    done = atoll("data", "check", str(faulty), "--target", "readmitted", "--fix", "-o", str(tmp_path / "cleaned"))
    assert done.exit_code == 0, done.output
    assert {path.name: path.read_bytes() for path in faulty.iterdir()} == before  # the originals are not touched
    assert check(tmp_path / "cleaned", target="readmitted").problems == []
    changes = json.loads((tmp_path / "cleaned-changes.json").read_text())
    assert len(changes) == len(PLANTED)
    assert {"file", "column", "lines", "problem", "done"} == {*changes[0]}
    task = Task.own(tmp_path / "cleaned", target="readmitted")
    assert task.names == ("Lund", "Porto", "Ulm")
    assert task.scaling.schema.columns == ("age", "sex=F", "sex=M", "pressure", "admitted")
    again = atoll("data", "check", str(faulty), "--fix", "-o", str(tmp_path / "cleaned"))
    assert again.exit_code == 2
    assert "must have a folder of its own" in again.stderr


def test_what_is_filled_in_is_the_median_of_the_client_alone(faulty):
    checked = check(faulty, target="readmitted")
    cleaned, _ = clean(checked)
    rows = dict(zip((sheet.name for sheet in checked.sheets), checked.sheets, strict=True))["Porto.csv"].rows
    usual = np.median([float(row[0]) for row in rows if row[0] not in ("", "unknown")])
    porto = next(sheet for sheet in cleaned.sheets if sheet.name == "Porto.csv")
    ages = porto.column("age")
    assert [float(ages[row]) for row in (7, 9)] == [pytest.approx(usual, rel=1e-5)] * 2


def test_in_one_file_too_a_client_is_filled_from_its_own_values(hospitals, tmp_path):
    rows = [[*row, name] for name in ("Lund", "Ulm") for row in hospitals[name]]
    for row in rows[70:]:
        row[0] = f"{float(row[0]) + 100:.2f}"  # Ulm's patients are much older
    usual = np.median([float(row[0]) for row in rows[71:]])
    rows[70][0] = "NA"
    write(tmp_path / "all.csv", rows, [*HEADER, "hospital"])
    cleaned, _ = clean(check(tmp_path / "all.csv", target="readmitted", client="hospital"))
    assert float(cleaned.sheets[0].column("age")[70]) == pytest.approx(usual, rel=1e-5)


def test_numbers_of_a_cleaned_copy_are_those_of_the_files(faulty):
    cleaned, _ = clean(check(faulty, target="readmitted"))
    ulm = next(sheet for sheet in cleaned.sheets if sheet.name == "Ulm.csv")
    written = [line.split(";")[0].replace(",", ".") for line in (faulty / "Ulm.csv").read_text().splitlines()[1:]]
    assert ulm.column("age") == written
    day = (np.datetime64("2025-01-01") + 180 - np.datetime64("1970-01-01")).astype(int)  # the first of Ulm's
    assert ulm.column("admitted")[0] == str(day)


FAULTS = {
    "name": ("Lund.csv", (b"age,", b"Age ,"), "is called `age`"),
    "lacks": ("Lund.csv", (b"age,", b"years,"), "is missing in this file"),
    "encoding": ("Lund.csv", (b"A1", b"\xfc1"), "is not UTF-8"),
    "ragged": ("Lund.csv", (b"\n", b"\n1,2\n"), "1 line with 2 cells instead of 6"),
    "stray": ("notes.txt", (b"", b"hello"), "is no .csv"),
    "unreadable": ("empty.csv", (b"", b""), "it is empty"),
    "spelling": ("Ulm.csv", (b"yes", b"Yes"), "'Yes' (1) is elsewhere written 'yes'"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_files(hospitals, tmp_path, kind):
    for name, rows in hospitals.items():
        write(tmp_path / f"{name}.csv", rows)
    file, (before, after), said = FAULTS[kind]
    path = tmp_path / file
    path.write_bytes(path.read_bytes().replace(before, after, 1) if path.exists() else after)
    found = {one.kind: one.what for one in check(tmp_path, target="readmitted").problems}
    assert said in found[kind]


def test_another_unit_and_names_of_cases_are_noticed(hospitals, tmp_path):
    for number, (name, rows) in enumerate(hospitals.items()):
        for place, row in enumerate(rows):
            if name == "Ulm":
                row[0] = f"{12 * float(row[0]) * 30:.1f}"  # in days
            row += [str(place), f"case {number}-{place}"]
        write(tmp_path / f"{name}.csv", rows, [*HEADER, "row", "patient"])
    found = {(one.kind, one.file, one.column) for one in check(tmp_path, target="readmitted").problems}
    assert found == {
        ("unit", "Ulm.csv", "age"),
        ("identifier", "all files", "row"),
        ("identifier", "all files", "patient"),
    }
    kept = check(tmp_path, target="readmitted", apart=["patient", "row"]).problems
    assert {(one.kind, one.column) for one in kept} == {("unit", "age")}


def test_a_target_that_is_not_there_and_one_client_only(hospitals, tmp_path):
    rows = [[*row, "Ulm"] for row in hospitals["Ulm"]]
    write(tmp_path / "all.csv", rows, [*HEADER, "hospital"])
    found = {one.kind: one.what for one in check(tmp_path / "all.csv", target="readmited", client="hospital").problems}
    assert found["absent"] == "there is no such column to predict. Did you mean: readmitted?"
    assert found["clients"] == "all rows belong to 'Ulm': there must be at least 2 clients"
    with pytest.raises(DataError, match="Column `hospital` must name at least 2 clients. It is 'Ulm' in all 60 rows"):
        Task.own(tmp_path / "all.csv", target="readmitted", client="hospital")


def test_arrays_are_checked_and_cleaned(tmp_path):
    draw, folder = generator(0, "arrays"), tmp_path / "windows"
    folder.mkdir()
    for number in range(3):
        signal = draw.normal(size=(2, 16 * 31 + 32))
        x = np.stack([signal[:, start : start + 32] for start in range(0, 16 * 30, 16)])
        y = np.array(["walk", "sit"] * 15)
        if number == 1:
            x[4, 0, 3], x[5, 1, 2], y[7] = np.nan, 1e12, "jump"
        if number == 2:
            x, y = x[:5], y[:5]
        np.savez(folder / f"p{number}.npz", x=x, y=y)
    done = atoll("data", "check", str(folder), "--fix", "-o", str(tmp_path / "cleaned"))
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    for said in (
        "1 sample with NaN",
        "with spikes, as 1e+12",
        "'jump' occurs once",
        "windows share raw values",
        "5 samples, about 1",
    ):
        assert said in shown
    assert sorted(path.name for path in (tmp_path / "cleaned").iterdir()) == ["p0.npz", "p1.npz"]
    assert len(np.load(tmp_path / "cleaned" / "p1.npz")["x"]) == 27


def test_a_fix_needs_a_folder_and_a_source(tmp_path):
    assert "must be given a folder for the cleaned copy" in atoll("data", "check", str(tmp_path), "--fix").stderr
    assert "There is no" in atoll("data", "check", str(tmp_path / "nowhere")).stderr
    assert "Got an empty folder" in atoll("data", "check", str(tmp_path)).stderr
