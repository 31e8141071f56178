"""Commands for authors of methods: new, check, bench."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from atoll.cli import completion
from atoll.cli.display import out, show_progress
from atoll.cli.program import FAILED, app, option
from atoll.kernel.errors import RunError, UnknownName
from atoll.report.table import plain_table


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
        text = (files("atoll.cli") / "templates" / template).read_text(encoding="utf-8")
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
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ALGORITHM",
            help="A method's name or file, also with hyperparameters, or `all`.",
            **completion.METHODS,
        ),
    ],
) -> None:
    """Check that a method does what every method must: isolation, determinism, honest bytes, resuming, and more."""
    from atoll.compose import create
    from atoll.testing import conformance

    several = name == "all"
    methods = conformance.everything() if several else {name: create(name)}
    summary = []
    for number, (called, method) in enumerate(methods.items(), 1):
        with show_progress(len(conformance.checks())) as bar:
            bar.begin(f"{called} ({number} of {len(methods)})" if several else called)
            results = conformance.check(method, on_result=lambda _, bar=bar: bar.advance())  # type: ignore[misc]
        failed = [one.name for one in results if not one.passed]
        rows = [
            ["pass" if one.passed else "FAIL", one.name, f"{one.seconds:.1f}", one.message]
            for one in results
            if not several or not one.passed
        ]
        verdict = f"{len(failed)} of {len(results)} checks failed" if failed else f"all {len(results)} checks passed"
        shown_rows = [plain_table(["", "check", "seconds", ""], rows)] if rows else []
        out().print(*shown_rows, Text(f"{called}: {verdict}", style="bold red" if failed else "bold green"))
        seconds = sum(one.seconds for one in results)
        summary.append(["FAIL" if failed else "pass", called, f"{seconds:.1f}", ", ".join(failed)])
    failures = sum(row[0] == "FAIL" for row in summary)
    if several:
        verdict = f"{failures} of {len(methods)} methods failed" if failures else f"all {len(methods)} methods passed"
        style = "bold red" if failures else "bold green"
        out().print("", plain_table(["", "method", "seconds", "failed checks"], summary), Text(verdict, style=style))
    if failures:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    device: Annotated[str, option("auto, cpu, cuda or mps.", **completion.WHERE)] = "auto",
    quick: Annotated[bool, option("Within a minute: few steps, nothing compiled, no targets.", "--quick")] = False,
    only: Annotated[list[str] | None, option("Only this workload; repeatable.")] = None,
    peer: Annotated[list[str] | None, option("Run a peer's code beside ours: pfllib=PATH of your copy.")] = None,
    output: Annotated[Path | None, option("Write the result as JSON to this file.", "--output", "-o")] = None,
) -> None:
    """Measure speed on this machine: steps, whole comparisons, first results, and peers' code beside ours."""
    from atoll.testing.bench import run as run_bench

    raise typer.Exit(run_bench(device, quick=quick, only=only, peers=peer, file=output))
