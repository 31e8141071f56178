"""Reptile: the shared model moves a part of the way to where clients get from it by training.

    w <- w + beta sum_k p_k (w_k - w),        w_k = SGD on F_k from w

Seen as meta-learning, w becomes a good start for each client's own training: a client deploys w after `adapt_epochs`
epochs on its own training data. With ``beta = 1`` the server does what it does in FedAvg.

Reference: Nichol, Achiam, Schulman. "On First-Order Meta-Learning Algorithms." 2018, Algorithm 2 (batched).
https://arxiv.org/abs/1803.02999
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Replies, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Reptile(Algorithm):
    """A shared starting point, found by first-order meta-learning."""

    beta: NonNegative = 1.0  # β: step of the server towards the mean of w_k
    epochs: Epochs = 1  # local epochs per round
    adapt_epochs: Epochs = 5  # epochs from w to the model that a client deploys
    weighting: Weighting = "uniform"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {
        "fedavg": {"beta": 1.0, "adapt_epochs": 0, "weighting": "samples"},
        "fedavg-ft": {"beta": 1.0, "adapt_epochs": 5, "weighting": "samples"},
    }
    cites: ClassVar[str] = "nichol2018first"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train from w and send what changed."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Go the share β of the way to the mean; statistics are averaged."""
        return w.step(replies.mean("delta"), self.beta)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Train from w on the client's training data, never on its test data; a new client does the same."""
        return sgd(cohort, start=w, epochs=self.adapt_epochs, stream="tune")
