"""FedBABU: only the body is trained and averaged, under a random head that is frozen and the same for everybody.

    min_w  sum_k p_k F_k(w, h_0);        v_k = SGD on F_k from (w, h_0), for `tune_epochs` epochs over `tune`

A head that never moves cannot drift apart between clients, and the body learns to serve it. To deploy, each client
fine-tunes the model on its own data; nothing of that is sent or kept.

Reference: Oh, Kim, Yun. "FedBABU: Toward Enhanced Representation for Federated Image Classification." ICLR 2022,
Algorithm 1. https://arxiv.org/abs/2106.06042
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
class FedBABU(Algorithm):
    """A body trained under a frozen head, then fine-tuned by each client."""

    frozen: Part = "head"  # the leaves that keep their initial values until a client tunes them
    epochs: Epochs = 1  # E: local epochs per round, on the body
    tune: Annotated[Part, among("all", "head")] = "all"  # which leaves are fine-tuned
    tune_epochs: Annotated[Epochs, among(1, 2, 5, 10, 20)] = 5  # E_ft: epochs of fine-tuning
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"fedavg-ft": {"frozen": "none"}, "fedavg": {"frozen": "none", "tune_epochs": 0}}
    cites: ClassVar[str] = "oh2022fedbabu"

    def start(self, task: Facts) -> Params:
        """Return the whole model, of which only the body will change."""
        say_what_is_shared(self, task.network.initial, self.frozen)
        return task.network.initial

    def broadcast(self, w: Params) -> Params:
        """Send the body; everybody makes the head from the seed."""
        return w.without_part(self.frozen)

    def local(self, body: Params, cohort: Cohort) -> Update:
        """Train the body and send what changed."""
        w_k = sgd(cohort, start=cohort.initial | body, epochs=self.epochs, only=body)
        return Update(send={"delta": w_k.only(body) - body}, weight=cohort.weights(self.weighting))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Tune the model on the client's training data, never on its test data."""
        return sgd(cohort, start=w, epochs=self.tune_epochs, only=self.tune, stream="tune")
