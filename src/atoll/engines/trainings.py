"""Long local training, kept on disk under what decides it, so that it is done once.

A scan is a pure function of its step, its values, the client's data and the seed. So where a client was after some
epochs can be found again by a digest of these: by another method whose clients train the same way and whose server
differs, by a run with more epochs, which goes on from there, and by a run that was interrupted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atoll.engines.programs import Leaves, Work, fingerprint
from atoll.models.network import Network
from atoll.params import Structure, stacked_leaves
from atoll.sources import code_digest

if TYPE_CHECKING:
    from atoll.cohort import Cohort

log = logging.getLogger("atoll.engine")

SAVED_EVERY = 30.0  # seconds
OnEpoch = Callable[[int, int, int], None]  # so many clients have done so many epochs of so many
Run = Callable[[Leaves, int, int], Leaves]  # the carry after the epochs from one to before another


class Trainings:
    """A folder with one file per client and point of its training; `stop` ends a training after its epoch."""

    def __init__(self, folder: Path, stop: threading.Event | None = None, on_epoch: OnEpoch | None = None) -> None:
        self.folder, self.stop, self.on_epoch = folder, stop or threading.Event(), on_epoch
        self.found = list[float]()  # seconds that training took which was done before and is not done again

    def of_the_server(self) -> Trainings:
        """The same place for a server's training, whose epochs are not the clients'."""
        mine = Trainings(self.folder, self.stop)
        mine.found = self.found
        return mine

    def carry_on(self, names: Sequence[str], carry: Leaves, epochs: int, run: Run, work: Work) -> tuple[Leaves, int]:
        """The carry after all epochs, and how many of these were found; `names` are the clients' digests."""
        found, before = max((done for done in self._points(names) if done <= epochs), default=0), 0.0
        if found:
            log.info("%d of %d epochs of local training were done before", found, epochs)
            carry, before = self._load(names, found, carry, work)
            self.found.append(before)
        saved_at = began = time.monotonic()
        for done in range(found + 1, epochs + 1):
            carry = run(carry, done - 1, done)
            if self.on_epoch:
                self.on_epoch(len(names), done, epochs)
            stopping = self.stop.is_set() and done < epochs
            if done == epochs or stopping or time.monotonic() - saved_at > SAVED_EVERY:
                self._save(names, done, carry, work, began - before, last=done == epochs)
                saved_at = time.monotonic()
            if stopping:
                raise KeyboardInterrupt(f"stopped after epoch {done} of {epochs} of local training, which is kept")
        return carry, found

    def _points(self, names: Sequence[str]) -> set[int]:
        """How many epochs can be found for all of these clients."""
        there = [{int(file.name.partition(".")[0]) for file in self._files(name)} for name in names]
        return set.intersection(*there)

    def _files(self, name: str) -> list[Path]:
        return [*(self.folder / name).glob("*.safetensors")]

    def _load(self, names: Sequence[str], done: int, like: Leaves, work: Work) -> tuple[Leaves, float]:
        """The carry after so many epochs, and the seconds that all these clients took to get there."""
        rows, seconds = list[list[Tensor]](), 0.0
        for name in names:
            file = next((self.folder / name).glob(f"{done}.*"))
            with safetensors.safe_open(file, framework="pt") as opened:
                work.gradients[0] = int(opened.metadata()["gradients"])
                seconds += float(opened.metadata()["seconds"])
                rows.append([opened.get_tensor(f"{number}") for number in range(len(like))])
        return [torch.stack(parts).to(leaf.device) for leaf, *parts in zip(like, *rows, strict=True)], seconds

    def _save(self, names: Sequence[str], done: int, carry: Leaves, work: Work, began: float, *, last: bool) -> None:
        """Write a point of every client; of those on the way to the last one, only the newest is kept."""
        kind = "safetensors" if last else "way.safetensors"
        for row, name in enumerate(names):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            earlier = [file for file in self._files(name) if file.name.endswith("way.safetensors")]
            leaves = {f"{number}": leaf[row].cpu().clone() for number, leaf in enumerate(carry)}
            begun = self.folder / name / f"{done}.begun"  # renamed when whole, so that nobody reads half of it
            each = (time.monotonic() - began) / len(names)  # now that the values are here, all steps are done
            safetensors.torch.save_file(leaves, begun, {"gradients": f"{work.gradients[0]}", "seconds": f"{each}"})
            begun.rename(begun.with_name(f"{done}.{kind}"))
            for file in earlier:
                if file.name != f"{done}.{kind}":
                    file.unlink(missing_ok=True)


def digests(cohort: Cohort, work: Work, carry: Leaves, given: Leaves, facts: Sequence[object]) -> list[str]:
    """One for each client of a cohort: of everything that decides its training; raises Unstable if that is not known.

    `facts` are what the scan was asked for. The package's own sources belong to it: a training made by other code is
    not found.
    """
    task = cohort.population.task
    common = hashlib.blake2b(digest_size=16)
    known = (
        code_digest(), torch.__version__, cohort.population.seed, cohort.round, task.fingerprint, str(task.augment),
        task.training, _architecture(work.network), work.variant.precision, _plain(fingerprint(work.step)),
        _shape(work.carry), _shape(work.given), facts,
    )  # fmt: skip
    common.update(repr(known).encode())
    rows = stacked_leaves(work.given)
    for leaf, row in zip(given, rows, strict=True):
        if not row:
            common.update(_bytes(leaf))
    mine = [*carry, *(leaf for leaf, row in zip(given, rows, strict=True) if row)]
    found = []
    for place, client in enumerate(cohort.clients):
        own = common.copy()
        own.update(str(client).encode())
        for leaf in mine:
            own.update(_bytes(leaf[place]))
        found.append(own.hexdigest())
    return found


def _bytes(leaf: Tensor) -> bytes:
    plain = leaf.detach().cpu().contiguous()
    return f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.flatten().view(torch.uint8).numpy().tobytes()


def _shape(structure: Structure) -> tuple[object, ...]:
    """What a structure says about values; the layout of a model follows from its network."""
    return structure.kind, structure.names, structure.value, *map(_shape, structure.parts)


def _architecture(network: Network) -> object:
    """What a network computes: its modules as they print themselves, and the code of their passes."""
    passes = {type(part).forward for part in network.submodules()}
    codes = sorted(repr(_plain(getattr(one, "__code__", one.__qualname__))) for one in passes)
    return str(next(iter(network.submodules()))), codes, _plain(fingerprint(network.loss))


def _plain(value: Any) -> object:
    """A fingerprint as it reads in every process: without addresses, line numbers and the order of sets."""
    match value:
        case CodeType():
            return value.co_code, value.co_names, tuple(map(_plain, value.co_consts))
        case tuple():
            return tuple(map(_plain, value))
        case frozenset():
            return sorted(map(repr, map(_plain, value)))
        case type():
            return value.__qualname__
    return getattr(value, "__qualname__", None) or repr(value)
