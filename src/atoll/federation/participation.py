"""Participation: a schedule, written in words, that says who is there in a round.

    constant          everybody, always
    random:P          each client with probability P, drawn anew in every round
    diurnal:T         each client for half of every T rounds; when its day begins is drawn once
    turnover:S        a share S of the clients leaves for good, another share S joins later, each in a round drawn once
    file:PATH         a CSV with the columns client, from, to: the rounds, counted from 1, in which it is there; a
                      client may stand there several times, and one that does not is never there

A client that comes back has what it kept when it left, however old that is. The server asks those who are there, or as
many of them as `cohort` says. A reply may also be late: it then counts in the round in which it arrives, for less (see
`Settings.late`), and its client is not asked before that.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernel.algorithm import Arrival
from atoll.kernel.errors import CohortError, DataError, unknown
from atoll.kernel.params import Tree
from atoll.kernel.randomness import generator

There = NDArray[np.bool_]


class Moment(NamedTuple):
    """A round of a federation of so many clients and rounds, with its seed."""

    round: int
    clients: int
    seed: int
    rounds: int


Schedule = Callable[[Moment], There]


def parse(words: str) -> Schedule:
    """Parse a schedule from words."""
    name, _, value = words.partition(":")
    if name not in SCHEDULES:
        raise unknown("participation", name, SCHEDULES)
    return SCHEDULES[name](value)


def fingerprint(words: str) -> dict[str, str]:
    """Return what the words alone do not fix: the content of a file, which may change while its name stays."""
    name, _, value = words.partition(":")
    return {"file": hashlib.sha256(repr(_read_stays(value)).encode()).hexdigest()[:16]} if name == "file" else {}


def _constant(value: str) -> Schedule:
    if value:
        raise CohortError(f"constant participation takes no value. Got {value!r}.", hint="for example random:0.7.")
    return lambda now: np.ones(now.clients, dtype=bool)


def _random(value: str) -> Schedule:
    share = _parse_number("random", value, 0, 1)
    return lambda now: generator(now.seed, "there", now.round).random(now.clients) < share


def _diurnal(value: str) -> Schedule:
    period = _parse_number("diurnal", value, 1, 1e9)

    def find_present(now: Moment) -> There:
        phase = generator(now.seed, "dawn").random(now.clients)
        awake: There = (now.round / period + phase) % 1 < 0.5
        return awake

    return find_present


def _turnover(value: str) -> Schedule:
    share = _parse_number("turnover", value, 0, 0.5)

    def find_present(now: Moment) -> There:
        draw, size = generator(now.seed, "turnover"), int(share * now.clients + 0.5)
        order, when = draw.permutation(now.clients), draw.integers(1, max(now.rounds, 2), now.clients)
        first, last = np.zeros(now.clients, dtype=np.int64), np.full(now.clients, now.rounds)
        first[order[:size]] = when[:size]
        last[order[size : 2 * size]] = when[size : 2 * size]
        here: There = (first <= now.round) & (now.round < last)
        return here

    return find_present


def _from_file(value: str) -> Schedule:
    stays = _read_stays(value)  # now: a file that cannot be read is found before the first round

    def find_present(now: Moment) -> There:
        here = np.zeros(now.clients, dtype=bool)
        for client, first, last in stays:
            if not 0 <= client < now.clients:
                raise DataError(f"{value} must name clients from 0 to {now.clients - 1}. It names {client}.")
            here[client] |= first <= now.round + 1 <= last
        return here

    return find_present


def _read_stays(path: str) -> tuple[tuple[int, int, int], ...]:
    try:
        with Path(path).open(newline="") as file:
            lines = [*csv.DictReader(file)]
        if not lines:
            raise ValueError("it names nobody")
        return tuple((int(line["client"]), int(line["from"]), int(line["to"])) for line in lines)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"A file of participation must be a CSV of whole numbers with the columns client, from, to. "
            f"{path or 'No path'} is not ({type(error).__name__}: {error}).",
            hint="for example: `participation=file:schedule.csv`.",
        ) from error


def _parse_number(name: str, value: str, low: float, high: float) -> float:
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if not low < found <= high:
        raise CohortError(
            f"`{name}` must be given with a number above {low:g} and at most {high:g}. Got {value!r}.",
            hint="for example random:0.7, diurnal:24 or turnover:0.3.",
        )
    return found


SCHEDULES: dict[str, Callable[[str], Schedule]] = {
    "constant": _constant,
    "random": _random,
    "diurnal": _diurnal,
    "turnover": _turnover,
    "file": _from_file,
}


class Late:
    """Replies on their way: a share of them arrives some rounds after the one they belong to.

    A reply that is d rounds old counts 1 / sqrt(1 + d) of what it would have counted in a mean (`Arrival.counted`); it
    holds what its client had been sent. One that would arrive after the last round is lost; it was sent, so the ledger
    has it.
    """

    def __init__(self, share: float, delay: int, seed: int) -> None:
        self.share, self.delay, self.seed = share, delay, seed
        self.waiting: list[tuple[int, int, Arrival]] = []  # (due in round, rounds late, what arrives)

    @property
    def clients(self) -> NDArray[np.int64]:
        """Whose replies are on their way."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(arrival.clients for _, _, arrival in self.waiting)])

    def pass_on(self, arrivals: Iterable[Arrival], round: int, clients: int) -> Iterator[Arrival]:
        """Yield the replies that arrive in a round: older ones that are due, then those of this round in time."""
        due = [one for one in self.waiting if one[0] <= round]
        self.waiting = [one for one in self.waiting if one[0] > round]
        for _, late, arrival in due:
            yield arrival._replace(late=late)
        if not self.share:
            yield from arrivals
            return
        draw = generator(self.seed, "late", round)
        delays = np.where(draw.random(clients) < self.share, draw.integers(1, self.delay, clients, endpoint=True), 0)
        for arrival in arrivals:
            own = delays[arrival.clients]
            for late in np.unique(own):
                part = arrival.only(own == late)
                if late:
                    self.waiting.append((round + int(late), int(late), part))
                else:
                    yield part

    def save(self) -> list[Tree]:
        """Return the replies for a checkpoint; those to one broadcast keep it once."""
        kept, broadcasts = [], list[Tree]()
        for due, late, one in self.waiting:
            number = next((n for n, sent in enumerate(broadcasts) if sent is one.broadcast), len(broadcasts))
            new = {"broadcast": one.broadcast} if number == len(broadcasts) else {}
            broadcasts += new.values()
            kept.append({
                "due": due, "late": late, "clients": torch.from_numpy(one.clients), "fields": dict(one.fields),
                "weight": one.weight, "unicast": one.unicast, "answers": number, **new,
            })  # fmt: skip
        return kept

    def load(self, saved: list[Tree]) -> None:
        """Put back what `save` returned."""
        self.waiting, broadcasts = [], list[Tree]()
        for one in saved:
            broadcasts += [one["broadcast"]] if one["answers"] == len(broadcasts) else []
            arrival = Arrival(
                one["clients"].cpu().numpy(), one["fields"], one["weight"],
                broadcast=broadcasts[one["answers"]], unicast=one["unicast"],
            )  # fmt: skip
            self.waiting.append((one["due"], one["late"], arrival))
