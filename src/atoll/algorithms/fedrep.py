"""FedRep: a shared representation w under personal heads, trained in turns.

    min_w  sum_k p_k min_{h_k} F_k(w, h_k)                (w averaged, h_k never sent)

In a round each client first fits its head to the received representation, many epochs long, then takes a few epochs on
the representation under the head that it has just fitted. After the last round every client fits its head once more.

Reference: Collins, Hassani, Mokhtari, Shakkottai. "Exploiting Shared Representations for Personalized Federated
Learning." ICML 2021, Algorithm 1. https://arxiv.org/abs/2102.07078
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Update, Weighting, among
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.sharing import say_what_is_shared


@dataclass(frozen=True, kw_only=True)
class FedRep(Algorithm):
    """A shared body under personal heads; first the head is trained, then the body."""

    private: Part = "head"  # the leaves that never leave the client
    head_epochs: Annotated[Epochs, among(1, 2, 5, 10)] = 10  # E_h: local epochs per round on the private leaves
    epochs: Epochs = 1  # E_b: local epochs per round on the shared leaves, after those on the private ones
    final_epochs: Annotated[Epochs, among(0, 10)] = 10  # the same, of all clients, after the last round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {
        "fedavg": {"private": "none"},
        "local": {"private": "all", "head_epochs": 1, "final_epochs": 0},
    }
    cites: ClassVar[str] = "collins2021exploiting"

    def start(self, task: Facts) -> Params:
        """Return the shared leaves, which are all that the server knows."""
        say_what_is_shared(self, task.network.initial, self.private)
        return task.network.initial.without_part(self.private)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the head under the received body, then the body under the new head."""
        w_k = sgd(cohort, start=self.personalize(w, cohort), epochs=self.head_epochs, only=self.private)
        w_k = sgd(cohort, start=w_k, epochs=self.epochs, only=w)
        shared, private = w_k.without_part(self.private), w_k.part(self.private)
        return Update(send={"delta": shared - w}, weight=cohort.weights(self.weighting), keep=private)

    def finish(self, w: Params, cohort: Cohort) -> Stack:
        """Fit every client's head to the final body, also of one that never took part."""
        return self.welcome(w, cohort).part(self.private)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the shared leaves with the client's own; a client that never took part has the initial ones."""
        return cohort.recall(default=cohort.initial.part(self.private)) | cohort.stacked(w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Fit the head of a new client, from the initial one, to the newest body."""
        return sgd(cohort, self.personalize(w, cohort), epochs=self.final_epochs, only=self.private, stream="final")
