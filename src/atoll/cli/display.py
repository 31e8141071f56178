"""The output of commands: tables and paths on stdout; progress and messages on stderr."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from atoll.report.table import megabytes, newcomers_notes, newcomers_table, notes, run_table

if TYPE_CHECKING:
    from atoll.experiments.comparison import Comparison
    from atoll.records.report import Report
    from atoll.records.rounds import Round

WIDTH_OF_A_FILE = 100  # of tables that are not shown on a terminal


def present_run(outcome: "Report") -> None:
    """Write the report of a run with a folder, and show its table."""
    from atoll.experiments.comparison import Comparison

    folder = outcome.folder
    assert folder is not None
    if not outcome.finished:
        say(f"This run is incomplete: {outcome.progress}.", style="yellow")
    if not outcome.evaluations:  # only the server's test set was used, or nothing yet
        return write("", run_table(outcome))
    comparison = Comparison.of_runs([outcome])
    paths = comparison.save(folder)
    up, down = megabytes(outcome.megabytes("up")), megabytes(outcome.megabytes("down"))
    write("", run_table(outcome), Text(comparison.protocol, style="dim"))
    write(f"{up} MB up, {down} MB down, {outcome.gradients} gradients, {outcome.seconds:.1f} s of training")
    return write_paths(run=folder, report=paths["report"])


def present_comparison(comparison: "Comparison", folder: Path, reused: int = 0) -> None:
    """Write the results of a comparison, show its table and say what it shows."""
    from atoll.report.summary import write_findings

    paths = comparison.save(folder)
    write("", comparison.table(), Text(notes(comparison), style="dim"), "")
    if comparison.newcomers:
        write(newcomers_table(comparison), Text(newcomers_notes(comparison), style="dim"), "")
    write(*map(Text, write_findings(comparison)))
    for missing in comparison.missing:
        say(missing, style="yellow")
    runs = len(comparison.outcomes) * len(comparison.seeds)
    if reused:
        say(f"{reused} of {runs} runs were finished already and are reused.")
    shown = ("report", "results", "json", "markdown", "latex", "clients")
    write_paths(**{name: path for name, path in paths.items() if name in shown})


def write_paths(**paths: Path) -> None:
    """Write where files were saved."""
    write("")
    for name, path in paths.items():
        out().print(Text(f"{name:<8} {path}"), soft_wrap=True)


class ProgressBar:
    """Progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, bar: Progress, rounds: int, runs: int) -> None:
        self.bar, self.rounds = bar, rounds
        self.reused, self.name = 0, ""
        self.done: dict[str, int] = {}  # rounds, by run
        self.scores: dict[str, str] = {}
        self.said = time.monotonic()
        self.task = bar.add_task("", total=rounds * runs, facts="")

    def begin(self, name: str, done: int = 0) -> "Callable[[Round], None]":
        """Begin a run; return what shows its rounds."""
        self.name, self.done[name] = name, done
        self.bar.update(self.task, description=name, completed=sum(self.done.values()))
        return partial(self._show_round, name)

    def begin_run(self, method: str, seed: int, how: str) -> "Callable[[Round], None]":
        """Begin a run of a comparison; return what shows its rounds."""
        self.reused += how == "reused"
        return self.begin(f"{method}, seed {seed}", self.rounds if how == "reused" else 0)

    def show_epoch(self, clients: int, done: int, epochs: int) -> None:
        """Show how many epochs of a long training some clients have done."""
        facts = f"epoch {done} of {epochs}, {clients} client{'s' if clients > 1 else ''}"
        self.bar.update(self.task, facts=facts)
        self._say(facts)

    def advance(self) -> None:
        """Advance by a step that is not a round."""
        self.done[self.name] += 1
        self.bar.update(self.task, completed=sum(self.done.values()))

    def _show_round(self, name: str, line: "Round") -> None:
        facts = [f"loss {value:.3f}" for key, value in line.loss.items() if key == "loss/main"]
        if line.personal is not None:
            self.scores[name] = f"validation {line.personal['val'].macro:.3f}"
        facts += [self.scores[name]] if name in self.scores else []
        self.name, self.done[name] = name, line.round
        completed = sum(self.done.values())
        self.bar.update(self.task, description=name, completed=completed, facts="  ".join(facts))
        self._say(f"round {line.round} of {self.rounds}, {', '.join(facts)}")

    def _say(self, facts: str) -> None:
        if not self.bar.console.is_terminal and time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            say(f"{self.name}: {facts}")


@contextmanager
def show_progress(rounds: int, runs: int = 1) -> Iterator[ProgressBar]:
    """Show a progress bar that vanishes at its end."""
    columns = (
        TextColumn("{task.description:<18}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}", style="dim"),
    )  # fmt: skip
    console = messages()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ProgressBar(bar, rounds, runs)


def out() -> Console:
    """Return the console for data."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)


def write(*parts: Any) -> None:
    """Show data, one part under the other."""
    for part in parts:
        out().print(part, highlight=False)


def messages() -> Console:
    """Return the console for progress and messages."""
    return Console(stderr=True)


def say(text: str, style: str = "") -> None:
    """Print a message on stderr, as it is."""
    messages().print(Text(text, style=style), soft_wrap=True)


def listen(verbose: bool) -> None:
    """Show what Atoll logs: warnings, or everything."""
    logger = logging.getLogger("atoll")
    handler = RichHandler(
        logging.INFO if verbose else logging.WARNING,
        messages(), show_time=verbose, show_path=False, rich_tracebacks=False,
    )  # fmt: skip
    logger.handlers = [one for one in logger.handlers if not isinstance(one, RichHandler)] + [handler]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def combine(*calls: Callable[..., None]) -> Callable[..., None]:
    """Combine several calls into one."""

    def call(*given: Any) -> None:
        for one in calls:
            one(*given)

    return call
