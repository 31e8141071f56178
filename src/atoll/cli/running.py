"""Commands that run methods: run, compare, resume, report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.options import ROUNDS, Options, with_options
from atoll.cli.program import RUNS, VERBOSE, app, option
from atoll.cli.shown import each, listen, present_comparison, present_run, progress, say
from atoll.kernel.errors import unknown

if TYPE_CHECKING:
    from atoll.experiments.tracking import Tracking
    from atoll.kernel.algorithm import Algorithm
    from atoll.records.results import Select
    from atoll.runtime.engines.local import LocalEngine


@app.command()
@with_options
def run(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="ditto, ditto:lam=0.1,epochs=2 or ./mine.py")],
    *,
    options: Options,
) -> None:
    """Run one method, and report on every client."""
    from atoll.algorithms import name_of
    from atoll.compose import create
    from atoll.experiments.tracking import tracking
    from atoll.federation import federate
    from atoll.records.runs import now

    algorithm = create(method, **options.hyperparameters)
    settings, engine, task = options.settings([algorithm]), options.local_engine(), options.recipe().build()
    folder = options.out or unused(RUNS / f"{options.task}-{name_of(algorithm).replace('/', '-')}-{now()}")
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with progress(settings.rounds) as shown:
            shown.begin(method)
            tracked.begin(folder)
            on_round = each(shown.after, tracked.after)
            federate(
                task, algorithm, settings=settings, engine=engine, folder=folder, on_round=on_round,
                on_epoch=shown.in_training,
            )  # fmt: skip
        present_run(folder)


SELECT = option("Which round counts: last, best (on validation), or oracle (best on test).")
TARGET = option("Validation score whose rounds and MB are counted; else 95 % of FedAvg's best.")


@app.command()
@with_options
def compare(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="As for `run`; local and fedavg are added if missing.")
    ],
    seeds: Annotated[int, option("How many seeds, from --seed on.", min=1, **ROUNDS)] = 3,
    select: Annotated[str, SELECT] = "last",
    target: Annotated[float | None, TARGET] = None,
    fresh: Annotated[bool, option("Run everything again, in a new folder.", "--fresh")] = False,
    *,
    options: Options,
) -> None:
    """Compare methods over several seeds; finished runs of the same task and settings are reused."""
    from atoll.experiments.comparison import compare as compare_methods
    from atoll.experiments.comparison import folder_name, with_references
    from atoll.experiments.tracking import tracking

    asked = _create_all(methods, options.hyperparameters)
    algorithms = list(with_references(asked).values())
    recipe, settings, engine = options.recipe(), options.settings(asked), options.local_engine()
    numbers = [*range(options.seed, options.seed + seeds)]
    folder = options.out or RUNS / folder_name(recipe, settings, engine)
    folder = unused(folder) if fresh else folder
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with progress(settings.rounds, runs=len(algorithms) * seeds) as shown:
            comparison = compare_methods(
                recipe, algorithms, seeds=numbers, settings=settings, engine=engine, folder=folder,
                on_run=each(shown.begin_run, _tracked_run(tracked, algorithms)),
                on_round=each(shown.after, tracked.after), on_epoch=shown.in_training,
                select=_selection(select), target=target,
            )  # fmt: skip
        present_comparison(comparison, folder, shown.reused)


def _tracked_run(tracked: "Tracking", algorithms: Sequence["Algorithm"]) -> Callable[[str, int, str], None]:
    """Tells trackers which run of a comparison begins."""
    from atoll.experiments.comparison import run_name
    from atoll.records.results import label

    labelled = {label(algorithm): algorithm for algorithm in algorithms}
    return lambda method, seed, _: tracked.begin(tracked.home / run_name(labelled[method], seed))


def _create_all(methods: Sequence[str], values: dict[str, str]) -> list["Algorithm"]:
    """The methods; a hyperparameter given with --set goes to each one that has it."""
    from atoll.compose import create, read

    known = {text: read(text.partition(":")[0]).hyperparameters.keys() for text in methods}
    for name in values:
        if not any(name in names for names in known.values()):
            raise unknown("hyperparameter", name, set().union(*known.values()))
    return [create(text, **{name: value for name, value in values.items() if name in known[text]}) for text in methods]


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    device: Annotated[str | None, option("Continue on another device.")] = None,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Continue what was interrupted, from its last checkpoint."""
    from atoll.data.recipe import Recipe
    from atoll.experiments.comparison import compare as compare_methods
    from atoll.experiments.comparison import reopen
    from atoll.experiments.tracking import tracking, used_in
    from atoll.federation import federate
    from atoll.records.configuration import Settings
    from atoll.records.results import Outcome
    from atoll.records.runs import Run

    listen(verbose)
    if (folder / "comparison.json").exists():
        asked = reopen(folder)
        runs = len(asked["methods"]) * len(asked["seeds"])
        with tracking(folder, **used_in(folder)) as tracked:
            with progress(asked["settings"].rounds, runs) as shown:
                engine = _engine_again(asked.pop("engine"), device)
                comparison = compare_methods(
                    **asked, engine=engine,
                    on_run=each(shown.begin_run, _tracked_run(tracked, asked["methods"])),
                    on_round=each(shown.after, tracked.after), on_epoch=shown.in_training,
                )  # fmt: skip
            return present_comparison(comparison, folder, shown.reused)
    config = Run.open(folder).config
    done = Outcome.read(folder)
    if done.finished:
        say(f"{folder} is finished already.")
        return present_run(folder)
    task, settings = Recipe.of_config(config).build(), Settings(**config["settings"])
    with tracking(folder, **used_in(folder)) as tracked:
        with progress(settings.rounds) as shown:
            shown.begin(config["algorithm"]["name"])
            tracked.begin(folder)
            engine = _engine_again(config["engine"], device)
            federate(
                task, done.algorithm, settings=settings, engine=engine, folder=folder, resume=True,
                on_round=each(shown.after, tracked.after), on_epoch=shown.in_training,
            )  # fmt: skip
        return present_run(folder)


def _engine_again(options: dict[str, Any], device: str | None) -> "LocalEngine":
    from atoll.runtime.engines.local import LocalEngine

    return LocalEngine(**{**options, **({"device": device} if device else {})})


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of one comparison.")],
    select: Annotated[str, SELECT] = "last",
    target: Annotated[float | None, TARGET] = None,
    out: Annotated[Path | None, option("Folder of the report; else that of the first RUN.")] = None,
) -> None:
    """Write the report of runs, finished or not; of several, a comparison."""
    from atoll.experiments.comparison import Comparison, runs_in
    from atoll.records.results import Outcome

    runs = [Outcome.read(path) for folder in folders for path in runs_in(folder)]
    if len(runs) == 1 and not runs[0].evaluations:
        return present_run(folders[0])
    comparison = Comparison.of_runs(runs, select=_selection(select), target=target)
    return present_comparison(comparison, out or folders[0])


def _selection(text: str) -> "Select":
    from atoll.records.results import SELECTIONS

    if text not in SELECTIONS:
        raise unknown("selection", text, SELECTIONS)
    return text


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there yet."""
    found, number = folder, 1
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
