"""Commands that only show: list, show, partition, explain."""

import functools
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from atoll.cli import completion
from atoll.cli.display import out, say, write, write_paths
from atoll.cli.options import OwnOptions, with_options
from atoll.cli.program import RUNS, TRUST, app, option
from atoll.federation.numbers import UNKNOWN, Numbers
from atoll.kernel.errors import AtollError, unknown
from atoll.report.table import plain_table
from atoll.toolbox.references import bibtex

if TYPE_CHECKING:
    from atoll.kernel.algorithm import Algorithm


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, pairs, tasks, partitions, models, rules, attacks, compressions or runs",
            **completion.WHAT_TO_LIST,
        ),
    ] = "algorithms",
    one_shot: Annotated[bool, option("Only algorithms whose clients upload once.", "--one-shot")] = False,
    long: Annotated[bool, option("With hyperparameters, or runs of tune and advise.", "--long", "-l")] = False,
) -> None:
    """List algorithms, pairs, tasks, partitions, models, rules, attacks, compressions or runs."""
    kinds: dict[str, Callable[[], RenderableType]] = {
        "algorithms": functools.partial(_list_algorithms, one_shot, long),
        "pairs": functools.partial(_list_pairs, long),
        "tasks": _list_tasks, "partitions": _list_partitions, "models": _list_models,
        "runs": functools.partial(_list_runs, long),
        "rules": _list_rules, "attacks": _list_attacks, "compressions": _list_compressions,
    }  # fmt: skip
    if what not in kinds:
        raise unknown("list", what, kinds)
    out().print(kinds[what]())
    if what == "algorithms" and not long:
        say("`atoll show NAME` explains one, `--long` adds hyperparameters, `--one-shot` lists those that upload once.")


def _list_algorithms(one_shot: bool, long: bool) -> Table:
    from atoll.algorithms import list_methods
    from atoll.kernel.algorithm import hyperparameters

    methods = {name: method for name, method in sorted(list_methods().items()) if method.one_shot or not one_shot}
    described = {name: (method.__doc__ or "").split("\n")[0] for name, method in methods.items()}
    if long:
        values = {
            name: ", ".join(f"{one.name}={one.default}" for one in hyperparameters(method))
            for name, method in methods.items()
        }
        rows = [[name, text, values[name]] for name, text in described.items()]
        return plain_table(["algorithm", "what it is", "hyperparameters"], rows)
    room = out().width - max(map(len, described)) - 3
    rows = [[name, textwrap.shorten(text, room, placeholder=" …")] for name, text in described.items()]
    return plain_table(["algorithm", "what it is"], rows)


def _list_pairs(long: bool) -> Group:
    """List trainings, pieces and answers with what they are; then which answers go with each training."""
    from atoll.algorithms import list_pairs, list_parts, name_of
    from atoll.kernel.algorithm import hyperparameters
    from atoll.toolbox.pairs import AnswerPiece, LocalTraining, ServerAnswer, TrainingPiece

    rows = [
        [
            title,
            name,
            (part.__doc__ or "").split("\n")[0],
            *([", ".join(one.name for one in hyperparameters(part))] if long else []),
        ]
        for title, kind in (
            ("training", LocalTraining),
            ("piece", TrainingPiece),
            ("answer", ServerAnswer),
            ("its piece", AnswerPiece),
        )
        for name, part in list_parts(kind).items()
    ]
    parts = plain_table(["", "name", "what it is", *(["hyperparameters"] if long else [])], rows)
    pairs = list_pairs()
    together = []
    for training in list_parts(LocalTraining):
        mine = {
            name.partition("/")[2]: name_of(pair) for name, pair in pairs.items() if name.startswith(f"{training}/")
        }
        named = [f"{training}/{answer} is {name}" for answer, name in mine.items() if "/" not in name]
        together.append([training, ", ".join(mine), ", ".join(named)])
    return Group(parts, "", plain_table(["training", "with any of these answers", "by name"], together))


def _list_tasks() -> Table:
    from atoll.data import datasets

    return plain_table(
        ["task", "where it comes from"], [[name, datasets.describe_origin(name)] for name in datasets.names()]
    )


def _list_partitions() -> Table:
    from atoll.data import partition

    return plain_table(["partition", "what it does"], [[*both] for both in partition.meanings().items()])


def _list_models() -> Table:
    from atoll import models

    auto = ["auto", "the data set's own, or cnn for images from 16x16, else mlp"]
    return plain_table(["model", "what it is for"], [auto, *([*both] for both in models.purposes().items())])


def _list_rules() -> Table:
    from atoll.protect.rules import MIXINGS, RULES

    mixings = {f"{name}+RULE": kind for name, kind in MIXINGS.items()}
    return _describe_classes("rule", {**RULES, **mixings})


def _list_attacks() -> Table:
    from atoll.protect.attacks import ATTACKS

    return _describe_classes("attack", ATTACKS)


def _list_compressions() -> Table:
    from atoll.protect.compression import COMPRESSIONS

    return _describe_classes("compression", COMPRESSIONS)


def _describe_classes(kind: str, classes: Mapping[str, type]) -> Table:
    rows = [[name, (one.__doc__ or "").split("\n")[0]] for name, one in classes.items()]
    return plain_table([kind, "what it does"], rows)


def _list_runs(long: bool) -> Table:
    """List runs; those inside a folder of tune or advise as one line, unless all are asked for."""
    from atoll.experiments.tuning import QUESTION
    from atoll.records.runs import find_runs

    found = find_runs(RUNS)
    choices = {run: next((one for one in run.parents if (one / QUESTION).exists()), run) for run in found}
    inside = Counter(choice for run, choice in choices.items() if choice != run)
    rows = []
    for folder in found if long else dict.fromkeys(choices.values()):
        try:
            rows.append(_describe_choice(folder, inside[folder]) if folder in inside else _describe_run(folder))
        except AtollError as error:
            say(f"left out: {folder}. {error}", style="yellow")
    if inside and not long:
        say(f"`atoll list runs --long` lists the {inside.total()} runs of tune and advise as well.")
    return plain_table(["run", "task", "rounds", "mean test score"], rows)


def _describe_choice(folder: Path, runs: int) -> list[str]:
    """Return a row for a folder of tune or advise, with so many runs."""
    from atoll.experiments.tuning import QUESTION, Question
    from atoll.records.files import read_record

    asked = read_record(folder / QUESTION, Question)
    task = UNKNOWN if asked.recipe is None else asked.recipe.dataset
    return [str(folder), task, str(asked.settings.rounds), f"{asked.kind}: {runs} run{'s' * (runs > 1)}"]


def _describe_run(folder: Path) -> list[str]:
    """Return a row for a run; nothing that its folder names is run."""
    from atoll.federation.config import RunConfig
    from atoll.records.runs import Run

    run = Run.open(folder)
    run.verify()
    asked, history = RunConfig.of_run(run), run.metrics()
    scores = history[-1].personal if history else None
    numbers = Numbers(**asked.task.metric)
    score = f"{numbers.score(scores['test'].macro)} {numbers.name}" if scores else UNKNOWN
    return [str(folder), asked.task.name, f"{len(history)}/{asked.settings.rounds}", score]


@app.command()
@with_options
def partition(
    task: Annotated[str, option("Data set; see `atoll list tasks`.", **completion.TASKS)] = "digits",
    partition: Annotated[
        str, option("How samples are dealt; see `atoll list partitions`.", **completion.PARTITIONS)
    ] = "auto",
    clients: Annotated[int | None, option("How many there are; else 20, or all natural ones.")] = None,
    split: Annotated[str, option("Per cent of a client's samples: train/val/test.")] = "60/15/25",
    data: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.")] = None,
    seed: Annotated[int, option("Of the draws.")] = 0,
    out: Annotated[Path | None, option("Where to draw it, an .svg file.")] = None,
    *,
    options: OwnOptions,
) -> None:
    """Show who gets which samples: sizes, labels and how clients differ, as a table and as a picture."""
    from atoll.data.recipe import Recipe
    from atoll.report.partition import save_picture, statistics_table

    folder = None if data is None else str(data.resolve())
    words: dict[str, Any] = {"partition": partition, "clients": clients, "seed": seed, "split": split}
    own = options.own_data()
    recipe = Recipe(task, data=folder, **words) if own is None else Recipe.of_own(own, **words)
    found = recipe.build().statistics
    write(statistics_table(found), "", Text(f"{found.sentence} Training samples, seed {seed}."))
    if out is not None:
        save_picture(found, out)
        write_paths(picture=out)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A method's name or file.", **completion.METHODS)],
) -> None:
    """Explain a method: its objective, hyperparameters, what it sends, and what to cite."""
    from atoll.compose import create
    from atoll.kernel.algorithm import describe_values, hyperparameters
    from atoll.kernel.wrapper import core_of

    method = create(name)
    console, kind = out(), type(core_of(method))
    for part in parts_of(kind) if getattr(kind, "full_name", "") else [kind]:
        described = sys.modules[part.__module__].__doc__ or part.__doc__ or ""
        console.print(Text(inspect.cleandoc(described)), soft_wrap=True)
    meanings = field_comments(method)
    rows = [[one.name, one.expected, repr(one.default), meanings.get(one.name, "")] for one in hyperparameters(method)]
    write("", plain_table(["hyperparameter", "must be", "default", "meaning"], rows), "")
    sent = ", ".join(f"{field} ({kind})" for field, kind in method.sends.items()) or "nothing"
    tuned = "; ".join(f"{one.name}: {one.search}" for one in hyperparameters(method) if one.search is not None)
    console.print(Text(f"Tuned     {tuned or 'the step size only'}"))
    console.print(Text(f"Sends     {sent}"))
    sums = (
        "yes: the server needs sums over clients only" if method.sums_suffice else "no: the server needs single replies"
    )
    console.print(Text(f"Secure    {sums}"))
    for other, values in method.limits.items():
        console.print(Text(f"Limit     with {describe_values(values)} it is {other}"))
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
    parts: Annotated[bool, option("Open the models, and say which of their parts are a client's own.")] = False,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Say why clients gain or lose: how their data differ, whom they learn from, what would likely help."""
    from atoll.experiments.explain import Study, overview
    from atoll.experiments.explain import explain as explain_client

    study = Study.read(folder, method, seed, trust=trust)
    clients = study.most_affected(most) if client is None else [study.find(client)]
    write(*map(Text, overview(study)))
    for one in clients:
        paragraphs = Table.grid(Column(no_wrap=True, style="dim"), Column(), padding=(0, 2))
        for heading, sentences in explain_client(study, one, parts=parts).items():
            paragraphs.add_row(Text(heading), Text(" ".join(sentences)))
        write("", Text(study.title(one), style="bold"), paragraphs)
    if not clients:
        write("", "Nobody gains or loses more than one standard error; --client explains one of them.")


def field_comments(method: "Algorithm") -> dict[str, str]:
    """Return what the comment after each field of a method says; those of the methods or parts inside it among them."""
    from atoll.kernel.algorithm import Algorithm

    found: dict[str, str] = {}
    for field in fields(method):
        value = getattr(method, field.name)
        found |= field_comments(value) if isinstance(value, Algorithm) else {}
    classes = [one for part in (type(method), *parts_of(type(method))) for one in part.__mro__[:-1]]
    for part in dict.fromkeys(reversed(classes)):
        try:
            source = inspect.getsource(part)
        except OSError:  # a pair without a file of its own
            continue
        names = getattr(method, "values_of", {}).get(part, {})  # what a pair calls a field of its part
        for name, first, rest in re.findall(r"^    (\w+): [^#\n]*# (.+)((?:\n    # .+)*)", source, flags=re.MULTILINE):
            found[names.get(name, name)] = first + rest.replace("\n    #", "")
    return found


def parts_of(method: type) -> list[type]:
    """Return what a pair is made of; nothing for another method."""
    return [*getattr(method, "client_parts", ()), *getattr(method, "server_parts", ())]
