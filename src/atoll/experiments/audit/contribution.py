"""Who contributes: the value of each client's replies, by leave-one-out and by Shapley values over rounds.

The run is played once more, and single replies are watched. With w_t the model of a round and S some of its clients,

    U(S) = mean over all clients of the validation score of  w_t + mean of the replies of S,      U of nobody is w_t's

Nobody is trained again. Leave-one-out is U(all) - U(all but k), the Shapley value the mean of what k adds to those who
came before it, over all orders; both are summed over rounds. Up to 6 replies are enumerated. More are sampled: every
client comes first equally often, an order is cut off once the rest can add little, and sampling ends when the values
settle. A round that moves the score by at most 0.01 is skipped, unless this is switched off.

The values are indicative. They read validation samples, which no epsilon covers, and a client can game them.

References: Ghorbani, Zou, ICML 2019 (truncated Monte-Carlo); Liu et al., ACM TIST 2022 (GTG-Shapley).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.experiments.audit.subject import Subject, answer
from atoll.federation.loop import federate
from atoll.federation.report import Report
from atoll.kernel.algorithm import Arrival
from atoll.kernel.errors import PrivacyError, RunError, TaskError
from atoll.kernel.params import Params
from atoll.kernel.predictor import predictor_of
from atoll.kernel.randomness import generator
from atoll.records.audits import Contributed

Values = NDArray[np.float64]
Utility = Callable[[tuple[int, ...]], float]  # of some of the players, in order
MOST_ENUMERATED = 6
BETWEEN, WITHIN = 0.01, 0.001  # what a round must move, and what may be left in an order
SETTLED, LAST = 0.05, 10


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution(Contributed):
    """What clients contributed, and what it took to find out."""

    skipped: int  # rounds that moved the score too little
    evaluations: int

    def describe(self) -> str:
        """Say what was found in a sentence."""
        order = np.argsort(self.shapley, kind="stable")
        most, least = int(order[-1]), int(order[0])
        below = sum(value < 0 for value in self.shapley)
        return (
            f"The shared model's validation score moved by {100 * self.moved:+.1f} points. Most of it is due to client "
            f"{self.names[most]} ({100 * self.shapley[most]:+.1f}), least to client {self.names[least]} "
            f"({100 * self.shapley[least]:+.1f}); the value of {below} of {len(self.names)} clients is negative. "
            f"{_describe_skipped(self.skipped)}Indicative only."
        )


def _describe_skipped(rounds: int) -> str:
    if not rounds:
        return ""
    which = "1 round was" if rounds == 1 else f"{rounds} rounds were"
    return f"{which} skipped because the score moved by at most 0.01. "


@dataclass
class Cached:
    """A utility that is asked for each set of players once."""

    ask: Utility
    known: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __call__(self, players: Sequence[int]) -> float:
        """Return what these players are worth."""
        key = tuple(sorted(players))
        if key not in self.known:
            self.known[key] = self.ask(key)
        return self.known[key]


def enumerate_shapley(utility: Utility, players: int) -> Values:
    """Return the exact Shapley values of so many players."""
    asked, values = Cached(utility), np.zeros(players)
    for player in range(players):
        others = [one for one in range(players) if one != player]
        for size in range(players):
            share = math.factorial(size) * math.factorial(players - size - 1) / math.factorial(players)
            for some in combinations(others, size):
                values[player] += share * (asked([*some, player]) - asked(some))
    return values


def sample_shapley(utility: Utility, players: int, rng: np.random.Generator, *, within: float = WITHIN) -> Values:
    """Return Shapley values from sampled orders that are cut off once the rest can add little."""
    asked, total, history = Cached(utility), np.zeros(players), list[Values]()
    everybody, fewest = asked(range(players)), max(30, players)
    for number in range(5 * fewest):
        first = number % players
        order = [first, *rng.permutation([one for one in range(players) if one != first]).tolist()]
        before, come = asked(()), list[int]()
        for player in order:
            if abs(everybody - before) <= within and come:
                break
            come.append(player)
            now = asked(come)
            total[player] += now - before
            before = now
        history.append(total / (number + 1))
        if number + 1 >= fewest and (number + 1) % players == 0 and _is_settled(history):
            break
    return history[-1]


def _is_settled(history: Sequence[Values]) -> bool:
    last = np.stack(history[-LAST:])
    scale = max(float(np.abs(last[-1]).mean()), 1e-12)
    return bool((np.abs(last - last[-1]).mean(1) / scale).max() < SETTLED)


def leave_one_out(utility: Utility, players: int) -> Values:
    """Return what is lost without each player."""
    everybody = utility(tuple(range(players)))
    return np.array([everybody - utility(tuple(one for one in range(players) if one != out)) for out in range(players)])


@dataclass
class Watcher:
    """Collects the replies of a round, and values them when it ends."""

    subject: Subject
    between: float
    arrivals: list[Arrival] = field(default_factory=list)
    moved: float = 0.0
    skipped: int = 0
    evaluations: int = 0

    def __post_init__(self) -> None:
        clients = self.subject.task.clients
        self.shapley, self.alone = np.zeros(clients), np.zeros(clients)
        self.rounds = np.zeros(clients, dtype=np.int64)
        val = self.subject.task.splits["val"]
        sizes = np.diff(val.offsets)
        self.x, self.y = self.subject.task.x[val.order], self.subject.task.y[val.order]
        weight = np.repeat(1 / np.maximum(sizes, 1), sizes) / max((sizes > 0).sum(), 1)
        self.weight = torch.from_numpy(weight)

    def see(self, round: int, arrival: Arrival) -> None:
        """Collect replies; see `on_reply` of `federate`."""
        self.arrivals.append(arrival)

    def score(self, w: Params) -> float:
        """Return the validation score of a model: the mean over clients."""
        self.evaluations += 1
        network = self.subject.live.population.task.network
        outputs = answer((predictor_of(w), network), self.x)
        return float((network.score(outputs, self.y.cpu()).double() * self.weight).sum())

    def close(self, line: object) -> None:
        """Value the replies of a round that ends."""
        arrivals, self.arrivals = self.arrivals, []
        if not arrivals:
            return
        w = arrivals[0].broadcast
        assert isinstance(w, Params)
        clients = np.concatenate([one.clients for one in arrivals])
        weights = torch.cat([one.counted for one in arrivals]).double()
        deltas = [one.fields["delta"].floating for one in arrivals]
        leaves = {name: torch.cat([delta[name] for delta in deltas]) for name in deltas[0]}

        def utility(players: tuple[int, ...]) -> float:
            chosen = torch.tensor(players, dtype=torch.int64, device=weights.device)
            total = weights[chosen].sum()
            if not len(players) or not float(total):
                return self.score(w)
            share = weights[chosen] / total
            mean = {name: torch.tensordot(share.to(leaf), leaf[chosen], dims=1) for name, leaf in leaves.items()}
            return self.score(w + Params(mean, w.layout))

        asked = Cached(utility)
        self.rounds[clients] += 1
        gained = asked(range(len(clients))) - asked(())
        self.moved += gained
        if abs(gained) <= self.between:
            self.skipped += 1
            return
        if len(clients) <= MOST_ENUMERATED:
            values = enumerate_shapley(asked, len(clients))
        else:
            values = sample_shapley(
                asked, len(clients), generator(self.subject.seed, "shapley", int(self.rounds.sum()))
            )
        np.add.at(self.shapley, clients, values)
        np.add.at(self.alone, clients, leave_one_out(asked, len(clients)))


def find_contributions(run: Report | Path | str, *, between: float = BETWEEN, trust: bool = False) -> Contribution:
    """Play a finished run once more and value the replies of every client; `between` 0 skips no round that moves."""
    return value_clients(Subject.open(run, trust=trust), between=between)


def value_clients(subject: Subject, *, between: float = BETWEEN) -> Contribution:
    """Play a run once more and value the replies of every client."""
    require_deltas(subject)
    watcher = Watcher(subject, between)
    federate(
        subject.task, subject.report.algorithm, engine=subject.live.engine, progress=False,
        settings=replace(subject.live.settings, evaluation="none", memory="auto"),
        on_reply=watcher.see, on_round=watcher.close,
    )  # fmt: skip
    task, scores = subject.task, list[float | None]([None] * subject.task.clients)
    if subject.report.evaluations:
        found = subject.report.scores()
        if len(found) == task.clients:
            scores = [float(one) for one in found]
    return Contribution(
        names=[task.client_name(client) for client in range(task.clients)], shapley=watcher.shapley.tolist(),
        alone=watcher.alone.tolist(), rounds=watcher.rounds.tolist(), score=scores, moved=watcher.moved,
        skipped=watcher.skipped, evaluations=watcher.evaluations,
    )  # fmt: skip


def require_deltas(subject: Subject) -> None:
    """Raise where there are no single replies whose mean moves one shared model."""
    settings, method, label = subject.live.settings, subject.method, subject.report.label
    if settings.secure != "none" or settings.dp != "none":
        raise PrivacyError(
            "Contributions are those of single replies. In this run the server has sums only, and nobody has single "
            "replies.",
            hint="value a run without `dp` and `secure`.",
        )
    if settings.aggregate != "mean" or settings.late:
        raise RunError(
            "Contributions are valued in means of replies that come in time. Got "
            f"aggregate={settings.aggregate!r}, late={settings.late:g}."
        )
    plain = "delta" in method.sends and not method.defines("aggregate") and isinstance(subject.live.server, Params)
    if not plain or method.shared(subject.live.server) is None:
        raise RunError(
            f"Contributions are to one shared model that moves by the mean of its clients' deltas. {label} has none.",
            hint="value a run of fedavg, fedprox or ditto on the same data.",
        )
    if not len(subject.task.splits["val"].order):
        raise TaskError("Contributions are valued on validation samples. No client has any.")
