"""Commands about data: the data sets there are, a check of your own files, and a schema that sites share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from atoll.cli.display import messages, say, write, write_paths
from atoll.cli.options import split_names
from atoll.cli.program import FAILED, app, option
from atoll.kernel.errors import UnknownName
from atoll.report.table import plain_table

if TYPE_CHECKING:
    from atoll.data.sheets import Problem

SETS = "sets"  # the command that is meant where none is named


class DataCommands(TyperGroup):
    """Takes what is no command for the name of a data set: `atoll data hapt` is `atoll data sets hapt`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in front that is meant."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [SETS, *args]
        return super().parse_args(ctx, args)


data = typer.Typer(cls=DataCommands, help="Data sets and where they are; checks and schemas of your own data.")
app.add_typer(data, name="data")


@data.command("sets")
def list_sets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One data set; else all of them.")] = None,
    download: Annotated[bool, option("Fetch it from where it is published.", "--download")] = False,
    verify: Annotated[bool, option("Check the files against known checksums.", "--verify")] = False,
    folder: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.", "--data")] = None,
) -> None:
    """List data sets and where they are; fetch one; check files."""
    from atoll.data import datasets
    from atoll.data import download as files

    root = datasets.data_folder(folder)
    if download:
        if name is None:
            raise UnknownName("`--download` must be given the name of a data set.", hint="`atoll data` lists them.")
        with files.show_progress(messages()) as progress:
            files.fetch(name, datasets.require_root(root), progress=progress)
    if verify:
        folder = datasets.require_root(root)
        verdicts = files.verify(folder, name)
        rows = [[str(path.relative_to(folder)), verdict] for path, verdict in verdicts.items()]
        write(plain_table([f"file in {folder}", "checksum"], rows))
        if "WRONG" in verdicts.values():
            raise typer.Exit(FAILED)
        return
    write(plain_table(datasets.OVERVIEW, datasets.overview(root, name)))
    say(f"folder: {root}" if root else "no data folder is given: use --data DIR, or set ATOLL_DATA")
    if name and datasets.locate(name, root) == datasets.ABSENT:
        say(f"to get it: {files.how_to_get(name)}")


@data.command()
def check(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder with a file per client, or one file.")],
    target: Annotated[str | None, option("The column to predict; else y, if there is one.")] = None,
    client: Annotated[str | None, option("Of one file, the column that names the client.")] = None,
    apart: Annotated[str | None, option("Columns that are no features, as patient,time.")] = None,
    fix: Annotated[bool, option("Write a cleaned copy, and a list of what was done.", "--fix")] = False,
    output: Annotated[Path | None, option("Folder of the cleaned copy.", "--out", "-o")] = None,
) -> None:
    """Find all problems of all files at once; with --fix, write a cleaned copy. Exit code 1 if there are any."""
    from atoll.data.check import Check
    from atoll.data.check import check as check_tables
    from atoll.data.check_arrays import check_arrays
    from atoll.data.clean import clean, save

    if fix and output is None:
        raise UnknownName("`--fix` must be given a folder for the cleaned copy.", hint="for example -o cleaned.")
    arrays = check_arrays(source, target) if source.exists() else None
    found = arrays or check_tables(source, target=target, client=client, apart=split_names(apart) or ())
    if not found.problems:
        write(f"{source}: {found.summary}. No problems found.")
        return
    _show_problems(found.problems, fixing=fix)
    mendable = sum(bool(problem.fix) for problem in found.problems)
    say(f"{source}: {found.summary}. {len(found.problems)} problems, of which --fix mends {mendable}.")
    if not fix:
        raise typer.Exit(FAILED)
    assert output is not None
    cleaned, changes = clean(found) if isinstance(found, Check) else found.clean()
    paths = save(cleaned, changes, output) if isinstance(cleaned, Check) else cleaned.save(changes, output)
    if cleaned.problems:
        say("What is left in the cleaned copy:", style="yellow")
        _show_problems(cleaned.problems, fixing=False)
    write_paths(**paths)


def _show_problems(problems: Sequence["Problem"], *, fixing: bool) -> None:
    rows = [[one.file, one.column, one.lines, one.what, one.fix or "–"] for one in problems]
    write(plain_table(["file", "column", "lines", "problem", "mended" if fixing else "--fix"], rows))


@data.command()
def schema(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A file, or a folder with a file per client.")],
    target: Annotated[str | None, option("The column to predict; else y.")] = None,
    client: Annotated[str | None, option("The column that names the client, which is no feature.")] = None,
    features: Annotated[str | None, option("The columns to use, as age,sex; else all others.")] = None,
    categorical: Annotated[str | None, option("Columns of codes that look like numbers, as ward,icd.")] = None,
    classes: Annotated[str | None, option("How many, or the labels in order, as low,high.")] = None,
    kind: Annotated[str, option("auto, classification, regression or tokens.")] = "auto",
    standardise: Annotated[str, option("Whether each site scales its numbers: client or none.")] = "client",
    apart: Annotated[str | None, option("Columns that are no features, as patient,time.")] = None,
    output: Annotated[Path, option("The file to write.", "--out", "-o")] = Path("schema.json"),
) -> None:
    """Write down columns, types, categories and classes, so sites prepare their files alike; no sample is in it."""
    from atoll.data.own import find_schema_of, parse_classes

    found = find_schema_of(
        source, target=target, client=client, features=split_names(features), kind=kind,
        categorical=split_names(categorical) or (), classes=parse_classes(classes), standardise=standardise,
        apart=split_names(apart) or (),
    )  # fmt: skip
    rows = [[one.name, one.type, _describe_feature(one)] for one in found.features]
    rows.append([found.target or "the next token", found.kind, ", ".join(found.classes)])
    found.save(output)
    write(plain_table(["column", "type", "values"], rows))
    say("check that the categories and classes are complete: a site with another one is refused")
    write_paths(schema=output)


def _describe_feature(feature: Any) -> str:
    if feature.type == "array":
        return f"{'x'.join(map(str, feature.shape))} {feature.holds}"
    return ", ".join(feature.categories)
