"""What a site keeps of a federation: private state, committed and pending, in a folder of its own.

A round's work changes what clients keep. Whether it counts is known later: the coordinator's next message says which
reply it accepted last. Until then the new state is pending, with the job it belongs to; if the reply did not count, the
site goes back to the committed state. `state.json` is replaced last and at once, so a site that is killed at any moment
has the state from before or from after its work, and answers the same job with the same reply.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.deploy.messages import LARGEST_BODY
from atoll.kernel.errors import AtollError, DeployError
from atoll.kernel.params import Layout, Tree
from atoll.records.files import read_record, write_record
from atoll.records.schema import Record
from atoll.runtime import serialise
from atoll.runtime.files import alone_in, read_regular, write_whole
from atoll.runtime.memory import RamMemory

log = logging.getLogger("atoll.site")
LARGEST = 64 * LARGEST_BODY


@dataclass(frozen=True, eq=False, kw_only=True)
class Pending(Record):
    """Work that may count or not."""

    job: str  # the digest of the message that asked for it
    number: int  # of the exchange
    round: int
    kept: str | None  # the file of what clients keep after it; None: nothing
    kept_sha256: str | None = None
    reply: str  # the file of the reply


@dataclass(frozen=True, eq=False, kw_only=True)
class State(Record):
    """Where a site is in a federation."""

    site: str  # the name of its place
    coordinator: str  # the public key whose jobs it takes
    terms: str  # the digest of what was agreed
    data: str  # the fingerprint of the site's samples
    protection: str = ""  # the digest of what messages pass before they leave
    hides_sizes: bool = False  # whether it does not tell how many training samples it has
    noisy: int = 0  # messages that left with this site's noise
    kept: str | None = None  # the file of what clients keep, committed
    kept_sha256: str | None = None
    committed: str | None = None  # the digest of the job after which it was committed
    committed_round: int | None = None
    number: int = -1  # of the newest exchange that was answered
    pending: Pending | None = None


class Store:
    """The folder of one federation at a site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder: one process works for a site at a time."""
        with contextlib.ExitStack() as held:
            with writing(self.folder):
                held.enter_context(alone_in(self.folder))
            yield

    def load(self) -> State | None:
        """Return where the site is; None before its first job."""
        path = self.folder / "state.json"
        return read_record(path, State) if path.exists() else None

    def memory(self, state: State, clients: int, layout: Layout, *, pending: bool = False) -> RamMemory:
        """Return what the clients keep: what is committed, or what is pending."""
        one: Any = state.pending if pending and state.pending is not None else state
        memory = RamMemory(clients)
        if one.kept is None:
            return memory
        path = self.folder / one.kept
        data = read_regular(path, LARGEST)
        if hashlib.sha256(data).hexdigest() != one.kept_sha256:
            raise DeployError(
                f"What this site keeps must be as it was written. {path} was changed or damaged.",
                hint="put the file back from a backup, or leave the federation and join it anew with an empty folder.",
            )
        saved = serialise.from_bytes(data, layout)
        memory.load([saved], round=0)
        return memory

    def settle(self, state: State, counted: str | None) -> State:
        """Return the state after the coordinator said which job's reply it accepted last: commit, or go back."""
        pending = state.pending
        if pending is None:
            return state
        if counted == pending.job:
            return replace(
                state, kept=pending.kept, kept_sha256=pending.kept_sha256, committed=pending.job,
                committed_round=pending.round, pending=None,
            )  # fmt: skip
        log.warning(
            "round %d: this site's reply did not count; what its clients keep is again as it was before", pending.round
        )
        return replace(state, pending=None)

    def save(self, state: State, memory: RamMemory, pending: Pending, reply: bytes) -> State:
        """Write pending work and its reply; then the state, at once."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            saved: Tree = memory.save(round=0)
            if saved is not None:
                data = serialise.to_bytes(saved, about="")
                pending = replace(
                    pending, kept=f"kept-{pending.job[:16]}.safetensors", kept_sha256=hashlib.sha256(data).hexdigest()
                )
                write_whole(self.folder / str(pending.kept), data)
            write_whole(self.folder / pending.reply, reply)
            state = replace(state, pending=pending, number=pending.number)
            write_record(self.folder / "state.json", state)
        self._tidy(state)
        return state

    def commit(self, state: State) -> None:
        """Write the state."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_record(self.folder / "state.json", state)

    def reply(self, pending: Pending) -> bytes:
        """Return the reply that was written for a job."""
        return read_regular(self.folder / pending.reply, LARGEST)

    def replace_reply(self, pending: Pending, reply: bytes) -> None:
        """Write another reply for a job in place of the one that was there."""
        with writing(self.folder):
            write_whole(self.folder / pending.reply, reply)

    def _tidy(self, state: State) -> None:
        """Remove what no state needs."""
        needed = {state.kept, "state.json"}
        needed |= {state.pending.kept, state.pending.reply} if state.pending else set()
        for path in self.folder.iterdir():
            if path.name.startswith(("kept-", "reply-")) and path.name not in needed:
                path.unlink(missing_ok=True)

    def forget_training(self) -> None:
        """Remove the progress of long training, which is of no use after its reply."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder / "trained")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn failures to write at a site into errors that say what to do."""
    try:
        yield
    except AtollError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DeployError(
                f"The disk with {folder} must have room for what this site keeps. It is full.",
                hint="make room and give the same command again: nothing was changed.",
            ) from error
        raise DeployError(f"{folder} must be writable: {error}.") from error
