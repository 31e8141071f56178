"""Write the last table of docs/guides/sites.md: what leaves a client and what reaches it, as the ledger has it.

    python benchmarks/leaving_page.py

Every method plays two rounds (a one-shot method one) with five clients on 300 of scikit-learn's digits and a
perceptron of one hidden layer with 16 units. What lasts long is played short: the bytes of a message depend on the
model, and not on how long it was trained.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from atoll import LocalEngine, Recipe, Report, federate
from atoll.algorithms import list_methods
from atoll.compose import create
from atoll.deploy.demands import holds_rows_of_clients
from atoll.runtime.serialise import size_of
from atoll.testing.conformance.methods import shorten
from atoll.testing.conformance.tasks import build_task

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "sites.md"
MODEL = "mlp:16"
TABLE = "| methods | leaves"  # where the table begins; what stands before it is written by hand


def play(name: str) -> Report:
    """Run a method for as long as the table needs."""
    method = shorten(create(name))
    task = Recipe(clients=5, partition="dirichlet:0.5", model=MODEL, samples=300, public=0.1).build()
    if method.items_by:  # users and items, in float32 as everything on the page
        task = build_task(items_by=method.items_by).to(torch.device("cpu"), torch.float32)
    rounds = 1 if method.one_shot else max(2, method.least_rounds)
    return federate(task, method, rounds=rounds, engine=LocalEngine(device="cpu", strategy="loop eager"))


def describe(name: str) -> str:
    """Return the cells of a method's row."""
    report = play(name)
    last = len(report.history) - 1
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for entry in report.ledger.entries:
        place = "before" if entry.round < 0 else entry.direction
        arrow = {"up": "↑ ", "down": "↓ "}[entry.direction] if place == "before" else ""
        title = f"{arrow}{entry.field} ({entry.kind})" if entry.direction == "up" else f"{arrow}{entry.field}"
        if entry.round in (-1, 0, last) and entry.field != "last broadcast":
            parts[place][title] = max(parts[place].get(title, 0), entry.bytes)
    cells = [
        ", ".join(f"{title} {size:,}" for title, size in parts[place].items()) or "–"
        for place in ("up", "down", "before")
    ]
    sent = report.algorithm.state_for(report.server, np.array([0]))
    state = "–" if sent is None else f"{size_of(sent):,}"
    return f"{' | '.join(cells)} | {state} | {', '.join(remarks(report)) or '–'} |"


def remarks(report: Report) -> Iterator[str]:
    """Yield what is particular about a method at sites."""
    method = report.algorithm
    if method.needs_public_data:
        yield "needs server data"
    if not method.sums_suffice:
        yield "one by one"
    if not method.defines("state_for") and holds_rows_of_clients(report.server, report.task.clients):
        yield "others' too"
    if method.defines("finish"):
        yield "last step at the site"


def main() -> None:
    logging.getLogger("atoll").setLevel(logging.ERROR)
    methods: dict[str, list[str]] = defaultdict(list)  # by what leaves
    for name in list_methods():
        methods[describe(name)].append(f"`{name}`")
        print(name, flush=True)
    rows = [f"| {', '.join(names)} | {cells}" for cells, names in methods.items()]
    text = PAGE.read_text()
    start = text.index("|---", text.index(TABLE))
    start = text.index("\n", start) + 1
    PAGE.write_text(text[:start] + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
