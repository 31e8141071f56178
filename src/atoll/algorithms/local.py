"""Local: every client trains alone and sends nothing.

    min_{v_k}  F_k(v_k)                                   (each client by itself)

It takes the same number of gradient steps as a federated method with the same rounds and epochs, and is therefore the
reference for what federation gains or costs a client.

Reference: the baseline of every personalization paper; budget as in Mansour, Mohri, Ro, Suresh. "Three Approaches for
Personalization with Applications to Federated Learning." 2020. https://arxiv.org/abs/2002.10619
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """No communication at all."""

    epochs: Epochs = 1  # E: local epochs per round

    mixes_architectures: ClassVar[bool] = True
    sends: ClassVar[Mapping[str, str]] = {}

    def start(self, task: Facts) -> None:
        """Return nothing: the server has nothing to do."""

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train on from where the client stopped."""
        v = sgd(cohort, start=self.personalize(nothing, cohort), epochs=self.epochs)
        return Update(keep=v)

    def aggregate(self, nothing: None, replies: Replies) -> None:
        """Return nothing: nobody replied."""

    def personalize(self, nothing: None, cohort: Cohort) -> Stack:
        """Return the client's own model."""
        return cohort.recall(default=cohort.initial)
