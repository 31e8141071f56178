"""The data sets Atoll can read, from the folder named by `ATOLL_DATA` (`digits` comes with scikit-learn).

Files are taken as they lie: the layouts below, or those that torchvision leaves behind. Nothing is unpickled.

    digits          no files
    mnist           {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz] in mnist/ or MNIST/raw/
    fashion-mnist   the same in fashion-mnist/ or FashionMNIST/raw/
    cifar10         {data_batch_1..5,test_batch}.npz (lossless WebP strips) in cifar10/,
                    or the same names with .bin in cifar-10-batches-bin/
"""

import gzip
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.errors import DataError, unknown
from atoll.models.objective import Metric, PerSample, accuracy, cross_entropy

Bytes = NDArray[np.uint8]
Part = tuple[Bytes, Bytes]  # images [n, C, H, W] and their labels

CIFAR10_TRAIN = [f"data_batch_{k}" for k in range(1, 6)]
CIFAR10_TEST = ["test_batch"]


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
    gap: int | None = None  # an owner's samples are in time order, and so many are left out between its splits
    model: str | None = None  # the network that suits it, by name
    loss: PerSample = cross_entropy
    metric: Metric = accuracy

    def __repr__(self) -> str:
        central = "" if self.central is None else f" + {len(self.central[1])} central"
        return f"Dataset({self.name!r}, {len(self.y)}{central} samples of {tuple(self.x.shape[1:])})"


def names() -> list[str]:
    """The data sets `load` knows."""
    return list(LOADERS)


def load(name: str, root: Path | None = None, merge: bool = True) -> Dataset:
    """Read a data set from `root`, by default the folder named by `ATOLL_DATA`.

    With `merge`, training and official test samples stand together, to be split inside each client (the
    protocol of PFLlib); without, the official test set becomes `central`. `digits` has no official test set.
    """
    if name not in LOADERS:
        raise unknown("data set", name, LOADERS)
    if root is None and os.environ.get("ATOLL_DATA"):
        root = Path(os.environ["ATOLL_DATA"])
    return LOADERS[name](root, merge)


def _digits(_root: Path | None, _merge: bool) -> Dataset:
    from sklearn.datasets import load_digits  # slow to import, and the other sets do not need it

    images, labels = load_digits(return_X_y=True)
    x = _normalised(images.reshape(-1, 1, 8, 8), top=16)
    source = "scikit-learn's digits (Alpaydin and Kaynak, 1998)"
    return Dataset("digits", x, torch.from_numpy(labels.astype(np.int64)), 10, None, source)


def _idx(name: str, folders: Sequence[str], origin: str, root: Path | None, merge: bool) -> Dataset:
    stems = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    folder, paths = _find(name, root, [(folder, stems, ["", ".gz"]) for folder in folders])
    x, y, x_test, y_test = (_read_idx(path) for path in paths)
    source = f"{origin}, from {folder}"
    return _assemble(name, (x[:, None], y), (x_test[:, None], y_test), 10, merge, source)


def _cifar10(root: Path | None, merge: bool) -> Dataset:
    stems = CIFAR10_TRAIN + CIFAR10_TEST
    layouts = [("cifar10", stems, [".npz"]), ("cifar-10-batches-bin", stems, [".bin"])]
    folder, paths = _find("cifar10", root, layouts)
    parts = [_read_webp(path) if path.suffix == ".npz" else _read_cifar_bin(path) for path in paths]
    *train, test = parts
    source = f"CIFAR-10 (Krizhevsky, 2009), from {folder}"
    return _assemble("cifar10", _concatenated(train), test, 10, merge, source)


# Loaders take the data folder, if any is known, and whether to merge the official test set.
LOADERS: dict[str, Callable[[Path | None, bool], Dataset]] = {
    "digits": _digits,
    "mnist": partial(_idx, "mnist", ["mnist", "MNIST/raw"], "MNIST (LeCun et al., 1998)"),
    "fashion-mnist": partial(
        _idx, "fashion-mnist", ["fashion-mnist", "FashionMNIST/raw"], "Fashion-MNIST (Xiao et al., 2017)"
    ),
    "cifar10": _cifar10,
}


def _assemble(name: str, train: Part, test: Part, classes: int, merge: bool, source: str) -> Dataset:
    for images, labels in (train, test):
        if len(images) != len(labels) or labels.max(initial=0) >= classes:
            raise DataError(
                f"`{name}` must have one label in 0..{classes - 1} for each image. "
                f"Got {len(images)} images and {len(labels)} labels up to {labels.max(initial=0)}.",
                hint="the files are damaged or of different data sets; fetch them again.",
            )
    if merge:
        return Dataset(name, *_tensors(_concatenated([train, test])), classes, None, source)
    return Dataset(name, *_tensors(train), classes, _tensors(test), source)


def _concatenated(parts: Sequence[Part]) -> Part:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _tensors(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = part
    return _normalised(images, top=255), torch.from_numpy(labels.astype(np.int64))


def _normalised(values: NDArray[np.uint8] | NDArray[np.float64], top: float) -> torch.Tensor:
    """0 .. top to -1 .. 1, in place and in this order of operations: the same bits as PFLlib's."""
    return torch.from_numpy(values.astype(np.float32)).div_(top).sub_(0.5).div_(0.5)


def _find(name: str, root: Path | None, layouts: Sequence[tuple[str, list[str], list[str]]]) -> tuple[str, list[Path]]:
    """The first folder with a file for every stem, under one of the suffixes, and those files in order."""
    if root is None:
        raise DataError(
            f"`{name}` is read from a data folder, and none is known.",
            hint="set ATOLL_DATA to the folder that holds the data sets, or use `digits`: it needs no files.",
        )
    missing = []
    for folder, stems, suffixes in layouts:
        candidates = [[root / folder / f"{stem}{suffix}" for suffix in suffixes] for stem in stems]
        found = [next((path for path in paths if path.is_file()), None) for paths in candidates]
        if all(found):
            return folder, [path for path in found if path is not None]
        first = stems[found.index(None)]
        missing.append(f"  {root / folder}: no {' or '.join(first + suffix for suffix in suffixes)}")
    pickles = (root / "cifar-10-batches-py").is_dir() and name == "cifar10"
    raise DataError(
        f"`{name}` was not found. Looked in\n" + "\n".join(missing),
        hint="cifar-10-batches-py holds pickles, which may run code and are not read; get the binary version."
        if pickles
        else "put the files there, or set ATOLL_DATA to the folder that holds one of these.",
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} could not be read: {error}", hint="the file is damaged; fetch it again.") from error


def _read_idx(path: Path) -> Bytes:
    """An idx file: two zero bytes, 8 for uint8, the number of axes, their big-endian lengths, the values."""
    with _reading(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is not an idx file of bytes")
        axes = content[3]
        shape = np.frombuffer(content, ">u4", count=axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape.tolist())


def _read_webp(path: Path) -> Part:
    """Lossless WebP strips, each of many 32x32 images on top of each other."""
    with _reading(path), np.load(path, allow_pickle=False) as arrays:
        stored, offsets = memoryview(arrays["webp"]), arrays["offsets"]
        strips = (stored[a:b] for a, b in pairwise(offsets))
        pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(strip))) for strip in strips])
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), arrays["labels"]


def _read_cifar_bin(path: Path) -> Part:
    """Rows of one label and 3x32x32 pixels."""
    with _reading(path):
        rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
