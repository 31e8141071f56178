"""MTFL: every client has a batch-norm patch of its own in a network that is otherwise shared.

    min_{w, p_1..p_N}  sum_k p_k F_k(w, patch_k)          (w averaged, patch_k never sent)

The patch is a part of all batch-norm layers: "yb" their scales and shifts (gamma, beta), "us" their running statistics
(mu, sigma), "usyb" both, which is FedBN. On a network without batch norm this is FedAvg.

Reference: Mills, Hu, Min. "Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing."
IEEE TPDS 33(3), 2022, Algorithm 1. https://arxiv.org/abs/2007.09236
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.sharing import Patch, batchnorm_patch, fit_patch, say_what_is_shared


@dataclass(frozen=True, kw_only=True)
class MTFL(Algorithm):
    """Shared layers with private scales, shifts or statistics between them."""

    private: Patch = "yb"  # the patch: γ and β, running μ and σ, or all of them
    epochs: Epochs = 1  # E: local epochs per round, on everything together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"fedbn": {"private": "usyb"}}
    cites: ClassVar[str] = "mills2022multi"

    def start(self, task: Facts) -> Params:
        """Return everything but patches, which is all that the server knows."""
        initial = task.network.initial
        say_what_is_shared(self, initial, "batchnorm")
        return initial.without(self._patch(initial))

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train everything, send what is shared, keep the patch."""
        w_k = sgd(cohort, start=self.personalize(w, cohort), epochs=self.epochs)
        return Update(send={"delta": w_k.only(w) - w}, weight=cohort.weights(self.weighting), keep=w_k.without(w))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the shared leaves with the client's patch; a client that never took part has the initial one."""
        return cohort.recall(default=cohort.initial.without(w)) | cohort.stacked(w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Fit a new client's patch, from the initial one, and nothing else; statistics need no labels."""
        return fit_patch(cohort, w, self._patch(cohort.initial))

    def _patch(self, model: Params) -> Params:
        return batchnorm_patch(model, self.private)
