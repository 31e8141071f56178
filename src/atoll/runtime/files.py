"""Files that are complete or absent."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from atoll.kernel.errors import RunError

LOCK, WRITER = ".lock", ".writer"
LARGEST = 2**32  # bytes of a file that is read


def cache_folder() -> Path:
    """Return the folder of what can be made again: $ATOLL_CACHE, else atoll in $XDG_CACHE_HOME, else ~/.cache/atoll."""
    own = os.environ.get("ATOLL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; see `replacing`."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield another name to write a file under, then flush it to disk and rename it: nobody ever sees half of it.

    Several processes may write the same file: one of theirs will be there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)  # of a crash, or a link
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush the list of files in a folder to disk."""
    with contextlib.suppress(OSError):  # some file systems cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for writing; raise if another process, or this one, is writing there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LOCK, WRITER):
        require_no_link(folder / name)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        writer = folder / WRITER
        who = (writer.read_text(errors="replace").strip() if writer.is_file() else "") or "another process"
        raise RunError(
            f"One process at a time may write to {folder}. {who} does.",
            hint="wait until it is done, or choose another folder.",
        ) from None
    try:
        with contextlib.suppress(OSError):  # on a full disk; it is for the message above alone
            (folder / WRITER).write_text(f"process {os.getpid()} on {platform.node()}\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / WRITER).unlink()
        lock.release()


def require_no_link(path: Path) -> None:
    """Raise if a file of a run is a link: what is written would end up elsewhere."""
    if path.is_symlink():
        raise RunError(
            f"The files of a run must lie in its folder. {path} is a link to {path.readlink()}.",
            hint="replace the link by its target, or remove it.",
        )


def open_regular(path: Path, largest: int = LARGEST) -> BinaryIO:
    """Open a file of a run to read it; raise RunError unless it is a regular file that is not too large.

    A link could lead anywhere, and a pipe would be waited for.
    """
    try:
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if path.is_symlink():
            raise RunError(f"A file of a run must not be a link. {path} is one.") from error
        raise RunError(f"{path} must be readable: {error.strerror}.") from error
    found = os.fstat(opened)
    reason = None
    if not stat.S_ISREG(found.st_mode):
        reason = f"A file of a run must be a regular file. {path} is {_kind(found.st_mode)}."
    elif found.st_size > largest:
        reason = f"{path} must have at most {largest:,} bytes. It has {found.st_size:,}."
    if reason is not None:
        os.close(opened)
        raise RunError(reason)
    return os.fdopen(opened, "rb")


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    """Read a file of a run, as `open_regular` opens it."""
    with open_regular(path, largest) as file:
        return file.read()


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "none"
