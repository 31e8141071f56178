"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from atoll.kernel.errors import RunError


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
    """Flush to disk which files a folder holds."""
    with contextlib.suppress(OSError):  # some file systems cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def require_no_link(path: Path) -> None:
    """Raise if a file of a run is a link: what is written would end up elsewhere."""
    if path.is_symlink():
        raise RunError(
            f"What a run writes must lie in its folder. {path} is a link to {path.readlink()}.",
            hint="replace the link by what it leads to, or by nothing.",
        )
