"""A `Recipe` is a task in words: enough to build it, and to build it again when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.data import augment, datasets, partition
from atoll.data.datasets import Dataset
from atoll.data.million import Million
from atoll.data.own import Own
from atoll.data.splits import FOLDS, REPEATS, Cut, Shares, list_cuts
from atoll.data.task import Task, Training
from atoll.kernel.errors import NamesChecked, RunError, TaskError
from atoll.kernel.randomness import generator


@dataclass(frozen=True)
class Recipe(NamesChecked):
    """A task in words: the data, how they are dealt to clients, the model, and how clients take their steps."""

    dataset: str = "digits"
    partition: str = "auto"  # natural where samples belong to somebody, else dirichlet:0.3
    clients: int | None = None  # 20, or all natural ones; of `million`, a million
    model: str = "auto"  # cnn, mlp:64; with slashes, clients have different ones in turn: cnn/mlp:64
    seed: int = 0  # of the model's initial values, and of the partition unless it has its own
    partition_seed: int | None = None
    data: str | None = None  # the folder of the data sets; ATOLL_DATA by default
    samples: int | None = None  # so many of the data set's, drawn before anything else; all by default
    split: str = "60/15/25"  # per cent of each client's samples: train / val / test; of own data also a column
    stratify: bool = False  # class by class, which flatters personal models of small clients
    folds: int | None = None  # instead of a split, each in turn for testing; None: a comparison decides, 0: a split
    repeats: int = REPEATS  # of all folds
    number: int = 0  # of the cut: fold `number % folds` of repeat `number // folds`
    central: str = "none"  # test set of the server: none, official, or a share taken before dealing, as 0.1
    public: float = 0.0  # share that everybody may see, taken before dealing
    augment: str = "none"  # how training images are changed: none, crop-flip, crop, simclr or simclr-batch
    unseen: float = 0.0  # share of clients that take no part, and are welcomed after the last round
    devices: str | None = None  # a CSV file that says how fast clients are, what they can hold, how long they last
    training: Training = field(default_factory=Training)
    own: Own | None = None  # data of the user's, which `dataset` is then only a name for

    @classmethod
    def of_own(cls, own: Own, **words: Any) -> Recipe:
        """Return the recipe of a task of own data; a `split` that is no shares is the column that says it."""
        split = words.get("split", cls.split)
        if not looks_like_shares(split):
            own, words = replace(own, split=split), {**words, "split": cls.split}
        return cls(dataset=own.title, own=own, **words)

    def build(self) -> Task:
        """Build the task."""
        if self.dataset == "million" and self.own is None:
            return self._generate()
        if self.own is None:
            folder = datasets.data_folder(None if self.data is None else Path(self.data))
            dataset = _load(self.dataset, folder, merge=self.central != "official")
        else:
            self._require_natural()
            dataset = self.own.read()
        deal = self.seed if self.partition_seed is None else self.partition_seed
        if self.samples is not None:
            dataset = dataset.subsample(self.samples, generator(deal, "samples"))
        natural = dataset.owner is not None
        words = ("natural" if natural else "dirichlet:0.3") if self.partition == "auto" else self.partition
        dealt = partition.parse(words)
        task = Task.build(
            dataset,
            dealt,
            clients=20 if self.clients is None and dealt.reads != "owners" else self.clients,
            model=None if self.model == "auto" else self.model.split("/"),
            seed=self.seed,
            partition_seed=self.partition_seed,
            training=self.training,
            cut=Cut(shares_of(self.split), self.stratify, self.folds or 0, self.number),
            central=_central_share(self.central, dataset),
            public=self.public,
            augment=augment.parse(self.augment),
            facts={"recipe": {**self.words, "partition": words}},
        )
        task = task if self.devices is None else task.with_devices(self.devices)
        return task.hold_out(self.unseen, deal)

    def _require_natural(self) -> None:
        """Raise unless the clients are those who own the data."""
        if self.partition not in ("auto", "natural"):
            raise TaskError(
                f"Own data belong to their clients, so `partition` must be auto or natural. Got {self.partition!r}.",
                hint="`client` names the column of clients.",
            )

    def _generate(self) -> Task:
        """Build the task whose clients' samples are made when they are needed."""
        fixed = {"samples": None, "central": "none", "public": 0.0, "augment": "none", "stratify": False}
        changed = [name for name, value in fixed.items() if getattr(self, name) != value]
        changed += [] if self.partition in ("auto", "natural") else ["partition"]
        changed += ["folds"] if self.folds else []
        if changed:
            raise TaskError(
                f"The samples of million are made for their clients, so {', '.join(changed)} cannot be chosen.",
                hint="choose `clients`, `split`, `unseen` and `partition_seed`.",
            )
        deal = self.seed if self.partition_seed is None else self.partition_seed
        made = Million(seed=deal) if self.clients is None else Million(self.clients, deal)
        task = made.task(
            model="mlp:32" if self.model == "auto" else self.model.split("/"),
            seed=self.seed,
            training=self.training,
            shares=shares_of(self.split),
            facts={"recipe": {**self.words, "partition": "natural"}},
        )
        task = task if self.devices is None else task.with_devices(self.devices)
        return task.hold_out(self.unseen, deal)

    def with_seed(self, seed: int) -> Recipe:
        """Return the same recipe with another seed."""
        return replace(self, seed=seed)

    def choose_folds(self) -> Recipe:
        """Return the recipe of a comparison: with folds, or with 0 of them where one part is held out."""
        if self.folds is not None or self.own is None:
            return self
        return replace(self, folds=FOLDS if self.build().wants_folds else 0)

    def list_cuts(self, seed: int) -> dict[int, Recipe]:
        """Return the recipe of every cut by the seed of its training, the first of which is given."""
        deal = seed if self.partition_seed is None else self.partition_seed
        numbers = [cut.number for cut in list_cuts(self.folds or 0, self.repeats)]
        return {
            seed + number: replace(self, seed=seed + number, partition_seed=deal, number=number) for number in numbers
        }

    @property
    def words(self) -> dict[str, Any]:
        """The recipe as a run's configuration holds it; the training stands there by itself."""
        left_out = {"training"} | {name for name in ("own", "devices") if getattr(self, name) is None}  # as older runs
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a run from its configuration."""
        words = config["task"].get("recipe")
        if words is None:
            raise RunError(
                f"Only a task that was built from a recipe can be built again. {config['task']['name']!r} was not.",
                hint="build the task in Python and continue with federate(task, ..., folder=..., resume=True).",
            )
        own = None if words.get("own") is None else Own.of_json(words["own"])
        return cls(**{**words, "own": own}, training=Training(**config["training"]))


def describe_own(
    source: Any, model: Any, reading: Mapping[str, Any], *, seed: int, shares: Shares, central: float, public: float
) -> dict[str, Any]:
    """Return the recipe of own data for a task's facts; nothing where words cannot say all of it."""
    in_words = isinstance(source, str | Path) and isinstance(model, str | None) and Path(source).exists()
    if not in_words or not {*reading} <= {one.name for one in fields(Own)} - {"path", "digest"}:
        return {}
    recipe = Recipe.of_own(
        Own.of(source, **reading), model=model or "auto", seed=seed, partition="natural", public=public,
        split="/".join(f"{100 * share:g}" for share in shares), central=f"{central:g}" if central else "none",
    )  # fmt: skip
    return {"recipe": recipe.words}


def looks_like_shares(split: str) -> bool:
    """Return whether a split is given in per cent, as 60/15/25, and not by a column's name."""
    return all(part.replace(".", "", 1).strip().lstrip("-").isdigit() for part in split.split("/"))


def shares_of(split: str) -> Shares:
    """Parse `60/15/25` into three shares of 1."""
    try:
        train, val, test = (float(part) / 100 for part in split.split("/"))
    except ValueError:
        raise TaskError(
            f"A split must be three numbers that sum to 100, train/val/test. Got {split!r}.",
            hint="for example 60/15/25.",
        ) from None
    if not (min(train, val, test) >= 0 and train > 0 and abs(train + val + test - 1) <= 1e-6):
        raise TaskError(f"The three parts of a split must sum to 100, and train must be above 0. Got {split!r}.")
    return train, val, test


def _central_share(central: str, dataset: Dataset) -> float:
    if central == "official" and dataset.central is None:
        raise TaskError(
            f"`central` must not be official: {dataset.name} has no official test set.",
            hint="set `central` to a share, as 0.1.",
        )
    if central in ("none", "official"):
        return 0.0
    try:
        return float(central)
    except ValueError:
        raise TaskError(f"`central` must be none, official or a share of the samples. Got {central!r}.") from None


def _load(dataset: str, folder: Path | None, merge: bool) -> Dataset:
    """Load a data set; the last two stay in memory as long as their files do not change."""
    return _read_once(dataset, folder, merge, datasets.list_files(dataset, folder))


@lru_cache(maxsize=2)  # a comparison builds one task per seed from the same samples
def _read_once(dataset: str, folder: Path | None, merge: bool, files: tuple[tuple[Path, int, int], ...]) -> Dataset:  # noqa: ARG001
    return datasets.load(dataset, folder, merge)
