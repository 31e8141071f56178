"""What stands between clients and server, and between the server and clients that mean harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.algorithm import Arrival
from atoll.kernel.params import Tree
from atoll.kernel.replies import Rule
from atoll.protect.ledger import Direction
from atoll.protect.stages import Stage

Clients = NDArray[np.int64]


class Forger(Protocol):
    """Clients that replace their replies; `atoll.protect.attacks` has some."""

    def forge(self, arrivals: Sequence[Arrival], attackers: Clients, *, seed: int, round: int) -> list[Arrival]:
        """Return the replies of a round after the attackers among them replaced theirs."""
        ...


class Adder(Protocol):
    """Who adds up the messages of a round before the server reads them; `atoll.protect` has some."""

    @property
    def neighbours(self) -> int:
        """With how many others a client has masks; 0: with all, or there are no masks."""
        ...

    def add_up(self, arrivals: Sequence[Arrival], *, round: int, asked: Clients) -> Arrival:
        """Return the sum of all messages, in one row; raise SumLost if too few of who was asked are left for it."""
        ...

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes that each of so many clients sends and receives beside its message."""
        ...

    def opening(self, clients: int) -> dict[Direction, int]:
        """Return the bytes that one client sends and receives, so the sum of so many can be read."""
        ...


@dataclass(frozen=True, eq=False)
class Protection:
    """The stages that messages pass, who attacks and how, who adds up, and the rule by which replies become one."""

    stages: tuple[Stage, ...] = ()
    attack: Forger | None = None
    attackers: Clients | None = None
    rule: Rule | None = None
    adder: Adder | None = None  # None: the server reads single messages

    def rule_in(self, round: int, asked: Clients) -> Rule | None:
        """Return the rule of a round, for the clients that were asked: one that draws has draws of its own in each."""
        return None if self.rule is None else self.rule.in_round(round, asked)

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes that each of so many clients sends and receives beside its messages."""
        sizes: Counter[Direction] = Counter()
        for part in (self.rule, self.adder):
            sizes.update({} if part is None else part.overhead(clients))
        return dict(sizes)

    @property
    def always_releases(self) -> bool:
        """Whether there must be a release in every round, also where nobody replied."""
        return self.rule is not None and self.rule.always

    def save(self) -> Tree:
        """Return what the rule remembers from round to round; None where it remembers nothing."""
        return None if self.rule is None else self.rule.save()

    def load(self, state: Tree) -> None:
        """Let the rule go on with what was saved."""
        if self.rule is not None:
            self.rule.load(state)
