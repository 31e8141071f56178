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
from functools import cache
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
LISTED_AT = {  # pages that list the hyperparameters that these methods share with another one
    **dict.fromkeys(("fafi-bank", "fafi-etf", "fafi-queue", "fafi-two-stage"), "fafi"),
    **dict.fromkeys(("coboosting", "intactofl"), "dense"),
    **dict.fromkeys(("fedncf", "pfedrec", "gpfedrec", "fedrap", "fedora-items"), "fedmf"),
    "abhs-local": "abhs",
}
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
    "feddf:target=avg_probs", "kt-pfl:coefficient_pull=0.05,coefficient_lr=0.05",
    "ensemble:weighting=classes", "ensemble:of=probs",
    "ce-supcon:lam=0.1", "fedetf:scale=4", "fedetf:answer=average",
    "rga:prototypes=means",
    "oneshot-df:server_epochs=400", "fedic:server_epochs=400",
    "oneshot-margins:shrinkage=1", "oneshot-proto:encoder=average",
    "afl:width=1000", "fedcgs:width=1000", "fedpft:components=1", "regmean:damping=1", "fedlpa:damping=0.1",
    "fedov:destroyed=0,adversarial=0",
    "fafi:profile=faithful", "fafi-plus:own=0.5",
    "abhs:theta=2", "abhs:student_epochs=0", "abhs-local:theta=2",
)  # fmt: skip


BEGIN, END = "<!-- facts: python benchmarks/methods_table.py --page -->", "<!-- /facts -->"


HEADER = """\
# Every method on one task

<!-- Written by benchmarks/methods_table.py; do not edit. -->

```
python benchmarks/methods_table.py && python benchmarks/methods_table.py --page
```

Digits, 20 clients by Dirichlet 0.3 with about 54 training, 13 validation and 22 test samples each, [cut at random](cuts.md); the MLP 64-128-128-10, step size 0.1, batch 10, **default hyperparameters**, seeds {seeds}, each with a partition of its own. Nothing is tuned or selected: the table shows what methods do as they come, and where a default does not suit so small a task. It is no ranking.

*Mean* and *worst* are accuracy in % on clients' own test samples, of what each would deploy after the last round; ± is half the 95 % t-interval over three seeds, for gains that of the paired differences. *Harmed*: worse off than alone by more than one standard error. *Down* and *up*: bytes per client and round, from the ledger.

One-shot methods are compared with `{local}` and `{fedavg}` in one round, which train as long. Tasks with public samples leave clients 10 % fewer, and have references of their own. `fedbn` and `mtfl` are left out: they keep batch normalisation private, which this network lacks (`mtfl-adam` shares everything here). Recommenders have [their own page](recommend.md). Names with values are other settings, or what a default was before. The last two tables have four planted groups of five clients, whose images are turned by 0, 90, 180 and 270 degrees, or who call classes by other names.

{about}; {minutes:.0f} minutes of CPU time in all.
"""  # noqa: E501


class Group(NamedTuple):
    """A table of its own: rounds or one upload, with public samples or without, and clients that differ in some way."""

    title: str
    one_shot: bool = False
    public: bool = False
    partition: str = "dirichlet:0.3"
    methods: tuple[str, ...] = ()  # none: all that are of this kind

    @property
    def references(self) -> tuple[str, str]:
        """Return what stands for Local and for FedAvg."""
        return ALONE if self.one_shot else ("local", "fedavg")

    def key(self, method: str, seed: int) -> str:
        """Return the name of a cell."""
        words = [method, "public" * self.public, "once" * self.one_shot, self.partition * bool(self.methods)]
        return " ".join([*filter(None, words), "seed", str(seed)])


MAIN = (
    Group(f"{ROUNDS} rounds"),
    Group(f"{ROUNDS} rounds, public samples", public=True),
    Group("One upload", one_shot=True),
    Group("One upload, public samples", one_shot=True, public=True),
)
GROUPS = (
    *MAIN,
    Group(
        "Planted groups, turned images",
        partition="iid+rotation:4",
        methods=(
            "cfl", "cfl:eps1=0.5,eps2=1", "ditto", "fedavg-ft", "fedora", "fedper", "flhc", "flhc:clusters=4", "ifca",
            "ifca:starts=kmeans++,restarts=10",
        ),
    ),
    Group(
        "Planted groups, exchanged names of classes",
        public=True,
        partition="iid+concept:4",
        methods=("fedmd", "fedora", "fedora:similarity=labels", "ifca", "kt-pfl"),
    ),
)  # fmt: skip


def list_group(group: Group) -> list[str]:
    """Return the methods of a table, its references first."""
    names = [name for name, method in list_methods().items() if not method.items_by and name not in NORMED]
    in_order = sorted([*names, *FURTHER], key=lambda name: (name.partition(":")[0], ":" in name))
    fitting = group.methods or [name for name in in_order if needs(name) == (group.one_shot, group.public)]
    return list(dict.fromkeys([*group.references, *fitting]))


@cache
def needs(name: str) -> tuple[bool, bool]:
    """Return whether a method uploads once, and whether it needs public samples."""
    method = create(name)
    return method.one_shot, bool(method.needs_public_data) or name.partition(":")[0] in BEGINS_PUBLIC


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
            print(
                group.key(name, seed), f"{100 * scores.mean():.1f}", cells[group.key(name, seed)]["cpu_s"], flush=True
            )


def write_cells(cells: dict[str, Any]) -> str:
    """Return the cells as JSON, each on a line."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items()) + "\n}\n"


def build(group: Group, seed: int) -> Any:
    """Build the task of a table."""
    public = PUBLIC if group.public else 0.0
    return Recipe("digits", partition=group.partition, clients=20, seed=seed, public=public).build()


def commit() -> str:
    """Return the commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


# -- pages -------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A method's line: means over seeds with half their 95 % intervals, in percentage points."""

    mean: str
    worst: str
    gains: tuple[str, str]  # over Local and FedAvg
    harmed: str
    down: int
    up: int


def write_rows(cells: dict[str, Any], group: Group) -> dict[str, Row]:
    """Return the rows of a table."""

    def scores(name: str) -> list[np.ndarray]:
        return [np.array(one["right"]) / np.array(one["samples"]) for one in of_seeds(name)]

    def of_seeds(name: str) -> list[dict[str, Any]]:
        return [cells[group.key(name, seed)] for seed in SEEDS]

    def gain(name: str, reference: str) -> str:
        if name == reference:
            return "–"
        pairs = zip(scores(name), scores(reference), strict=True)
        return write_mean([float((ours - theirs).mean()) for ours, theirs in pairs], "+")

    local = scores(group.references[0])
    found = {}
    for name in list_group(group):
        if any(group.key(name, seed) not in cells for seed in SEEDS):  # a method that has not been measured yet
            continue
        ours, first = scores(name), of_seeds(name)[0]
        harmed = [
            is_harmed(mine - alone, standard_error(mine * (1 - mine), alone * (1 - alone), one["samples"])).sum()
            for mine, alone, one in zip(ours, local, of_seeds(name), strict=True)
        ]
        found[name] = Row(
            mean=write_mean([float(one.mean()) for one in ours]),
            worst=f"{100 * mean(one.min() for one in ours):.1f}",
            gains=(gain(name, group.references[0]), gain(name, group.references[1])),
            harmed="–" if name == group.references[0] else f"{mean(map(float, harmed)):.1f}",
            down=first["down"],
            up=first["up"],
        )
    return found


def write_mean(values: list[float], sign: str = "") -> str:
    """Write a mean over seeds with half its 95 % interval, in %."""
    return f"{100 * mean(values):{sign}.1f} ± {100 * (interval(values) or 0):.1f}"


def write_table(cells: dict[str, Any]) -> str:
    """Return the page of results."""
    commits = sorted({cell["commit"] for key, cell in cells.items() if key != "about"})
    seconds = sum(cell["cpu_s"] for key, cell in cells.items() if key != "about")
    of_seeds = ", ".join(map(str, SEEDS))
    about = f"{cells['about']['machine']}, torch {cells['about']['torch']}, commits {', '.join(commits)}"
    parts = [HEADER.format(seeds=of_seeds, local=ALONE[0], fedavg=ALONE[1], about=about, minutes=seconds / 60)]
    for group in GROUPS:
        local, fedavg = group.references
        parts += [
            f"## {group.title}\n",
            f"| method | mean | worst | gain over {local} | gain over {fedavg} | harmed of 20 | down | up |",
            "|---|---|---|---|---|---|--:|--:|",
        ]
        for name, row in write_rows(cells, group).items():
            page = name.partition(":")[0]
            link = f"[{name}](../algorithms/{page}.md)" if name == page else f"`{name}`"
            shown = (link, row.mean, row.worst, *row.gains, row.harmed, f"{row.down:,}", f"{row.up:,}")
            parts.append(f"| {' | '.join(shown)} |")
        parts.append("")
    return "\n".join(parts)


def write_facts(name: str, rows: dict[str, tuple[Group, Row]], items: dict[str, Any]) -> str:
    """Return what a method's page says of it that is made from code and cells."""
    method = list_methods()[name]
    own, elsewhere = list_rows(name), list_rows(LISTED_AT[name]) if name in LISTED_AT else []
    table = [row for row in own if row not in elsewhere]
    which = "The others" if table else "Hyperparameters"
    there = f"{which} are on the page of [{LISTED_AT[name]}]({LISTED_AT[name]}.md)." if len(table) < len(own) else ""
    lines = [
        *(["| hyperparameter | range | default | meaning |", "|---|---|---|---|", *table, ""] if table else []),
        *([there, ""] if there else []),
        f"- **Leaves a client**: {describe_sent(method())}{describe_traffic(rows.get(name))}",
        *(f"- **Limit**: {limit}" for limit in describe_limits(method)),
        f"- **Measured**: {describe_result(name, rows.get(name), items)}",
        "- **Proved**: [what tests show of it](../concepts/proofs.md).",
    ]
    return "\n".join([BEGIN, "", *lines, "", END])


def list_rows(name: str) -> list[str]:
    """Return a row for each hyperparameter of a method."""
    method = list_methods()[name]
    meanings = field_comments(method())
    return [
        f"| `{one.name}` | {one.expected} | {write_default(one.default)} | {meanings[one.name]} |"
        for one in hyperparameters(method)
    ]


def write_default(value: Any) -> str:
    """Write a default; of a fraction six digits are enough."""
    return str(round(value, 6) if isinstance(value, float) else value)


def describe_sent(method: Algorithm) -> str:
    """Say what leaves a client, and whether the server reads it one by one."""
    sent = ", ".join(f"`{field}` ({kind})" for field, kind in method.sends.items())
    if not sent:
        return "nothing."
    how = "The server needs sums over clients only." if method.sums_suffice else "The server reads single replies."
    return f"{sent}. {how}"


def describe_traffic(found: tuple[Group, Row] | None) -> str:
    """Say how many bytes travel."""
    if found is None or not found[1].down + found[1].up:
        return ""
    once = "" if found[0].one_shot else " and round"
    return f" {found[1].down:,} bytes down and {found[1].up:,} up per client{once} with the digits MLP."


def describe_limits(method: type[Algorithm]) -> list[str]:
    """Say with which values it is another method."""
    return [
        ", ".join(
            f"`{field}={value:g}`" if isinstance(value, float) else f"`{field}={value}`"
            for field, value in values.items()
        )
        + f" is [{other}]({other}.md), bit for bit"
        + (", with all clients in every round." if isinstance(values, WithEverybody) else ".")
        for other, values in method.limits.items()
    ]


def describe_result(name: str, found: tuple[Group, Row] | None, items: dict[str, Any]) -> str:
    """Say what it reaches, in a sentence with a link to the table."""
    if list_methods()[name].items_by:
        hits = [
            f"{mean(items[f'{name} {data} {seed}']['hr@10'] for seed in SEEDS):.1f} % on {title}"
            for data, title in (("movietweetings-5core", "MovieTweetings"), ("movielens-100k", "MovieLens"))
        ]
        return f"HR@10 among all items {' and '.join(hits)}: [all recommenders](../results/recommend.md)."
    if found is None:
        why = "has no batch normalisation" if name in NORMED else "was not trained with it yet"
        return f"not in [the table](../results/methods.md), whose network {why}."
    group, row = found
    gains = [
        f"{gain} over `{reference}`" for gain, reference in zip(row.gains, group.references, strict=True) if gain != "–"
    ]
    harmed = [] if row.harmed == "–" else [f"{row.harmed} of 20 clients harmed"]
    return (
        f"{'; '.join([f'{row.mean} % on digits, worst client {row.worst}', *gains, *harmed])} "
        f"([all methods](../results/methods.md#{re.sub('[^a-z0-9 ]', '', group.title.lower()).replace(' ', '-')}))."
    )


def write_pages() -> dict[Path, str]:
    """Return the text of every page that has something of the cells."""
    cells, items = json.loads(CELLS.read_text()), json.loads(ITEMS.read_text())
    rows = {name: (group, row) for group in reversed(MAIN) for name, row in write_rows(cells, group).items()}
    pages = {CELLS.with_suffix(".md"): write_table(cells)}
    for name in list_methods():
        path = DOCS / "algorithms" / f"{name}.md"
        before, _, rest = path.read_text().partition(BEGIN)
        pages[path] = before + write_facts(name, rows, items) + rest.partition(END)[2]
    return pages


def main() -> None:
    """Run the cells that are missing, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", help="regular expression")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        for path, text in write_pages().items():
            path.write_text(text)
    else:
        run_missing(given.again)


if __name__ == "__main__":
    main()
