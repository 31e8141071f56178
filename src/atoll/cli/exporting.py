"""Commands for models that leave a run: export, predict, welcome."""

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from atoll.cli.display import say, show_progress, write, write_paths
from atoll.cli.program import TRUST, app, option
from atoll.federation.numbers import Numbers
from atoll.kernel.errors import AtollError, RunError, UnknownName, first_line
from atoll.report.table import plain_table

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.export.folder import Exported, WrittenModel
    from atoll.export.model import ClientModel
    from atoll.federation.models import Quality
    from atoll.federation.report import Report

RUN = typer.Argument(metavar="RUN", help="The folder of a finished run.")
FORMAT = option("safetensors, onnx or pt2.", "--format")
LICENCE = option("Licence of your own data, for the manifest.")
NEW = typer.Argument(metavar="FILE", help="New samples: CSV, Parquet or npz; of a data set, also npy.")
SHOWN = 20  # clients whose names are listed


@app.command()
def export(
    folder: Annotated[Path, RUN],
    client: Annotated[list[str] | None, option("A client, by name or number; repeatable.")] = None,
    everybody: Annotated[bool, option("The models of all clients.", "--all")] = False,
    form: Annotated[str, FORMAT] = "safetensors",
    int8: Annotated[bool, option("Weights of 8 bits; says what that costs each client.", "--int8")] = False,
    out: Annotated[Path | None, option("Folder of the models; else RUN/models/FORMAT.")] = None,
    licence: Annotated[str | None, LICENCE] = None,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Write clients' models as files that need no Atoll: weights, preprocessing, class names, a loader."""
    if everybody == bool(client):
        raise UnknownName(
            "`atoll export` must know whose model it is. Give --client, or --all for everybody's.",
            hint=f"for example: atoll export {folder} --client 0",
        )
    report = _read(folder, trust=trust)
    out = out or folder / "models" / (f"{form}-int8" if int8 else form)
    total = report.clients if client is None else len(client)
    with show_progress(total) as bar:
        bar.begin("export")
        made = report.export(out, client, format=form, int8=int8, licence=licence, on_client=lambda _: bar.advance())
    _present(report, made, out)


def _present(report: "Report", made: "list[Exported]", out: Path) -> None:
    """Show what was measured of each model, and name those whom 8 bits cost something."""
    numbers = Numbers(**report.metric)
    rows = []
    for one in made:
        pairs = [one.made] if one.before is None else [one.before, one.made]
        scores = [numbers.score(p.score) if p.score is not None else "–" for p in pairs]
        rows.append([
            one.client, " → ".join(f"{p.bytes / 1000:.1f}" for p in pairs),
            " → ".join(f"{p.milliseconds:.2f}" for p in pairs), " → ".join(scores),
            f"{one.made.difference:.0e}",
        ])  # fmt: skip
    write(plain_table(["client", "kB", "ms a sample", f"validation {numbers.name}", "difference"], rows))
    if made and made[0].before is not None:
        losing = [one for one in made if one.loses]
        names = ", ".join(one.client for one in losing[:SHOWN]) + (", ..." if len(losing) > SHOWN else "")
        what = f"{len(losing)} of {len(made)} clients lose by 8 bits: {names}." if losing else "Nobody loses by 8 bits."
        write("", Text(f"{what} Scores are those on validation samples, before and after."))
    write("", Text("Difference: at most, of the files' answers from the model's, on the client's own samples."))
    write_paths(models=out, manifest=made[0].folder / "manifest.json")


@app.command()
def predict(
    folder: Annotated[Path, RUN],
    file: Annotated[Path, NEW],
    client: Annotated[str, option("Whose model answers: a client by name or number, or one that was welcomed.")],
    out: Annotated[Path | None, option("A CSV file; else the answers are written to stdout.")] = None,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Answer new samples with a client's model: the class and its probability, or the number, row by row."""
    model = _find_model(_read(folder, trust=trust), client, trust=trust)
    _write_answers(model, model.answer(_samples(file)), out)


def _find_model(report: "Report", name: str, *, trust: bool) -> "ClientModel | WrittenModel":
    """Return the model of a client of the run, or of one that it welcomed."""
    from atoll.federation.models import find_client, newcomers_of, read_newcomer

    welcomed = newcomers_of(report)
    try:
        find_client(report.require_live().task, name)
    except UnknownName as error:
        if name in welcomed:
            return read_newcomer(welcomed[name], trust=trust)
        if welcomed:
            error.hint = f"{error.hint or ''} Welcomed were {', '.join([*welcomed][:SHOWN])}.".strip()
        raise
    if name in welcomed:
        raise UnknownName(
            f"A client's name must be that of one model. {name!r} is a client of the run, and one that it welcomed.",
            hint="welcome the other one from a file of another name.",
        )
    return report.model(name)


def _write_answers(model: "ClientModel | WrittenModel", answers: "Tensor", out: Path | None) -> None:
    from atoll.export.model import name_classes

    classes = model.classes
    head, rows = (
        ["prediction"],
        [[f"{number:.6g}" for number in row] for row in answers.reshape(len(answers), -1).tolist()],
    )
    if classes is None:
        several = len(rows[0]) > 1 if rows else False
        head = [f"prediction {place}" for place in range(len(rows[0]))] if several else head
    elif answers.ndim > 2:  # a class at every place
        head, rows = ["prediction"], [[" ".join(one)] for one in name_classes(answers, classes)]
    else:
        head = ["prediction", *(f"p({name})" for name in classes)]
        names = name_classes(answers, classes)
        rows = [[name, *(f"{p:.4f}" for p in row)] for name, row in zip(names, answers.tolist(), strict=True)]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([head, *rows])
        return
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])
    except OSError as error:
        raise RunError(f"The answers must be written to a file that can be. {out}: {error.strerror}.") from error
    say(f"{len(rows)} answers in {out}")


@app.command()
def welcome(
    folder: Annotated[Path, RUN],
    file: Annotated[Path, NEW],
    unlabelled: Annotated[bool, option("Read no labels; some methods need none.", "--unlabelled")] = False,
    form: Annotated[str, FORMAT] = "safetensors",
    out: Annotated[Path | None, option("Folder of the model; else RUN/models/new/FILE.")] = None,
    licence: Annotated[str | None, LICENCE] = None,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Make a model for a client that was never there, from its samples and the run's folder, and export it."""
    from atoll.federation.models import NEWCOMERS, export_newcomer, score_newcomer

    report, raw = _read(folder, trust=trust), _samples(file)
    model = report.model_for(raw, unlabelled=unlabelled)
    quality = None if unlabelled else score_newcomer(report, raw)
    place = out or folder / NEWCOMERS / file.stem
    made = export_newcomer(report, model, raw, place, file.stem, format=form, licence=licence, quality=quality)
    labels = "its samples alone" if unlabelled else "its samples and labels"
    write(Text(f"{file.stem}: {model.kind}, by {report.label} from {labels}."))
    if not unlabelled:
        write(Text(_describe_quality(report, quality)))
    write("")
    _present(report, [made], place)


def _describe_quality(report: "Report", quality: "Quality | None") -> str:
    """Say how good a new client's model is, beside the shared one."""
    numbers = Numbers(**report.metric)
    if quality is None:
        return "How good it is cannot be told: scoring takes at least 2 samples, in 2 groups where there are groups."
    unit = " %" if numbers.share else ""
    if quality.shared is None:
        beside = "and there is no shared model"
    elif quality.shared == quality.score:
        beside = "the same as that of the shared model"
    else:
        beside = f"that of the shared model {numbers.score(quality.shared)}{unit}"
    return (
        f"Its {numbers.name} is {numbers.score(quality.score)}{unit}, {beside}: on "
        f"{quality.samples} samples in {quality.folds} folds, each answered by a model made from the other folds. The "
        f"model that is written was made from all of them."
    )


def _read(folder: Path, *, trust: bool) -> "Report":
    """Read a finished run; of a comparison, say which runs it has."""
    from atoll.federation.report import Report

    if (folder / "comparison.json").exists():
        runs = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise UnknownName(
            f"A model comes from one run. {folder} holds a comparison.", hint=f"its runs are: {', '.join(runs)}."
        )
    return Report.read(folder, trust=trust)


def _samples(file: Path) -> Any:
    """Return raw samples of a file: an array of an npy file, else the file itself, which is read as a table."""
    if not file.exists():
        raise UnknownName(f"New samples must be in a file. There is no {file}.")
    if file.suffix != ".npy":
        return file
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise AtollError(f"{file} must be an array of NumPy. It cannot be read: {first_line(error)}") from error
