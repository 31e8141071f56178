"""The command line. Data goes to stdout, progress and messages to stderr; heavy imports wait until they are needed.

Exit codes: 0 done, 1 a run or a check failed, 2 bad input, 130 stopped by Ctrl-C or SIGTERM (and resumable).
"""

import dataclasses
import inspect
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from atoll.errors import (
    AtollError,
    CheckpointError,
    DivergedError,
    EngineError,
    PayloadError,
    RunError,
    UnknownName,
    unknown,
)
from atoll.references import bibtex
from atoll.report.table import (
    UNKNOWN,
    Numbers,
    megabytes,
    newcomers_notes,
    newcomers_table,
    notes,
    plain_table,
    run_table,
)

if TYPE_CHECKING:
    from atoll.algorithm import Algorithm
    from atoll.engines.local import LocalEngine
    from atoll.federation import Settings
    from atoll.recipe import Recipe
    from atoll.results import Comparison, Select
    from atoll.tracking import Tracking

FAILED, BAD_INPUT, STOPPED = 1, 2, 130
FAILURES = (DivergedError, CheckpointError, PayloadError)  # other errors are about what was asked for
RUNS = Path("runs")
WIDTH_OF_A_FILE = 100  # of tables that are not shown on a terminal


class Commands(TyperGroup):
    """Turns errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; whatever it raises on purpose is said on stderr."""
        try:
            with terminations():
                return super().invoke(ctx)
        except AtollError as error:
            say(f"error: {error}", style="red")
            failed = isinstance(error, FAILURES) or isinstance(error.__cause__, OSError)
            raise typer.Exit(FAILED if failed else BAD_INPUT) from None
        except KeyboardInterrupt as stop:
            say(str(stop) or "stopped")
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized and one-shot federated learning on non-IID data: simulate, compare, deploy.",
)


def main() -> None:
    """The `atoll` program."""
    app(prog_name="atoll")


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out().print(f"atoll {version('atoll')}", highlight=False)
        raise typer.Exit


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:  # noqa: A002 - typer's word
    """An option of the command line."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


VERBOSE = option("Show what the engine chooses, and more.", "--verbose", "-v")


@app.callback()
def _every_command(
    _version: Annotated[bool, option("Say the version.", "--version", callback=_say_version, is_eager=True)] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    listen(verbose)


# -- what run and compare have in common -------------------------------------------------------------------------------

TASK, STEPS, ROUNDS, ENGINE, TRACKING = (
    {"panel": name} for name in ("The task", "Clients' steps", "The federation", "The engine", "Tracking")
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `run` and `compare`, with their help."""

    task: Annotated[str, option("Data set; see `atoll list tasks`.", **TASK)] = "digits"
    partition: Annotated[str, option("How samples are dealt; see `atoll list partitions`.", **TASK)] = "auto"
    clients: Annotated[int | None, option("How many there are; else 20, or all natural ones.", **TASK)] = None
    model: Annotated[str, option("Network, see `atoll list models`; several in turn: mlp:32/mlp:64.", **TASK)] = "auto"
    data: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.", **TASK)] = None
    partition_seed: Annotated[int | None, option("Who gets what; else the seed.", **TASK)] = None
    split: Annotated[str, option("Per cent of a client's samples: train/val/test.", **TASK)] = "60/15/25"
    central: Annotated[str, option("The server's test set: none, official, or a share as 0.1.", **TASK)] = "none"
    public: Annotated[float, option("Share of samples that everybody may see.", **TASK)] = 0.0
    augment: Annotated[str, option("How training images are changed: none, crop-flip or crop.", **TASK)] = "none"
    unseen: Annotated[float, option("Share of clients that take no part and are welcomed at the end.", **TASK)] = 0.0
    lr: Annotated[float, option("Step size.", **STEPS)] = 0.1
    batch_size: Annotated[int, option("Samples per step.", **STEPS)] = 10
    momentum: Annotated[float, option("Of a client's steps.", **STEPS)] = 0.0
    weight_decay: Annotated[float, option("Pull of all parameters to 0.", **STEPS)] = 0.0
    clip: Annotated[float | None, option("Largest norm of a gradient.", **STEPS)] = None
    set_: Annotated[list[str] | None, option("A hyperparameter, name=value; repeatable.", "--set", **STEPS)] = None
    rounds: Annotated[int, option("Exchanges between server and clients.", **ROUNDS)] = 30
    seed: Annotated[int, option("Of everything drawn; the first one of a comparison.", **ROUNDS)] = 0
    cohort: Annotated[str | None, option("Clients per round: a number, or a share as 0.1; else all.", **ROUNDS)] = None
    participation: Annotated[
        str, option("Who is there: constant, random:P, diurnal:T, turnover:S, file:PATH.", **ROUNDS)
    ] = "constant"
    drop: Annotated[float, option("Probability that a client drops out of a round.", **ROUNDS)] = 0.0
    late: Annotated[float, option("Probability that a reply arrives in a later round.", **ROUNDS)] = 0.0
    delay: Annotated[int, option("The most rounds that a late reply needs.", min=1, **ROUNDS)] = 1
    eval_every: Annotated[int | None, option("Rounds between evaluations; else a tenth.", min=1, **ROUNDS)] = None
    memory: Annotated[str, option("Where clients keep their state: ram or disk.", **ROUNDS)] = "ram"
    engine: Annotated[str, option("Clients at once: auto, loop, whole, threads, chunk:N, threads:N.", **ENGINE)] = (
        "auto"
    )
    compile: Annotated[bool | None, option("Else if it pays.", "--compile/--no-compile", **ENGINE)] = None
    precision: Annotated[str, option("fp32, tf32 or bf16.", **ENGINE)] = "fp32"
    device: Annotated[str, option("auto, cpu or cuda.", **ENGINE)] = "auto"
    timeout: Annotated[float | None, option("Seconds after which a reply counts as lost.", **ENGINE)] = None
    tensorboard: Annotated[bool, option("Write events for TensorBoard.", "--tensorboard", **TRACKING)] = False
    mlflow: Annotated[bool, option("Log to $MLFLOW_TRACKING_URI; else in the folder.", "--mlflow", **TRACKING)] = False
    out: Annotated[Path | None, option("Folder of the results; else one in runs/.")] = None
    verbose: Annotated[bool, VERBOSE] = False

    def recipe(self) -> "Recipe":
        """The task in words."""
        from atoll.data.task import Training
        from atoll.recipe import Recipe

        names = ("lr", "batch_size", "momentum", "weight_decay", "clip")
        training = Training(**{name: getattr(self, name) for name in names})
        data = None if self.data is None else str(self.data.resolve())
        named = (
            "partition", "clients", "model", "seed", "partition_seed", "split", "central", "public", "augment",
            "unseen",
        )  # fmt: skip
        return Recipe(self.task, data=data, training=training, **{name: getattr(self, name) for name in named})

    def settings(self) -> "Settings":
        """How the federation is run."""
        from atoll.federation import Settings

        names = ("rounds", "seed", "participation", "drop", "late", "delay", "eval_every", "memory")
        return Settings(cohort=cohort_of(self.cohort), **{name: getattr(self, name) for name in names})

    def local_engine(self) -> "LocalEngine":
        """The engine, as forced."""
        return engine_of(self.engine, self.compile, self.precision, self.device, self.timeout)

    @property
    def hyperparameters(self) -> dict[str, str]:
        """What was given with --set."""
        pairs = [text.partition("=") for text in self.set_ or ()]
        for name, given, value in pairs:
            if not (name and given and value):
                raise UnknownName(f"`--set` must be given as name=value. Got {name + given + value!r}.")
        return {name: value for name, _, value in pairs}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Options`; it receives them as one object."""
    own = [entry for entry in inspect.signature(command).parameters.values() if entry.name != "options"]
    hints = get_type_hints(command, include_extras=True) | get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(Options)
    ]

    @wraps(command)
    def wrapped(**given: Any) -> None:
        options = Options(**{entry.name: given.pop(entry.name) for entry in shared})
        if options.verbose:
            listen(verbose=True)
        command(**given, options=options)

    mine = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own]
    wrapped.__signature__ = inspect.Signature([*mine, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {entry.name: hints[entry.name] for entry in [*mine, *shared]}
    return wrapped


# -- running -----------------------------------------------------------------------------------------------------------


@app.command()
@with_options
def run(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="ditto, ditto:lam=0.1,epochs=2 or ./mine.py")],
    *,
    options: Options,
) -> None:
    """Run one method, and report on every client."""
    from atoll.algorithms import create, name_of
    from atoll.federation import federate
    from atoll.runs import now
    from atoll.tracking import tracking

    algorithm = create(method, **options.hyperparameters)
    settings, engine, task = options.settings(), options.local_engine(), options.recipe().build()
    folder = options.out or unused(RUNS / f"{options.task}-{name_of(type(algorithm))}-{now()}")
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with progress(settings.rounds) as shown:
            shown.begin(method)
            tracked.begin(folder)
            on_round = each(shown.after, tracked.after)
            federate(task, algorithm, settings=settings, engine=engine, folder=folder, on_round=on_round)
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
    from atoll.comparison import compare as compare_methods
    from atoll.comparison import folder_name, with_references
    from atoll.tracking import tracking

    algorithms = list(with_references(_create_all(methods, options.hyperparameters)).values())
    recipe, settings, engine = options.recipe(), options.settings(), options.local_engine()
    numbers = [*range(options.seed, options.seed + seeds)]
    folder = options.out or RUNS / folder_name(recipe, settings, engine)
    folder = unused(folder) if fresh else folder
    with tracking(folder, tensorboard=options.tensorboard, mlflow=options.mlflow) as tracked:
        with progress(settings.rounds, runs=len(algorithms) * seeds) as shown:
            comparison = compare_methods(
                recipe, algorithms, seeds=numbers, settings=settings, engine=engine, folder=folder,
                on_run=each(shown.begin_run, _tracked_run(tracked, algorithms)),
                on_round=each(shown.after, tracked.after), select=_selection(select), target=target,
            )  # fmt: skip
        present_comparison(comparison, folder, shown.reused)


def _tracked_run(tracked: "Tracking", algorithms: Sequence["Algorithm"]) -> Callable[[str, int, str], None]:
    """Tells trackers which run of a comparison begins."""
    from atoll.comparison import run_name
    from atoll.results import label

    labelled = {label(algorithm): algorithm for algorithm in algorithms}
    return lambda method, seed, _: tracked.begin(tracked.home / run_name(labelled[method], seed))


def _create_all(methods: Sequence[str], values: dict[str, str]) -> list["Algorithm"]:
    """The methods; a hyperparameter given with --set goes to each one that has it."""
    from atoll.algorithm import hyperparameters
    from atoll.algorithms import create, find

    known = {text: {one.name for one in hyperparameters(find(text.partition(":")[0]))} for text in methods}
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
    from atoll.comparison import compare as compare_methods
    from atoll.comparison import reopen
    from atoll.federation import Settings, federate
    from atoll.recipe import Recipe
    from atoll.results import Outcome
    from atoll.runs import Run
    from atoll.tracking import tracking, used_in

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
                    on_round=each(shown.after, tracked.after),
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
                on_round=each(shown.after, tracked.after),
            )  # fmt: skip
        return present_run(folder)


def _engine_again(options: dict[str, Any], device: str | None) -> "LocalEngine":
    from atoll.engines.local import LocalEngine

    return LocalEngine(**{**options, **({"device": device} if device else {})})


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of one comparison.")],
    select: Annotated[str, SELECT] = "last",
    target: Annotated[float | None, TARGET] = None,
    out: Annotated[Path | None, option("Folder of the report; else that of the first RUN.")] = None,
) -> None:
    """Write the report of runs, finished or not; of several, a comparison."""
    from atoll.comparison import runs_in
    from atoll.results import Comparison, Outcome

    runs = [Outcome.read(path) for folder in folders for path in runs_in(folder)]
    if len(runs) == 1 and not runs[0].evaluations:
        return present_run(folders[0])
    comparison = Comparison.of_runs(runs, select=_selection(select), target=target)
    return present_comparison(comparison, out or folders[0])


def _selection(text: str) -> "Select":
    from atoll.results import SELECTIONS

    if text not in SELECTIONS:
        raise unknown("selection", text, SELECTIONS)
    return text


# -- looking -----------------------------------------------------------------------------------------------------------


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, partitions, models or runs")] = "algorithms",
) -> None:
    """Say what there is."""
    kinds: dict[str, Callable[[], Table]] = {
        "algorithms": _algorithms, "tasks": _tasks, "partitions": _partitions, "models": _models, "runs": _runs,
    }  # fmt: skip
    if what not in kinds:
        raise unknown("list", what, kinds)
    out().print(kinds[what]())


def _algorithms() -> Table:
    from atoll.algorithm import hyperparameters
    from atoll.algorithms import found

    rows = [
        [
            name,
            (method.__doc__ or "").split("\n")[0],
            ", ".join(f"{one.name}={one.default}" for one in hyperparameters(method)),
        ]
        for name, method in sorted(found().items())
    ]
    return plain_table(["algorithm", "what it is", "hyperparameters"], rows)


def _tasks() -> Table:
    from atoll.data import datasets

    return plain_table(["task", "where it comes from"], [[name, datasets.origin(name)] for name in datasets.names()])


def _partitions() -> Table:
    from atoll.data import partition

    return plain_table(["partition", "what it does"], [[*both] for both in partition.meanings().items()])


def _models() -> Table:
    from atoll import models

    return plain_table(["model"], [["auto"], *([name] for name in models.names())])


def _runs() -> Table:
    from atoll.runs import Run

    rows = []
    for path in sorted(RUNS.rglob("config.json")):
        run = Run.open(path.parent)
        asked, history = run.config, run.metrics()
        done: dict[str, Any] = history[-1] if history else {"round": 0}
        scores = done.get("evaluation", {}).get("personal")
        numbers = Numbers(**asked["task"].get("metric", {"name": "accuracy"}))
        score = f"{numbers.score(scores['test']['macro'])} {numbers.name}" if scores else UNKNOWN
        rows.append([str(path.parent), asked["task"]["name"], f"{done['round']}/{asked['settings']['rounds']}", score])
    return plain_table(["run", "task", "rounds", "mean test score"], rows)


@app.command()
def partition(
    task: Annotated[str, option("Data set; see `atoll list tasks`.")] = "digits",
    partition: Annotated[str, option("How samples are dealt; see `atoll list partitions`.")] = "auto",
    clients: Annotated[int | None, option("How many there are; else 20, or all natural ones.")] = None,
    split: Annotated[str, option("Per cent of a client's samples: train/val/test.")] = "60/15/25",
    data: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.")] = None,
    seed: Annotated[int, option("Of the draws.")] = 0,
    out: Annotated[Path | None, option("Where to draw it, an .svg file.")] = None,
) -> None:
    """Show who gets which samples: sizes, labels and how clients differ, as a table and as a picture."""
    from atoll.recipe import Recipe
    from atoll.report.partition import save_picture

    folder = None if data is None else str(data.resolve())
    found = Recipe(task, partition, clients, seed=seed, split=split, data=folder).build().statistics
    write(found.table(), "", Text(f"{found.sentence} Training samples, seed {seed}."))
    if out is not None:
        save_picture(found, out)
        _paths(picture=out)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A method's name or file.")]) -> None:
    """Explain a method: its objective, hyperparameters, what it sends, and what to cite."""
    from atoll.algorithm import hyperparameters
    from atoll.algorithms import find

    method = find(name)
    console = out()
    console.print(
        Text(inspect.cleandoc(sys.modules[method.__module__].__doc__ or method.__doc__ or "")), soft_wrap=True
    )
    meanings = field_comments(method)
    rows = [[one.name, one.expected, repr(one.default), meanings.get(one.name, "")] for one in hyperparameters(method)]
    write("", plain_table(["hyperparameter", "must be", "default", "meaning"], rows), "")
    sent = ", ".join(f"{field} ({kind})" for field, kind in method.sends.items()) or "nothing"
    console.print(Text(f"Sends     {sent}"))
    sums = (
        "yes: the server needs sums over clients only" if method.sums_suffice else "no: the server needs single replies"
    )
    console.print(Text(f"Secure    {sums}"))
    for other, values in method.limits.items():
        console.print(
            Text(f"Limit     with {', '.join(f'{key}={value!r}' for key, value in values.items())} it is {other}")
        )
    if method.cites:
        write("")
        console.print(Text(bibtex(method.cites)), soft_wrap=True)


@app.command()
def explain(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    client: Annotated[str | None, option("One client, by name or number; else the most affected.")] = None,
    method: Annotated[str | None, option("Of a comparison; else the best that is not a reference.")] = None,
    seed: Annotated[int | None, option("Of a comparison; else its first.")] = None,
    most: Annotated[int, option("How many of the most affected, the harmed first.", min=1)] = 3,
) -> None:
    """Say why clients gain or lose: how their data differ, whom they learn from, what would likely help."""
    from atoll.explain import Study, overview
    from atoll.explain import explain as explain_client

    study = Study.read(folder, method, seed)
    clients = study.affected(most) if client is None else [study.find(client)]
    write(*map(Text, overview(study)))
    for one in clients:
        paragraphs = Table.grid(Column(no_wrap=True, style="dim"), Column(), padding=(0, 2))
        for heading, sentences in explain_client(study, one).items():
            paragraphs.add_row(Text(heading), Text(" ".join(sentences)))
        write("", Text(study.title(one), style="bold"), paragraphs)
    if not clients:
        write("", "Nobody gains or loses more than one standard error; --client explains one of them.")


def field_comments(method: type) -> dict[str, str]:
    """What the comment after each field of a class says, in the class and in those it is made from."""
    found: dict[str, str] = {}
    for part in reversed(method.__mro__[:-1]):
        lines = inspect.getsource(part).splitlines()
        matches = (re.match(r"    (\w+): [^#]*# (.+)", line) for line in lines)
        found |= {match[1]: match[2] for match in matches if match}
    return found


@app.command("data")
def data_(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One data set; else all of them.")] = None,
    download: Annotated[bool, option("Fetch it from where it is published.", "--download")] = False,
    verify: Annotated[bool, option("Check the files against known checksums.", "--verify")] = False,
    folder: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.", "--data")] = None,
) -> None:
    """Say which data sets are there and where; fetch one; check files."""
    from atoll.data import datasets
    from atoll.data import download as files

    root = datasets.data_folder(folder)
    if download:
        if name is None:
            raise UnknownName("`--download` must be given the name of a data set.", hint="`atoll data` lists them.")
        with files.shown(messages()) as progress:
            files.fetch(name, datasets.known(root), progress=progress)
    if verify:
        folder = datasets.known(root)
        verdicts = files.verify(folder, name)
        rows = [[str(path.relative_to(folder)), verdict] for path, verdict in verdicts.items()]
        write(plain_table([f"file in {folder}", "checksum"], rows))
        if "WRONG" in verdicts.values():
            raise typer.Exit(FAILED)
        return
    write(plain_table(datasets.OVERVIEW, datasets.overview(root, name)))
    say(f"folder: {root}" if root else "no data folder is known: give --data DIR, or set ATOLL_DATA")
    if name and datasets.where(name, root) == datasets.ABSENT:
        say(f"to get it: {files.how_to_get(name)}")


# -- writing a method --------------------------------------------------------------------------------------------------


@app.command()
def new(name: Annotated[str, typer.Argument(help="What the method will be called.")]) -> None:
    """Write a small working method and its test, to start from."""
    from importlib.resources import files

    stem = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", stem):
        raise UnknownName(
            f"A method's name must be lower-case letters, digits and dashes, and begin with a letter. Got {name!r}.",
            hint="for example: atoll new my-method",
        )
    title = "".join(part.capitalize() for part in stem.split("_"))
    paths = {Path(f"{stem}.py"): "example.py", Path(f"test_{stem}.py"): "test_example.py"}
    for path in paths:
        if path.exists():
            raise RunError(f"`atoll new` writes new files only. {path} exists.", hint="choose another name.")
    for path, template in paths.items():
        text = (files("atoll") / "templates" / template).read_text(encoding="utf-8")
        path.write_text(text.replace("Example", title).replace("example", stem), encoding="utf-8")
    file, test = paths
    out().print(
        f"Wrote {file} and {test}. Next:\n"
        f"  atoll check ./{file}                    what every method must pass\n"
        f"  atoll compare ./{file} ditto            against others\n"
        f"  pytest {test}",
        highlight=False,
    )


@app.command()
def check(name: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A method's name or file, or `all`.")]) -> None:
    """Check that a method does what every method must: isolation, determinism, honest bytes, resuming, and more."""
    from atoll import conformance
    from atoll.algorithms import find, found

    methods = found() if name == "all" else {name: find(name)}
    failures = 0
    for called, method in methods.items():
        with progress(len(conformance.checks())) as shown:
            shown.begin(called)
            results = conformance.check(method, on_result=lambda _, shown=shown: shown.advance())  # type: ignore[misc]
        rows = [["pass" if one.passed else "FAIL", one.name, f"{one.seconds:.1f}", one.message] for one in results]
        table = plain_table(["", "check", "seconds", ""], rows)
        failed = sum(not one.passed for one in results)
        verdict = f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks passed"
        out().print(table, Text(f"{called}: {verdict}\n", style="bold red" if failed else "bold green"))
        failures += failed
    if failures:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    device: Annotated[str, option("auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, option("Fewer repetitions.", "--quick")] = False,
    only: Annotated[list[str] | None, option("Only this workload; repeatable.")] = None,
) -> None:
    """Measure speed on this machine, against the plain loop a researcher writes."""
    from atoll.bench import run as run_bench

    raise typer.Exit(run_bench(device=device, quick=quick, only=only or []))


# -- what is shown -----------------------------------------------------------------------------------------------------


def present_run(folder: Path) -> None:
    """Write the report of a run and show its table."""
    from atoll.results import Comparison, Outcome

    outcome = Outcome.read(folder)
    if not outcome.finished:
        say(f"This run is incomplete: {outcome.done} of {outcome.rounds} rounds.", style="yellow")
    if not outcome.evaluations:  # only the server's test set was used, or nothing yet
        return write("", run_table(outcome))
    comparison = Comparison.of_runs([outcome])
    paths = comparison.save(folder)
    up, down = megabytes(outcome.megabytes("up")), megabytes(outcome.megabytes("down"))
    write("", run_table(outcome), Text(comparison.protocol, style="dim"))
    write(f"{up} MB up, {down} MB down, {outcome.gradients} gradients, {outcome.seconds:.1f} s of training")
    return _paths(run=folder, report=paths["report"])


def present_comparison(comparison: "Comparison", folder: Path, reused: int = 0) -> None:
    """Write the results of a comparison, show its table and say what it shows."""
    from atoll.report.summary import findings

    paths = comparison.save(folder)
    write("", comparison.table(), Text(notes(comparison), style="dim"), "")
    if comparison.newcomers:
        write(newcomers_table(comparison), Text(newcomers_notes(comparison), style="dim"), "")
    write(*map(Text, findings(comparison)))
    for missing in comparison.missing:
        say(missing, style="yellow")
    runs = len(comparison.outcomes) * len(comparison.seeds)
    if reused:
        say(f"{reused} of {runs} runs were finished already and are reused.")
    shown = ("report", "results", "json", "markdown", "latex", "clients")
    _paths(**{name: path for name, path in paths.items() if name in shown})


def _paths(**paths: Path) -> None:
    write("")
    for name, path in paths.items():
        out().print(Text(f"{name:<8} {path}"), soft_wrap=True)


class Shown:
    """Progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, bar: Progress, rounds: int, runs: int) -> None:
        self.bar, self.rounds, self.runs = bar, rounds, runs
        self.reused, self.begun, self.name, self.score = 0, 0, "", ""
        self.said = time.monotonic()
        self.task = bar.add_task("", total=rounds * runs, facts="")

    def begin(self, name: str) -> None:
        """A run begins."""
        self.name, self.begun, self.score = name, self.begun + 1, ""
        self.bar.update(self.task, description=name, completed=self.rounds * (self.begun - 1))

    def begin_run(self, method: str, seed: int, how: str) -> None:
        """A run of a comparison begins."""
        self.begin(f"{method}, seed {seed}")
        self.reused += how == "reused"

    def advance(self) -> None:
        """A step without a round."""
        self.bar.advance(self.task)

    def after(self, line: dict[str, Any]) -> None:
        """A round is done."""
        facts = [f"loss {value:.3f}" for name, value in line["loss"].items() if name == "loss/main"]
        if "personal" in line.get("evaluation", {}):
            self.score = f"validation {line['evaluation']['personal']['val']['macro']:.3f}"
        facts += [self.score] if self.score else []
        completed = self.rounds * (self.begun - 1) + line["round"]
        self.bar.update(self.task, completed=completed, facts="  ".join(facts))
        if not self.bar.console.is_terminal and time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            say(f"{self.name}: round {line['round']} of {self.rounds}, {', '.join(facts)}")


@contextmanager
def progress(rounds: int, runs: int = 1) -> Iterator[Shown]:
    """A progress bar that vanishes at its end."""
    columns = (
        TextColumn("{task.description:<18}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}", style="dim"),
    )  # fmt: skip
    console = messages()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Shown(bar, rounds, runs)


def out() -> Console:
    """Where data goes."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)


def write(*parts: Any) -> None:
    """Show data, one part under the other."""
    for part in parts:
        out().print(part, highlight=False)


def messages() -> Console:
    """Where progress and messages go."""
    return Console(stderr=True)


def say(text: str, style: str = "") -> None:
    """A message on stderr, as it is."""
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


# -- small parts -------------------------------------------------------------------------------------------------------


def each(*calls: Callable[..., None]) -> Callable[..., None]:
    """One call for several."""

    def call(*given: Any) -> None:
        for one in calls:
            one(*given)

    return call


def cohort_of(text: str | None) -> int | float | None:
    """Clients per round from the command line: `10` is a number, `0.1` a share."""
    if text is None:
        return None
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise UnknownName(f"`--cohort` must be a number of clients or a share of them. Got {text!r}.") from None


def engine_of(
    strategy: str, compile_: bool | None, precision: str, device: str, timeout: float | None
) -> "LocalEngine":
    """The engine that was asked for."""
    from atoll.engines.local import LocalEngine

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise EngineError(f"`--device` must be auto, cpu, mps, cuda or cuda:N. Got {device!r}.")
    return LocalEngine(strategy=strategy, compile=compile_, precision=precision, device=device, timeout=timeout)  # type: ignore[arg-type]


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there yet."""
    found, number = folder, 1
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


@contextmanager
def terminations() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does."""

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
