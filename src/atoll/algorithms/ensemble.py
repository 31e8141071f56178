"""Ensemble: the server keeps all models, and they answer together.

    answer(x) = sum_k a_kc z_kc(x),        sum_k a_kc = 1 for every class c

z_k(x) are the logits of client k's model, less their mean over classes, which says nothing; or its probabilities, whose
sum is normalised again. a_kc is the same for all clients, or goes by their samples, by the square root of these, or by
their samples of class c, so that nobody is heard about classes it never saw. The accuracy that distillation aims at, at
the price of K models.

Reference: Guha, Talwalkar, Smith. "One-Shot Federated Learning." 2019. https://arxiv.org/abs/1902.11175
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.algorithm import Predictor
from atoll.batch import Batch
from atoll.oneshot import ClassVotes, OneShot, Server, class_shares
from atoll.params import Params
from atoll.predictor import ensemble, members_of

Of = Literal["logits", "probs"]


@dataclass(frozen=True, kw_only=True)
class Ensemble(OneShot):
    """All clients' models, heard together."""

    of: Of = "logits"  # what is averaged
    weighting: ClassVotes = "uniform"  # a_kc: alike, by samples, by their square root, or by samples of the class

    deploys_a_model: ClassVar[bool] = False
    cites: ClassVar[str] = "guha2019one"

    def fused(self, server: Server) -> Predictor:
        """The models with their shares."""
        shares = Params.of(shares=class_shares(server["labels"], self.weighting))
        return ensemble(server["models"], shares, of_logits if self.of == "logits" else of_probabilities)


def together(outputs: Tensor, shares: Tensor, of: Of) -> Tensor:
    """The logits of an ensemble, from those of its members, [member, sample, class], and shares, [member, class]."""
    if of == "logits":
        return torch.einsum("knc,kc->nc", outputs - outputs.mean(2, keepdim=True), shares)
    # Added in logarithms: a class that all are sure it is not stays finite.
    return (outputs.log_softmax(2) + shares[:, None].log()).logsumexp(0).log_softmax(1)


def of_logits(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """The mean of the members' logits."""
    return together(_outputs(beside, batch), beside["shares"], "logits")


def of_probabilities(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """The logarithm of the mean of their probabilities."""
    return together(_outputs(beside, batch), beside["shares"], "probs")


def _outputs(beside: Params, batch: Batch) -> Tensor:
    return torch.stack([batch.outputs(member) for member in members_of(beside)])
