"""compare(): several methods, several seeds, every client. Gains are paired, client by client.

Every comparison contains Local (each client alone) and FedAvg (one model for all), because what a method is worth to a
client is what it gains over these two. A client counts as harmed if it is worse off than alone by more than one
standard error of the difference:

    a_k - r_k < -se_k,        se_k^2 = (a_k (1 - a_k) + r_k (1 - r_k)) / n_k

with a_k and r_k the accuracies of the method and of Local on the n_k test samples of client k.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.algorithm import Algorithm
from atoll.algorithms import create, file_of, find, name_of
from atoll.channel import Ledger
from atoll.channel.ledger import Direction
from atoll.data.task import Task, Training
from atoll.engines.local import LocalEngine
from atoll.errors import RunError
from atoll.federation import Settings, describe, federate, interruptions
from atoll.recipe import Recipe
from atoll.references import bibtex
from atoll.report.report import Report
from atoll.runs import Run, write_json, writing

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("atoll.comparison")

Scores = NDArray[np.float64]
Begun = Literal["new", "resumed", "reused"]
REFERENCES = ("local", "fedavg")
MEGABYTE = 1e6


@dataclass(frozen=True, eq=False)
class Outcome:
    """The evidence of one run, from memory or from its folder."""

    algorithm: Algorithm
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    bytes: Mapping[tuple[Direction, str], int]  # by direction and kind

    @classmethod
    def of(cls, report: Report) -> Outcome:
        """Of a run that just ended."""
        config = describe(report.task, report.algorithm, report.settings)
        return cls(report.algorithm, config, report.history, report.ledger.by_kind())

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """Of a run in a folder."""
        run = Run.open(folder)
        config = run.config
        return cls(algorithm_of(config), config, run.metrics(), Ledger(run.ledger()).by_kind())

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return int(self.config["settings"]["seed"])

    @property
    def finished(self) -> bool:
        """Whether all rounds were done."""
        return bool(self.history) and self.history[-1]["round"] == self.config["settings"]["rounds"]

    def last(self, split: str = "test", model: str = "personal") -> Mapping[str, Any]:
        """The figures of all clients after the last round."""
        found = self.history[-1].get("evaluation", {}) if self.history else {}
        if model not in found:
            raise RunError(
                f"A comparison needs every client's score. This run of {label(self.algorithm)} has none.",
                hint="finish it with `atoll resume`, and run it with evaluation='all'.",
            )
        figures: Mapping[str, Any] = found[model][split]
        return figures

    def scores(self, split: str = "test") -> Scores:
        """Every client's score after the last round."""
        return np.array(self.last(split)["clients"], dtype=np.float64)

    def samples(self, split: str = "test") -> NDArray[np.int64]:
        """How many samples each client was scored on."""
        return np.array(self.last(split)["samples"], dtype=np.int64)

    def curve(self, split: str = "val") -> list[tuple[int, float]]:
        """The mean score over clients by round."""
        return [
            (line["round"], line["evaluation"]["personal"][split]["macro"])
            for line in self.history
            if "personal" in line.get("evaluation", {})
        ]

    def megabytes(self, direction: Direction) -> float:
        """What all clients together received (down) or sent (up)."""
        return sum(size for (way, _), size in self.bytes.items() if way == direction) / MEGABYTE

    @property
    def seconds(self) -> float:
        """Of training, without evaluation."""
        return float(sum(line["seconds"]["round"] for line in self.history))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods side by side: for each, one outcome per seed. A single run is a comparison of one."""

    outcomes: Mapping[str, Sequence[Outcome]]

    def __post_init__(self) -> None:
        seeds = {tuple(outcome.seed for outcome in of_method) for of_method in self.outcomes.values()}
        if len(seeds) != 1:
            raise RunError(f"All methods of a comparison must have the same seeds. Got {sorted(seeds)}.")

    @property
    def seeds(self) -> list[int]:
        """The seeds every method was run with."""
        return [outcome.seed for outcome in next(iter(self.outcomes.values()))]

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return int(self.example.config["task"]["clients"])

    @property
    def example(self) -> Outcome:
        """One of the outcomes, for what all have in common."""
        return next(iter(self.outcomes.values()))[0]

    def reference(self, name: str) -> str | None:
        """What the Local or FedAvg of this comparison is called, if there is one."""
        return next(
            (method for method, (one, *_) in self.outcomes.items() if name_of(type(one.algorithm)) == name), None
        )

    # -- what a client gains -----------------------------------------------------------------------------------------
    def gains(self, method: str, over: str = "local") -> Scores | None:
        """What each client gains over a reference, as [seed, client]; None without that reference."""
        reference = self.reference(over)
        if reference is None:
            return None
        pairs = zip(self.outcomes[method], self.outcomes[reference], strict=True)
        return np.stack([one.scores() - other.scores() for one, other in pairs])

    def harmed(self, method: str) -> NDArray[np.bool_] | None:
        """Which clients are worse off than alone by more than one standard error, as [seed, client]."""
        gains, reference = self.gains(method), self.reference("local")
        if gains is None or reference is None:
            return None
        pairs = list(zip(self.outcomes[method], self.outcomes[reference], strict=True))
        errors = [standard_error(one.scores(), other.scores(), one.samples()) for one, other in pairs]
        return np.asarray(gains < -np.stack(errors))

    # -- tables ------------------------------------------------------------------------------------------------------
    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """One row per method: means over seeds, in the order in which the methods were named."""
        return [self._row(method, of_method) for method, of_method in self.outcomes.items()]

    def _row(self, method: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        macro = [outcome.last()["macro"] for outcome in outcomes]
        harmed = self.harmed(method)
        return {
            "method": method,
            "mean": float(np.mean(macro)),
            "interval": interval(macro),
            **{
                name: _mean(outcome.last()[name] for outcome in outcomes)
                for name in ("micro", "worst", "bottom10", "std")
            },
            **{f"gain_{name}": _nanmean(self.gains(method, name)) for name in REFERENCES},
            "harmed": None if harmed is None else float(harmed.sum(axis=1).mean()),
            "clients": self.clients,
            "megabytes_up": _mean(outcome.megabytes("up") for outcome in outcomes),
            "megabytes_down": _mean(outcome.megabytes("down") for outcome in outcomes),
            "seconds": _mean(outcome.seconds for outcome in outcomes),
            "seeds": len(outcomes),
        }

    @property
    def best(self) -> str:
        """The method with the highest mean."""
        return str(max(self.results, key=lambda row: row["mean"])["method"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per method, seed and client."""
        for method, outcomes in self.outcomes.items():
            of_method = {f"gain_{name}": self.gains(method, name) for name in REFERENCES} | {
                "harmed": self.harmed(method)
            }
            for index, outcome in enumerate(outcomes):
                for client, (score, samples) in enumerate(zip(outcome.scores(), outcome.samples(), strict=True)):
                    paired = {
                        name: None if values is None else values[index, client].item()
                        for name, values in of_method.items()
                    }
                    yield {
                        "method": method, "seed": outcome.seed, "client": client, "test_samples": int(samples),
                        "score": float(score), **paired,
                    }  # fmt: skip

    @property
    def protocol(self) -> str:
        """What the figures are figures of."""
        config = self.example.config
        task, settings = config["task"], config["settings"]
        dealt = task.get("recipe", {}).get("partition")
        over = f"; ± is the 95 % t-interval over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        return (
            f"Accuracy in % of the model each client would deploy, on its own test split, after the last round "
            f"({settings['rounds']}); all {task['clients']} clients, each counted the same{over}. "
            f"{task['name']}{f', {dealt}' if dealt else ''}, seed{'s' if len(self.seeds) > 1 else ''} "
            f"{', '.join(map(str, self.seeds))}."
        )

    @property
    def citations(self) -> str:
        """BibTeX of the methods, each once."""
        cites = (bibtex(one.algorithm.cites) for one, *_ in self.outcomes.values())
        return "\n\n".join(dict.fromkeys(filter(None, cites)))

    def table(self) -> Table:
        """For the terminal."""
        from atoll.report.table import comparison_table

        return comparison_table(self)

    def save(self, folder: Path | str) -> list[Path]:
        """Write report.html, results.csv, results.json and clients.csv; returns their paths."""
        from atoll.report.html import page

        folder = Path(folder)
        paths = [folder / name for name in ("report.html", "results.csv", "results.json", "clients.csv")]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            paths[0].write_text(page(self), encoding="utf-8")
            _write_csv(paths[1], self.results)
            write_json(
                paths[2], _strict({"protocol": self.protocol, "results": self.results, "clients": [*self.rows()]})
            )
            _write_csv(paths[3], self.rows())
        return paths


# -- running -----------------------------------------------------------------------------------------------------------


def compare(
    task: Recipe | Task | Callable[[int], Task],
    methods: Sequence[Algorithm | str],
    *,
    seeds: int | Sequence[int] = 3,
    settings: Settings | None = None,
    engine: LocalEngine | None = None,
    folder: Path | str | None = None,
    on_run: Callable[[str, int, Begun], None] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    **more: Any,
) -> Comparison:
    """Run every method with every seed on the same clients, and pair them client by client.

    A seed decides training, initial values and, unless the recipe has a `partition_seed`, who gets which samples; a
    `Task` is the same for all seeds. Local and FedAvg are added if they are missing. With a `folder`, runs that are
    finished there are reused and interrupted ones continued. All runs share one engine, and so its programs.

        compare(Recipe("digits", clients=20), ["fedper", Ditto(lam=0.1)], seeds=3, rounds=30).table()
    """
    settings = Settings(**more) if settings is None else settings
    engine = engine or LocalEngine()
    seeds = [*range(settings.seed, settings.seed + seeds)] if isinstance(seeds, int) else [*seeds]
    if not seeds:
        raise RunError("A comparison must have at least 1 seed. Got none.")
    chosen = with_references([create(method) if isinstance(method, str) else method for method in methods])
    build = _builder(task)
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _claim(folder, task, list(chosen.values()), seeds, settings, engine)
    outcomes: dict[str, list[Outcome]] = {method: [] for method in chosen}
    with interruptions(enabled=folder is not None) as stop:
        for seed in seeds:
            here = build(seed)
            for method, algorithm in chosen.items():
                place = None if folder is None else folder / run_name(algorithm, seed)
                written = place is not None and (place / "config.json").exists()
                done = Outcome.read(place) if place is not None and written else None
                if on_run:
                    on_run(method, seed, "new" if done is None else "reused" if done.finished else "resumed")
                if done is None or not done.finished:
                    try:
                        report = federate(
                            here, algorithm, settings=replace(settings, seed=seed), engine=engine, folder=place,
                            resume=written, on_round=on_round, stop=stop,
                        )  # fmt: skip
                    except KeyboardInterrupt:
                        stop.set()
                    else:
                        done = Outcome.of(report) if place is None else Outcome.read(place)
                if stop.is_set():
                    how = "" if folder is None else f"; continue with `atoll resume {folder}`"
                    raise KeyboardInterrupt(f"stopped in {method} with seed {seed}{how}")
                assert done is not None
                outcomes[method].append(done)
    return Comparison(outcomes)


def with_references(algorithms: Sequence[Algorithm]) -> dict[str, Algorithm]:
    """The algorithms by label, each once, with Local and FedAvg in front if they are missing."""
    present = {name_of(type(algorithm)) for algorithm in algorithms}
    # the same gradient budget: as many local epochs as the methods they are a reference for
    epochs = max((algorithm.epochs for algorithm in algorithms if hasattr(algorithm, "epochs")), default=1)
    added = [find(name)(epochs=epochs) for name in REFERENCES if name not in present]  # type: ignore[call-arg]
    if added:
        log.warning("added %s: gains are measured against them", " and ".join(map(label, added)))
    return {label(algorithm): algorithm for algorithm in [*added, *algorithms]}


def label(algorithm: Algorithm, name: str | None = None) -> str:
    """What a method is called in tables, as the command line takes it: `ditto`, `ditto:lam=0.1`, `mine.py`."""
    values = [
        f"{field.name}={getattr(algorithm, field.name)}"
        for field in fields(algorithm)
        if getattr(algorithm, field.name) != field.default
    ]
    return ":".join([name or _name(algorithm), *filter(None, [",".join(values)])])


def _name(algorithm: Algorithm) -> str:
    file, here = file_of(type(algorithm)), Path.cwd()
    if file is None:
        return name_of(type(algorithm))
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def run_name(algorithm: Algorithm, seed: int) -> str:
    """The folder of a run in a comparison; it changes with the hyperparameters, and with the text of a user's file."""
    file = file_of(type(algorithm))
    name = None if file is None else f"{file.stem}-{_digest(file.read_bytes())}"
    return re.sub(r"[^\w.=,+-]+", "-", f"{label(algorithm, name)}-seed{seed}")


def algorithm_of(config: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a run, from its configuration."""
    values = dict(config["algorithm"])
    name, file = values.pop("name"), values.pop("file", None)
    return find(file or name)(**values)


def folder_name(
    recipe: Recipe, methods: Sequence[Algorithm], seeds: Sequence[int], settings: Settings, engine: LocalEngine
) -> str:
    """The folder of a comparison: the same for the same question asked of the same code."""
    runs = [run_name(algorithm, seed) for algorithm in methods for seed in seeds]
    question = [asdict(recipe.seeded(0)), asdict(replace(settings, seed=0)), engine.precision, runs, code_digest()]
    return f"{recipe.dataset}-compare-{_digest(json.dumps(question).encode())}"


def code_digest() -> str:
    """Changes with every change of Atoll's code."""
    return _digest(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))))


def reopen(folder: Path) -> dict[str, Any]:
    """The arguments for `compare` of the comparison in a folder; its `engine` as the options of one."""
    asked = json.loads((folder / "comparison.json").read_text())
    if asked["recipe"] is None:
        raise RunError(
            "Only a comparison of a task that was built from a recipe can be resumed by its folder.",
            hint="call compare(task, ..., folder=...) again: it continues.",
        )
    recipe = Recipe(**{**asked["recipe"], "training": Training(**asked["recipe"]["training"])})
    return {
        "task": recipe,
        "methods": [algorithm_of({"algorithm": method}) for method in asked["methods"]],
        "seeds": asked["seeds"],
        "settings": Settings(**asked["settings"]),
        "folder": folder,
        "engine": asked["engine"],
    }


def _claim(
    folder: Path, task: Any, methods: list[Algorithm], seeds: list[int], settings: Settings, engine: LocalEngine
) -> None:
    """Write what is asked for into the folder; refuse one whose runs answer another question."""
    asked = {
        "recipe": asdict(task) if isinstance(task, Recipe) else None,
        "methods": [
            {"name": name_of(type(one)), "file": (file := file_of(type(one))) and str(file), **asdict(one)}
            for one in methods
        ],
        "seeds": seeds,
        "settings": asdict(settings),
        "engine": engine.options,
        "code": code_digest(),
    }
    path = folder / "comparison.json"
    if path.exists():
        before = json.loads(path.read_text())
        differs = [name for name in ("recipe", "settings") if before[name] != asked[name]]
        if differs:
            raise RunError(
                f"The runs of a comparison must have task and settings in common. {folder} has another {differs[0]}.",
                hint="choose another --out.",
            )
        if before["code"] != asked["code"]:
            log.warning(
                "Atoll's code has changed since this comparison was begun; its finished runs are used as they are"
            )
    elif (folder / "config.json").exists():
        raise RunError(
            f"A comparison must have a folder of its own. {folder} holds a single run.", hint="choose another --out."
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asked)


def _builder(task: Recipe | Task | Callable[[int], Task]) -> Callable[[int], Task]:
    if isinstance(task, Recipe):
        return lambda seed: task.seeded(seed).build()
    return (lambda _: task) if isinstance(task, Task) else task


# -- figures -----------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % t-interval of a mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy import stats

    return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def standard_error(score: Scores, reference: Scores, samples: NDArray[np.int64]) -> Scores:
    """Of the difference of two accuracies, as if each were a mean of `samples` coin tosses."""
    variance = score * (1 - score) + reference * (1 - reference)
    with np.errstate(invalid="ignore", divide="ignore"):  # a client without test samples has no score either
        return np.sqrt(variance / samples)


def _mean(values: Iterator[float]) -> float:
    return float(np.mean([*values]))


def _nanmean(values: Scores | None) -> float | None:
    return None if values is None else float(np.nanmean(values))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _strict(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]] | Iterator[Mapping[str, Any]]) -> None:
    rows = [*rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
