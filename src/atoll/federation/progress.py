"""Progress of long work: a bar in a terminal or a notebook; elsewhere nothing, or a line from time to time.

    with show_progress(rounds=30, runs=6) as bar:
        for name in methods:
            federate(task, name, rounds=30, on_round=bar.begin(name))

One bar is shown at a time: work inside work that shows one shows none of its own. Work of a moment shows none either.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from markupsafe import Markup
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from atoll.records.rounds import Round

DELAY = 0.5  # seconds of work before a bar appears
PAUSE = 0.2  # seconds between two pictures in a notebook
BETWEEN_LINES = 10.0  # seconds, where there is no bar

_showing = threading.Lock()  # held by the bar that is shown


class State(NamedTuple):
    """What a bar shows: the work under way, how many of all steps are done, and a few facts."""

    name: str
    done: int
    total: int
    facts: str


class Bar(Protocol):
    """A way to show progress."""

    def show(self, state: State) -> None:
        """Show how far the work is."""

    def close(self, state: State, *, finished: bool) -> None:
        """Show that the work has ended."""


class TerminalBar:
    """A bar in a terminal, which vanishes at its end."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<18}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}", style="dim"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", facts="")
        self._bar.start()

    def show(self, state: State) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=state.name, completed=state.done, total=state.total, facts=state.facts)

    def close(self, state: State, *, finished: bool) -> None:
        """Remove the bar."""
        self._bar.stop()


class NotebookBar:
    """A bar under the cell of a notebook; it stays, and says how long the work took."""

    def __init__(self) -> None:
        from IPython.display import display

        self._began, self._shown = time.monotonic(), 0.0
        show: Any = display  # it has no types
        self._handle = show(_Html(Markup("")), display_id=True)

    def show(self, state: State) -> None:
        """Draw the bar again, a few times a second at most."""
        if time.monotonic() - self._shown >= PAUSE:
            self._draw(state)

    def close(self, state: State, *, finished: bool) -> None:
        """Say how long it took, and whether it was finished."""
        took = f"{time.monotonic() - self._began + DELAY:.0f} s"
        self._draw(state._replace(facts=took if finished else f"stopped after {took}"))

    def _draw(self, state: State) -> None:
        self._shown = time.monotonic()
        text = Markup(
            '<div role="status" style="font-family: monospace">{name} '
            '<progress value="{done}" max="{total}" aria-label="{name}"></progress> {done}/{total} {facts}</div>'
        ).format(**state._asdict())
        self._handle.update(_Html(text))


class _Html:
    """Markup that a notebook shows."""

    def __init__(self, text: Markup) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return str(self._text)

    def __repr__(self) -> str:
        return self._text.striptags()


class Lines:
    """A line from time to time, where there is no terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, time.monotonic()

    def show(self, state: State) -> None:
        """Say how far the work is, if the last time was long ago."""
        if time.monotonic() - self._said > BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(f"{state.name}: {state.done} of {state.total}, {state.facts}".removesuffix(", "))

    def close(self, state: State, *, finished: bool) -> None:
        """Say nothing: results follow."""


class ProgressTracker:
    """Counts the rounds of one run or of several, and has them shown."""

    def __init__(self, rounds: int, runs: int = 1) -> None:
        self.rounds, self.total = rounds, rounds * runs
        self.reused, self.name, self.facts = 0, "", ""
        self.done: dict[str, int] = {}  # rounds, by run
        self._scores: dict[str, str] = {}
        self._bar: Bar | None = None
        self._lock = threading.Lock()  # runs side by side, and the timer that opens the bar

    @property
    def state(self) -> State:
        """How far the work is."""
        return State(self.name, sum(self.done.values()), self.total, self.facts)

    def begin(self, name: str, done: int = 0) -> Callable[[Round], None]:
        """Begin a run; return what shows its rounds."""
        with self._lock:
            self.name, self.done[name] = name, done
            self._show()
        return partial(self._show_round, name)

    def begin_run(self, method: str, seed: int, how: str) -> Callable[[Round], None]:
        """Begin a run of a comparison; return what shows its rounds."""
        self.reused += how == "reused"
        return self.begin(f"{method}, seed {seed}", self.rounds if how == "reused" else 0)

    def show_epoch(self, clients: int, done: int, epochs: int) -> None:
        """Show how many epochs of a long training some clients have done."""
        with self._lock:
            self.facts = f"epoch {done} of {epochs}, {clients} client{'s' if clients > 1 else ''}"
            self._show()

    def advance(self, steps: int = 1, facts: str = "") -> None:
        """Advance by steps that are not rounds."""
        with self._lock:
            self.done[self.name] = self.done.get(self.name, 0) + steps
            self.facts = facts
            self._show()

    def _show_round(self, name: str, line: Round) -> None:
        with self._lock:
            facts = [f"loss {value:.3f}" for key, value in line.loss.items() if key == "loss/main"]
            if line.personal is not None and "val" in line.personal:
                self._scores[name] = f"validation {line.personal['val'].macro:.3f}"
            facts += [self._scores[name]] if name in self._scores else []
            self.name, self.done[name], self.facts = name, line.round, "  ".join(facts)
            self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.show(self.state)

    def open(self, make: Callable[[], Bar]) -> None:
        """Make the bar, and show in it what has happened so far."""
        with self._lock:
            self._bar = make()
            self._show()

    def close(self, *, finished: bool) -> None:
        """End the bar, if there is one."""
        with self._lock:
            if self._bar is not None:
                self._bar.close(self.state, finished=finished)
            self._bar = None


@contextmanager
def show_progress(
    rounds: int, runs: int = 1, *, enabled: bool = True, say: Callable[[str], None] | None = None
) -> Iterator[ProgressTracker]:
    """Show the progress of `runs` runs of `rounds` rounds each, where somebody can see it.

    That is in a terminal (on stderr) and in a notebook. Elsewhere `say`, if it is given, is called with a line from
    time to time.
    """
    tracker = ProgressTracker(rounds, runs)
    make = _choose_bar(say) if enabled else None
    if make is None or not _showing.acquire(blocking=False):
        yield tracker
        return
    timer = threading.Timer(DELAY, tracker.open, [make])
    timer.daemon = True
    timer.start()
    finished = False
    try:
        yield tracker
        finished = True
    finally:
        timer.cancel()
        timer.join()  # it may be opening the bar just now
        tracker.close(finished=finished)
        _showing.release()


def _choose_bar(say: Callable[[str], None] | None) -> Callable[[], Bar] | None:
    """Return what makes the bar that can be seen here; None if none can."""
    if in_notebook():
        return NotebookBar
    console = Console(stderr=True)
    if console.is_terminal:
        return partial(TerminalBar, console)
    return None if say is None else partial(Lines, say)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def call_all(*calls: Callable[..., None] | None) -> Callable[..., None]:
    """Combine several calls into one; those that are None are left out."""
    there = [call for call in calls if call is not None]

    def call_each(*given: Any) -> None:
        for call in there:
            call(*given)

    return call_each
