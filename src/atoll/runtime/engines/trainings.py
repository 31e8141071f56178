"""Long local training, kept on disk under a digest of what decides it, so it is done once.

A scan is a pure function of its step, its values, the client's data and the seed. So where a client was after some
epochs can be found again by a digest of these: by another method whose clients train the same way and whose server
differs, by a run with more epochs, which goes on from there, and by a run that was interrupted.

A curve by epoch stops all training `until` an epoch, has it answered and scored, and goes on from there.

An entry holds a checksum of itself. If it is damaged, the log says so and its client is trained again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor

from atoll.kernel.fingerprints import content, files_of, fingerprint, portable
from atoll.kernel.params import Structure, stacked_leaves
from atoll.kernel.sources import training_digest
from atoll.runtime.engines.work import Leaves, Work
from atoll.runtime.files import flush_folder, write_whole

if TYPE_CHECKING:
    from atoll.data.task import Task
    from atoll.kernel.cohort import Cohort

log = logging.getLogger("atoll.engine")

SAVED_EVERY = 30.0  # seconds
ENTRY = re.compile(r"(\d+)(\.way)?\.safetensors")  # after so many epochs, which may be on the way to more
TRAINED = "trained"  # the folder of trained clients
OnEpoch = Callable[[int, int, int], None]  # so many clients have done so many epochs of so many
Run = Callable[[Leaves, int, int], Leaves]  # the carry after the epochs from one to before another


@dataclass
class Pause:
    """Where clients were when their training paused, and how many seconds it took them to get there."""

    carry: Leaves
    epochs: int = 0
    seconds: float = 0.0
    gradients: int = 0  # of one step


class Trainings:
    """A folder with one file per client and point of its training; `stop` ends a training after its epoch.

    Without a folder, only a training that pauses for a curve is kept, in memory.
    """

    def __init__(self, folder: Path | None, stop: threading.Event | None = None, on_epoch: OnEpoch | None = None):
        self.folder, self.stop, self.on_epoch = folder, stop or threading.Event(), on_epoch
        self.until: int | None = None  # every training pauses after this epoch; None: it goes on to its last one
        self.found = list[float]()  # seconds that training took which was done before and is not done again
        self._paused = dict[tuple[str, ...], Pause]()  # by the digests of clients that train together

    def for_server(self) -> Trainings:
        """Return the same place for a server's training, whose epochs are not the clients'."""
        mine = Trainings(self.folder, self.stop)
        mine.found = self.found
        return mine

    def end(self, epochs: int) -> int:
        """Return the epoch after which a training of so many ends, or pauses."""
        return epochs if self.until is None else min(self.until, epochs)

    def carry_on(self, names: Sequence[str], carry: Leaves, epochs: int, run: Run, work: Work) -> tuple[Leaves, int]:
        """Do the missing epochs; return the carry, and how many were found. `names` are the clients' digests."""
        end, pause, found, before = self.end(epochs), self._paused.pop(tuple(names), Pause(carry)), 0, 0.0
        if any(pause.epochs < done <= end for done in _in_common([self._points(name) for name in names])):
            carry, found, before = self._find(names, carry, end, work)
        if found > pause.epochs:
            log.info("%d of %d epochs of local training were done before", found, epochs)
            self.found.append(before - pause.seconds)
        elif pause.epochs:
            carry, found, before, work.gradients[0] = pause.carry, pause.epochs, pause.seconds, pause.gradients
        saved_at = began = time.monotonic()
        for done in range(found + 1, end + 1):
            carry = run(carry, done - 1, done)
            if self.on_epoch:
                self.on_epoch(len(names), done, epochs)
            stopping = self.stop.is_set() and done < epochs
            kept = False
            if done == end or stopping or time.monotonic() - saved_at > SAVED_EVERY:
                kept = self._keep(names, done, carry, work, began - before, last=done == end)
                saved_at = time.monotonic()
            if stopping:
                which = "which is kept" if kept else "which could not be kept"
                raise KeyboardInterrupt(f"stopped after epoch {done} of {epochs} of local training, {which}")
        if end < epochs:
            self._paused[tuple(names)] = Pause(carry, end, time.monotonic() - began + before, work.gradients[0])
        return carry, found

    # -- reading ---------------------------------------------------------------------------------------------------
    def _find(self, names: Sequence[str], carry: Leaves, epochs: int, work: Work) -> tuple[Leaves, int, float]:
        """Return the latest carry that is found for all clients, after how many epochs, and the seconds these took."""
        there = [self._points(name) for name in names]
        for done in _in_common(there):
            if done > epochs:
                continue
            try:
                entries = [_read(points[done], name, done) for name, points in zip(names, there, strict=True)]
            except FileNotFoundError:  # another process has gone on and tidied up
                continue
            except _Damaged as damaged:
                log.warning("%s; this training is done again", damaged)
                continue
            rows = [[leaves[f"{number}"] for number in range(len(carry))] for leaves, _ in entries]
            work.gradients[0] = int(entries[0][1]["gradients"])
            seconds = sum(float(facts["seconds"]) for _, facts in entries)
            stacked = [torch.stack(parts).to(leaf.device) for leaf, *parts in zip(carry, *rows, strict=True)]
            return stacked, done, seconds
        return carry, 0, 0.0

    def _points(self, name: str) -> dict[int, Path]:
        """Return the entries of a client by their number of epochs; files that are no entries are left alone."""
        if self.folder is None:
            return {}
        files = {file: ENTRY.fullmatch(file.name) for file in sorted((self.folder / name).glob("*.safetensors"))}
        return {int(named[1]): file for file, named in files.items() if named and file.is_file()}

    # -- writing ---------------------------------------------------------------------------------------------------
    def _keep(self, names: Sequence[str], done: int, carry: Leaves, work: Work, began: float, *, last: bool) -> bool:
        """Write a point of every client; return whether it worked, as a full disk must not end the training."""
        if self.folder is None:
            return False
        try:
            self._save(names, done, carry, work, began, last=last)
        except OSError as error:
            log.warning("local training cannot be kept in %s: %s", self.folder, error)
            return False
        return True

    def _save(self, names: Sequence[str], done: int, carry: Leaves, work: Work, began: float, *, last: bool) -> None:
        """Write a point of every client; of those on the way to the last one, only the newest is kept."""
        assert self.folder is not None
        kind = "safetensors" if last else "way.safetensors"
        for row, name in enumerate(names):
            place = self.folder / name
            place.mkdir(parents=True, exist_ok=True)
            flush_folder(self.folder)
            earlier = [file for file in self._points(name).values() if file.name.endswith("way.safetensors")]
            leaves = {f"{number}": leaf[row].cpu().clone() for number, leaf in enumerate(carry)}
            each = (time.monotonic() - began) / len(names)  # now that the values are here, all steps are done
            facts = {"of": name, "epochs": f"{done}", "gradients": f"{work.gradients[0]}", "seconds": f"{each}"}
            sealed = {**facts, "checksum": _checksum(leaves, facts)}
            write_whole(place / f"{done}.{kind}", safetensors.torch.save(leaves, sealed))
            for file in earlier:
                if file.name != f"{done}.{kind}":
                    file.unlink(missing_ok=True)


def _in_common(points: Sequence[Mapping[int, Path]]) -> list[int]:
    """Return after how many epochs there are entries of all clients, the latest first."""
    return sorted(set.intersection(*map(set, points)), reverse=True)


class _Damaged(Exception):
    """An entry is not as it was written."""


def _read(file: Path, name: str, done: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the leaves and facts of an entry; raise _Damaged unless they are of this client after these epochs."""
    try:
        data = file.read_bytes()  # at once: another process may put another file there at any time
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        facts: dict[str, str] = dict(header.get("__metadata__", {}))
        leaves = safetensors.torch.load(data)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        raise _Damaged(f"{file} cannot be read ({error})") from error
    checksum = facts.pop("checksum", None)
    if checksum != _checksum(leaves, facts) or (facts["of"], facts["epochs"]) != (name, f"{done}"):
        raise _Damaged(f"{file} is damaged: its checksum does not hold")
    return leaves, facts


def _checksum(leaves: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    parts = [*sorted((name, content(leaf)) for name, leaf in leaves.items()), *sorted(facts.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def digests(cohort: Cohort, task: Task, work: Work, carry: Leaves, given: Leaves, facts: Sequence[object]) -> list[str]:
    """Return a digest per client of everything that decides its training; raise Unstable if that is not known.

    `facts` are what the scan was asked for. The code belongs to it, as far as training can reach: the step's, the
    model's and the loss's, whole files of users with what they import, and the parts of Atoll behind them.
    """
    network = work.network
    functions = (fingerprint(work.step), network.function, fingerprint(task.augment), fingerprint(task.training))
    known = (
        training_digest(files_of(functions)), portable(functions), torch.__version__, cohort.task.seed,
        cohort.round, task.samples, network.values, work.variant.precision, _describe(work.carry),
        _describe(work.given), facts,
        [content(leaf) for leaf, row in zip(given, stacked_leaves(work.given), strict=True) if not row],
    )  # fmt: skip
    common = hashlib.sha256(repr(known).encode()).hexdigest()
    mine = [*carry, *(leaf for leaf, row in zip(given, stacked_leaves(work.given), strict=True) if row)]
    return [
        hashlib.sha256(repr((common, int(client), [content(leaf[place]) for leaf in mine])).encode()).hexdigest()[:32]
        for place, client in enumerate(cohort.clients)
    ]


def _describe(structure: Structure) -> tuple[object, ...]:
    """Return the part of a structure that concerns values; the layout of a model follows from its network."""
    return structure.kind, structure.names, structure.value, *map(_describe, structure.parts)
