"""The command that attacks a run: audit."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from atoll.cli.display import show_progress, write, write_paths
from atoll.cli.program import FAILED, TRUST, app, option
from atoll.kernel.errors import UnknownName


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    attacks: Annotated[str | None, option("What is tried, joined by commas; else all attacks.")] = None,
    references: Annotated[int, option("Shadow federations, an even number; 0: other clients' models.", min=0)] = 2,
    canaries: Annotated[int, option("Canaries that check the promise: of --dp clients, of +dpsgd samples.", min=0)] = 0,
    contribution: Annotated[bool, option("Value every client's replies, too.", "--contribution")] = False,
    client: Annotated[list[str] | None, option("A client, by name or number; repeatable; else all.")] = None,
    out: Annotated[Path | None, option("Folder of the findings; else RUN/audit.")] = None,
    trust: Annotated[bool, TRUST] = False,
) -> None:
    """Attack a finished run: who can be found in its models, what its updates show, whether its promise holds."""
    from atoll.experiments.audit import ATTACKS
    from atoll.experiments.audit import audit as attack
    from atoll.experiments.audit.findings import count_steps
    from atoll.experiments.comparison import Comparison
    from atoll.federation.report import Report

    if (folder / "comparison.json").exists():
        runs = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise UnknownName(
            f"An audit is of one run. {folder} holds a comparison.", hint=f"its runs are: {', '.join(runs)}."
        )
    chosen = ATTACKS if attacks is None else tuple(filter(None, attacks.split(",")))
    with show_progress(count_steps(chosen, references, canaries, contribution=contribution)) as bar:
        bar.begin("audit")
        found = attack(
            folder, attacks=chosen, references=references, canaries=canaries, contribution=contribution,
            clients=client, trust=trust, on_step=lambda _: bar.advance(),
        )  # fmt: skip
    for sentence in found.sentences:
        write(Text(sentence), "")
    paths = found.save(out or folder / "audit")
    if out is None and (page := folder / "report.html").exists():  # it has sections of what was found
        Comparison.of_runs([Report.read(folder, trust=trust)]).save(folder)
        paths["report"] = page
    write_paths(**paths)
    if not found.holds:
        raise typer.Exit(FAILED)
