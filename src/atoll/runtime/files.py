"""Files that are complete or absent."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from atoll.kernel.errors import RunError

LOCK, WRITER = ".lock", ".writer"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name, flush it to disk and rename it: nobody ever sees half of it.

    Several processes may write the same file: one of theirs will be there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)  # of a crash, or a link
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
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
        who = writer.read_text(errors="replace").strip() if writer.is_file() else "another process"
        raise RunError(
            f"One process at a time may write to {folder}. {who} does.",
            hint="wait until it is done, or choose another folder.",
        ) from None
    try:
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
