import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from atoll import Recipe, compare
from atoll.experiments.comparison import Comparison
from atoll.records.rounds import Round
from atoll.report.export import _write_csv, as_json, save, write_latex, write_markdown

FILES = {
    "report": "report.html", "results": "results.csv", "json": "results.json", "markdown": "results.md",
    "latex": "results.tex", "clients": "clients.csv", "citations": "citations.bib",
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(Recipe(clients=5), ["local", "fedavg", "ditto:lam=0.5"], seeds=2, rounds=2)


@pytest.fixture(scope="module")
def errors() -> Comparison:
    """Of a task whose score is not a share, and better when lower."""
    return compare(Recipe("linear", clients=3), ["local", "fedavg"], seeds=1, rounds=1)


def renamed(comparison: Comparison, name: str) -> Comparison:
    """The same with FedAvg called otherwise, as the file of a user may be."""
    return Comparison({name if method == "fedavg" else method: of for method, of in comparison.outcomes.items()})


def body(text: str) -> list[str]:
    """The rows of a LaTeX table between its rules."""
    return text.split("\\midrule\n")[1].split("\\bottomrule")[0].strip().splitlines()


def cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)&", line.removesuffix("\\\\"))


# -- files -------------------------------------------------------------------------------------------------------------


def test_all_files_are_written(found, tmp_path):
    paths = save(found, tmp_path / "new" / "folder")
    assert {name: path.name for name, path in paths.items()} == FILES
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(FILES.values())
    assert paths["report"].read_text().lstrip().lower().startswith("<!doctype html>")
    assert "@" in paths["citations"].read_text()
    assert paths["markdown"].read_text() == write_markdown(found)
    assert paths["latex"].read_text() == write_latex(found)


def test_csv_holds_every_figure_in_full(found, tmp_path):
    paths = save(found, tmp_path)
    with paths["results"].open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 3
    for row, result in zip(rows, found.results, strict=True):
        assert list(row) == list(result)
        for name, value in result.items():
            assert row[name] == ("" if value is None else str(value))
        assert float(row["mean"]) == result["mean"]  # to the last digit
    with paths["clients"].open(newline="") as file:
        clients = [*csv.DictReader(file)]
    assert len(clients) == 3 * 2 * 5
    expected = [*found.rows()]
    assert [float(row["gain_local"]) for row in clients] == [row["gain_local"] for row in expected]
    assert [row["harmed"] for row in clients] == [str(row["harmed"]) for row in expected]
    assert [float(row["mcnemar_local"]) for row in clients] == [row["mcnemar_local"] for row in expected]


def test_a_name_with_a_comma_is_one_cell(found, tmp_path):
    with save(renamed(found, 'my "a,b".py'), tmp_path)["results"].open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["local", 'my "a,b".py', "ditto:lam=0.5"]


def test_json_is_strict_and_has_everything(found, tmp_path):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(save(found, tmp_path)["json"].read_text(), parse_constant=refuse)
    assert read["protocol"] == found.protocol
    assert (read["select"], read["missing"]) == ("last", [])
    assert read["metric"] == {"name": "accuracy", "higher_is_better": True, "share": True, "mean": True}
    assert [row["mean"] for row in read["results"]] == [row["mean"] for row in found.results]
    assert len(read["clients"]) == 30
    assert read["groups"]["fedavg"]["size"] == {
        name: score._asdict() for name, score in found.groups("fedavg")["size"].items()
    }


def test_what_is_not_known_is_null(found):
    outcome = found.outcomes["fedavg"][0]
    line = json.loads(json.dumps(outcome.history[-1].as_json()))
    test = line["evaluation"]["personal"]["test"]
    test["clients"][2], test["samples"][2], test["loss"] = float("nan"), 0, float("nan")
    without = replace(outcome, history=[Round.of_json(line)])
    read = as_json(Comparison({"fedavg": [without]}))
    assert read["clients"][2]["score"] is None
    assert read["results"][0]["loss"] is None
    json.dumps(read, allow_nan=False)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_markdown_table_has_as_many_cells_in_every_row(found):
    table, _, text = write_markdown(found).partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 2 + 3
    assert {line.count("|") for line in lines} == {12}
    heads = [head.strip() for head in lines[0].strip("|").split("|")]
    assert heads[:3] == ["method", "val", "mean ± 95 %"]
    assert heads[8] == "harmed of 5"
    assert [line.strip("|").split("|")[0].strip().removesuffix(" \\*") for line in lines[2:]] == list(found.outcomes)
    assert sum(" \\* |" in line for line in lines) == 1
    # without the backslash it would be a list
    assert text.startswith("\\* best on validation samples (val), by which a method may be chosen.")
    assert found.protocol in text


def test_a_latex_table_is_whole(found):
    text = write_latex(found)
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[{}]", "", code)
    assert plain.count("{") == plain.count("}")
    assert len(re.findall(r"(?<!\\)\$", code)) % 2 == 0
    assert code.isascii()
    columns = re.search(r"\\begin\{tabular\}\{(l?r*)\}", text).group(1)
    head = code.split("\\toprule\n")[1].split("\\midrule")[0].strip()
    assert {len(cells(line)) for line in [head, *body(text)]} == {len(columns)}
    assert all(line.endswith("\\\\") for line in [head, *body(text)])
    for command in ("toprule", "midrule", "bottomrule", "end{tabular}"):
        assert code.count(f"\\{command}") == 1
    assert not re.search(r"(?<!\\)%", code)
    assert text.startswith(f"% * best on validation samples (val), by which a method may be chosen. {found.protocol}")


def test_the_best_is_bold_in_latex_and_marks_are_commands(found):
    best = [line for line in body(write_latex(found)) if "textbf" in line]
    assert len(best) == 1
    assert f"\\textbf{{{found.best}}} & \\textbf{{" in best[0]
    assert "*" not in "".join(body(write_latex(found)))
    assert "$\\pm$" in best[0]


def test_marks_are_the_same_in_every_table(found, monkeypatch):
    marked = renamed(found, "fedavg")
    monkeypatch.setattr(type(marked), "find_harmed", lambda *_: np.array([[True, True, False]]))
    for row in marked.results:
        row["p_local"], row["p_fedavg"] = (None if row is marked.results[0] else 0.01), 1.0
    lines = body(write_latex(marked))
    assert ["$^\\dagger$" in line for line in lines] == [False, True, True]
    assert ["2 $\\downarrow$" in line for line in lines] == [False, True, True]
    rows = write_markdown(marked).splitlines()[2:5]
    assert ["† |" in row for row in rows] == [False, True, True]
    assert ["2 ▼ |" in row for row in rows] == [False, True, True]


def test_names_cannot_break_a_table(found):
    odd = renamed(found, "my_5%&#|{x}$.py")
    assert body(write_latex(odd))[1].startswith(r"my\_5\%\&\#|\{x\}\$.py ")
    assert {len(cells(line)) for line in body(write_latex(odd))} == {11}
    assert {line.count("|") for line in write_markdown(odd).splitlines()[:5]} == {12}
    assert r"my\_5%&amp;\#&#124;{x}$.py" in write_markdown(odd)


NASTY = "a\nb\r\n\\input{x} ^~`*_<b>[l](u)|&"


def test_names_with_newlines_and_marks_stay_in_their_cell(found):
    """catches: a newline in a name that begins a row, or ends the comment above a LaTeX table."""
    odd = renamed(found, NASTY)
    named = Comparison({
        method: [
            replace(one, written=replace(one.config, task=replace(one.config.task, name=NASTY))) for one in several
        ]
        for method, several in found.outcomes.items()
    })  # fmt: skip
    for one in (odd, named):
        text = write_latex(one)
        assert [line[:2] for line in text.splitlines()[:2]] == ["% ", "\\b"]
        assert len(body(text)) == 3
        assert {len(cells(line)) for line in body(text)} == {11}
        table, _, below = write_markdown(one).partition("\n\n")
        assert {line.count("|") for line in table.splitlines()} == {12}
        assert len(table.splitlines()) == 5
        assert len(below.splitlines()) == 1
        assert "<b>" not in write_markdown(one).replace("\\<b\\>", "")
    written = r"a b \textbackslash{}input\{x\} \textasciicircum{}\textasciitilde{}`*\_<b>[l](u)|\&"
    assert body(write_latex(odd))[1].startswith(written)
    assert r"a b \\input{x} ^~\`\*\_\<b\>\[l\](u)&#124;&amp;" in write_markdown(odd)


@pytest.mark.parametrize("name", ["=1+2", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", " =1", "\t=1", "\r=1"])
def test_spreadsheets_find_no_formula_in_a_name(found, tmp_path, name):
    paths = save(renamed(found, name), tmp_path)
    for kind in ("results", "clients"):
        with paths[kind].open(newline="") as file:
            rows = [*csv.DictReader(file)]
        assert {row["method"] for row in rows} == {"local", f"'{name}".replace("\r", "\n"), "ditto:lam=0.5"}
        for cell in (cell for row in rows for cell in row.values() if cell[:1] in "=+-@"):
            assert not cell or float(cell) < 0  # a number


def test_numbers_and_names_that_are_numbers_are_written_as_they_are():
    assert _write_csv([{"client": "-3", "gain": -0.5, "none": None}]) == "client,gain,none\n-3,-0.5,\n"


def test_a_single_seed_and_a_score_that_is_not_a_share(errors):
    text = write_markdown(errors)
    assert "mean ±" not in text
    assert " 95 %" not in text.split("\n\n")[0]
    assert "in units of mean absolute error" in text
    row = text.splitlines()[2].strip("|").split("|")
    assert float(row[2]) == pytest.approx(errors.results[0]["mean"], rel=0.01)
    assert as_json(errors)["metric"]["share"] is False
