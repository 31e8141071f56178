"""How several models answer together: by the mean of their logits, or of their probabilities."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.params import Params
from atoll.kernel.predictor import members_of

Of = Literal["logits", "probs"]


def combine_votes(outputs: Tensor, shares: Tensor, of: Of) -> Tensor:
    """Return the logits of an ensemble from its members', [member, sample, class], and shares, [member, class]."""
    if of == "logits":
        return torch.einsum("knc,kc->nc", outputs - outputs.mean(2, keepdim=True), shares)
    # Added in logarithms: a class that all are sure it is not stays finite.
    return (outputs.log_softmax(2) + shares[:, None].log()).logsumexp(0).log_softmax(1)


def of_logits(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return the mean of the members' logits."""
    return combine_votes(_outputs(beside, batch), beside["shares"], "logits")


def _outputs(beside: Params, batch: Batch) -> Tensor:
    return torch.stack([batch.outputs(member) for member in members_of(beside)])
