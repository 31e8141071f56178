"""Ensemble: the server keeps all models, and they answer together.

    answer(x) = sum_k a_kc z_kc(x),        sum_k a_kc = 1 for every class c

z_k(x) are the logits of client k's model, less their mean over classes, which says nothing; or its probabilities, whose
sum is normalised again. a_kc is the same for all clients, or goes by their samples, by the square root of these, or by
their samples of class c, so nobody is heard about classes it never saw.

Reference: Guha, Talwalkar, Smith. "One-Shot Federated Learning." 2019. https://arxiv.org/abs/1902.11175
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Predictor, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.params import Params
from atoll.kernel.predictor import Answer, ensemble, members_of
from atoll.toolbox.oneshot import ClassVotes, class_shares
from atoll.toolbox.pairs import LocalTraining, Models, ServerAnswer, Start, keep_models
from atoll.toolbox.server.voting import Of, combine_votes


@dataclass(frozen=True, kw_only=True)
class Together(ServerAnswer):
    """All clients' models, heard together."""

    of: Of = "logits"  # what is averaged
    weighting: ClassVotes = "uniform"  # a_kc: by samples, by their square root, uniform, or by samples of the class

    called: ClassVar[str] = "ensemble"
    cites: ClassVar[str] = "guha2019one"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Models:
        """Keep the models."""
        return keep_models(replies)

    def deploy(self, training: LocalTraining, start: Start, answer: Models) -> Predictor:
        """Return the models with their shares."""
        beside = training.beside(start) | Params.of(shares=class_shares(answer.counts, self.weighting))
        return ensemble(answer.models, beside, partial(answer_together, read=training.read, of=self.of))


def answer_together(model: Params, beside: Params, batch: Batch, *, read: Answer, of: Of) -> Tensor:  # noqa: ARG001
    """Return the mean of the members' logits, or the logarithm of that of their probabilities."""
    each = torch.stack([read(member, beside, batch) for member in members_of(beside)])
    return combine_votes(each, beside["shares"], of)
