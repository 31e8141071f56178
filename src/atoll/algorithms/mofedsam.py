"""MoFedSAM: FedSAM whose local steps go mostly where everybody went in the round before.

    w_k <- w_k - eta (alpha g_s(w_k) + (1 - alpha) Delta),        g_s as in FedSAM

    w <- w + sum_k p_k (w_k - w),        Delta <- -sum_k p_k (w_k - w) / sum_k p_k K_k eta

K_k is how many steps client k took and eta their size in that round, so Delta is the mean of the directions they
followed. It begins at 0. With ``alpha = 1`` this is FedSAM.

Reference: Qu, Li, Duan, Liu, Tang, Lu. "Generalized Federated Learning via Sharpness Aware Minimization." ICML 2022,
Algorithm 2. https://arxiv.org/abs/2206.02618
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Replies, Share, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.sharpness import Radius, sharp_gradient

log = logging.getLogger("atoll.algorithms")


@record
class State:
    """What the server has, and clients receive."""

    w: Params
    momentum: Params  # Delta


@record
class Given:
    """What does not change on the way of a client's model."""

    momentum: Params
    radius: Tree


@dataclass(frozen=True, kw_only=True)
class MoFedSAM(Algorithm):
    """One shared model; sharpness-aware local steps with momentum from the server."""

    rho: NonNegative = 0.1  # ρ: radius of the neighbourhood
    alpha: Share = 0.1  # α: share of the client's own gradient in a step; the rest is Δ
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "way": "statistic"}
    limits: ClassVar[Limits] = {"fedsam": {"alpha": 1.0, "rho": 0.05}}
    cites: ClassVar[str] = "qu2022generalized"

    def start(self, task: Facts) -> State:
        """Return the model, and no momentum yet."""
        return begin(self, task, self.rho)

    def local(self, received: State, cohort: Cohort) -> Update:
        """Train with the momentum."""
        return self.update(received, self.train(received, cohort, self.rho), cohort)

    def train(self, received: State, cohort: Cohort, radius: Radius) -> Stack:
        """Return each client's model after its epochs."""
        given = Given(received.momentum, radius)
        return sgd(
            cohort, start=received.w, epochs=self.epochs, gradient=partial(_mix_momentum, self.alpha), given=given
        )

    def update(self, received: State, w_k: Stack, cohort: Cohort) -> Update:
        """Return what changed and `way`, the sum of all step sizes: the server divides one by the other."""
        send = {"delta": w_k - received.w, "way": Stack.of(length=cohort.steps(self.epochs) * cohort.lr)}
        return Update(send=send, weight=cohort.weights(self.weighting))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average; the momentum is where everybody went."""
        return move(server, replies)

    def personalize(self, server: State, cohort: Cohort) -> Params | Stack:
        """Return the shared model."""
        return server.w

    def shared(self, server: State) -> Params:
        """Return the shared model."""
        return server.w


def begin(method: object, task: Facts, radius: float) -> State:
    """Return the model without momentum; say so if no radius is above 0."""
    if radius == 0:
        log.warning("%s with radius 0 looks for no flat place: its gradients are plain ones", type(method).__name__)
    return State(task.network.initial, task.network.initial.zeros())


def move(server: State, replies: Replies) -> State:
    """Return the mean model, and as momentum the mean step per unit of step size, of trained leaves only."""
    delta, way = replies.mean("delta"), replies.mean("way").value
    return State(server.w + delta, -delta.trained / way.clamp(min=1e-12))  # 0 if nobody moved


def _mix_momentum(alpha: float, w: Params, batch: Batch, given: Given) -> Found:
    """Return the sharpness-aware gradient, mixed with the momentum."""
    g, after, loss = sharp_gradient(w, batch, given.radius)
    return (g * alpha).moved(given.momentum, 1 - alpha), after, loss
