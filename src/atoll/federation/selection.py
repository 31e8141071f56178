"""Selection: who of the clients that are there is asked, where `cohort` asks for some of them only; in words.

    uniform              all equally likely
    power-of-choice:D    of D clients drawn, those with the highest losses
    oort[:E]             those with the highest utility, samples times loss; a share E (0.2) was never heard
    ucb[:GAMMA]          a bandit: those with high losses, or of whom little is known; losses fade by GAMMA (0.7)
    turns                those who were asked least often

A client's loss is its mean loss in the last round that it trained in, one number that it sends with its reply; the
ledger counts it. Who was never heard comes first. Ties are drawn. Nothing is asked of clients beforehand, which is the
variant `rpow-d` of Power-of-Choice.

References: Cho, Wang, Joshi. "Towards Understanding Biased Client Selection in Federated Learning." AISTATS 2022.
Lai, Zhu, Madhyastha, Chowdhury. "Oort: Efficient Federated Learning via Guided Participant Selection." OSDI 2021.
Cho, Gupta, Joshi, Yagan. "Bandit-based Communication-Efficient Client Selection Strategies for Federated Learning."
Asilomar 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError, unknown

Clients = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass
class Experience:
    """What a server knows of all clients from earlier rounds."""

    asked: Clients  # how often each was asked
    last: Clients  # the last round, counted from 1, from which its loss is known; 0 for none
    loss: Numbers  # that loss
    total: Numbers  # its losses, each faded by `fade` per round
    count: Numbers  # their number, faded alike
    rounds: float = 0.0  # all rounds, faded alike

    @classmethod
    def none(cls, clients: int) -> Experience:
        """Return the experience before the first round."""
        counts, numbers = np.zeros(clients, dtype=np.int64), np.zeros(clients)
        return cls(counts, counts.copy(), numbers, numbers.copy(), numbers.copy())

    @property
    def heard(self) -> NDArray[np.bool_]:
        """Of whom a loss is known."""
        known: NDArray[np.bool_] = self.last > 0
        return known

    def learn(self, round: int, asked: Clients, clients: Clients, losses: Numbers, fade: float = 1.0) -> None:
        """Take in a round: who was asked, and the losses of those who trained."""
        self.asked[asked] += 1
        self.rounds = self.rounds * fade + 1
        self.total *= fade
        self.count *= fade
        self.last[clients], self.loss[clients] = round + 1, losses
        self.total[clients] += losses
        self.count[clients] += 1

    def save(self) -> dict[str, Tensor]:
        """Return it for a checkpoint."""
        values = {name: value for name, value in vars(self).items() if name != "rounds"}
        saved = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        return {**saved, "rounds": torch.tensor(self.rounds, dtype=torch.float64)}

    @classmethod
    def load(cls, saved: Mapping[str, Tensor]) -> Experience:
        """Return what `save` was given."""
        values = {name: value.cpu().numpy().copy() for name, value in saved.items() if name != "rounds"}
        return cls(**values, rounds=float(saved["rounds"]))


@dataclass(frozen=True)
class Pool:
    """The clients of whom some are asked."""

    present: Clients
    size: int  # how many are asked; fewer than are present
    experience: Experience
    samples: Numbers  # of all clients
    draw: np.random.Generator

    def best(self, value: Numbers, among: Clients) -> Clients:
        """Return those with the highest values, `among` in an order that was drawn, which decides between equals."""
        return among[np.argsort(-value[among], kind="stable")[: self.size]]


class Selection(Protocol):
    """A rule that says who is asked."""

    reads_losses: ClassVar[bool]

    @property
    def fade(self) -> float:
        """By how much older losses fade per round; 1 if they do not."""
        ...

    def check(self, size: int, clients: int) -> None:
        """Raise if it cannot choose so many of so many clients."""
        ...

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        ...


class _Rule:
    """What most rules have in common."""

    reads_losses: ClassVar[bool] = True

    @property
    def fade(self) -> float:
        """Losses do not fade."""
        return 1.0

    def check(self, size: int, clients: int) -> None:
        """Accept any number of clients."""


@dataclass(frozen=True)
class Uniform(_Rule):
    """All clients are equally likely."""

    reads_losses: ClassVar[bool] = False

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        drawn: Clients = pool.draw.choice(pool.present, pool.size, replace=False)
        return drawn


@dataclass(frozen=True)
class PowerOfChoice(_Rule):
    """Of `candidates` clients drawn, those with the highest losses; with as many as are asked it is `uniform`."""

    candidates: int

    def check(self, size: int, clients: int) -> None:
        """Raise unless there are enough candidates, and no more than clients."""
        if not size <= self.candidates <= clients:
            raise CohortError(
                f"power-of-choice:D draws D candidates, which must be at least the cohort, {size}, and at most all "
                f"clients, {clients}. Got D={self.candidates}."
            )

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        drawn = pool.draw.choice(pool.present, min(self.candidates, len(pool.present)), replace=False)
        known = pool.experience
        return pool.best(np.where(known.heard, known.loss, np.inf), drawn)


@dataclass(frozen=True)
class Oort(_Rule):
    """A share of the cohort was never asked; the rest is drawn by utility, of those near the highest utilities.

    The utility is samples times loss, over the highest one, and sqrt(0.1 log R / r) for a client whose loss is from
    round r, in round R. Those above 95 % of the lowest utility that would have to be asked are drawn in proportion.
    """

    explore: float

    CUT_OFF: ClassVar[float] = 0.95

    def __post_init__(self) -> None:
        _require_share("oort", self.explore)

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        known, heard = pool.experience, pool.experience.heard[pool.present]
        new, old = pool.present[~heard], pool.present[heard]
        explored = min(len(new), max(round(self.explore * pool.size), pool.size - len(old)))
        first = pool.draw.choice(new, explored, replace=False)
        left = pool.size - explored
        if not left:
            return first
        gain = pool.samples[old] * known.loss[old]
        stale = np.sqrt(0.1 * math.log(max(int(known.last.max()) + 1, 2)) / known.last[old])
        utility = gain / max(gain.max(), np.finfo(float).tiny) + stale
        near = utility >= self.CUT_OFF * np.sort(utility)[-left]
        chosen = pool.draw.choice(old[near], left, replace=False, p=utility[near] / utility[near].sum())
        return np.concatenate([first, chosen])


@dataclass(frozen=True)
class Ucb(_Rule):
    """A discounted upper confidence bound: p_k (L_k / N_k + sqrt(2 s^2 log T / N_k)).

    L_k and N_k are a client's losses and their number, T the number of rounds, all faded by gamma per round; s is the
    standard deviation of the clients' last losses and p_k a client's share of the samples.
    """

    gamma: float

    def __post_init__(self) -> None:
        _require_share("ucb", self.gamma)

    @property
    def fade(self) -> float:
        """Losses fade by gamma per round."""
        return self.gamma

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        return pool.best(self.bounds(pool.experience, pool.samples), pool.draw.permutation(pool.present))

    def bounds(self, known: Experience, samples: Numbers) -> Numbers:
        """Return the bound of every client; infinity where nothing is known."""
        bound = np.full(len(samples), np.inf)
        heard, spread = known.heard & (known.count > 0), known.loss[known.heard].std() if known.heard.any() else 0.0
        count = known.count[heard]
        doubt = np.sqrt(2 * spread**2 * math.log(max(known.rounds, 1.0)) / count)
        bound[heard] = samples[heard] / samples.sum() * (known.total[heard] / count + doubt)
        return bound


@dataclass(frozen=True)
class Turns(_Rule):
    """Those who were asked least often."""

    reads_losses: ClassVar[bool] = False

    def choose(self, pool: Pool) -> Clients:
        """Return who is asked."""
        return pool.best(-pool.experience.asked.astype(np.float64), pool.draw.permutation(pool.present))


RULES: dict[str, Callable[..., Selection]] = {
    "uniform": Uniform,
    "power-of-choice": lambda value="": PowerOfChoice(int(value)),
    "oort": lambda value="0.2": Oort(float(value)),
    "ucb": lambda value="0.7": Ucb(float(value)),
    "turns": Turns,
}


def parse_selection(words: str) -> Selection:
    """Parse a rule from words."""
    name, *values = words.split(":")
    if name not in RULES:
        raise unknown("selection", name, RULES)
    try:
        return RULES[name](*values)
    except (TypeError, ValueError) as error:
        if isinstance(error, CohortError):
            raise
        raise CohortError(
            "A selection must be uniform, power-of-choice:D, oort, oort:E, ucb, ucb:GAMMA or turns, with a whole "
            f"number D and shares E and GAMMA. Got {words!r}.",
            hint="for example select_clients='power-of-choice:10'.",
        ) from None


def gather_losses(notes: Iterable[tuple[Clients, Mapping[str, Numbers]]]) -> tuple[Clients, Numbers]:
    """Return whose training losses are in the notes of a round, and these; of several, the first one."""
    clients, losses = [np.empty(0, dtype=np.int64)], [np.empty(0)]
    for some, values in notes:
        first = next((value for name, value in values.items() if name.startswith("loss/")), None)
        if first is not None:
            clients.append(some)
            losses.append(first)
    return np.concatenate(clients), np.concatenate(losses)


def _require_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise CohortError(f"`{name}` must be given with a number above 0 and at most 1. Got {value!r}.")
