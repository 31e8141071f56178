"""The pages of results are what their scripts write, and their tables compare like with like."""

import argparse
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from atoll.compose import create

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
SCRIPTS = {
    "oneshot": ["oneshot"],
    "fedfsa_table": ["fedfsa"],
    "pfllib_table": ["pfllib", "personalized"],
    "niid_bench_table": ["niid-bench"],
    "cost": ["cost"],
}
TABLES = re.compile(r"(?:^\|.*\n)+", flags=re.MULTILINE)


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Every table with the heading that it stands under: its rows, the first of which names the columns."""
    found = []
    for match in TABLES.finditer(text):
        headings = re.findall(r"^#+ (.+)$", text[: match.start()], flags=re.MULTILINE)
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].splitlines()]
        found.append((headings[-1], [lines[0], *lines[2:]]))
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_is_what_its_script_writes(script: str, tmp_path: Path) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), "--page", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    for page in SCRIPTS[script]:
        assert (tmp_path / f"{page}.md").read_text() == (RESULTS / f"{page}.md").read_text(), page


@pytest.mark.parametrize("script", ["pfllib_table", "cost"])
def test_a_pattern_that_matches_no_cell_is_an_error(script: str, tmp_path: Path) -> None:
    """catches: a pattern with a slip, after which the script ends at once as if everything had been run."""
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), "--out", str(tmp_path), "--only"]
    for pattern, said in (("fedvag", "matches none of these"), ("(", "must be a regular expression")):
        done = subprocess.run([*command, pattern], check=False, capture_output=True, text=True)
        assert done.returncode == 2
        assert said in done.stderr
    assert not [*tmp_path.glob("*.md")]


def test_every_script_that_takes_patterns_refuses_those_that_match_nothing() -> None:
    for script in (ROOT / "benchmarks").glob("*.py"):
        text = script.read_text()
        if re.search(r'"--only",(?! choices)', text) and not script.name.startswith("oneshot"):
            assert "choose(" in text, script.name


def test_patterns_choose_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from published import choose

    parser, names = argparse.ArgumentParser(), ["ditto 1", "fedavg 0", "ditto 0"]
    assert choose(parser, names, None) == names
    assert choose(parser, names, ["avg", "0$"]) == ["fedavg 0", "ditto 0"]
    with pytest.raises(SystemExit):
        choose(parser, names, ["0$", "fedprox"])


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_column_has_means_over_seeds_or_single_cells(page: Path) -> None:
    for heading, (names, *rows) in tables(page.read_text()):
        for name, cells in zip(names, zip(*rows, strict=True), strict=True):
            figures = [cell for cell in cells if re.match(r"[+-]?\d", cell)]
            assert len({"±" in cell for cell in figures}) <= 1, f"{heading}: {name}"


def test_only_what_ran_alone_has_seconds() -> None:
    """One-shot cells shared a GPU or cores with each other."""
    found = tables((RESULTS / "oneshot.md").read_text())
    assert {heading for heading, (names, *_) in found if "seconds" in names} == {"Speed"}


def test_the_settings_of_the_release_are_not_called_the_release() -> None:
    """The split, the views and the test images differ from it."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md"]
    for page in [*pages, ROOT / "CHANGELOG.md"]:
        assert not re.search(r"as\s+released", page.read_text(), flags=re.IGNORECASE), page.name


def test_every_table_of_single_cells_says_how_much_a_cell_moves() -> None:
    """In the one-shot tables of the GPU, where the same cell run again gives another score."""
    text = (RESULTS / "oneshot.md").read_text()
    on_gpu = text[: text.index("## Fashion-MNIST")]
    sections = re.split(r"^### ", on_gpu, flags=re.MULTILINE)[1:]
    single = [section for section in sections if section.splitlines()[0].endswith("seed 0")]
    assert single
    for section in single:
        words = " ".join(takewhile(lambda line: not line.startswith("|"), section.splitlines()[1:]))
        assert "uncertain by ±7.7" in words or "was not measured" in words, section.splitlines()[0]


def test_every_study_of_one_shot_has_cells_on_every_scale_whose_methods_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from oneshot_cells import FULL, SMALL, STUDIES, TINY, WALK, singles, walk

    for scale in (FULL, SMALL, TINY):
        cells = scale.cells()
        assert len({cell.name for cell in cells}) == len(cells)
        for study, pattern in STUDIES.items():
            found = [cell for cell in cells if re.search(f"^(small-|tiny-)?{pattern}", cell.name)]
            assert found, study
            for method in {cell.method for cell in found}:
                create(method)
    clean = create("fafi").training
    assert [getattr(create(walk()[-1]).training, option) for option in WALK if hasattr(clean, option)] == [
        clean.value_of(option) for option in WALK if hasattr(clean, option)
    ]
    assert len(walk()) == len(WALK) + 1 == len(singles()) + 2
