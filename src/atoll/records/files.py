"""The one writer and the one guarded reader of a run's files.

A JSON file holds the version of its form (`schema`) and a digest of the rest (`seal`), so one that was changed by hand
is noticed. Whatever else a file may be, a link, a folder, garbage, of another form, ends in a RunError that names it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from atoll.kernel.errors import RunError
from atoll.records.schema import SCHEMA, SchemaError, parse
from atoll.runtime.files import open_regular, read_regular, require_no_link, write_whole

log = logging.getLogger("atoll.run")

LARGEST_JSON = 2**30  # bytes; a million clients need about a tenth of it
T = TypeVar("T")


# -- writing -----------------------------------------------------------------------------------------------------------


def write_record(path: Path, record: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file with its version and seal, whole or not at all; without `indent`, in one line."""
    content = {"schema": SCHEMA, **{name: value for name, value in record.items() if name != "schema"}}
    write_json(path, {**content, "seal": _seal_of(content)}, indent=indent)


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file, whole or not at all; without `indent`, in one line."""
    write_whole(path, (json.dumps(value, indent=indent) + "\n").encode())


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_whole(path, text.encode())


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to add lines to it; never through a link."""
    require_no_link(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn failures to write into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"The disk with {folder} must have room for the run. It is full.",
                hint=f"make room, then continue with `atoll resume {folder}`; all before the last checkpoint is safe.",
            ) from error
        raise RunError(f"{folder} must be writable: {error}.") from error


# -- reading -----------------------------------------------------------------------------------------------------------


def read_record(path: Path, hint: type[T]) -> T:
    """Read a JSON file as a record; raise RunError, naming file and reason, if it is not one, or was changed."""
    text = read_regular(path, LARGEST_JSON)
    with guarding(path):
        content = json.loads(text)
        if not isinstance(content, dict):
            raise SchemaError("it must be a dictionary")
        schema, seal = content.get("schema"), content.pop("seal", None)
        if schema is not None and (not isinstance(schema, int) or schema > SCHEMA):
            raise RunError(
                f"{path} must be of a form that this Atoll knows, at most schema {SCHEMA}. It is of schema {schema}.",
                hint="it was written by a newer Atoll: update, or begin a new run in another folder.",
            )
        if (schema is not None or seal is not None) and seal != _seal_of(content):  # older files have neither
            raise changed_file_error(path)
        content.pop("schema", None)
        made: T = parse(hint, content)
        return made


def read_lines(path: Path, hint: type[T], sealed: int = 0) -> list[T]:
    """Read a file of lines as records; a file that is not there has none.

    A crash may have cut the last line short, or lost some: after the first `sealed` lines, which a checkpoint vouches
    for, all from the first one that cannot be read is left out, with a warning unless it is only the last one's end.
    """
    found: list[T] = []
    if not path.exists() and not path.is_symlink():
        return found
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            try:
                with guarding(path):
                    found.append(parse(hint, json.loads(line)))
            except RunError as error:
                if number <= sealed:
                    raise
                if line.endswith(b"\n") or not line.startswith(b"{"):
                    log.warning("%s; line %d and what follows are left out", str(error).rstrip("."), number)
                break
    return found


@contextlib.contextmanager
def guarding(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with the content of a file into an error that names it."""
    try:
        yield
    except RecursionError as error:
        raise RunError(f"{path} must not be nested so deeply.") from error
    except SchemaError as error:
        raise RunError(f"{path} must be what a run writes: {error}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise RunError(f"{path} must be what a run writes. It cannot be read: {error}.") from error


def changed_file_error(path: Path, when: str = "it was written") -> RunError:
    """Make the error for a file that is not as it was written."""
    return RunError(
        f"The files of a run must be those that it wrote. {path} was changed after {when}.",
        hint="put the file back as it was, or begin a new run in another folder.",
    )


def _seal_of(content: Any) -> str:
    """Digest what JSON holds, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
