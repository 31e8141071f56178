"""FedDyn: each client's loss is changed from round to round until its own optimum is everybody's.

    theta_k = argmin F_k(theta) - <q_k, theta> + (alpha / 2) ||theta - w||^2,        q_k <- q_k - alpha (theta_k - w)

    h <- h - (alpha / N) sum_k (theta_k - w),        w <- mean_k theta_k - h / alpha

q_k is the client's gradient at theta_k and h the mean of all q_k. At the fixed point every theta_k is w and h is 0: w
is the optimum of (1/N) sum_k F_k, for any alpha and any number of local steps.

Reference: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. "Federated Learning Based on Dynamic
Regularization." ICLR 2021, Algorithm 1. https://arxiv.org/abs/2111.04263
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.task import Facts
from atoll.toolbox.client import linear, proximal, sgd
from atoll.toolbox.server import dynamic
from atoll.toolbox.server.dynamic import Dynamic


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    """One shared model; dynamic regularisation against client drift."""

    alpha: Positive = 0.1  # α: pull towards the received model
    epochs: Epochs = 1  # local epochs per round

    cites: ClassVar[str] = "acar2021federated"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls the local model to w."""
        return {"lr * alpha": lr * self.alpha}

    def start(self, task: Facts) -> Dynamic:
        """Return the model, the state h, and how many clients there are."""
        return dynamic.begin(task)

    def broadcast(self, server: Dynamic) -> Params:
        """Send the model only; h stays with the server, q_k with the client."""
        return server.w

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train on the changed loss, then change it."""
        q = cohort.recall(default=w.zeros())
        theta = sgd(cohort, start=w, epochs=self.epochs, penalty=linear(-q) + proximal(self.alpha, center=w))
        delta = theta - w
        return Update(send={"delta": delta}, keep=q - delta.trained * self.alpha)

    def aggregate(self, server: Dynamic, replies: Replies) -> Dynamic:
        """Average, and correct the mean by h."""
        return dynamic.move(server, replies, self.alpha)

    def personalize(self, server: Dynamic, cohort: Cohort) -> Params:
        """Return the shared model."""
        return server.w

    def shared(self, server: Dynamic) -> Params:
        """Return the shared model."""
        return server.w
