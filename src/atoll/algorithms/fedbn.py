"""FedBN: federated averaging of everything but batch normalisation, which each client keeps to itself.

    min_{w, b_1..b_N}  sum_k p_k F_k(w, b_k)              (b_k: scales, shifts and running statistics, never sent)

For clients whose inputs look different (another scanner, another camera): normalised by their own statistics they look
alike to the shared layers. Layers are recognised by their type, whatever they are called.

Reference: Li, Jiang, Zhang, Kamp, Dou. "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization."
ICLR 2021, Algorithm 1. https://arxiv.org/abs/2102.07623
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Epochs, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.sharing import say_what_is_shared, train_with_own, with_own
from atoll.toolbox.client.statistics import refresh_statistics


@dataclass(frozen=True, kw_only=True)
class FedBN(Algorithm):
    """Shared layers between batch normalisation of one's own."""

    private: Literal["batchnorm", "norm"] = "batchnorm"  # batch norm only, or layers of every kind of normalisation
    epochs: Epochs = 1  # E: local epochs per round, on body and head together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    cites: ClassVar[str] = "li2021fedbn"

    def start(self, task: Facts) -> Params:
        """Return the shared leaves, which are all that the server knows."""
        say_what_is_shared(self, task.network.initial, self.private)
        return task.network.initial.without_part(self.private)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train everything, send the shared leaves, keep the rest."""
        return train_with_own(w, cohort, self.private, epochs=self.epochs, weighting=self.weighting)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the shared leaves with the client's own; a client that never took part has the initial ones."""
        return with_own(w, cohort, self.private)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Give a new client the initial scales and shifts, with statistics of its own samples: it needs no labels."""
        own = cohort.initial.part(self.private)
        start = cohort.stacked(w) | own
        return start | refresh_statistics(cohort, start).only(own)
