"""Commands that run methods: run, compare, resume, report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import completion
from atoll.cli.display import listen, present_comparison, present_run, say, show_progress, write
from atoll.cli.options import ROUNDS, TASK, TOGETHER, Options, build_engine, with_options
from atoll.cli.program import RUNS, TRUST, VERBOSE, app, option
from atoll.federation.progress import call_all
from atoll.kernel.errors import EngineError, RunError, unknown

if TYPE_CHECKING:
    from atoll.experiments.cells import OnRun
    from atoll.experiments.tracking import Tracking
    from atoll.federation.progress import ProgressTracker
    from atoll.federation.report import Select
    from atoll.kernel.algorithm import Algorithm
    from atoll.kernel.engine import Engine
    from atoll.records.rounds import Round


@app.command()
@with_options
def run(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="ditto, ditto:lam=0.1,epochs=2 or ./mine.py", **completion.METHODS)
    ],
    *,
    options: Options,
) -> None:
    """Run one method, and report on every client."""
    from atoll.algorithms import name_of
    from atoll.compose import create
    from atoll.experiments.tracking import tracking
    from atoll.federation.loop import federate
    from atoll.records.runs import now

    algorithm = create(method, **options.hyperparameters)
    settings, engine, recipe = options.settings([algorithm]), options.build_engine(), options.recipe()
    task = recipe.build()
    folder = options.out or unused_folder(RUNS / f"{recipe.dataset}-{name_of(algorithm).replace('/', '-')}-{now()}")
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with show_progress(settings.rounds) as bar:
            tracked.begin(folder)
            on_round = call_all(bar.begin(method), tracked.after)
            report = federate(
                task, algorithm, settings=settings, engine=engine, folder=folder, on_round=on_round,
                on_epoch=bar.show_epoch,
            )  # fmt: skip
        present_run(report)


SELECT = option("Which round counts: last, best (on validation), or oracle (best on test).")
REACH = option("Validation score whose rounds and MB are counted; else 95 % of FedAvg's best.", "--reach")


@app.command()
@with_options
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...", help="As for `run`; local and fedavg are added if missing.", **completion.METHODS
        ),
    ],
    seeds: Annotated[
        int | None, option("How many seeds, from --seed on; else 3, or one per fold.", min=1, **ROUNDS)
    ] = None,
    folds: Annotated[
        int | None,
        option("Test on each of so many folds in turn; 0: hold one part out. Else 5 for small own clients.", **TASK),
    ] = None,
    repeats: Annotated[int | None, option("How often folds are dealt anew; else 2.", min=1, **TASK)] = None,
    select: Annotated[str, SELECT] = "last",
    reach: Annotated[float | None, REACH] = None,
    together: Annotated[bool | None, TOGETHER] = None,
    fresh: Annotated[bool, option("Run everything again, in a new folder.", "--fresh")] = False,
    *,
    options: Options,
) -> None:
    """Compare methods over several seeds; finished runs of the same task and settings are reused."""
    from atoll.experiments.comparison import add_references, folder_name, plan_recipe, plan_tasks
    from atoll.experiments.comparison import compare as compare_methods
    from atoll.experiments.tracking import tracking

    asked = _create_all(methods, options.hyperparameters)
    algorithms = list(add_references(asked).values())
    settings, engine = options.settings(asked), options.build_engine()
    recipe = plan_recipe(options.recipe(), seeds, folds, repeats)
    tasks = plan_tasks(recipe, seeds, None, None, options.seed)
    folder = options.out or RUNS / folder_name(recipe, settings, engine)
    folder = unused_folder(folder) if fresh else folder
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with show_progress(settings.rounds, runs=len(algorithms) * len(tasks)) as bar:
            comparison = compare_methods(
                recipe, algorithms, seeds=[*tasks], settings=settings, engine=engine, folder=folder,
                on_run=_follow_runs(bar, tracked, algorithms), on_epoch=bar.show_epoch,
                select=_require_selection(select), target=reach, together=_share_lanes(together, tracked),
            )  # fmt: skip
        present_comparison(comparison, folder, bar.reused)


def _follow_runs(bar: "ProgressTracker", tracked: "Tracking", algorithms: Sequence["Algorithm"]) -> "OnRun":
    """Return a function that tells the progress bar and trackers which run begins; it returns what shows its rounds."""
    from atoll.experiments.cells import run_name
    from atoll.federation.labels import label

    labelled = {label(algorithm): algorithm for algorithm in algorithms}

    def begin(method: str, seed: int, how: str) -> Callable[["Round"], None]:
        tracked.begin(tracked.home / run_name(labelled[method], seed))
        return call_all(bar.begin_run(method, seed, how), tracked.after)

    return begin


def _share_lanes(together: bool | None, tracked: "Tracking") -> bool | None:
    """Return whether runs go side by side: trackers follow one run at a time."""
    if together and tracked.trackers:
        raise EngineError(
            "Trackers follow one run at a time, so --together must be left out. Got --together and a tracker.",
            hint="leave out --tensorboard and --mlflow, or --together.",
        )
    return False if tracked.trackers else together


def _create_all(methods: Sequence[str], values: dict[str, str]) -> list["Algorithm"]:
    """Create the methods; a hyperparameter given with --set goes to each one that has it."""
    from atoll.compose import create, read

    known = {text: read(text.partition(":")[0]).hyperparameters.keys() for text in methods}
    for name in values:
        if not any(name in names for names in known.values()):
            raise unknown("hyperparameter", name, set().union(*known.values()))
    return [create(text, **{name: value for name, value in values.items() if name in known[text]}) for text in methods]


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    device: Annotated[str | None, option("Continue on another device.", **completion.WHERE)] = None,
    engine: Annotated[str | None, option("Continue on another engine: auto, ray, ray:HOST:PORT.")] = None,
    trust: Annotated[bool, TRUST] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Continue what was interrupted, from its last checkpoint."""
    from atoll.experiments.comparison import compare as compare_methods
    from atoll.experiments.comparison import reopen
    from atoll.experiments.tracking import trackers_in, tracking
    from atoll.federation.loop import federate
    from atoll.federation.report import Report

    listen(verbose)
    if (folder / "federation.json").exists():
        raise RunError(
            f"A run whose clients are at sites goes on where they are reached. {folder} is one.",
            hint=f"`atoll server --resume --out {folder}`, or by files `atoll round finish REPLIES --folder {folder}`.",
        )
    if (folder / "choosing.json").exists():
        from atoll.cli.choosing import resume_choice

        return resume_choice(folder, lambda options: _rebuild_engine(options, device, engine))
    if (folder / "comparison.json").exists():
        asked = reopen(folder, trust=trust)
        runs = len(asked["methods"]) * len(asked["seeds"])
        with tracking(folder, **trackers_in(folder)) as tracked:
            with show_progress(asked["settings"].rounds, runs) as bar:
                rebuilt = _rebuild_engine(asked.pop("engine"), device, engine)
                comparison = compare_methods(
                    **asked, engine=rebuilt, together=_share_lanes(None, tracked), on_epoch=bar.show_epoch,
                    on_run=_follow_runs(bar, tracked, asked["methods"]),
                )  # fmt: skip
            return present_comparison(comparison, folder, bar.reused)
    done = Report.read(folder, trust=trust)
    if done.finished:
        say(f"{folder} is finished already.")
        return present_run(done)
    config, settings, task = done.config, done.settings, done.config.recipe.build()
    with tracking(folder, **trackers_in(folder)) as tracked:
        with show_progress(settings.rounds) as bar:
            tracked.begin(folder)
            rebuilt = _rebuild_engine(config.engine, device, engine)
            report = federate(
                task, done.algorithm, settings=settings, engine=rebuilt, folder=folder, resume=True,
                on_round=call_all(bar.begin(config.algorithm.name), tracked.after), on_epoch=bar.show_epoch,
            )  # fmt: skip
        return present_run(report)


def _rebuild_engine(options: dict[str, Any], device: str | None, engine: str | None) -> "Engine":
    """Build the engine of a run again, or the one that is asked for now."""
    from atoll.runtime.engines.local import LocalEngine
    from atoll.runtime.installed import ENGINES, load_installed

    options = {**options, **({"device": device} if device else {})}
    name = options.pop("cluster", None)
    try:
        if engine is not None:
            kept = {name: options.get(name) for name in ("compile", "precision", "device", "timeout")}
            return build_engine(engine, kept.pop("compile"), **kept)  # type: ignore[arg-type]
        rebuilt: Engine = (LocalEngine if name is None else load_installed(ENGINES, name))(**options)
        return rebuilt
    except TypeError as error:
        raise EngineError(f"The engine of a run must be one of this Atoll: {error}.") from error


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of one comparison.")],
    select: Annotated[str, SELECT] = "last",
    reach: Annotated[float | None, REACH] = None,
    out: Annotated[Path | None, option("Folder of the report; else that of the first RUN.")] = None,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Write the report of runs, finished or not; of several, a comparison."""
    from atoll.experiments.comparison import Comparison, read_runs

    read = [read_runs(folder, trust=trust) for folder in folders]
    runs = [run for some, _ in read for run in some]
    if len(runs) == 1 and not runs[0].evaluations:
        return present_run(runs[0])
    absent = [sentence for _, sentences in read for sentence in sentences]
    comparison = Comparison.of_runs(runs, absent=absent, select=_require_selection(select), target=reach)
    return present_comparison(comparison, out or folders[0])


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    port: Annotated[int, option("Of the page; 0: a free one.", min=0, max=65535)] = 0,
    trust: Annotated[bool, TRUST] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Serve the report of a run while it goes on; the page reloads by itself. For this machine only."""
    from atoll.experiments.watching import serve

    listen(verbose)
    with serve(folder, port=port, trust=trust) as server:
        write(f"{server.address} shows {folder}; Ctrl-C ends it.")
        server.serve_forever()


def _require_selection(text: str) -> "Select":
    from atoll.federation.results import SELECTIONS

    if text not in SELECTIONS:
        raise unknown("selection", text, SELECTIONS)
    return text


def unused_folder(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that does not exist yet."""
    found, number = folder, 1
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
