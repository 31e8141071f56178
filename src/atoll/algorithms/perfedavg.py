"""Per-FedAvg: a shared model from which one gradient step on a client's own data leads far.

    min_w  sum_k p_k F_k(w - alpha grad F_k(w))

Clients descend on this by local steps along the meta-gradient (I - alpha H_k(w; D'')) g_k(w - alpha g_k(w; D); D') with
independent batches D, D', D'': without the curvature H_k (``order = "fo"``), with its product from a difference of two
gradients (``"hf"``), or differentiated exactly (``"full"``, where D'' = D). The server averages. A client deploys w
after `adapt_steps` full-gradient steps on its own training data. With ``alpha = 0`` this is FedAvg.

Reference: Fallah, Mokhtari, Ozdaglar. "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach." NeurIPS 2020, Algorithm 1. https://arxiv.org/abs/2002.07948
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Search, Update, Weighting, among
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import adapt, meta_gradient, sgd
from atoll.toolbox.client.meta import STREAMS, Order


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Algorithm):
    """A shared starting point, adapted by each client in a step."""

    alpha: Annotated[NonNegative, Search(0.001, 0.1, log=True)] = 0.01  # α: the client's own step
    order: Order = "fo"  # how the curvature enters: not at all, by differences, or exactly
    delta: Positive = 0.001  # δ: how far apart the two gradients of `hf` are taken
    epochs: Epochs = 1  # local epochs per round; τ is the number of batches in them
    adapt_steps: Annotated[Epochs, among(1, 5)] = 1  # gradient steps from w to the model that a client deploys
    weighting: Weighting = "uniform"  # p_k: by training samples, or the same for all

    follows_samples: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"fedavg": {"alpha": 0.0, "order": "fo", "weighting": "samples"}}
    cites: ClassVar[str] = "fallah2020personalized"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Descend along meta-gradients; the step size β is the task's."""
        gradient = meta_gradient(self.order, self.alpha, delta=self.delta)
        w_k = sgd(cohort, start=w, epochs=self.epochs, stream=STREAMS[self.order], gradient=gradient)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Adapt on the client's training data, never on its test data; a new client does the same."""
        return adapt(cohort, w, alpha=self.alpha, steps=self.adapt_steps)
