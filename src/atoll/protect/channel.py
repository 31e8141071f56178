"""The channel between server and clients: stages that change replies, and the ledger that counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Arrival, Update
from atoll.kernel.engine import Memory
from atoll.kernel.errors import PayloadError
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.wrapper import title_of
from atoll.protect.ledger import Direction, Entry, Ledger
from atoll.protect.stages import Place, Sent, Stage, read_through, send_through
from atoll.runtime.serialise import size_of


class Channel:
    """Carries messages both ways, changes replies by its stages, and counts every byte."""

    def __init__(
        self, stages: Sequence[Stage] = (), ledger: Ledger | None = None, seed: int = 0, secret: bytes | None = None
    ) -> None:
        self.stages = tuple(stages)
        self.seed, self._secret = seed, secret
        self.ledger = ledger or Ledger()

    def broadcast(self, tree: Tree, clients: NDArray[np.int64], round: int) -> None:
        """Count what the server sends to all of these clients alike."""
        self._record_down("broadcast", tree, clients, round, each=False)

    def last_broadcast(self, tree: Tree, clients: NDArray[np.int64], round: int) -> None:
        """Count what the server sends to all of these clients alike after the last round."""
        self._record_down("last broadcast", tree, clients, round, each=False)

    def unicast(self, tree: Tree, clients: NDArray[np.int64], round: int) -> None:
        """Count what the server sends to each of these clients by itself: its row of a stacked tree."""
        self._record_down("unicast", tree, clients, round, each=True)

    def _record_down(self, field: str, tree: Tree, clients: NDArray[np.int64], round: int, *, each: bool) -> None:
        if tree is not None:
            size = size_of(tree, each=each)
            self.ledger.record(Entry("down", round, field, _kind(tree), size, tuple(map(int, clients))))

    def record_overhead(
        self, sizes: Mapping[Direction, int], clients: NDArray[np.int64], round: int, *, name: str = "keys"
    ) -> None:
        """Count what a protocol sends each of these clients, and they it, beside the messages: keys and shares."""
        for direction, size in sizes.items():
            self.ledger.record(Entry(direction, round, name, "protocol", size, tuple(map(int, clients))))

    def record_losses(self, clients: NDArray[np.int64], round: int) -> None:
        """Count the losses that these clients send with their replies, for the server to choose by: a number each."""
        if len(clients):
            size = size_of(Stack.of(loss=torch.zeros(1)), each=True)
            self.ledger.record(Entry("up", round, "loss", "statistic", size, tuple(map(int, clients))))

    def up(
        self, algorithm: Algorithm, clients: NDArray[np.int64], update: Update, round: int, memory: Memory | None = None
    ) -> Arrival:
        """Pass on what these clients send, both halves of the way: `send` and `receive`."""
        return self.receive(algorithm, clients, self.send(algorithm, clients, update, round, memory), round)

    def send(
        self, algorithm: Algorithm, clients: NDArray[np.int64], update: Update, round: int, memory: Memory | None = None
    ) -> Sent:
        """Return what leaves these clients, after checking that it is what the method declares.

        Stages may remember something of the clients in their `memory`.
        """
        require_declared(algorithm, clients, update)
        sent = Sent(dict(update.send), update.weight, summed=update.summed)
        place = Place(round, clients, algorithm.sends, memory, self.seed, update.of_model, self._secret)
        return send_through(self.stages, sent, place)

    def receive(
        self, algorithm: Algorithm, clients: NDArray[np.int64], sent: Sent, round: int, *, written: int | None = None
    ) -> Arrival:
        """Count what these clients sent in a round; return it as the server reads it.

        In the ledger it stands under the same round, or where it is `written` instead.
        """
        messages = [(name, algorithm.sends.get(name, "statistic"), value) for name, value in sent.fields.items()]
        if sent.fields and sent.weight is not None:  # it tells the server how much data a client has
            messages.append(("weight", "statistic", Stack.of(weight=sent.weight)))
        for name, kind, value in messages:
            size, at = size_of(value, each=True), round if written is None else written
            self.ledger.record(Entry("up", at, name, kind, size, tuple(map(int, clients))))
        read = read_through(self.stages, sent, Place(round, clients, algorithm.sends, None, self.seed))
        weight = _count_equally(read, len(clients)) if read.weight is None else read.weight
        return Arrival(clients, read.fields, weight, summed=sent.summed)


def require_declared(algorithm: Algorithm, clients: NDArray[np.int64], update: Update) -> None:
    """Raise unless these clients send fields that the method declares, with a row and a weight for each client."""
    for name, value in update.send.items():
        if name not in algorithm.sends:
            raise PayloadError(
                f"{title_of(algorithm)} sends a field {name!r} that it does not declare.",
                hint=f'declare it: sends = {{"{name}": "model"}} (or "state", "statistic", "labels").',
            )
        if not isinstance(value, Stack) or (len(value) and value.clients != (1 if update.summed else len(clients))):
            raise PayloadError(
                f"Field {name!r} must be a Stack with one row per client, {len(clients)}. Got {value!r}."
            )
    if update.weight is not None and not update.summed and update.weight.shape != (len(clients),):
        raise PayloadError(
            f"`weight` must have one value per client, {len(clients)}. Got shape {tuple(update.weight.shape)}."
        )


def _count_equally(sent: Sent, clients: int) -> Tensor:
    """Return a weight of 1 for each client; of replies that were added up, their sum."""
    leaves = [leaf for value in sent.fields.values() for leaf in value.values()]
    like = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
    ones = torch.ones(clients) if like is None else like.new_ones(clients)
    return ones.sum(0, keepdim=True) if sent.summed else ones


def _kind(tree: Tree) -> str:
    return "model" if isinstance(tree, Params | Stack) else "state"
