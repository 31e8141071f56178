"""MAML with gradient upload: clients send one meta-gradient a round, the server takes the step.

    min_w  sum_k p_k F_k(u_k(w)),        u_k(w): `adapt_steps` steps of size alpha on F_k from w

    g_k = gradient of F_k(u_k(w)) with respect to w,        w <- w - beta sum_k p_k g_k

The gradient is first order (``order = "fo"``: that of F_k at u_k) or exact (``"full"``). A client deploys w after
`adapt_steps` full-gradient steps on its own training data. With ``alpha = 0`` this is gradient descent on the
mean of the F_k.

Reference: Finn, Abbeel, Levine. "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks." ICML 2017,
Algorithm 1, with clients as tasks. https://arxiv.org/abs/1703.03400
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Count, NonNegative, Replies, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import adapt, full_gradient, meta_gradient
from atoll.toolbox.client.meta import STREAMS


@dataclass(frozen=True, kw_only=True)
class MAML(Algorithm):
    """A shared starting point; clients say in which direction it gets better."""

    alpha: NonNegative = 0.01  # α: the client's own step, in training and when it adapts
    beta: NonNegative = 0.1  # β: the server's step
    order: Literal["fo", "full"] = "full"  # whether to differentiate through the client's own steps
    adapt_steps: Count = 1  # s: the client's own steps from w, in training and when it adapts
    weighting: Weighting = "uniform"  # p_k: by training samples, or the same for all

    sends: ClassVar[Mapping[str, str]] = {"gradient": "model"}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "finn2017model"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Find the meta-gradient at w over all of a client's data, and with it BatchNorm's statistics."""
        gradient = meta_gradient(self.order, self.alpha, steps=self.adapt_steps)
        g, after = full_gradient(cohort, w, gradient=gradient, stream=STREAMS[self.order])
        changed = after.buffers - w.buffers
        return Update(send={"gradient": g | changed}, weight=cohort.weights(self.weighting))

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Take one step along the mean; average the statistics."""
        mean = replies.mean("gradient")
        return w.moved(mean.trained, -self.beta) | (w.buffers + mean.buffers)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Adapt on the client's training data, never on its test data; a new client does the same."""
        return adapt(cohort, w, alpha=self.alpha, steps=self.adapt_steps)
