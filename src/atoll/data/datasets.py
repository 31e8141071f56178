"""The data sets Atoll can read, from the folder named by `ATOLL_DATA`; some need no files.

Files are taken as they lie: the layouts below, or those that torchvision leaves behind. Nothing is unpickled.

    digits          no files: it comes with scikit-learn
    mnist           {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz] in mnist/ or MNIST/raw/
    fashion-mnist   the same in fashion-mnist/ or FashionMNIST/raw/
    cifar10         {data_batch_1..5,test_batch}.npz (lossless WebP strips) in cifar10/,
                    or the same names with .bin in cifar-10-batches-bin/
    cifar100        {train,test}.npz (JPEG strips) in cifar100/, or {train,test}.bin in cifar-100-binary/
    femnist         LEAF's all_data_*.json in femnist/ or femnist/data/all_data/
    hapt            hapt.npz in hapt/, or UCI's text files in hapt/RawData/ or "HAPT Data Set/RawData/"
    shakespeare     shakespeare_by_role.npz, or Jon Bosak's plays as *.xml, in shakespeare/
    movietweetings  movietweetings_100k.npz, or the original ratings.dat, in movietweetings/
    movielens-100k  u.data, or ml-100k.inter of RecBole, or its wheel as it is (recbole-*.whl), in ml-100k/
    gaussian, linear, rotated-mnist, rotated-fashion-mnist: made by `atoll.data.synthetic`
    million         made by `atoll.data.million` for the clients that are asked, and not stored
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.dealing import LEAST
from atoll.data.files import (
    Part,
    read_hapt,
    read_hapt_text,
    read_idx,
    read_leaf,
    read_plays,
    read_ratings,
    read_roles,
    read_rows,
    read_strips,
)
from atoll.data.ratings import list_interactions
from atoll.kernel.errors import DataError, unknown
from atoll.kernel.objective import Metric, PerSample, absolute_error, accuracy, cross_entropy, squared_error

PLACES = 80  # characters in a sample of shakespeare
BASIC_ACTIVITIES = 6  # of HAPT; its other six are rare transitions between postures
FEWEST_RATINGS = 20  # of a user of movietweetings
ALIASES = {"fashion": "fashion-mnist", "rotated-fashion": "rotated-fashion-mnist"}
PICKLES = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` (images are float32 [n, C, H, W], normalised) with targets `y`.

    Targets are int64 in 0 .. classes - 1, one per sample or, for next-token tasks, one per place; or, with
    `classes=None`, numbers. `central` is the official test set, where there is one and it was not merged into `x`
    and `y`. Where samples belong to somebody (a person, a role, a user), `owner` says to whom.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    classes: int | None
    central: tuple[torch.Tensor, torch.Tensor] | None
    source: str
    owner: NDArray[np.int64] | None = None  # of each sample, in 0 .. len(owners) - 1
    owners: tuple[str, ...] = ()  # their names
    groups: NDArray[np.int64] | None = None  # of each owner, where the truth is known because it was planted
    least: int = LEAST  # samples that an owner must have to be a client, unless a partition says otherwise
    gap: int | None = None  # an owner's samples are in time order, and so many are left out between its splits
    model: str | None = None  # the network that suits it, by name
    loss: PerSample = cross_entropy
    metric: Metric = accuracy
    recommends: bool = False  # classes are items in time order: the last is for testing, the one before for validation

    def subsample(self, samples: int, draw: np.random.Generator) -> Self:
        """Draw so many of the samples and keep their order; the official test set stays whole."""
        if not 1 <= samples <= len(self.y):
            raise DataError(
                f"`samples` must be at least 1 and at most all {len(self.y)} of {self.name}. Got {samples}."
            )
        return self.take(np.sort(draw.permutation(len(self.y))[:samples]))

    @property
    def facts(self) -> dict[str, object]:
        """What a run's configuration says of the data."""
        return {"split_by": "by time: a user's last item is for testing"} if self.recommends else {}

    def take(self, rows: NDArray[np.int64]) -> Self:
        """Return some of the samples."""
        owner = None if self.owner is None else self.owner[rows]
        return replace(self, x=self.x[rows], y=self.y[rows], owner=owner)

    def __repr__(self) -> str:
        central = "" if self.central is None else f" + {len(self.central[1])} central"
        return f"Dataset({self.name!r}, {len(self.y)}{central} samples of {tuple(self.x.shape[1:])})"


@dataclass(frozen=True)
class Layout:
    """One way in which files lie: in a folder, for every stem (or glob), under the first suffix that is there."""

    folder: str
    stems: Sequence[str]
    suffixes: Sequence[str] = ("",)

    def search(self, root: Path) -> tuple[list[Path], str]:
        """Return the files in order; or none, and the name of what is missing."""
        paths: list[Path] = []
        for stem in self.stems:
            kinds = (sorted((root / self.folder).glob(stem + suffix)) for suffix in self.suffixes)
            found = next(filter(None, kinds), [])
            if not found:
                return [], " or ".join(stem + suffix for suffix in self.suffixes)
            paths += found
        return paths, ""


Read = Callable[[str, list[Path], bool], Dataset]  # (folder, files in it, whether to merge the official test set)


@dataclass(frozen=True)
class Entry:
    """The facts of a data set that are known before it is read."""

    read: Read
    samples: str
    classes: int | None
    owners: int | None
    licence: str
    layouts: tuple[Layout, ...] = ()  # none: it needs no files


def names() -> list[str]:
    """Return the names of the data sets that `load` knows."""
    return list(CATALOGUE)


def entry_of(name: str) -> tuple[str, Entry]:
    """Return a data set's own name, and what is known of it."""
    name = ALIASES.get(name, name)
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return name, CATALOGUE[name]


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of the data sets: the given one, else the one that `ATOLL_DATA` names."""
    return given or (Path(os.environ["ATOLL_DATA"]) if os.environ.get("ATOLL_DATA") else None)


def require_root(root: Path | None) -> Path:
    """Return the data folder; raise if none is given."""
    if root is None:
        raise DataError("A data folder must be given. Got none.", hint="name it with `data`, or set ATOLL_DATA.")
    return root


def require_folder(root: Path) -> Path:
    """Return the data folder; raise if it does not exist."""
    if not root.is_dir():
        raise DataError(f"The data folder must exist. {root} does not.", hint="check `data` and ATOLL_DATA.")
    return root


def load(name: str, root: Path | None = None, merge: bool = True) -> Dataset:
    """Read a data set from `root`, by default the folder named by `ATOLL_DATA`.

    With `merge`, training and official test samples stand together, to be split inside each client (the
    protocol of PFLlib); without, the official test set becomes `central`, where there is one.
    """
    name, entry = entry_of(name)
    folder, paths = find(name, data_folder(root)) if entry.layouts else ("", [])
    return entry.read(folder, paths, merge)


def list_files(name: str, root: Path | None) -> tuple[tuple[Path, int, int], ...]:
    """Return the files of a data set: where they are, how large, and when they were written."""
    name, entry = entry_of(name)
    paths = find(name, data_folder(root))[1] if entry.layouts else []
    facts = [(path, path.stat()) for path in paths]
    return tuple((path, one.st_size, one.st_mtime_ns) for path, one in facts)


def find(name: str, root: Path | None) -> tuple[str, list[Path]]:
    """Return the first complete layout: its folder, and its files in order."""
    if root is None:
        raise DataError(
            f"`{name}` is read from a data folder. None was given.",
            hint="set ATOLL_DATA to the folder that holds the data sets, or use `digits`: it needs no files.",
        )
    missing = []
    for layout in CATALOGUE[name].layouts:
        paths, lacking = layout.search(root)
        if paths:
            return layout.folder, paths
        missing.append(f"  {root / layout.folder}: no {lacking}")
    pickles = PICKLES.get(name)
    raise DataError(
        f"`{name}` was not found. Looked in\n" + "\n".join(missing),
        hint=f"{pickles} holds pickles, which may run code and are not read; get the binary version."
        if pickles and (root / pickles).is_dir()
        else f"set ATOLL_DATA to the folder that holds one of these, or see `atoll data {name}` for where to get it.",
    )


def describe_origin(name: str) -> str:
    """Say where a data set comes from."""
    if name == "digits":
        return "comes with scikit-learn"
    return "read from the data folder" if CATALOGUE[name].layouts else "made by Atoll"


ABSENT = "not there"
OVERVIEW = ["data set", "samples", "classes", "clients", "where", "licence"]


def overview(root: Path | None, only: str | None = None) -> list[list[str]]:
    """Return a row for each data set, or for one, with the columns of `OVERVIEW`."""
    chosen = names() if only is None else [entry_of(only)[0]]
    folder = None if root is None else require_folder(root)

    def row(name: str, entry: Entry) -> list[str]:
        counts = ["–" if count is None else str(count) for count in (entry.classes, entry.owners)]
        return [name, entry.samples, *counts, locate(name, folder), entry.licence]

    return [row(name, CATALOGUE[name]) for name in chosen]


def locate(name: str, root: Path | None) -> str:
    """Return the folder below `root` that holds a data set, or where else it comes from."""
    name, entry = entry_of(name)
    if not entry.layouts:
        return describe_origin(name)
    folders = (layout.folder for layout in entry.layouts if root is not None and layout.search(root)[0])
    return next((f"{folder}/" for folder in folders), ABSENT)


# -- images ------------------------------------------------------------------------------------------------------------


@cache
def _bundled_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read the digits once: their text takes longer to parse than a model to train on them."""
    from sklearn.datasets import load_digits  # slow to import, and the other sets do not need it

    images, labels = load_digits(return_X_y=True)
    return images, labels


def _read_digits(_folder: str, _paths: list[Path], _merge: bool) -> Dataset:
    images, labels = _bundled_digits()
    x = _normalise(images.reshape(-1, 1, 8, 8), top=16)
    source = "scikit-learn's digits (Alpaydin and Kaynak, 1998)"
    return Dataset("digits", x, torch.from_numpy(labels.astype(np.int64)), 10, None, source)


def _read_idx(name: str, published: str, folder: str, paths: list[Path], merge: bool) -> Dataset:
    x, y, x_test, y_test = map(read_idx, paths)
    return _assemble(name, (x[:, None], y), (x_test[:, None], y_test), 10, merge, f"{published}, from {folder}")


def _read_cifar(name: str, classes: int, folder: str, paths: list[Path], merge: bool) -> Dataset:
    codec, label, labels = ("webp", "labels", 1) if classes == 10 else ("jpeg", "fine", 2)
    packed = paths[0].suffix == ".npz"
    *train, test = (read_strips(path, codec, label) if packed else read_rows(path, labels) for path in paths)
    changed = " (JPEG-compressed and shuffled, not the original pixels)" if packed and codec == "jpeg" else ""
    source = f"CIFAR-{classes} (Krizhevsky, 2009), from {folder}{changed}"
    return _assemble(name, _concatenate(train), test, classes, merge, source)


def _assemble(name: str, train: Part, test: Part, classes: int, merge: bool, source: str) -> Dataset:
    for images, labels in (train, test):
        if len(images) != len(labels) or labels.max(initial=0) >= classes:
            raise DataError(
                f"`{name}` must have one label in 0..{classes - 1} for each image. "
                f"Got {len(images)} images and {len(labels)} labels up to {labels.max(initial=0)}.",
                hint="the files are damaged or of different data sets; fetch them again.",
            )
    if merge:
        return Dataset(name, *_to_tensors(_concatenate([train, test])), classes, None, source)
    return Dataset(name, *_to_tensors(train), classes, _to_tensors(test), source)


def _concatenate(parts: Sequence[Part]) -> Part:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _to_tensors(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = part
    return _normalise(images, top=255), torch.from_numpy(labels.astype(np.int64))


def _normalise(values: NDArray[np.uint8] | NDArray[np.float64], top: float) -> torch.Tensor:
    """Map 0 .. top to -1 .. 1, in place and in this order of operations: the same bits as PFLlib's."""
    return torch.from_numpy(values.astype(np.float32)).div_(top).sub_(0.5).div_(0.5)


def _read_rotated(base: str, folder: str, paths: list[Path], _merge: bool) -> Dataset:
    from atoll.data import synthetic  # it builds on this module

    return synthetic.rotate_clients(CATALOGUE[base].read(folder, paths, True))


def _read_femnist(folder: str, paths: list[Path], _merge: bool) -> Dataset:
    writers, images, labels = zip(*read_leaf(paths), strict=True)
    x, y = np.concatenate(images), np.concatenate(labels)
    source = f"FEMNIST (Caldas et al., 2018), from {folder}"
    owner = _number_owners([len(own) for own in labels])
    return Dataset("femnist", *_to_tensors((x, y)), 62, None, source, owner, writers)


# -- people ------------------------------------------------------------------------------------------------------------


def _read_hapt(folder: str, paths: list[Path], _merge: bool) -> Dataset:
    """Read HAPT in g and rad/s: fixed units near 1, so nothing is learnt from the clients."""
    samples, activity, person = read_hapt(paths[0]) if paths[0].suffix == ".npz" else read_hapt_text(paths[0])
    kept = np.flatnonzero(activity < BASIC_ACTIVITIES)
    kept = kept[np.argsort(person[kept], kind="stable")]  # each person's windows stay in time order
    persons, owner = np.unique(person[kept], return_inverse=True)
    return Dataset(
        name="hapt",
        x=torch.from_numpy(samples[kept]),
        y=torch.from_numpy(activity[kept]),
        classes=BASIC_ACTIVITIES,
        central=None,
        source=f"HAPT (Reyes-Ortiz et al., 2015), from {folder}",
        owner=owner,
        owners=tuple(f"person {number}" for number in persons),
        gap=1,  # neighbouring windows overlap by half
    )


def _read_shakespeare(folder: str, paths: list[Path], _merge: bool) -> Dataset:
    """Read roles with two or more windows of 80 characters that do not overlap; y is x one character later."""
    roles = read_roles(paths[0]) if paths[0].suffix == ".npz" else read_plays(paths)
    characters = np.unique(np.concatenate([*roles.values()]))
    cut = {role: (len(text) - 1) // PLACES for role, text in roles.items()}
    kept = [role for role, windows in cut.items() if windows >= 2]

    def windows(shift: int) -> torch.Tensor:
        texts = [roles[role][shift : shift + cut[role] * PLACES] for role in kept]
        numbers = np.searchsorted(characters, np.concatenate(texts)) if texts else np.zeros(0, np.int64)
        return torch.from_numpy(numbers.reshape(-1, PLACES))

    return Dataset(
        name="shakespeare",
        x=windows(0),
        y=windows(1),
        classes=len(characters),
        central=None,
        source=f"Shakespeare's plays in Jon Bosak's edition (1998), by role, from {folder}",
        owner=_number_owners([cut[role] for role in kept]),
        owners=tuple(kept),
        gap=0,
        model="char-transformer",
    )


def _read_movietweetings(folder: str, paths: list[Path], _merge: bool) -> Dataset:
    """Read users with 20 ratings or more, each in time order; items are numbered over all users."""
    user, item, rating, time = read_ratings(paths[0])
    items = np.unique(item, return_inverse=True)[1]
    users, owner, ratings_of = np.unique(user, return_inverse=True, return_counts=True)
    order = np.lexsort((time, user))
    order = order[ratings_of[owner[order]] >= FEWEST_RATINGS]
    kept, owner = np.unique(owner[order], return_inverse=True)
    return Dataset(
        name="movietweetings",
        x=torch.from_numpy(items[order][:, None]),
        y=torch.from_numpy(rating[order]).float(),
        classes=None,
        central=None,
        source=f"MovieTweetings 100K (Dooms et al., 2013), from {folder}",
        owner=owner,
        owners=tuple(f"user {number}" for number in users[kept]),
        gap=0,
        model="matrix-factorisation",
        loss=squared_error,
        metric=absolute_error,
    )


def _read_interactions(name: str, fewest: int, leak: bool, folder: str, paths: list[Path], _merge: bool) -> Dataset:
    """Read ratings of MovieTweetings as interactions, of users and items with so many of them."""
    user, item, _, time = read_ratings(paths[0])
    source = f"MovieTweetings 100K (Dooms et al., 2013), from {folder}"
    return Dataset(**list_interactions(name, source, user, item, time, fewest=(fewest, fewest), leak=leak))


def _read_movielens(name: str, leak: bool, folder: str, paths: list[Path], _merge: bool) -> Dataset:
    """Read MovieLens-100K as interactions, of all users and items."""
    user, item, _, time = read_ratings(paths[0])
    source = f"MovieLens 100K (Harper and Konstan, 2015), from {folder}"
    return Dataset(**list_interactions(name, source, user, item, time, fewest=(5, 1), leak=leak))


def _number_owners(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(sizes)), sizes)


def _make_synthetic(kind: str, _folder: str, _paths: list[Path], _merge: bool) -> Dataset:
    from atoll.data import synthetic  # it builds on this module

    made: Dataset = getattr(synthetic, kind)().dataset()
    return made


def _refuse_million(_folder: str, _paths: list[Path], _merge: bool) -> Dataset:
    raise DataError(
        "`million` is made client by client and cannot be read as a whole.",
        hint='build its task: Recipe("million", clients=1000).build().',
    )


# -- the catalogue -----------------------------------------------------------------------------------------------------

IDX_STEMS = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
MNIST = tuple(Layout(folder, IDX_STEMS, ["", ".gz"]) for folder in ("mnist", "MNIST/raw"))
FASHION = tuple(Layout(folder, IDX_STEMS, ["", ".gz"]) for folder in ("fashion-mnist", "FashionMNIST/raw"))
CIFAR10_STEMS = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
CIFAR100_STEMS = ["train", "test"]
SHARE_ALIKE, ZALANDO = "CC BY-SA 3.0 (usual)", "MIT"
TINY_IMAGES = "none; research use"

MOVIETWEETINGS = tuple(Layout("movietweetings", [file]) for file in ("movietweetings_100k.npz", "ratings.dat"))
MOVIELENS = (
    *(Layout(folder, ["u.data"]) for folder in ("ml-100k", "movielens-100k")),
    Layout("ml-100k", ["ml-100k.inter"]),
    Layout("ml-100k", ["recbole-*.whl"]),
)

CATALOGUE: dict[str, Entry] = {
    "digits": Entry(_read_digits, "1,797", 10, None, "CC BY 4.0"),
    "mnist": Entry(partial(_read_idx, "mnist", "MNIST (LeCun et al., 1998)"), "70,000", 10, None, SHARE_ALIKE, MNIST),
    "fashion-mnist": Entry(
        partial(_read_idx, "fashion-mnist", "Fashion-MNIST (Xiao et al., 2017)"), "70,000", 10, None, ZALANDO, FASHION
    ),
    "cifar10": Entry(
        partial(_read_cifar, "cifar10", 10), "60,000", 10, None, TINY_IMAGES,
        (Layout("cifar10", CIFAR10_STEMS, [".npz"]), Layout("cifar-10-batches-bin", CIFAR10_STEMS, [".bin"])),
    ),
    "cifar100": Entry(
        partial(_read_cifar, "cifar100", 100), "60,000", 100, None, TINY_IMAGES,
        (Layout("cifar-100-binary", CIFAR100_STEMS, [".bin"]), Layout("cifar100", CIFAR100_STEMS, [".npz"])),
    ),
    "femnist": Entry(
        _read_femnist, "805,263", 62, 3550, "as NIST SD 19",
        tuple(Layout(folder, ["all_data_*.json"]) for folder in ("femnist", "femnist/data/all_data")),
    ),
    "hapt": Entry(
        _read_hapt, "10,411", BASIC_ACTIVITIES, 30, "not commercial",
        (
            Layout("hapt", ["hapt.npz"]),
            *(Layout(folder, ["labels.txt"]) for folder in ("hapt/RawData", "HAPT Data Set/RawData")),
        ),
    ),
    "shakespeare": Entry(
        _read_shakespeare, "53,419", 72, 1063, "public domain",
        (Layout("shakespeare", ["shakespeare_by_role.npz"]), Layout("shakespeare", ["*.xml"])),
    ),
    "movietweetings": Entry(
        _read_movietweetings, "47,640", None, 1154, "MIT",
        MOVIETWEETINGS,
    ),
    "movietweetings-5core": Entry(
        partial(_read_interactions, "movietweetings-5core", 5, False), "68,055", 2414, 4333, "MIT", MOVIETWEETINGS
    ),
    "movietweetings-5core-leak": Entry(
        partial(_read_interactions, "movietweetings-5core-leak", 5, True), "68,055", 2414, 4333, "MIT", MOVIETWEETINGS
    ),
    "movietweetings-10core": Entry(
        partial(_read_interactions, "movietweetings-10core", 10, False), "44,613", 1099, 2059, "MIT", MOVIETWEETINGS
    ),
    "movielens-100k": Entry(
        partial(_read_movielens, "movielens-100k", False), "100,000", 1682, 943, "not redistributable", MOVIELENS
    ),
    "movielens-100k-leak": Entry(
        partial(_read_movielens, "movielens-100k-leak", True), "100,000", 1682, 943, "not redistributable", MOVIELENS
    ),
    "gaussian": Entry(partial(_make_synthetic, "Gaussian"), "1,200", 5, 20, "–"),
    "linear": Entry(partial(_make_synthetic, "Linear"), "1,200", None, 20, "–"),
    "million": Entry(_refuse_million, "30 each", 10, 1_000_000, "–"),
    "rotated-mnist": Entry(partial(_read_rotated, "mnist"), "16,884", 10, 36, SHARE_ALIKE, MNIST),
    "rotated-fashion-mnist": Entry(partial(_read_rotated, "fashion-mnist"), "16,884", 10, 36, ZALANDO, FASHION),
}  # fmt: skip
