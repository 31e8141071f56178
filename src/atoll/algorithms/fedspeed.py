"""FedSpeed: FedDyn along sharpness-aware gradients.

    min over theta  F_k(theta + eps) - <q_k, theta> + (alpha / 2) ||theta - w||^2,        eps = rho g / ||g||

g is the gradient of F_k alone, and the two terms are taken at theta itself. They, q_k and the server's step are those
of FedDyn; with ``rho = 0`` this is FedDyn. The paper mixes the plain gradient with the one uphill, (1 - a) g + a g_s;
its code has a = 1, which is the default of `mix`.

Reference: Sun, Shen, Huang, Ding, Tao. "FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy." ICLR 2023, Algorithm 1. https://arxiv.org/abs/2302.10429
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Replies, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.task import Facts
from atoll.toolbox.client import linear, proximal, sgd
from atoll.toolbox.client.sharpness import mixed_gradient
from atoll.toolbox.server import dynamic
from atoll.toolbox.server.dynamic import Dynamic


@dataclass(frozen=True, kw_only=True)
class FedSpeed(Algorithm):
    """One shared model; dynamic regularisation and flat minima."""

    alpha: Positive = 0.1  # α: pull towards the received model
    epochs: Epochs = 1  # local epochs per round
    rho: NonNegative = 0.1  # ρ: radius of the neighbourhood
    mix: Share = 1.0  # a: share of the gradient taken uphill; the rest is the plain one

    follows_samples: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"feddyn": {"rho": 0.0}}
    cites: ClassVar[str] = "sun2023fedspeed"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls the local model to w."""
        return {"lr * alpha": lr * self.alpha}

    def start(self, task: Facts) -> Dynamic:
        """Begin as FedDyn."""
        return dynamic.begin(task)

    def broadcast(self, server: Dynamic) -> Params:
        """Send the model only; h stays with the server, q_k with the client."""
        return server.w

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train as FedDyn, with the loss's gradient taken uphill."""
        q = cohort.recall(default=w.zeros())
        penalty = linear(-q) + proximal(self.alpha, center=w)
        if self.mix == 1:
            w_k = sgd(cohort, start=w, epochs=self.epochs, penalty=penalty, radius=self.rho)
        else:
            gradient = partial(mixed_gradient, radius=self.rho, share=self.mix)
            w_k = sgd(cohort, start=w, epochs=self.epochs, penalty=penalty, gradient=gradient)
        delta = w_k - w
        return Update(send={"delta": delta}, keep=q - delta.trained * self.alpha)

    def aggregate(self, server: Dynamic, replies: Replies) -> Dynamic:
        """Aggregate as FedDyn."""
        return dynamic.move(server, replies, self.alpha)

    def personalize(self, server: Dynamic, cohort: Cohort) -> Params:
        """Return the shared model."""
        return server.w

    def shared(self, server: Dynamic) -> Params:
        """Return the shared model."""
        return server.w
