"""Every method on one task, with default hyperparameters: docs/results/methods.md, and a line on each method's page.

    nice python benchmarks/methods_table.py                     # runs what is missing in docs/results/methods.json
    python benchmarks/methods_table.py --again '^ditto'         # runs these again
    python benchmarks/methods_table.py --page                   # writes the page, and the blocks on the methods' pages

Digits, 20 clients by Dirichlet 0.3, samples cut at random, three seeds with partitions of their own. Methods that take
rounds have 30. One-shot methods have one, and are compared with clients that train alone for the same ten epochs.
Methods that need public samples have tasks of their own, from which a tenth is taken before dealing. Nothing is tuned
or selected. A cell is kept as soon as it is there, so the command can be stopped and called again.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll import LocalEngine, Recipe, federate
from atoll.algorithms import list_methods
from atoll.cli.looking import field_comments
from atoll.compose import create
from atoll.kernel.algorithm import Algorithm, WithEverybody, hyperparameters
from atoll.metrics.significance import interval, is_harmed, standard_error

DOCS = Path(__file__).parents[1] / "docs"
CELLS = DOCS / "results" / "methods.json"
ITEMS = DOCS / "results" / "recommend.json"  # recommenders are measured by recommend_table.py
SEEDS = (0, 1, 2)
ROUNDS, EPOCHS = 30, 10
PUBLIC = 0.1
ALONE = ("local:epochs=10", "fedavg:epochs=10")  # as long as one-shot methods train
BEGINS_PUBLIC = ("abhs",)  # clients begin from a model that is trained on public samples
NORMED = ("fedbn", "mtfl")  # what they keep private this network does not have: they are FedAvg
FURTHER = (  # values other than the defaults: those that pages speak of, and what defaults were before
    "ditto:lam=0.1",
    "interp:adapt=grid,begin=own",
    "apfl:adaptive=true", "apfl-survey:adaptive=false",
    "pfedme:eta=0.05", "pfedme-survey:lam=1,follow=1,weighting=samples",
    "fedfsa:sensitivity=minmax", "fedfsa:sensitivity=loss",
    "fedala:weights_lr=0", "fedala:layers=all",
    "fedamp:lam=0.1", "fedamp:variant=heur",
    "fedphp:way=mmd",
    "fedpac:epochs=1", "fedpac:epochs=1,heads=own",
    "fedrep:head_epochs=1",
    "fml:meme=mlp:16",
    "mtl-reg:lam=1", "mtl-reg:lam=0.01",
    "mocha:lam=0.01", "mocha:lam=1",
    "maml:beta=0.5,alpha=0.1,adapt_steps=5", "perfedavg:alpha=0.1,adapt_steps=5", "reptile:beta=0.5",
    "pfedhn:server_lr=0.1", "pfedhn:server_lr=0.1,private=head",
    "fedmask:epochs=5", "sub-fedavg:epochs=5", "fedavg:epochs=5",
    "ifca:starts=kmeans++,restarts=10", "cfl:eps1=0.5,eps2=1", "flhc:clusters=4",
    "fedgen:beta=0", "fedgen-local:use=classifier",
    "feddf:target=avg_probs", "fedmd:server_epochs=5", "kt-pfl:coefficient_pull=0.05,coefficient_lr=0.05",
    "mtfl-adam:private=none",
    "ensemble:weighting=classes", "ensemble:of=probs",
    "ce-supcon:lam=0.1", "fedetf:scale=4", "fedetf:answer=average",
    "rga:prototypes=means",
    "oneshot-df:server_epochs=400", "fedic:server_epochs=400",
    "oneshot-margins:shrinkage=1", "oneshot-proto:encoder=average",
    "afl:width=1000", "fedcgs:width=1000", "fedpft:components=1", "regmean:damping=1", "fedlpa:damping=0.1",
    "fedov:destroyed=0,adversarial=0",
    *(f"{name}:server_epochs=60,generator_steps=30,server_lr=0.1,width=8,noise=64"
      for name in ("dense", "coboosting", "intactofl")),
    "fafi:profile=faithful", "fafi-plus:own=0.5",
    "abhs:theta=2", "abhs:student_epochs=0", "abhs-local:theta=2",
)  # fmt: skip


class Group(NamedTuple):
    """A table of its own: rounds or one upload, with public samples or without."""

    one_shot: bool
    public: bool

    @property
    def title(self) -> str:
        """Return the heading of its table."""
        return ("One upload" if self.one_shot else f"{ROUNDS} rounds") + (", public samples" if self.public else "")

    @property
    def references(self) -> tuple[str, str]:
        """Return what stands for Local and for FedAvg."""
        return ALONE if self.one_shot else ("local", "fedavg")

    def key(self, method: str, seed: int) -> str:
        """Return the name of a cell."""
        return f"{method} {'public ' if self.public else ''}{'once ' if self.one_shot else ''}seed {seed}"


GROUPS = tuple(Group(one_shot, public) for one_shot in (False, True) for public in (False, True))


def list_group(group: Group) -> list[str]:
    """Return the methods of a table, its references first."""
    names = [name for name, method in list_methods().items() if not method.items_by and name not in NORMED]
    sorted_names = sorted([*names, *FURTHER], key=lambda name: (name.partition(":")[0], ":" in name))
    found = [name for name in sorted_names if group_of(name) == group]
    return list(dict.fromkeys([*group.references, *found]))


def group_of(name: str) -> Group:
    """Return the table that a method is in."""
    method = create(name)
    return Group(method.one_shot, bool(method.needs_public_data) or name.partition(":")[0] in BEGINS_PUBLIC)


def run_missing(again: str | None) -> None:
    """Run the cells that are missing, and those that a pattern names."""
    torch.set_num_threads(1)
    cells = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    engine = LocalEngine(device="cpu", strategy="whole traced one_core")
    for group in GROUPS:
        missing = [
            (name, seed)
            for seed in SEEDS for name in list_group(group)
            if group.key(name, seed) not in cells or (again and re.search(again, name))
        ]  # fmt: skip
        tasks = {seed: build(group, seed) for seed in {seed for _, seed in missing}}
        for name, seed in missing:
            started = time.process_time()
            rounds = 1 if group.one_shot else ROUNDS
            report = federate(
                tasks[seed], name, rounds=rounds, seed=seed, engine=engine, eval_every=rounds, progress=False
            )
            scores, samples = report.scores(), report.samples()
            cells[group.key(name, seed)] = {
                "right": np.rint(scores * samples).astype(int).tolist(),
                "samples": samples.tolist(),
                **{way: round(report.ledger.bytes(way) / len(scores) / rounds) for way in ("down", "up")},
                "cpu_s": round(time.process_time() - started, 1),
                "commit": commit(),
            }
            cells["about"] = {"torch": torch.__version__, "machine": f"{platform.machine()}, one core"}
            CELLS.write_text(write_cells(cells))
            print(group.key(name, seed), f"{100 * scores.mean():.1f}", cells[group.key(name, seed)]["cpu_s"], flush=True)


def write_cells(cells: dict[str, Any]) -> str:
    """Return the cells as JSON, each on a line."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items()) + "\n}\n"


def build(group: Group, seed: int) -> Any:
    """Build the task of a table."""
    public = PUBLIC if group.public else 0.0
    return Recipe("digits", partition="dirichlet:0.3", clients=20, seed=seed, public=public).build()


def commit() -> str:
    """Return the commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> None:
    """Run the cells that are missing, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", help="regular expression")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    run_missing(given.again)


if __name__ == "__main__":
    main()
