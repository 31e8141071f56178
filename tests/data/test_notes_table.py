"""The study of the notes' table: its records, its verdicts, and the page that they make."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import LocalEngine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import oneshot_notes as study  # noqa: E402
from oneshot_notes_page import Difference, Page, between, judge, pages, spans_of, together  # noqa: E402


def record(arm: str, seed: int, score: float, alpha: float = 0.05, epochs: int = 36, **more: Any) -> dict[str, Any]:
    point = {"epoch": epochs, "score": score, "inductive": score - 1, "running": score - 2, "own": [score] * 5}
    return {
        "cell": f"{arm}-{alpha}-{seed}-{epochs}", "arm": arm, "alpha": alpha, "seed": seed, "epochs": epochs,
        "temperature": 0.5, "points": [point], "seconds": 60.0, "machine": "GPU", "precision": "bf16", "torch": "2",
        "commit": "abc", **more,
    }  # fmt: skip


def page(*found: dict[str, Any]) -> Page:
    return Page({one["cell"]: one for one in found}, chinese=False)


def verdict(shown: Page, claim: str) -> tuple[str, str]:
    (row,) = [line for line in shown.claims().splitlines() if claim in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    return cells[1], cells[2]


def arms(v4: list[float], v5: list[float], alpha: float = 0.05) -> list[dict[str, Any]]:
    return [
        record(arm, seed, score, alpha)
        for arm, scores in (("V4", v4), ("V5", v5))
        for seed, score in enumerate(scores, 1)
    ]


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_difference_is_paired_and_has_student_s_interval() -> None:
    found = Difference.of({1: 70.0, 2: 72.0, 3: 71.0, 4: 9.0}, {3: 73.0, 1: 71.0, 2: 71.0})
    assert found.values == (-1.0, 1.0, -2.0)
    spread = math.sqrt(sum((value + 2 / 3) ** 2 for value in found.values) / 2)
    assert found.half == pytest.approx(4.302652729911275 * spread / math.sqrt(3))
    assert found.seen == pytest.approx((4.302652729911275 + 1.0606601717798212) * spread / math.sqrt(3))
    assert str(found) == "-0.7 ± 3.8"
    assert str(Difference((1.5,))) == "+1.5"
    assert str(Difference(())) == "–"


@pytest.mark.parametrize(
    ("values", "sign", "word"),
    [
        ((-5.0, -6.0, -5.5), -1, "holds"), ((-5.0, -6.0, -5.5), 1, "falls"), ((-5.0, -6.0), -1, "open"),
        ((-5.0,), -1, "open"), ((-5.0, 6.0, -5.5), -1, "open"), ((), -1, "open"),
    ],
)  # fmt: skip
def test_three_seeds_that_agree_decide(values: tuple[float, ...], sign: int, word: str) -> None:
    assert judge(Difference(values), sign) == word


def test_a_claim_of_several_parts_falls_with_one() -> None:
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "falls"]) == "falls"
    assert together(["holds", "open"]) == together([]) == "open"


def test_the_harm_of_a_bank_is_judged_by_skew() -> None:
    shown = page(*arms([70, 71, 72], [64, 66, 65.5]), *arms([86, 87, 85], [85.9, 87.2, 84.8], 0.5))
    assert verdict(shown, "harms (V5 < V4) at 0.05") == ("**holds**", "0.05: -5.8 ± 1.9 (3)")
    assert verdict(shown, "harms (V5 < V4) at 0.5")[0] == "not decided"
    assert verdict(shown, "harms (V5 < V4) at 0.1") == ("not decided", "–")
    word, found = verdict(shown, "by as much as the notes")
    assert word == "**falls**"  # 33.8 points are outside the interval
    assert "notes -33.8" in found
    assert verdict(shown, "grows with skew")[0] == "**holds**"
    assert verdict(page(*arms([70], [30])), "harms (V5 < V4) at 0.05")[0] == "not decided"  # one seed


def test_means_of_other_partitions_are_compared_by_welch() -> None:
    found = between(Difference((-6.0, -5.0, -7.0)), Difference((0.0, 1.0, -1.0)))
    assert found == pytest.approx((-6.0, 2.7764451051977987 * math.sqrt(2 / 3)))
    assert between(Difference((1.0, 2.0)), Difference((1.0, 2.0, 3.0))) is None


def test_two_stages_are_compared_after_their_last_epoch() -> None:
    long = [record("V6", seed, 80.0 + seed, epochs=51) for seed in (1, 2, 3)]
    cut_off = {**record("V6", 4, 10.0, epochs=36), "epochs": 51, "cell": "cut off"}
    others = [record("V4", seed, 70.0 + seed, epochs=51) for seed in (1, 2, 3, 4)]
    shown = page(*long, cut_off, *others, *arms([1, 2, 3], [1, 2, 3]))
    assert verdict(shown, "V6 > V4) at 0.05") == ("**holds**", "0.05: +10.0 ± 0.0 (3)")
    assert verdict(shown, "V6 > V5) at 0.05") == ("not decided", "–")  # V5 has no score after 51 epochs


def test_what_clients_observe_is_undone_from_means_so_far() -> None:
    points = [(1, {"conflict": [0.5, 0.7]}), (3, {"conflict": [0.1, 0.3]})]
    assert spans_of(points) == [("conflict", ["+0.60", "+0.00"])]
    measured = record("V5-conflict", 1, 50.0, conflict={"1": points[0][1], "3": points[1][1]})
    assert "| conflict | +0.60 | +0.00 |" in page(measured).conflict_table()
    assert verdict(page(measured), "gradients of the two losses") == ("not decided", "0.05: +0.20 (1)")


def test_both_pages_have_the_same_figures() -> None:
    english, chinese = pages({one["cell"]: one for one in arms([70, 71, 72], [64, 66, 65.5])}).values()
    figures = [line for line in english.splitlines() if "71.0 ± 2.5 (3)" in line]
    assert len(figures) == 1 + 1  # in the table of its skew, and in that of the test batch's statistics
    assert all(line in chinese for line in figures)


def test_the_pages_are_what_the_records_make() -> None:
    for place, text in pages(study.read_records(study.TABLE)).items():
        assert (ROOT / "docs" / place).read_text(encoding="utf-8") == text, "run --study notes --page"


# -- records -----------------------------------------------------------------------------------------------------------


def test_the_last_whole_line_of_a_cell_counts(tmp_path: Path) -> None:
    study.write_record(tmp_path, {"cell": "a", "points": [1], "unfinished": True})
    study.write_record(tmp_path, {"cell": "a", "points": [1, 2]})
    study.write_record(tmp_path, {"cell": "a", "points": [], "unfinished": True})  # begun again elsewhere
    study.write_record(tmp_path, {"cell": "b", "points": [1], "unfinished": True})
    with (tmp_path / study.RECORDS).open("a") as file:
        file.write('{"cell": "b", "poi')  # cut off
    found = study.read_records(tmp_path / study.RECORDS)
    assert found == {"a": {"cell": "a", "points": [1, 2]}, "b": {"cell": "b", "points": [1], "unfinished": True}}


def test_records_of_several_folders_add_up(tmp_path: Path) -> None:
    table = tmp_path / "notes.json"
    study.write_record(tmp_path / "1", {"cell": "a", "points": [1, 2], "unfinished": True})
    study.write_record(tmp_path / "1", {"cell": "tiny-a", "points": [1]})
    study.write_record(tmp_path / "2", {"cell": "a", "points": [1], "unfinished": True})
    study.write_record(tmp_path / "2", {"cell": "b", "points": [1]})
    study.collect([tmp_path / "1", tmp_path / "2"], table)
    study.write_record(tmp_path / "3", {"cell": "b", "points": [9], "unfinished": True})
    assert study.collect([tmp_path / "3"], table) == json.loads(table.read_text()) == {
        "a": {"cell": "a", "points": [1, 2], "unfinished": True}, "b": {"cell": "b", "points": [1]},
    }  # fmt: skip


# -- cells -------------------------------------------------------------------------------------------------------------


def test_cells_come_in_the_order_of_patterns_and_a_pattern_must_match() -> None:
    every = study.cells()
    assert len({cell.name for cell in every}) == len(every)
    assert [cell.name for cell in every[:3]] == [f"a0.05-t0.5-{arm}-e51-seed1" for arm in ("V4", "V5", "V6")]
    chosen = study.choose(every, ["a0.5-t0.5-V5-e.*seed2$", "t0.5-V[45]-e.*seed2$"])
    assert chosen[0].name == "a0.5-t0.5-V5-e51-seed2"
    assert len(chosen) == len({cell.name for cell in chosen}) == 8
    with pytest.raises(ValueError, match=r"--only 'V9' matches no cell\. One is 'a0\.05-t0\.5-V4-e51-seed1'"):
        study.choose(every, ["V9"])


def test_cells_are_the_notes_protocol() -> None:
    cell = study.NotesCell("V6", 0.1, 2, 36)
    assert cell.method == "fafi-two-stage:epochs=36,profile=faithful,temperature=0.5,stage_share=0.2"
    assert cell.curve == (1, 11, 21, 36)
    assert cell.recipe == {
        "dataset": "cifar10", "partition": "fafi:0.1:2", "clients": 5, "split": "100/0/0", "public": 0.1, "seed": 2,
        "augment": "simclr-batch", "model": "resnet18", "central": "official",
    }  # fmt: skip
    assert cell.training == {"lr": 0.05, "momentum": 0.9, "clip": 1.0, "batch_size": 512}
    assert study.NotesCell("V4-all", 0.1, 2).recipe["public"] == 0.0


@pytest.mark.parametrize("arm", ["V5", "V4-conflict"])
def test_a_cell_is_run_once(arm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = study.NotesCell(arm, 0.5, 1, 2, tiny=True)
    made = study.run_cell(cell, tmp_path, None, LocalEngine(device="cpu", strategy="loop eager"))
    assert [point["epoch"] for point in made["points"]] == [1, 2]
    for point in made["points"]:
        assert {"score", "running", "own", "trained"} <= point.keys()
    assert ("conflict" in made) == (arm == "V4-conflict")
    assert sum(map(sum, made["labels"])) == sum(made["samples"])
    lines = (tmp_path / study.RECORDS).read_text().splitlines()
    assert ["unfinished" in json.loads(line) for line in lines] == [True, True, False]
    words = ["--tiny", "--only", f"^{cell.name}$", "--out", str(tmp_path)]
    assert study.main([*words, "--list"]) == 0
    assert f"done  {cell.name}" in capsys.readouterr().out
    assert study.main(words) == 0  # there is nothing left to run
    assert len((tmp_path / study.RECORDS).read_text().splitlines()) == 3


def test_missing_data_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    assert study.main(["--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "no data_batch_1.npz" in told
    assert "see `atoll data cifar10` for where to get it" in told
