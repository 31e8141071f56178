"""The files of a checkpoint: tensors, and what their JSON file says about them and about the files they build on."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import safetensors
import safetensors.torch
import torch

from atoll.kernel.errors import CheckpointError, RunError
from atoll.kernel.params import Layout, Tree
from atoll.records.schema import Record
from atoll.runtime.files import open_regular, replacing
from atoll.runtime.serialise import pack, unpack


@dataclass(frozen=True, eq=False, kw_only=True)
class Sealed(Record):
    """How many lines a file has, and their digest."""

    lines: int
    sha256: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment(Record):
    """A file of what clients kept: those that kept something since the checkpoint before it, or all of them."""

    round: int
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint(Record):
    """What a checkpoint says about its tensors, and about the files that it builds on."""

    round: int
    bytes: int
    sha256: str
    kept: int | None = None  # clients that have something in a memory on disk
    files: dict[str, Sealed] | None = None  # older runs have none
    segments: list[Segment] | None = None  # of what clients keep in RAM; a later one replaces what it holds again


class Seal:
    """The seal of a file that may grow."""

    def __init__(self) -> None:
        self.lines, self.digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: Path, lines: int | None = None) -> Seal:
        """Read the seal of a file, or of its first `lines` lines; one that is not there has none."""
        seal = cls()
        with open_regular(path) if path.exists() or path.is_symlink() else io.BytesIO() as file:
            for line in itertools.islice(file, lines):
                seal.add(line)
        return seal

    def add(self, line: bytes) -> None:
        """Add a line to the seal."""
        self.lines += 1
        self.digest.update(line)

    @property
    def sealed(self) -> Sealed:
        """What a checkpoint writes down."""
        return Sealed(lines=self.lines, sha256=self.digest.hexdigest())


def write_tensors(path: Path, tree: Tree, layouts: Sequence[Layout]) -> tuple[int, str]:
    """Write a tree as safetensors, whole or not at all; return the bytes and the SHA-256 of the file.

    The tensors go straight to the file: their bytes are never in one piece in memory, and other threads can work.
    """
    tensors, structure = pack(tree, layouts)
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, {"structure": structure})
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from error
        with temporary.open("rb") as file:
            return os.fstat(file.fileno()).st_size, _digest(file)


def read_tensors(path: Path, facts: Checkpoint | Segment, layouts: Sequence[Layout], device: torch.device) -> Tree:
    """Read what `write_tensors` wrote; raise CheckpointError unless the file is there, whole and readable."""
    try:
        with open_regular(path, largest=facts.bytes) as file:
            data = file.read()
        if len(data) != facts.bytes or hashlib.sha256(data).hexdigest() != facts.sha256:
            raise ValueError(f"{len(data)} bytes, expected {facts.bytes} with the recorded checksum")
        length = int.from_bytes(data[:8], "little")
        structure = json.loads(data[8 : 8 + length])["__metadata__"]["structure"]
        return unpack(safetensors.torch.load(data), structure, layouts, device)
    except (RunError, ValueError, LookupError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path.name} is damaged: {str(error).rstrip('.')}.") from error


def is_whole(path: Path, facts: Checkpoint | Segment) -> bool:
    """Return whether the file of tensors is there, with the recorded checksum."""
    try:
        with open_regular(path, largest=facts.bytes) as file:
            return _digest(file) == facts.sha256
    except RunError:
        return False


def _digest(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
