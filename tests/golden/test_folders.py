"""A run's folder and a federation of sites that an earlier Atoll wrote go on, or are refused in a sentence.

Both stop in the middle: `folders/run` after two of three rounds of ifca, `folders/sites` after one of two of ditto.
"""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import Report
from atoll.cli import app
from atoll.kernel.errors import AtollError

FOLDERS = Path(__file__).with_name("folders")
SITES = ("ulm", "porto")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(FOLDERS, tmp_path / "folders")
    return tmp_path / "folders"


def call(*words: str) -> str | None:
    """Run a command; return the sentence of a refusal, or None."""
    result = CliRunner().invoke(app, list(words))
    if result.exit_code == 0:
        return None
    refused = result.exception
    assert isinstance(refused, AtollError | SystemExit), result.output
    return str(refused) if isinstance(refused, AtollError) else " ".join(result.output.split())


def is_a_sentence(text: str) -> bool:
    """Whether a refusal says what must hold and what to do, and shows no traceback."""
    first = text.partition("hint:")[0].strip()
    return bool(re.search(r"\bmust\b", first) and "hint:" in text and "Traceback" not in text)


def test_a_run_of_before_is_read() -> None:
    report = Report.read(FOLDERS / "run")
    assert (report.label, report.clients, report.done, report.gradients) == ("ifca:clusters=2", 4, 2, 18)
    assert report.figures().macro == pytest.approx(0.4714285714, abs=1e-9)
    assert (report.megabytes("up"), report.megabytes("down")) == pytest.approx((0.02512, 0.043584), abs=1e-9)


def test_a_run_of_before_goes_on_or_is_refused_in_a_sentence(copied: Path) -> None:
    refused = call("resume", str(copied / "run"))
    if refused is not None:
        assert is_a_sentence(refused), refused
        return
    before, after = ((folder / "run" / "metrics.jsonl").read_text().splitlines() for folder in (FOLDERS, copied))
    assert after[:2] == before  # with their times: it did not begin again
    report = Report.read(copied / "run")
    assert report.finished
    assert report.figures().loss == pytest.approx(1.7025342, abs=1e-3)


def test_a_federation_of_before_goes_on_or_is_refused_in_a_sentence(copied: Path) -> None:
    here, keys = copied / "sites", copied / "sites" / "keys"

    def at_site(site: str, command: str, *words: str) -> str | None:
        own = ("--data", f"{here / site}/my.csv", "--state", f"{here / site}/state", "--key", f"{keys / site}.key")
        return call("round", command, *words, *own)

    def at_center(*words: str) -> str | None:
        return call("round", "finish", *words, "--folder", f"{here}/center/run", "--key", f"{keys}/center.key")

    def play() -> str | None:
        """Play to the end; return the first refusal."""
        for site in SITES:
            job, out = f"{here}/center/job-2.atoll", f"{here}/{site}/reply-2.atoll"
            if refused := at_site(site, "train", job, "-o", out):
                return refused
        replies, result = [f"{here}/{site}/reply-2.atoll" for site in SITES], f"{here}/center/result.atoll"
        if refused := at_center(*replies, "-o", result):
            return refused
        for site in SITES:
            out = ("-o", f"{here}/{site}/scores.atoll", "--models", f"{here}/{site}/models")
            if refused := at_site(site, "apply", result, *out):
                return refused
        return at_center(*(f"{here}/{site}/scores.atoll" for site in SITES))

    refused = play()
    if refused is not None:
        assert is_a_sentence(refused), refused
        return
    report = Report.read(here / "center" / "run")
    assert report.finished
    assert report.figures().loss == pytest.approx(0.6280187, abs=1e-3)


@pytest.mark.parametrize("text", ["Traceback ... must hint:", "It failed. hint: try again.", "A run must be whole."])
def test_what_is_no_sentence_is_found(text: str) -> None:
    assert not is_a_sentence(text)
