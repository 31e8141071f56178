"""What stands between clients and server, and between the server and clients that mean harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.algorithm import Arrival
from atoll.kernel.replies import Rule
from atoll.runtime.channel.ledger import Direction
from atoll.runtime.channel.stages import Stage

Clients = NDArray[np.int64]


class Forger(Protocol):
    """Clients that replace their replies; `atoll.robust.attacks` has some."""

    def forge(self, arrivals: Sequence[Arrival], attackers: Clients, *, seed: int, round: int) -> list[Arrival]:
        """Return the replies of a round after the attackers among them replaced theirs."""
        ...


@dataclass(frozen=True, eq=False)
class Protection:
    """The stages that messages pass, who attacks and how, and the rule by which replies become one."""

    stages: tuple[Stage, ...] = ()
    attack: Forger | None = None
    attackers: Clients | None = None
    rule: Rule | None = None

    def rule_in(self, round: int, asked: Clients) -> Rule | None:
        """Return the rule of a round, for the clients that were asked: one that draws has draws of its own in each."""
        in_round = getattr(self.rule, "in_round", None)
        return self.rule if in_round is None else in_round(round, asked)

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes that each of so many clients sends and receives beside its messages."""
        overhead = getattr(self.rule, "overhead", None)
        return {} if overhead is None else overhead(clients)

    @property
    def always_releases(self) -> bool:
        """Whether there must be a release in every round, also where nobody replied."""
        return bool(getattr(self.rule, "always", False))
