"""FedFomo: the server sends every client some of the other clients' models, who moves to those that help it.

    omega_kj = max(0, L_k(v_k) - L_k(v_j)) / ||v_j - v_k||        (L_k: loss on client k's validation data)
    v_k     <- v_k + sum_j (omega_kj / sum_i omega_ki) (v_j - v_k), then SGD on F_k

The server has sum_t omega_kj, with negative ones, as k's affinity to j. It sends the M models of most affinity, and now
and then others, to explore. A client that none of them helps stays where it is; one without a model of its own is at
the initial one. With ``models = 0`` each trains alone.

Reference: Zhang, Sapra, Fidler, Yeung, Alvarez. "Personalized Federated Learning with First Order Model Optimization."
ICLR 2021, Section 3. https://arxiv.org/abs/2012.08565
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Range, Replies, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.losses import losses_of
from atoll.toolbox.client.own import own_or_sent
from atoll.toolbox.server.mixing import identity_mixing, initial_models, mark_seen, none_seen, rows_for, with_replies


@record
class State:
    """Everybody's last model, and what others' were worth to each."""

    w: Stack
    seen: Tensor  # who has sent a model
    rounds: int
    chosen: Tensor  # whose models each client is sent next
    mixing: Tensor  # what each made its model of
    affinity: Tensor  # the sum of omega over rounds


@record
class Sent:
    """Models of others, and whose they are."""

    models: list[Stack]
    others: Stack


@record
class Shares:
    """How far a client moves to each model that it was sent."""

    share: Each


@dataclass(frozen=True, kw_only=True)
class FedFomo(Algorithm):
    """Clients choose whom to learn from by their validation loss."""

    models: Annotated[int, Range(low=0)] = 5  # M: how many other models a client is sent
    explore: Share = 0.3  # ε: probability that one of them is chosen at random, in the first round
    explore_decay: NonNegative = 0.05  # how much ε falls from round to round
    norm: Literal["l2", "l1"] = "l2"  # the distance between models
    epochs: Epochs = 1  # E: local epochs per round

    reads_validation: ClassVar[bool] = True  # losses there are how good a model is for a client
    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"delta": "model", "omega": "statistic", "others": "choice"}
    limits: ClassVar[Limits] = {"local": {"models": 0}}
    cites: ClassVar[str] = "zhang2021personalized"

    def start(self, task: Facts) -> State:
        """Begin with nobody heard of, so there is nothing to send."""
        w = initial_models(task, copies=3 + self.models)  # the state before and after a round, and what travels
        itself, none = identity_mixing(w), torch.zeros(task.clients, 0, dtype=torch.int64, device=task.sample.device)
        worth = torch.zeros_like(itself)
        return State(w, none_seen(w), rounds=0, chosen=none, mixing=itself, affinity=worth)

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Sent | None:
        """Send up to M models of others, and whose they are."""
        chosen = server.chosen[torch.from_numpy(ids).to(server.chosen.device)]
        if not chosen.shape[1]:
            return None
        return Sent([server.w.rows(column) for column in chosen.T], Stack.of(others=chosen))

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Move to the models that help, and train."""
        v = cohort.recall(default=cohort.initial)
        start, omega = v, cohort.lr.new_zeros(len(cohort), self.models)
        others = cohort.ids[:, None].expand(-1, self.models)  # of fewer than M models, oneself at worth 0
        if cohort.received is not None:
            received = cohort.received.models
            start, worth = self.combine(v, received, cohort)
            omega = torch.cat([worth, omega[:, len(received) :]], 1)
            others = torch.cat([cohort.received.others.value, others[:, len(received) :]], 1)
        v_k = sgd(cohort, start=start, epochs=self.epochs)
        send = {"delta": v_k.trained - v.trained, "omega": Stack.of(omega=omega), "others": Stack.of(others=others)}
        return Update(send=send, keep=v_k)

    def combine(self, v: Stack, others: list[Stack], cohort: Cohort) -> tuple[Stack, Tensor]:
        """Move v to the models that help; return it with omega.

        A client without a model of its own that cannot judge, for want of validation samples, takes their mean.
        """
        loss = losses_of([v, *(v | other for other in others)], cohort, split="val")
        apart = torch.stack([self._distance(v.trained, other) for other in others], 1)
        omega = torch.where(apart > 0, (loss[:, :1] - loss[:, 1:]) / apart.where(apart > 0, 1), 0)
        blind = ~cohort.has_kept & (omega == 0).all(1)
        share = torch.where(blind[:, None], 1 / len(others), shares(omega))
        return cohort.map(move_towards, v, others, Shares(share)), omega

    def aggregate(self, server: State, replies: Replies) -> State:
        """Store the models and what others' were worth to them, and choose whom to send next."""
        rows = torch.from_numpy(replies.clients).to(server.affinity.device)
        affinity, mixing = server.affinity, server.mixing
        # A reply says whose models it is about: a late one was sent others than the server would send now.
        omega, others = replies.stack("omega").value, replies.stack("others").value
        share = shares(omega)
        given = torch.zeros_like(affinity[rows]).scatter_add(1, others, share)
        given = given.scatter(1, rows[:, None], 1 - share.sum(1, keepdim=True))
        mixing = mixing.index_copy(0, rows, given)
        affinity = affinity.index_add(0, rows, torch.zeros_like(given).scatter_add(1, others, omega))
        seen, rounds = mark_seen(server.seen, replies.clients), server.rounds + 1
        explore = self.explore - self.explore_decay * rounds
        chosen = choose(affinity, seen, self.models, explore, replies.workbench.generator("models to send"))
        w = with_replies(server.w, replies.clients, replies.stack("delta"))
        return State(w, seen, rounds, chosen, mixing, affinity)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return no other models than those that these clients would be sent, and no worth."""
        rows = torch.from_numpy(ids).to(server.chosen.device)
        chosen = torch.zeros_like(server.chosen).index_copy(0, rows, server.chosen[rows])
        others = torch.unique(chosen[rows])
        nothing = torch.zeros_like(server.affinity)
        w = rows_for(server.w, others.cpu().numpy(), server.w.rows(others))
        return State(w, mark_seen(none_seen(w), ids), server.rounds, chosen, nothing, nothing)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model; one that never trained makes its first of those that it would be sent."""
        if not server.chosen.shape[1]:
            return cohort.recall(default=cohort.initial)

        def first() -> Stack:
            sent = self.unicast(server, cohort.clients)
            assert sent is not None
            return self.combine(cohort.stacked(cohort.initial), sent.models, cohort)[0].trained

        return own_or_sent(cohort, first)

    def mixing(self, server: State) -> Tensor:
        """Return what each client made its model of, the last time it took part."""
        return server.mixing

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Train a new client alone once: models of others are compared with its own."""
        return sgd(cohort, start=cohort.initial, epochs=self.epochs)

    def _distance(self, v: Stack, other: Stack) -> Tensor:
        apart = v - other
        if self.norm == "l2":
            return apart.norm()
        return torch.stack([leaf.abs().flatten(1).sum(1) for leaf in apart.values()]).sum(0)


def shares(omega: Tensor) -> Tensor:
    """Divide the positive weights by their sum; give nothing where there are none."""
    positive = omega.clamp(min=0)
    return positive / positive.sum(1, keepdim=True).clamp(min=torch.finfo(omega.dtype).tiny)


def move_towards(v: Params, others: list[Params], shares: Shares) -> Params:
    """Move one client's model towards others; its statistics stay."""
    start = v.trained
    for other, part in zip(others, shares.share.unbind(), strict=True):
        v = v.moved(other - start, part)
    return v


def choose(affinity: Tensor, seen: Tensor, models: int, explore: float, draw: np.random.Generator) -> Tensor:
    """Choose whose models every client is sent: of most affinity, or each with probability `explore` anybody's."""
    there = np.flatnonzero(seen.cpu().numpy())
    count = max(0, min(models, len(there) - 1))
    rows = []
    for client, worth in enumerate(affinity.cpu().numpy()):
        others = there[there != client]
        best = others[np.lexsort((draw.random(len(others)), -worth[others]))]  # of equals, any
        anybody, picked = draw.permutation(others), list[int]()
        for exploring in draw.random(count) < explore:
            picked.append(next(one for one in (anybody if exploring else best) if one not in picked))
        rows.append(picked)
    return torch.tensor(rows, dtype=torch.int64, device=seen.device).reshape(len(affinity), count)
