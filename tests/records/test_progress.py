"""Progress: who shows a bar, what it counts, and that work inside work shows none."""

import io
import threading

import pytest
from rich.console import Console

from atoll import Recipe, compare, federate
from atoll.federation import progress
from atoll.federation.progress import Lines, ProgressTracker, State, TerminalBar, call_all, show_progress
from atoll.records.rounds import Round


class Recorder:
    """A bar that remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[State] = []
        self.ended: list[bool] = []

    def show(self, state: State) -> None:
        self.shown.append(state)

    def close(self, state: State, *, finished: bool) -> None:
        self.shown.append(state)
        self.ended.append(finished)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """All bars that are opened, at once, as if there were a terminal."""
    made: list[Recorder] = []

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(progress, "_choose_bar", lambda say: make)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return made


def line(round: int) -> Round:
    return Round(round=round, loss={"loss/main": 0.5}, bytes={}, seconds={"round": 0.1})


def wait_for_bar(tracker: ProgressTracker) -> None:
    """The timer opens the bar beside the work."""
    for other in threading.enumerate():
        if isinstance(other, threading.Timer):
            other.join()
    assert tracker._bar is not None


def test_rounds_of_several_runs_add_up(bars: list[Recorder]) -> None:
    with show_progress(rounds=3, runs=2) as bar:
        wait_for_bar(bar)
        one = bar.begin("fedavg")
        one(line(3))
        bar.begin_run("ditto", 1, "reused")
    assert bars[0].shown[-1] == State("ditto, seed 1", 6, 6, "loss 0.500")
    assert bar.reused == 1
    assert bars[0].ended == [True]


def test_a_bar_that_is_opened_late_shows_what_was_done_before(bars: list[Recorder]) -> None:
    tracker = ProgressTracker(5)
    tracker.begin("fedavg")(line(2))
    tracker.open(lambda: bars.append(Recorder()) or bars[-1])
    assert bars[0].shown == [State("fedavg", 2, 5, "loss 0.500")]


def test_work_inside_work_shows_no_bar_of_its_own(bars: list[Recorder]) -> None:
    with show_progress(2) as outer:
        wait_for_bar(outer)
        with show_progress(5) as inner:
            inner.begin("inner")(line(1))
    assert len(bars) == 1
    with show_progress(2) as again:
        wait_for_bar(again)
    assert len(bars) == 2


def test_an_error_ends_the_bar_as_unfinished_and_the_next_one_can_open(bars: list[Recorder]) -> None:
    def fail() -> None:
        with show_progress(2) as bar:
            wait_for_bar(bar)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert [one.ended for one in bars] == [[False], [False]]


def test_a_bar_can_be_turned_off(bars: list[Recorder]) -> None:
    with show_progress(2, enabled=False) as bar:
        bar.begin("quiet")(line(1))
    assert bars == []


def test_federate_and_compare_show_one_bar_each(bars: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    task = Recipe("digits", clients=3, samples=150).build()
    opened = ProgressTracker.begin

    def begin(self: ProgressTracker, *given: object) -> object:
        if progress._showing.locked() and self._bar is None and self.done == {} and not bars_open(bars):
            wait_for_bar(self)
        return opened(self, *given)

    monkeypatch.setattr(ProgressTracker, "begin", begin)
    federate(task, "fedavg", rounds=2)
    assert bars[0].shown[-1][:3] == ("fedavg", 2, 2)
    assert "validation" in bars[0].shown[-1].facts
    compare(task, ["local", "fedavg"], seeds=2, rounds=2)
    assert len(bars) == 2
    assert bars[1].shown[-1][1:3] == (8, 8)
    federate(task, "fedavg", rounds=1, progress=False)
    assert len(bars) == 2


def bars_open(bars: list[Recorder]) -> bool:
    return any(not one.ended for one in bars)


def test_a_terminal_shows_a_bar_that_vanishes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = TerminalBar(console)
    state = State("ditto", 3, 30, "loss 0.412")
    bar.show(state)
    bar.close(state, finished=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ditto" in text
    assert "3/30" in text
    assert "loss 0.412" in text
    assert text.endswith("\x1b[2K")  # the line is erased


def test_without_a_terminal_a_line_is_said_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = Lines(said.append)
    state = State("ditto", 3, 30, "loss 0.412")
    lines.show(state)
    assert said == []
    monkeypatch.setattr(progress, "BETWEEN_LINES", -1.0)
    lines.show(state)
    lines.show(state._replace(facts=""))
    assert said == ["ditto: 3 of 30, loss 0.412", "ditto: 3 of 30"]


def test_without_a_terminal_nobody_is_shown_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=io.StringIO(), force_terminal=False))
    assert progress._choose_bar(None) is None
    assert progress._choose_bar(print) is not None


def test_calls_are_combined_without_those_that_are_missing() -> None:
    seen: list[int] = []
    call_all(seen.append, None, lambda value: seen.append(-value))(3)
    assert seen == [3, -3]
