"""Which files of methods this user has run: a run's folder names a file, and must not make anybody run it.

Digests are of a file and of all that it imports from beside it. They are kept in trusted.json in the user's state
folder: $ATOLL_STATE, else atoll in $XDG_STATE_HOME, else ~/.local/state/atoll.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from atoll.kernel.errors import RunError, UnknownName
from atoll.kernel.sources import own_digest
from atoll.runtime.files import read_regular, write_whole

MOST = 10_000  # files that are remembered; the oldest are forgotten


def state_folder() -> Path:
    """Return the folder of what Atoll knows about this user."""
    own = os.environ.get("ATOLL_STATE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "atoll"


def remember(file: Path) -> None:
    """Write down that this user runs a file; if that fails, the user is asked again."""
    digest, known = own_digest(file), _read_known()
    if digest in known:
        return
    kept = dict([*known.items(), (digest, str(file.resolve()))][-MOST:])
    try:
        state_folder().mkdir(parents=True, exist_ok=True)
        write_whole(state_folder() / "trusted.json", (json.dumps(kept, indent=2) + "\n").encode())
    except OSError:  # a home that cannot be written is no reason not to run
        return


def require_trusted(file: Path, *, trust: bool) -> None:
    """Raise unless this user has run this file as it is, or says now that it may run."""
    if not file.is_file():
        raise UnknownName(f"The file of a run's method must be there. There is no {file}.", hint="put it back there.")
    if trust:
        remember(file)
    elif own_digest(file) not in _read_known():
        raise RunError(
            f"A run's folder must not make you run a file that you have not run before. It names {file}.",
            hint="read that file and what it imports; if you trust it, say so with `trust`.",
        )


def _read_known() -> dict[str, str]:
    """Read which files this user has run, by digest; none if the list cannot be read."""
    path = state_folder() / "trusted.json"
    try:
        found = json.loads(read_regular(path, 2**26))
    except (RunError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
