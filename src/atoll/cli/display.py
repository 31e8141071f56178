"""The output of commands: tables and paths on stdout; progress and messages on stderr."""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from atoll.federation import progress
from atoll.report.table import EPOCHS, epochs_table, megabytes, newcomers_notes, newcomers_table, notes, run_table

if TYPE_CHECKING:
    from atoll.experiments.comparison import Comparison
    from atoll.federation.progress import ProgressTracker
    from atoll.federation.report import Report

WIDTH_OF_A_FILE = 100  # of tables that are not shown on a terminal


def present_run(outcome: "Report") -> None:
    """Write the report of a run with a folder, and show its table."""
    from atoll.experiments.comparison import Comparison
    from atoll.report.protection import write_protection

    folder = outcome.folder
    assert folder is not None
    if not outcome.finished:
        say(f"This run is incomplete: {outcome.progress}.", style="yellow")
    if not outcome.evaluations:  # only the server's test set was used, or nothing yet
        write("", run_table(outcome))
        return present_epochs({outcome.label: [outcome]})
    comparison = Comparison.of_runs([outcome])
    paths = comparison.save(folder)
    up, down = megabytes(outcome.megabytes("up")), megabytes(outcome.megabytes("down"))
    write("", run_table(outcome), Text(comparison.protocol, style="dim"))
    present_epochs(comparison.outcomes)
    write(f"{up} MB up, {down} MB down, {outcome.gradients} gradients, {outcome.seconds:.1f} s of training")
    for sentence in write_protection(comparison):
        write(sentence)
    return write_paths(run=folder, report=paths["report"])


def present_epochs(outcomes: "Mapping[str, Sequence[Report]]") -> None:
    """Show scores by epoch of one-shot training, where there is a curve."""
    table = epochs_table(outcomes)
    if table is not None:
        write(table, Text(EPOCHS, style="dim"), "")


def present_comparison(comparison: "Comparison", folder: Path, reused: int = 0) -> None:
    """Write the results of a comparison, say what to do, show its table and say what it shows."""
    from atoll.report.protection import write_protection
    from atoll.report.summary import write_findings, write_verdict

    paths = comparison.save(folder)
    if len(comparison.outcomes) > 1:
        head, more = write_verdict(comparison)
        write("", Text(head, style="bold"), Text(more))
    write("", comparison.table(), Text(notes(comparison), style="dim"), "")
    present_epochs(comparison.outcomes)
    if comparison.newcomers:
        write(newcomers_table(comparison), Text(newcomers_notes(comparison), style="dim"), "")
    write(*map(Text, [*write_findings(comparison), *write_protection(comparison)]))
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


def show_progress(rounds: int, runs: int = 1) -> AbstractContextManager["ProgressTracker"]:
    """Show a progress bar that vanishes at its end; without a terminal, a line every ten seconds."""
    return progress.show_progress(rounds, runs, say=say)


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
