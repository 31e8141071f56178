"""tune(): step size and hyperparameters of methods, chosen by validation scores, the same budget for every method.

First the step size, in factors of 3, as long as an end of the grid wins; then the method's own values at the best
one; methods without any get finer step sizes. All are judged after a ninth of the rounds, the best two after a third,
and the best one goes on to the end: runs are paused and continued, never repeated. Test samples are read at the end
alone, in new runs with seeds that nothing was chosen by.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from rich.table import Table as RichTable
from rich.text import Text

from atoll.algorithms import file_of, name_of
from atoll.compose import as_method
from atoll.compose.architectures import within_architectures
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.experiments.cells import runs_together, settings_of
from atoll.experiments.comparison import Comparison, _digest, compare
from atoll.experiments.race import Arm, Race, hide_test, list_rungs
from atoll.experiments.searching import FACTOR, Entry, overshoots, shorten
from atoll.federation.labels import REFERENCES, label
from atoll.federation.numbers import UNKNOWN, Numbers
from atoll.federation.participation import fingerprint
from atoll.federation.progress import show_progress
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine, Spreading, require_engine
from atoll.kernel.errors import AtollError, DivergedError, PrivacyError, RunError, TaskError
from atoll.kernel.sources import code_digest
from atoll.protect.rehearsal import promises_samples
from atoll.records.files import read_record, write_json, write_record, writing
from atoll.records.runs import quietly
from atoll.records.schema import Record
from atoll.records.trust import remember
from atoll.report.table import megabytes, plain_table
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.files import alone_in
from atoll.runtime.interruptions import interruptions

if TYPE_CHECKING:
    from atoll.federation.typed import GivenSettings

log = logging.getLogger("atoll.experiments.tuning")

QUESTION = "choosing.json"
FEWEST_SAMPLES = 50  # for validation, of all clients together; with fewer, only the step size is tuned
LEAST_TRIALS = 3
MOST_EXTENSIONS = 2  # of the grid of step sizes, on the side that wins
Say = Callable[[str], None]


class NothingTrains(RunError):
    """No configuration of a method can be trained."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Record):
    """What was asked for: the content of choosing.json."""

    kind: str  # "tune" or "advise"
    recipe: Recipe | None  # None of a task that was built in Python
    methods: list[str]
    settings: Settings
    schedule: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any]
    engine: dict[str, Any]
    data: str
    code: str


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """Methods with the values that were found, and the comparison that tests them."""

    best: Mapping[str, Arm]  # by the method as it was asked for
    race: Race
    seeds: Sequence[int]  # by which values were chosen
    comparison: Comparison | None  # with seeds that nothing was chosen by; None without test samples
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<Tuning: {', '.join(arm.label for arm in self.best.values())}>"

    @property
    def methods(self) -> dict[str, Algorithm]:
        """The tuned methods, by what was asked for."""
        return {text: arm.method for text, arm in self.best.items()}

    @property
    def budget(self) -> str:
        """What every method was given, in words."""
        counts = {text: sum(arm.entry == text for arm in self.race.arms) for text in self.best}
        tried = (
            f"{min(counts.values())} to {max(counts.values())}" if len({*counts.values()}) > 1 else min(counts.values())
        )
        return (
            f"Every method had the same budget: {tried} configurations each, Local and FedAvg included, judged on "
            f"validation samples with seeds {', '.join(map(str, self.seeds))} after {_list_rounds(self.race)} rounds."
        )

    def table(self) -> RichTable:
        """Return the table of all configurations for a terminal."""
        return arms_table(self.race, [*self.best.values()])

    def as_json(self) -> dict[str, Any]:
        """Return everything for programs."""
        return {
            "best": {text: arm.label for text, arm in self.best.items()},
            "arms": list_arms(self.race),
            "seeds": [*self.seeds],
            "tested_with": [] if self.comparison is None else self.comparison.seeds,
            "cost": self.race.cost,
            "notes": [*self.notes],
        }

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write tuning.json and the files of the comparison; return their paths by name."""
        folder = Path(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "tuning.json", self.as_json())
        return {"tuning": folder / "tuning.json"} | ({} if self.comparison is None else self.comparison.save(folder))


def tune(
    task: Recipe | Task,
    methods: Sequence[Algorithm | str] | Algorithm | str,
    *,
    trials: int = 9,
    chosen_by: int = 2,
    seeds: int = 3,
    settings: Settings | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    together: bool | None = None,
    progress: bool = True,
    say: Say | None = None,
    **more: Unpack[GivenSettings],
) -> Tuning:
    """Find step size and hyperparameters of methods, and compare the methods with them.

    Every method tries `trials` configurations, Local and FedAvg too, which are added if they are missing; values that
    are given, as in `ditto:lam=0.1` and `ditto:lr=0.05`, are kept. Configurations are judged by validation scores with
    `chosen_by` seeds, beginning with the settings' one. The best of each method is then run with the next `seeds`
    seeds, on whose test scores the comparison rests. Clients and their samples stay the same for all seeds. With a
    `folder`, a second call continues what was interrupted. With `together`, the default on a GPU and on a cluster,
    configurations that need not wait for each other run side by side, as in `compare`; on a cluster all its machines
    must see the folder.

        tune(Recipe("digits"), ["ditto", "fedper"], rounds=27).comparison.table()
    """
    settings = (settings or Settings()).change(more, tune)
    asked = add_reference_texts([methods] if isinstance(methods, str | Algorithm) else [*methods])
    options = {"trials": trials, "chosen_by": chosen_by, "seeds": seeds}
    halve = any(as_method(one).reads_validation for one in asked)
    with open_race(
        "tune",
        task,
        asked,
        settings,
        engine,
        folder,
        options,
        reads=lambda _: halve,
        together=together,
        progress=progress,
        say=say,
    ) as course:
        entries = [course.enter(text, must=True) for text in asked]
        course.expect(len(entries), finalists=len(entries), confirmed=len(entries))
        best = {entry.text: course.search(entry) for entry in entries if entry is not None}
        course.race.run([*best.values()], course.race.rounds)
        comparison = course.confirm([arm.method for arm in best.values()])
        return Tuning(best, course.race, course.seeds, comparison, [*course.notes, *course.warn_of_edges(best)])


# -- the course of a race ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Course:
    """A race under way, and how methods are taken through it."""

    task: Recipe | Task
    race: Race
    trials: int
    seeds: list[int]  # by which is chosen
    fresh: list[int]  # by which is tested
    step_only: bool  # too few samples to tune more
    say: Say
    notes: list[str] = field(default_factory=list)

    @property
    def example(self) -> Task:
        """The task with the first seed, without test samples."""
        return next(iter(self.race.tasks.values()))

    @property
    def first(self) -> int:
        """The rounds after which all configurations are judged."""
        return list_rungs(self.race.rounds)[0]

    @property
    def middle(self) -> int:
        """The rounds after which the best ones of each method are judged, and methods."""
        return (list_rungs(self.race.rounds)[:-1] or [self.race.rounds])[-1]

    def expect(self, entries: int, *, finalists: int, confirmed: int) -> None:
        """Tell the progress bar how many rounds there will be, about."""
        rounds, each = self.race.rounds, self.trials * self.first + 3 * (self.middle - self.first)
        chosen = entries * each + finalists * (rounds - self.middle)
        self.race.bar.total = len(self.seeds) * chosen + len(self.fresh) * confirmed * rounds

    def enter(self, asked: Algorithm | str, *, must: bool = False) -> Entry | None:
        """Return what is to be tuned; a method that cannot begin here is an error, or left out and said."""
        entry = Entry.of(asked, self.example)
        try:
            facts = self.example.public_facts(self.seeds[0])
            settings_of(entry.method, self.race.settings, self.seeds[0]).check(self.example, entry.method)
            with quietly():
                within_architectures(entry.method, facts).start(facts)
        except AtollError as error:
            if must:
                raise
            self.notes.append(f"{entry.text} is left out: {str(error).splitlines()[0]}")
            return None
        if (file := file_of(entry.method)) is not None:
            remember(file)
        return entry

    def search(self, entry: Entry) -> Arm:
        """Find the best configuration of a method, as far as the middle rung shows; the others are dropped."""
        arms = self._try_step_sizes(entry)
        best = self._judge(arms, self.middle)
        more = entry.list_finer(best.lr) if self.step_only or not entry.free else entry.draw(best.lr, 0)
        drawn = itertools.islice(more, max(0, self.trials - len(arms)))
        tried = [best, *self._try(entry, [(method, method.step_size or best.lr) for method in drawn])]
        self.race.run(self._rank(tried, self.first)[:2], self.middle)
        best = self._judge(tried, self.middle)
        for arm in {*arms, *tried} - {best}:
            if not arm.reason:
                arm.drop(max(arm.rungs), "behind")
        self.say(f"{entry.text}: {best.label} is the best of {len(arms) + len(tried) - 1} after {self.middle} rounds")
        return best

    def _try_step_sizes(self, entry: Entry) -> list[Arm]:
        """Try step sizes in factors of 3, further where an end wins; the best two go on to the middle rung."""
        arms = self._try(entry, [(entry.at(lr), lr) for lr in entry.begin_grid()])
        for rounds in (self.first, self.middle):
            if rounds == self.middle:
                self.race.run(self._rank(arms, self.first)[:2], self.middle)
            for _ in range(0 if entry.fixed else MOST_EXTENSIONS):
                lr = self._look_further(arms, rounds)
                if lr is None or len(arms) >= self.trials:
                    break
                further = self._try(entry, [(entry.at(lr), lr)])
                arms += further
                self.race.run([arm for arm in further if not arm.reason], rounds)
        return arms

    def _look_further(self, arms: Sequence[Arm], rounds: int) -> float | None:
        """Return the step size to try next: past the end that wins, far below all if none can train, else None."""
        grid, ranked = sorted(arm.lr for arm in arms), self._rank(arms, rounds)
        if not ranked:
            return shorten(grid[0] / FACTOR**2)
        best = ranked[0].lr
        return shorten(best * FACTOR) if best == grid[-1] else shorten(best / FACTOR) if best == grid[0] else None

    def _try(self, entry: Entry, trials: Iterable[tuple[Algorithm, float]]) -> list[Arm]:
        """Run configurations with their step sizes up to the first rung, but for those whose steps would overshoot."""
        arms = [Arm(entry.text, method, lr) for method, lr in trials]
        for arm in arms:
            if overshoots(arm.method, arm.lr):
                pulls = ", ".join(f"{name} = {value:.2g}" for name, value in arm.method.pulls(arm.lr).items())
                arm.drop(0, f"overshoots: {pulls}")
        self.race.arms += arms
        self.race.run([arm for arm in arms if not arm.reason], self.first)
        return arms

    def _rank(self, arms: Sequence[Arm], rounds: int) -> list[Arm]:
        """Sort those that can go on, the best first."""
        return self.race.rank([arm for arm in arms if not arm.reason and rounds in arm.rungs], rounds)

    def _judge(self, arms: Sequence[Arm], rounds: int) -> Arm:
        """Return the best arm after so many rounds; raise if none can go on."""
        ranked = self._rank(arms, rounds) or self._rank(arms, self.first)
        if not ranked:
            raise NothingTrains(
                f"At least one configuration of {arms[0].entry} must train. All of them diverged or overshoot.",
                hint="check the scale of the data, or lower `lr`.",
            )
        return ranked[0]

    def confirm(self, methods: Sequence[Algorithm]) -> Comparison | None:
        """Compare methods with new seeds, on test samples; None where nobody has any."""
        whole = _build(self.task, self.fresh[0]) if self.fresh else None
        if whole is None or not whole.splits["test"].offsets[-1]:
            self.notes.append(
                "There are no test samples, so nothing is claimed: scores are those of validation samples."
            )
            return None
        rounds = self.race.rounds
        settings = replace(self.race.settings, seed=self.fresh[0], eval_every=rounds)  # test samples are read once
        bar, started = self.race.bar, list(self.race.bar.done)

        def begin(name: str, seed: int, how: str) -> Any:
            return bar.begin(f"test of {name}, seed {seed}", rounds if how == "reused" else 0)

        bar.total = sum(bar.done[name] for name in started) + len(methods) * len(self.fresh) * rounds
        try:
            return compare(
                self.task, methods, seeds=self.fresh, settings=settings, engine=self.race.engine,
                folder=self.race.folder / "confirm", on_run=begin, together=self.race.together, progress=False,
            )  # fmt: skip
        except DivergedError as error:
            reason = str(error).splitlines()[0]
            self.notes.append(f"What was chosen does not train with every fresh seed, so nothing is claimed: {reason}")
            return None

    def warn_of_edges(self, best: Mapping[str, Arm]) -> list[str]:
        """Say where the best step size is the largest or the smallest that was tried, and where curves still rise."""
        found = []
        for text, arm in best.items():
            tried = {one.lr for one in self.race.arms if one.entry == text}
            if len(tried) > 1 and arm.lr in (min(tried), max(tried)):
                end = "largest" if arm.lr == max(tried) else "smallest"
                found.append(
                    f"{text} is best with the {end} step size that was tried, {arm.lr:g}: a further one may be better."
                )
        return found


@contextmanager
def open_race(
    kind: str, task: Recipe | Task, methods: Sequence[Algorithm | str], settings: Settings,
    engine: Engine | None, folder: Path | str | None, options: dict[str, Any], *,
    reads: Callable[[Task], bool], together: bool | None, progress: bool, say: Say | None,
) -> Iterator[Course]:  # fmt: skip
    """Check what was asked for, and open the folder; Ctrl-C leaves something that the same call continues."""
    require_engine(engine)
    engine = engine or LocalEngine()
    if together is None:  # other machines do not see a temporary folder
        together = runs_together(engine) and (folder is not None or not isinstance(engine, Spreading))
    trials, chosen_by, fresh = options["trials"], options["chosen_by"], options["seeds"]
    for name, value, least in (("trials", trials, LEAST_TRIALS), ("chosen_by", chosen_by, 1), ("seeds", fresh, 1)):
        if value < least:
            raise RunError(f"`{name}` must be at least {least}. Got {value!r}.")
    made = [as_method(method) for method in methods]
    private = [f"dp={settings.dp}"] if settings.privacy is not None else []
    private += [label(method) for method in made if promises_samples(method)]
    if private:
        raise PrivacyError(
            "What is chosen by clients' validation scores gives these away, and a promise of privacy counts one run "
            f"without them. Got {', '.join(private)}.",
            hint="choose on public or made-up data, or state what you know; then run with the promise.",
        )
    if not settings.scores_clients:
        raise RunError(f"Choosing needs the scores of clients: evaluation='all'. Got {settings.evaluation!r}.")
    task, notes = _fix_clients(task)
    seeds = [*range(settings.seed, settings.seed + chosen_by)]
    tasks = {seed: _build(task, seed) for seed in seeds}
    example = tasks[seeds[0]]
    if kind == "advise" and example.clients < 2:
        raise RunError("There is nothing to federate: advice needs at least 2 clients. Got 1.")
    known = int(example.splits["val"].offsets[-1])
    if not known:
        raise RunError(
            f"Values are chosen by validation samples. {example.name} has none.",
            hint="give them a share of each client's samples, as `split=60/15/25`.",
        )
    if (without := int((example.splits["val"].sizes(np.arange(example.clients)) == 0).sum())) > 0:
        notes.append(f"{without} of {example.clients} clients have no validation samples and no say in the choice.")
    if known < FEWEST_SAMPLES:
        notes.append(f"There are only {known} validation samples in all, so only step sizes are tuned.")
    halve = reads(example)
    if halve:
        notes.append(
            "Some methods read validation samples: half of them are for these, and all are judged by the rest."
        )
    rungs = list_rungs(settings.rounds)
    settings = replace(settings, eval_every=rungs[0])
    question = Question(
        kind=kind, recipe=task if isinstance(task, Recipe) else None,
        methods=[one if isinstance(one, str) else label(one) for one in methods], settings=settings,
        schedule=fingerprint(settings.participation), options=options, engine=dict(engine.options),
        data=example.fingerprint, code=code_digest(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else Path(folder)
        bar = show_progress(settings.rounds, enabled=progress, say=say)
        try:
            with alone_in(place), interruptions(enabled=True) as stop, bar as shown:
                _claim(place, question)
                hidden = {seed: hide_test(one, halve=halve) for seed, one in tasks.items()}
                race = Race(hidden, settings, engine, place / "race", stop, shown, together)
                fresh_seeds = [*range(seeds[-1] + 1, seeds[-1] + 1 + fresh)]
                course = Course(task, race, trials, seeds, fresh_seeds, known < FEWEST_SAMPLES, say or log.info, notes)
                yield course
        except KeyboardInterrupt as stopped:
            how = "nothing was kept" if folder is None else f"continue with `atoll resume {place}`"
            raise KeyboardInterrupt(f"stopped in the race; {how}") from stopped


def reopen(folder: Path) -> dict[str, Any]:
    """Return the arguments for `tune` or `advise` of what was begun in a folder; `kind` says which."""
    asked = read_record(folder / QUESTION, Question)
    if asked.recipe is None:
        raise RunError(
            "Only a choice for a task that was built from a recipe can be resumed by its folder.",
            hint=f"call {asked.kind}(task, ..., folder=...) again: it continues.",
        )
    found = {"task": asked.recipe, "settings": replace(asked.settings, eval_every=None), "folder": folder}
    return {**found, "kind": asked.kind, "methods": asked.methods, "engine": asked.engine, **asked.options}


def choice_name(
    kind: str,
    recipe: Recipe,
    methods: Sequence[str],
    settings: Settings,
    engine: Engine,
    options: dict[str, Any],
) -> str:
    """Return the folder name of a choice: the same question finds what was begun."""
    question = [
        kind, asdict(recipe), [*methods], asdict(settings), fingerprint(settings.participation),
        engine.options.get("precision"), options, code_digest(),
    ]  # fmt: skip
    return f"{recipe.dataset}-{kind}-{_digest(json.dumps(question, default=str).encode())}"


def add_reference_texts(methods: Sequence[Algorithm | str]) -> list[Algorithm | str]:
    """Return the methods, with Local and FedAvg in front if they are missing; raise for one that is there twice."""
    present = {name_of(as_method(one)) for one in methods}
    asked = [*(name for name in REFERENCES if name not in present), *methods]
    texts = [one if isinstance(one, str) else label(one) for one in asked]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise RunError(f"Every method must be named once. {twice} is there twice.")
    return asked


def _claim(folder: Path, question: Question) -> None:
    """Write the question into the folder; raise if another one was asked there."""
    path = folder / QUESTION
    if path.exists():
        before = read_record(path, Question)
        asked = json.loads(json.dumps(question.as_json()))
        if before["data"] != asked["data"]:
            raise RunError(
                f"A choice is continued with the same data only. Those of {folder} had the fingerprint "
                f"{before['data']}, now it is {asked['data']}.",
                hint="the data or their split have changed: choose another `folder`.",
            )
        written = json.loads(json.dumps(before.as_json()))
        differs = [name for name in asked if name != "engine" and written.get(name) != asked[name]]
        if differs:
            raise RunError(
                f"A choice is continued with what it was begun with. {folder} has another {differs[0]}.",
                hint="choose another `folder`.",
            )
    elif (folder / "config.json").exists() or (folder / "comparison.json").exists():
        raise RunError(
            f"A choice must have a folder of its own. {folder} holds runs already.", hint="choose another `folder`."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_record(path, question)


def _fix_clients(task: Recipe | Task) -> tuple[Recipe | Task, list[str]]:
    """Return the task whose clients have the same samples with every seed."""
    if isinstance(task, Task):
        return task, ["The task was built in Python: seeds change training, not the model's initial values."]
    if not isinstance(task, Recipe):
        raise TaskError(f"A choice must be made for a Recipe or a Task. Got {type(task).__name__}.")
    return (task if task.partition_seed is not None else replace(task, partition_seed=task.seed)), []


def _build(task: Recipe | Task, seed: int) -> Task:
    return task if isinstance(task, Task) else task.with_seed(seed).build()


# -- tables ------------------------------------------------------------------------------------------------------------


def list_arms(race: Race) -> list[dict[str, Any]]:
    """List all configurations for programs."""
    return [
        {
            "method": arm.entry, "values": arm.label, "lr": arm.lr,
            "rungs": [
                {"round": rounds, "val": value if math.isfinite(value) else None} for rounds, value in arm.rungs.items()
            ],
            "dropped_at": arm.dropped_at, "reason": arm.reason or None,
        }
        for arm in race.arms
    ]  # fmt: skip


def arms_table(race: Race, best: Sequence[Arm]) -> RichTable:
    """Make a table of all configurations: the validation score after each rung, and why they went no further."""
    numbers = Numbers(**next(iter(race.reports.values())).metric)
    rungs = list_rungs(race.rounds)
    table = plain_table([])
    table.add_column("configuration", overflow="fold")
    for head in (*(f"after {rung}" for rung in rungs), "MB\neach"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for arm in race.arms:
        scores = [numbers.score(arm.rungs[rung]) if rung in arm.rungs else "" for rung in rungs]
        cost = megabytes(race.megabytes(arm)) if arm.rungs else UNKNOWN
        mark = "chosen" if arm in best else arm.reason
        table.add_row(Text(arm.label), *scores, cost, Text(mark), style="bold" if arm in best else None)
    return table


def _list_rounds(race: Race) -> str:
    *before, last = map(str, list_rungs(race.rounds))
    return f"{', '.join(before)} and {last}" if before else last
