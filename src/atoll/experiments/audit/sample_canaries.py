"""An audit of a promise about samples (`+dpsgd`) in one run: a lower bound of epsilon beside the promised one.

The federation is run once more with M canary samples, a few bright pixels at random, dealt to the clients. Each is in
its client's training samples with probability 1/2. Whoever reads the messages, and knows all other samples, as the
promise allows, asks how much of each canary's gradient is in them:

    a = sum over rounds of (G G' + r I)^-1 G (-delta_t),      rows of G at the model that was sent, of norm 1:
        gradients of the client's canaries, and the sums over its own samples, class by class

Scores are a, less the mean of the client's canaries, in units of their spread. As with canary clients, guesses "in" for
the highest scores and "out" for the lowest bound epsilon from below, as far as they are right.

A message shows the sum of many noisy steps, and a canary is in one of them per epoch; so the bound stays far below the
promise unless a step reads all samples of a client (a large `batch_size`).

References: Steinke, Nasr, Jagielski, NeurIPS 2023 (one run); Nasr et al., IEEE S&P 2021 (canaries by their gradients).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.batches import Split, find_offsets
from atoll.data.task import Task
from atoll.experiments.audit.canaries import FEWEST, OneRun, choose_guesses, count_right
from atoll.experiments.audit.measures import lower_bound
from atoll.experiments.audit.messages import require_single_replies
from atoll.experiments.audit.subject import Subject
from atoll.federation.loop import federate
from atoll.federation.report import DELTA
from atoll.kernel.algorithm import Arrival
from atoll.kernel.batch import Batch
from atoll.kernel.errors import PrivacyError
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import values_of

BRIGHT = 0.1  # of the pixels of a canary
RIDGE = 1e-3
CHUNK = 256  # samples whose gradients are held together
Within = NDArray[np.bool_]


def require_sample_promise(subject: Subject, canaries: int) -> None:
    """Raise where sample canaries cannot check what the run promises."""
    if canaries < FEWEST:
        raise PrivacyError(f"`canaries` must be at least {FEWEST}: fewer show nothing. Got {canaries}.")
    require_single_replies(subject)
    if "delta" not in subject.method.sends or not isinstance(subject.live.server, Params):
        raise PrivacyError(
            f"Canary samples are sought in changes of one shared model. {subject.report.label} sends something else."
        )
    if not subject.task.x.is_floating_point():
        raise PrivacyError("Canary samples are random pixels. The samples of this task are no continuous numbers.")


@dataclass(frozen=True, eq=False)
class Canaries:
    """Samples that may be in: their pixels and classes, whose they are, and which are in."""

    x: Tensor
    y: Tensor
    owner: NDArray[np.int64]
    within: Within

    @classmethod
    def draw(cls, subject: Subject, count: int) -> Canaries:
        """Draw so many canaries, dealt to all clients in turn."""
        task, rng = subject.task, generator(subject.seed, "canary samples")
        low, high = float(task.x.min()), float(task.x.max())
        assert task.classes is not None
        dark = min(max(0.0, low), high)
        bright = high if high - dark > dark - low else low
        x = torch.from_numpy(np.where(rng.random((count, *task.x.shape[1:])) < BRIGHT, bright, dark)).to(task.x)
        owner = np.arange(count) % task.clients
        y = torch.from_numpy(rng.integers(task.classes, size=task.clients)[owner]).to(task.y)
        return cls(x, y, owner, rng.random(count) < 0.5)

    def join(self, task: Task) -> Task:
        """Return the task whose clients train on those canaries that are in, too."""
        train, parts = task.splits["train"], []
        for client in range(task.clients):
            mine = np.flatnonzero(self.within & (self.owner == client)) + len(task.x)
            own = train.order[train.offsets[client] : train.offsets[client + 1]]
            parts.append(torch.cat([own, torch.from_numpy(mine).to(own)]))
        split = Split(torch.cat(parts), find_offsets(np.array([len(part) for part in parts], dtype=np.int64)))
        return replace(
            task, x=torch.cat([task.x, self.x]), y=torch.cat([task.y, self.y]),
            splits={**task.splits, "train": split}, unseen=None,
        )  # fmt: skip


@dataclass
class Listener:
    """Scores canaries by the messages of all rounds."""

    canaries: Canaries
    task: Task  # without canaries: what the attacker knows
    network: Network
    clip: float
    scores: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.scores = np.zeros(len(self.canaries.owner))

    def see(self, round: int, arrival: Arrival) -> None:
        """Add what replies tell; see `on_reply` of `federate`."""
        w = arrival.broadcast
        assert isinstance(w, Params)
        for row, client in enumerate(arrival.clients):
            mine = np.flatnonzero(self.canaries.owner == client)
            if not len(mine):
                continue
            delta = arrival.fields["delta"].client(row).trained.floating
            moved = torch.cat([-leaf.double().flatten().cpu() for leaf in delta.values()])
            x, y = self.canaries.x[mine], self.canaries.y[mine]
            rows = torch.cat([self.gradients(w, x, y, delta), *self.own_sums(w, int(client), delta)])
            rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
            inner = rows @ rows.T + RIDGE * torch.eye(len(rows), dtype=rows.dtype)
            self.scores[mine] += torch.linalg.solve(inner, rows @ moved)[: len(mine)].numpy()

    def own_sums(self, w: Params, client: int, like: Params) -> Iterator[Tensor]:
        """Yield a client's own samples as an attacker knows them: the sum of their cut gradients, class by class."""
        train = self.task.splits["train"]
        order = train.order[train.offsets[client] : train.offsets[client + 1]]
        for label in torch.unique(self.task.y[order]):
            chosen = order[self.task.y[order] == label]
            parts = [
                self.gradients(w, self.task.x[some], self.task.y[some], like).sum(0, keepdim=True)
                for some in torch.split(chosen, CHUNK)
            ]
            yield torch.cat(parts).sum(0, keepdim=True)

    def gradients(self, w: Params, x: Tensor, y: Tensor, like: Params) -> Tensor:
        """Return the gradients of samples by the leaves that are sent, cut as clients cut them, a row each."""
        first = next(iter(like.values()))
        batch = Batch(x.to(first), y.to(first.device), None, None, self.network, Variant(train=False))
        each, _ = batch.sample_gradients(w, frozenset(like))
        rows = torch.cat([each[name].double().flatten(1).cpu() for name in like], dim=1)
        norms = rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
        made: Tensor = rows * (self.clip / norms).clamp(max=1.0)
        return made

    def place_among_own(self) -> NDArray[np.float64]:
        """Return the scores less their client's mean, in units of their spread."""
        found = self.scores.copy()
        for client in np.unique(self.canaries.owner):
            mine = self.canaries.owner == client
            found[mine] = (found[mine] - found[mine].mean()) / max(found[mine].std(), 1e-300)
        return found


def audit_samples(subject: Subject, count: int) -> OneRun:
    """Run the federation once more with canary samples; return what they show."""
    require_sample_promise(subject, count)
    canaries = Canaries.draw(subject, count)
    task = canaries.join(subject.task)
    clip = float(values_of(subject.report.algorithm)["sample_clip"])
    listener = Listener(canaries, subject.task, subject.live.population.task.network, clip)
    made = federate(
        task, subject.report.algorithm, engine=subject.live.engine, progress=False, on_reply=listener.see,
        settings=replace(subject.live.settings, evaluation="none", memory="auto"),
    )  # fmt: skip
    promised = max(made.sample_epsilons.values())
    guesses = choose_guesses(count, expected_distance(task, made.rounds, subject), DELTA, subject.seed)
    right = count_right(listener.place_among_own(), canaries.within, guesses // 2)
    return OneRun(count, guesses, right, DELTA, lower_bound(count, guesses, right, DELTA), promised, unit="sample")


def expected_distance(task: Task, rounds: int, subject: Subject) -> float:
    """Return how far apart, in standard deviations, the noise leads to expect scores of those in and those out.

    A canary is in one step of each epoch, and every step adds noise; a message shows the sum of all its steps.
    """
    values = values_of(subject.report.algorithm)
    noise, epochs = float(values["noise"]), float(values.get("epochs", 1))
    steps = -(-task.splits["train"].sizes(np.arange(task.clients)) // task.training.batch_size).max()
    return math.sqrt(rounds * epochs / float(steps)) / max(noise, 1e-6)
