"""FedPer: the body of the network is shared, each client keeps its own head.

    min_{w, h_1..h_N}  sum_k p_k F_k(w, h_k)              (w averaged, h_k never sent)

With ``private = "none"`` this is FedAvg, with ``private = "all"`` every client trains alone.

Reference: Arivazhagan, Aggarwal, Singh, Choudhary. "Federated Learning with Personalization Layers." 2019.
https://arxiv.org/abs/1912.00818
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.sharing import say_what_is_shared, train_with_own, with_own


@dataclass(frozen=True, kw_only=True)
class FedPer(Algorithm):
    """A shared body under personal heads."""

    private: Part = "head"  # the leaves that never leave the client
    epochs: Epochs = 1  # E: local epochs per round, on body and head together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"fedavg": {"private": "none"}, "local": {"private": "all"}}
    cites: ClassVar[str] = "arivazhagan2019federated"

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
