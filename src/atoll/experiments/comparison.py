"""compare(): several methods, several seeds, the same clients. Missing runs are made, finished ones reused."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from atoll.algorithms import file_of, name_of
from atoll.compose import as_method, create
from atoll.compose.architectures import within_architectures
from atoll.data.recipe import Recipe
from atoll.data.splits import FOLDS, REPEATS, list_cuts
from atoll.data.task import Task
from atoll.experiments.cells import Begun, Cell, OnRound, group_cells, run_cells, run_name, runs_together, settings_of
from atoll.federation.config import AlgorithmSpec
from atoll.federation.folds import pool_folds
from atoll.federation.labels import REFERENCES, label
from atoll.federation.participation import fingerprint
from atoll.federation.progress import call_all, show_progress
from atoll.federation.report import Report, Select
from atoll.federation.results import SELECTIONS, Results
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine, require_engine
from atoll.kernel.errors import RunError, TaskError, describe_given, unknown
from atoll.kernel.html import html_table
from atoll.kernel.sources import code_digest
from atoll.metrics.measures import measure_of
from atoll.records.files import read_record, write_record, writing
from atoll.records.runs import quietly
from atoll.records.schema import Record
from atoll.records.trust import remember
from atoll.report.export import save
from atoll.report.summary import write_findings
from atoll.report.table import ComparisonTable, comparison_cells, newcomers_cells, newcomers_notes, notes
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.trainings import OnEpoch
from atoll.runtime.files import alone_in
from atoll.runtime.interruptions import interruptions
from atoll.runtime.population import MANY_CLIENTS

if TYPE_CHECKING:
    from atoll.federation.typed import GivenSettings

log = logging.getLogger("atoll.experiments.comparison")


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Record):
    """What a comparison was asked for: the content of comparison.json."""

    recipe: Recipe | None  # None of a task that was built in Python
    methods: list[AlgorithmSpec]
    seeds: list[int]
    settings: Settings
    schedule: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any]
    code: str


class Comparison(Results):
    """Methods side by side, with their table and report."""

    def _repr_html_(self) -> str:
        """Show in a notebook what was found, the table and its protocol."""
        heads, rows = comparison_cells(self)
        found = html_table(heads, rows, title=str(self)[1:-1], sentences=write_findings(self), note=notes(self))
        if self.newcomers:
            heads, rows = newcomers_cells(self)
            found += html_table(heads, rows, note=newcomers_notes(self))
        return str(found)

    def table(self) -> ComparisonTable:
        """Return the table for a terminal."""
        return ComparisonTable(self)

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write report.html, results.csv, .json, .md and .tex, and clients.csv; return their paths by name."""
        return save(self, Path(folder))


def compare(
    task: Recipe | Task | Callable[[int], Task],
    methods: Sequence[Algorithm | str] | Algorithm | str,
    *,
    seeds: int | Sequence[int] | None = None,
    folds: int | None = None,
    repeats: int | None = None,
    settings: Settings | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    on_run: Callable[[str, int, Begun], OnRound | None] | None = None,
    on_round: OnRound | None = None,
    on_epoch: OnEpoch | None = None,
    select: Select = "last",
    target: float | None = None,
    together: bool | None = None,
    progress: bool = True,
    **more: Unpack[GivenSettings],
) -> Comparison:
    """Run every method with every seed on the same clients, and pair them client by client.

    A seed, of which there are 3 unless `seeds` says otherwise, decides training, initial values and, unless the recipe
    has a `partition_seed`, who gets which samples and how they are cut; a `Task` is the same for all seeds. With
    `folds`, each fold of a client's samples is for testing once, `repeats` times over, and every cut is trained with a
    seed of its own: the default for own data of small clients. Local and FedAvg are added if they are missing. With a
    `folder`, runs that are finished there are reused and interrupted ones continued. All runs share one engine, and so
    its programs; with `together`, the default on a GPU, they also run side by side, as more lanes of one program. On a
    cluster, where it is the default as well, each worker then has a run of its own; else all work on the clients of one
    run. `select` says which round counts: the last one, the best on validation, or, for comparison with papers, the
    oracle's. `on_run` may return a function to be called after each round of that run. With `progress`, a bar is shown
    in terminals and notebooks.

        compare(Recipe("digits", clients=20), ["fedper", Ditto(lam=0.1)], seeds=3, rounds=30).table()
    """
    settings = (settings or Settings()).change(more, compare)
    require_engine(engine)
    engine = engine or LocalEngine()
    task = plan_recipe(task, seeds, folds, repeats) if isinstance(task, Recipe) else task
    tasks = plan_tasks(task, seeds, folds, repeats, settings.seed)
    seeds = [*tasks]
    if select not in SELECTIONS:
        raise unknown("selection", select, SELECTIONS)
    if not settings.scores_clients:
        raise RunError(
            f"A comparison needs the scores of clients: evaluation='all' or 'sample:N'. Got {settings.evaluation!r}."
        )
    methods = [methods] if isinstance(methods, str | Algorithm) else methods
    chosen = add_references([*map(as_method, methods)])
    if settings.curve and not any(method.one_shot for method in chosen.values()):
        raise RunError(
            f"`curve` scores one-shot methods after some of their epochs. {', '.join(chosen)} train in rounds.",
            hint="leave it out: rounds are scored as they come, as `eval_every` says.",
        )
    folder = None if folder is None else Path(folder)
    found: dict[tuple[str, int], Report] = {}
    alone = alone_in(folder) if folder is not None else nullcontext()
    bar = show_progress(settings.rounds, runs=len(chosen) * len(seeds), enabled=progress)
    with alone, interruptions(enabled=folder is not None) as stop, bar as shown:

        def begin_run(name: str, seed: int, how: Begun) -> OnRound:
            return call_all(shown.begin_run(name, seed, how), on_run and on_run(name, seed, how))

        if folder is not None:
            _claim(folder, task, list(chosen.values()), seeds, settings, engine)
        if together is None:
            together = runs_together(engine)
        for some in [seeds] if together else [[seed] for seed in seeds]:
            cells = []
            for seed in some:
                here = replace(tasks[seed](), recut=None)  # what reads the samples again stays here
                _require_samples(here, select)
                _require_kept_scores(here, select, settings)
                _require_whole_folds(here, select, settings)
                _require_beginnings(here, chosen.values(), settings, seed)
                cells += [Cell.find(name, method, seed, here, settings, folder) for name, method in chosen.items()]
            for group in group_cells(cells, engine, together=together):
                found |= run_cells(
                    group, engine, stop, on_run=begin_run, on_round=on_round,
                    on_epoch=call_all(shown.show_epoch, on_epoch),
                )  # fmt: skip
    outcomes = {name: pool_folds([found[name, seed] for seed in seeds]) for name in chosen}
    return Comparison(outcomes, select, target)


def _require_samples(task: Task, select: Select) -> None:
    """Raise before the first run if samples would be missing after the last one."""
    if task.central is not None and select == "last":  # the server's test set is enough
        return
    for split in ("test", "val") if select == "best" else ("test",):
        if not task.splits[split].offsets[-1]:
            raise RunError(
                f"A comparison of the {select} round must have {split} samples. {task.name} has none.",
                hint="give every split a share, as `split=60/15/25`, or the server a test set, as `central=0.25`.",
            )


def _require_kept_scores(task: Task, select: Select, settings: Settings) -> None:
    """Raise before the first run if the round that counts would not be kept by client."""
    scored = len(settings.draw_scored(task.clients))
    if select != "last" and scored > MANY_CLIENTS:
        raise RunError(
            f"A comparison of the {select} round must score at most {MANY_CLIENTS:,} clients: of more, only the last "
            f"round's scores are kept by client. Got {scored:,}.",
            hint="score a sample: `evaluation=sample:1000`.",
        )


def _require_whole_folds(task: Task, select: Select, settings: Settings) -> None:
    """Raise before the first run if the scores of folds could not be put together."""
    if task.cut is None or not task.cut.folds:
        return
    if len(settings.draw_scored(task.clients)) < settings.count_honest(task.clients):
        raise RunError(
            f"Folds need the scores of all clients. Got evaluation={settings.evaluation!r}.",
            hint="choose evaluation='all', or folds=0.",
        )
    if select != "last" and not measure_of(settings.metric, task.network).mean:
        raise RunError(
            f"In folds, {settings.metric} is taken after the last round, over all samples of a client. Got "
            f"select={select!r}.",
            hint="choose select='last', a metric that is a mean over samples, or folds=0.",
        )


def _require_beginnings(task: Task, algorithms: Iterable[Algorithm], settings: Settings, seed: int) -> None:
    """Raise before the first run if a method could not begin; warnings of methods wait until they run."""
    facts = task.public_facts(seed)
    for algorithm in algorithms:
        settings_of(algorithm, settings, seed).check(task, algorithm)
        with quietly():
            within_architectures(algorithm, facts).start(facts)


def add_references(algorithms: Sequence[Algorithm]) -> dict[str, Algorithm]:
    """Return the algorithms by label, each once, with Local and FedAvg in front if they are missing."""
    present = {name_of(algorithm) for algorithm in algorithms}
    # the same gradient budget: as many local epochs as the methods they are a reference for
    many = [algorithm for algorithm in algorithms if not algorithm.one_shot] or algorithms
    epochs = max((algorithm.epochs for algorithm in many if hasattr(algorithm, "epochs")), default=1)
    added = [create(name, epochs=str(epochs)) for name in REFERENCES if name not in present]
    if added:
        log.warning("added %s: gains are measured against them", " and ".join(map(label, added)))
    return {label(algorithm): algorithm for algorithm in [*added, *algorithms]}


def folder_name(recipe: Recipe, settings: Settings, engine: Engine) -> str:
    """Return the folder name of all comparisons of one task with the same settings, first seed and code.

    They share runs. Seed 0 has no part of its own in the name.
    """
    question = [
        asdict(recipe.with_seed(0)), asdict(replace(settings, seed=0)), fingerprint(settings.participation),
        engine.options.get("precision"), code_digest(),
    ]  # fmt: skip
    seed = f"-seed{settings.seed}" if settings.seed else ""
    return f"{recipe.dataset}-compare-{_digest(json.dumps(question).encode())}{seed}"


def runs_in(folder: Path, *, trust: bool = False) -> list[Path]:
    """Return the folders of the runs that a comparison asked for last; a run's own folder as it is."""
    if not (folder / "comparison.json").exists():
        return [folder]
    return [place for place in _places(folder, trust=trust) if (place / "config.json").exists()]


def read_runs(folder: Path, *, trust: bool = False) -> tuple[list[Report], list[str]]:
    """Read the runs of `runs_in`; beside them, sentences about those that were asked for and are not there."""
    if not (folder / "comparison.json").exists():
        return [Report.read(folder, trust=trust)], []
    places = _places(folder, trust=trust)
    there = [place for place in places if (place / "config.json").exists()]
    absent = [f"{place.name} was asked for and is not there." for place in places if place not in there]
    return [Report.read(place, trust=trust) for place in there], absent


def _places(folder: Path, *, trust: bool) -> list[Path]:
    """Return the folders of all runs that a comparison asked for last."""
    asked = read_record(folder / "comparison.json", Question)
    methods = [method.create(trust=trust) for method in asked.methods]
    return [folder / run_name(method, seed) for method in methods for seed in asked.seeds]


def reopen(folder: Path, *, trust: bool = False) -> dict[str, Any]:
    """Return the arguments for `compare` of the comparison in a folder; `engine` holds the options of an engine."""
    asked = read_record(folder / "comparison.json", Question)
    if asked.recipe is None:
        raise RunError(
            "Only a comparison of a task that was built from a recipe can be resumed by its folder.",
            hint="call compare(task, ..., folder=...) again: it continues.",
        )
    return {
        "task": asked.recipe,
        "methods": [method.create(trust=trust) for method in asked.methods],
        "seeds": asked.seeds,
        "settings": asked.settings,
        "folder": folder,
        "engine": asked.engine,
    }


def _claim(
    folder: Path,
    task: Any,
    methods: list[Algorithm],
    seeds: list[int],
    settings: Settings,
    engine: Engine,
) -> None:
    """Write the question into the folder; raise if its runs answer another one."""
    asked = Question(
        recipe=task if isinstance(task, Recipe) else None,
        methods=[AlgorithmSpec.of(one) for one in methods],
        seeds=seeds,
        settings=settings,
        schedule=fingerprint(settings.participation),
        engine=dict(engine.options),
        code=code_digest(),
    )
    for method in methods:
        if (file := file_of(method)) is not None:  # the user gives it, so its runs may be read
            remember(file)
    path = folder / "comparison.json"
    if path.exists():
        before = read_record(path, Question)
        # Where clients keep their state changes no number.
        before = replace(before, settings=replace(before.settings, memory=settings.memory))
        differs = [name for name in ("recipe", "settings", "schedule") if before[name] != asked[name]]
        if differs:
            raise RunError(
                f"The runs of a comparison must have task and settings in common. {folder} has another {differs[0]}.",
                hint="choose another `folder`.",
            )
        if before.code != asked.code:
            log.warning(
                "Atoll's code has changed since this comparison was begun; its finished runs are used as they are"
            )
    elif (folder / "config.json").exists():
        raise RunError(
            f"A comparison must have a folder of its own. {folder} holds a single run.", hint="choose another `folder`."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_record(path, asked)


def plan_recipe(
    recipe: Recipe, seeds: int | Sequence[int] | None = None, folds: int | None = None, repeats: int | None = None
) -> Recipe:
    """Return the recipe with the folds that are asked for; where nothing is, with those that its data call for."""
    recipe = replace(
        recipe,
        folds=recipe.folds if folds is None else folds,
        repeats=recipe.repeats if repeats is None else repeats,
    )
    return recipe.choose_folds() if seeds is None else recipe


def plan_tasks(
    task: Recipe | Task | Callable[[int], Task], seeds: int | Sequence[int] | None, folds: int | None,
    repeats: int | None, first: int,
) -> dict[int, Callable[[], Task]]:  # fmt: skip
    """Return what builds the task of each seed: one for every cut, where there are folds."""
    if isinstance(task, Recipe):
        cuts = {seed: recipe.build for seed, recipe in task.list_cuts(first).items()}
    elif isinstance(task, Task):
        cuts = _recut(task, folds, repeats, first, wanted=seeds is None and task.wants_folds)
    elif callable(task):
        if folds:
            raise RunError("Folds need a Recipe or a Task. Got a function.", hint="give Task.own(...) itself.")
        cuts = {}
    else:
        raise TaskError(
            f"`task` must be a Task, a Recipe, or a function that makes a task of a seed. Got {describe_given(task)}.",
            hint="make one: Recipe('digits', clients=20), or Task.own(...) of your data.",
        )
    if cuts and (seeds is None or (not isinstance(seeds, int) and [*seeds] == [*cuts])):
        return cuts
    if cuts:
        raise RunError(
            f"Every fold is trained with a seed of its own, {len(cuts)} in all, so `seeds` must be left out. "
            f"Got {seeds!r}.",
            hint="choose `folds` and `repeats`; folds=0 holds out one part per seed.",
        )
    numbers = [*range(first, first + (3 if seeds is None else seeds))] if not isinstance(seeds, Sequence) else [*seeds]
    if not all(isinstance(seed, int) for seed in numbers):
        raise RunError(f"`seeds` must be how many there are, or a list of whole numbers. Got {seeds!r}.")
    if not numbers:
        raise RunError("A comparison must have at least 1 seed. Got none.")
    return {seed: functools.partial(_build, task, seed) for seed in numbers}


def _recut(
    task: Task, folds: int | None, repeats: int | None, first: int, *, wanted: bool
) -> dict[int, Callable[[], Task]]:
    """Return what builds a task for each of its cuts, by seed; nothing if one part is held out."""
    many = FOLDS if folds is None and wanted else folds or 0
    if not many:
        return {}
    if task.recut is None:
        raise RunError(
            f"Folds need own data, 2 samples or groups of every client, and no column or time that decides the split. "
            f"{task.name} cannot be cut again.",
            hint="leave out `folds`; of a data set in the catalogue give a Recipe.",
        )
    cuts = list_cuts(many, REPEATS if repeats is None else repeats)
    return {first + cut.number: functools.partial(task.recut, cut) for cut in cuts}


def _build(task: Recipe | Task | Callable[[int], Task], seed: int) -> Task:
    """Build the task of a seed; one that is there already is the same for all."""
    if isinstance(task, Recipe):
        return task.with_seed(seed).build()
    return task if isinstance(task, Task) else task(seed)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
