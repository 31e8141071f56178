"""Readers of the files that data sets come in. Nothing is unpickled, and a file that cannot be read is named."""

import gzip
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.kernel.errors import DataError

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Part = tuple[Bytes, Bytes]  # images [n, C, H, W] and their labels

LARGEST_FACTOR = 1032  # by which zlib can compress
WINDOW, STEP = 128, 64  # of HAPT: 2.56 s at 50 Hz, each window overlapping the next by half


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong inside into an error about this file."""
    try:
        yield
    except (
        OSError, EOFError, ValueError, KeyError, IndexError, zlib.error, zipfile.BadZipFile, ET.ParseError
    ) as error:  # fmt: skip
        raise DataError(f"{path} could not be read: {error}", hint="the file is damaged; fetch it again.") from error


@contextmanager
def open_arrays(path: Path) -> Iterator[Mapping[str, Any]]:
    """Open an npz file, whose arrays are read when asked for; none may claim to be larger than it can be.

    NumPy makes room for what the header of an array says before it reads the first of its values.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                claimed = _claimed_bytes(file)
                room = min(entry.file_size, LARGEST_FACTOR * entry.compress_size + file.tell()) - file.tell()
            if claimed > room:
                raise ValueError(f"{entry.filename} says that it holds {claimed} bytes, and has {max(room, 0)} at most")
    with np.load(path, allow_pickle=False) as arrays:  # a pickle may run code
        yield arrays


def _claimed_bytes(file: IO[bytes]) -> int:
    """Return the size that the header of an array claims."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return math.prod(shape) * dtype.itemsize


# -- images ------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> Bytes:
    """Read an idx file: two zero bytes, 8 for uint8, the number of axes, their big-endian lengths, the values."""
    with reading(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is not an idx file of bytes")
        axes = content[3]
        shape = np.frombuffer(content, ">u4", count=axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape.tolist())


def read_strips(path: Path, codec: str, labels: str) -> Part:
    """Read compressed strips, each of many 32x32 images on top of each other."""
    with reading(path), open_arrays(path) as arrays:
        stored, offsets = memoryview(arrays[codec]), arrays["offsets"]
        strips = (stored[a:b] for a, b in pairwise(offsets))
        pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(strip))) for strip in strips])
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), arrays[labels]


def read_rows(path: Path, labels: int) -> Part:
    """Read CIFAR's binary rows: `labels` labels, of which the last counts (the fine one), and 3x32x32 pixels."""
    with reading(path):
        rows = np.fromfile(path, np.uint8).reshape(-1, labels + 3 * 32 * 32)
        return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1]


def read_leaf(paths: Iterable[Path]) -> Iterator[tuple[str, Bytes, Numbers]]:
    """Read the writers in LEAF's JSON files one by one, with images [n, 1, 28, 28] and labels.

    One writer is decoded at a time: as Python numbers, a whole file would take gigabytes.
    """
    decode = json.JSONDecoder().raw_decode
    for path in paths:
        with reading(path):
            text = path.read_text(encoding="utf-8")
            place = _skip(r'"user_data"\s*:\s*{\s*', text, text.index('"user_data"'))
            while text[place] != "}":
                writer, place = decode(text, place)
                samples, place = decode(text, _skip(r"\s*:\s*", text, place))
                place = _skip(r"\s*,?\s*", text, place)
                pixels = np.rint(np.asarray(samples["x"], np.float32) * 255).astype(np.uint8)
                yield writer, pixels.reshape(-1, 1, 28, 28), np.asarray(samples["y"], np.int64)


def _skip(pattern: str, text: str, place: int) -> int:
    """Return where a pattern that must stand at `place` ends."""
    match = re.compile(pattern).match(text, place)
    if match is None:
        raise ValueError(f"it is not LEAF's JSON at character {place}")
    return match.end()


# -- people ------------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Windows of signals: samples [n, 6, 128] in g and rad/s, activities from 0 on, and persons, in time order."""

    samples: NDArray[np.float32]
    activity: Numbers
    person: Numbers


def read_hapt(path: Path) -> Windows:
    """Read the recordings in one npz file: whole numbers of sensor steps, and where the windows begin."""
    with reading(path), open_arrays(path) as arrays:
        signal = arrays["signal"] * arrays["scale"][:, None]
        return _cut_windows(signal, arrays["win_start"], arrays["win_label"], arrays["win_subject"])


def read_hapt_text(labels: Path) -> Windows:
    """Read UCI's folder RawData: labels.txt, and for each recording acceleration and angular velocity as text."""
    with reading(labels):
        segments = _parse_table(labels.read_text(encoding="ascii"), columns=5)
    parts = []
    for recording, person in sorted({(int(row[0]), int(row[1])) for row in segments}):
        signals = []
        for sensor in ("acc", "gyro"):
            path = labels.with_name(f"{sensor}_exp{recording:02}_user{person:02}.txt")
            with reading(path):
                signals.append(np.loadtxt(path, ndmin=2).T)
        own = segments[segments[:, 0] == recording]
        starts = [(first, row[2]) for row in own for first in range(row[3] - 1, row[4] - WINDOW + 1, STEP)]
        first, activity = np.asarray(starts, np.int64).reshape(-1, 2).T
        parts.append(_cut_windows(np.concatenate(signals), first, activity - 1, np.full(len(first), person)))
    samples, activities, persons = zip(*parts, strict=True)
    return Windows(np.concatenate(samples), np.concatenate(activities), np.concatenate(persons))


def _cut_windows(
    signal: NDArray[np.float64], first: NDArray[Any], activity: NDArray[Any], person: NDArray[Any]
) -> Windows:
    cut = signal[:, first[:, None] + np.arange(WINDOW)].astype(np.float32).transpose(1, 0, 2)
    return Windows(cut, activity.astype(np.int64), person.astype(np.int64))


def read_roles(path: Path) -> dict[str, Bytes]:
    """Read the text of each role from one npz file."""
    with reading(path), open_arrays(path) as arrays:
        names = [
            f"{role} ({arrays['play_titles'][play]})" for role, play in zip(arrays["role"], arrays["play"], strict=True)
        ]
        texts = np.split(arrays["text"], arrays["offsets"][1:-1])
        return dict(zip(names, texts, strict=True))


def read_plays(paths: Iterable[Path]) -> dict[str, Bytes]:
    """Read the text of each role from the plays in Jon Bosak's XML; a shared speech goes to the first speaker."""
    speeches: dict[str, list[str]] = {}
    for path in paths:
        with reading(path):
            play = ET.parse(path).getroot()
            title = play.findtext("TITLE", path.stem).strip()
            for speech in play.iter("SPEECH"):
                lines = filter(None, map(_spoken_text, speech.iter("LINE")))
                role = f"{speech.findtext('SPEAKER', '').strip()} ({title})"
                speeches.setdefault(role, []).append("".join(f"{line}\n" for line in lines))
    return {role: np.frombuffer("\n".join(said).encode(), np.uint8) for role, said in speeches.items()}


def _spoken_text(line: ET.Element) -> str:
    """Return a line without the stage directions in it."""
    return "".join([line.text or "", *(direction.tail or "" for direction in line)]).strip()


class Ratings(NamedTuple):
    """Ratings: user, item, rating and time of each."""

    user: Numbers
    item: Numbers
    rating: Numbers
    time: Numbers


def read_ratings(path: Path) -> Ratings:
    """Read ratings: MovieTweetings from an npz file or its own text, user::item::rating::time; MovieLens from its own.

    MovieLens-100K is `u.data`, the same four columns with tabs between them, or a table of them with a line of names,
    as it is in the wheel of RecBole.
    """
    with reading(path):
        if path.suffix == ".npz":
            with open_arrays(path) as arrays:
                columns = [arrays[name] for name in ("user", "item", "rating", "timestamp")]
        else:
            text = (_read_member(path) if path.suffix == ".whl" else path.read_text(encoding="ascii")).replace(
                "::", " "
            )
            if text[:1].isalpha():  # the names of the columns: user_id:token, item_id:token, rating:float, ...
                text = text.partition("\n")[2]
            columns = list(_parse_table(text, columns=4).T)
        return Ratings(*(column.astype(np.int64) for column in columns))


def _read_member(wheel: Path) -> str:
    """Return the table of MovieLens-100K in a wheel, which is neither installed nor run."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith("/ml-100k.inter")]
        if not names:
            raise ValueError("it must have a file ml-100k.inter, as recbole 1.2.1 has")
        return packed.read(names[0]).decode("ascii")


def _parse_table(text: str, columns: int) -> Numbers:
    """Parse rows of whole numbers."""
    rows = [line.split() for line in text.splitlines()]
    if not rows or any(len(row) != columns for row in rows):
        raise ValueError(f"it must have rows of {columns} numbers")
    return np.asarray(rows, np.float64).astype(np.int64)
