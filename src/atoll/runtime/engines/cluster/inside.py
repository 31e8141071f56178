"""Workers inside this process: the engine of a cluster without a cluster, to check that it gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from atoll.kernel.params import Tree
from atoll.runtime.engines.cluster.messages import Message, Order
from atoll.runtime.engines.cluster.worker import Epochs, Errand, Worker


class CrewInside:
    """Workers that are objects of this process; see `Crew`. Their orders are done one after another."""

    def __init__(self, workers: int, make: Callable[[], Worker]) -> None:
        self._make = make
        self._workers = {number: make() for number in range(workers)}

    @property
    def workers(self) -> Sequence[int]:
        """The workers that are there."""
        return [*self._workers]

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def hold(self, worker: int, key: Hashable, cargo: Any, kept: Any, *more: Any) -> None:
        """Have a worker hold a shard."""
        self._workers[worker].hold(key, cargo, kept, *more)

    def settle(self, worker: int, pending: Any) -> None:
        """Do nothing: it was waited for."""

    def run(self, worker: int, key: Hashable, order: Order, broadcast: Any) -> Iterator[Message | None]:
        """Do an order."""
        return self._workers[worker].run(key, order, broadcast)

    def do(self, worker: int, errand: Errand[Any], item: Any) -> Iterator[Any]:
        """Do an errand."""
        return self._workers[worker].do(errand, item)

    def abandon(self, worker: int, order: int) -> None:
        """Do nothing: an order that nobody reads does not go on."""

    def follow(self, worker: int, *, stop: bool) -> list[Epochs]:
        """Ask a worker how far its long training is."""
        return self._workers[worker].follow(stop)

    def plans(self, worker: int, key: Hashable, method: Hashable) -> list[Tree]:
        """Ask a worker how a method's jobs run there."""
        return self._workers[worker].plans(key, method)

    def replace(self, worker: int) -> int:
        """Make a new worker in place of one that is lost."""
        self._workers.pop(worker, None)
        number = max([worker, *self._workers]) + 1
        self._workers[number] = self._make()
        return number

    def forget(self) -> None:
        """Have all workers let go of what they hold."""
        for worker in self._workers.values():
            worker.forget()
