"""Open-set voting: every client votes with what it knows, and keeps silent where it says "unknown".

    answer(x) ~ sum_k p_kc(x),        (p_k1, ..., p_kC, p_ku) = softmax o_k(x)

p_kc(x) = (1 - p_ku(x)) q_kc(x), where q_k are the probabilities among classes alone: a client's vote is discounted by
what it says of unknown samples. Where nobody says so, this is the ensemble of probabilities. With ``heard = h``, the h
clients with the least p_ku(x) are heard.

Reference: Diao, Li, He. "Towards Addressing Label Skews in One-Shot Federated Learning." ICLR 2023.
https://openreview.net/forum?id=rzrqh85f4Sc
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Predictor, Range, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.toolbox.client.features import features_and_outputs
from atoll.toolbox.objectives.openset import join_unknown, open_votes, split_unknown
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import UNKNOWN, LocalTraining, ServerAnswer, Start


@record
class OpenModels:
    """All models, and what makes each of them say "unknown"."""

    models: Stack
    unknown: Stack  # `weight` and `bias`


@dataclass(frozen=True, kw_only=True)
class OpenVotes(ServerAnswer):
    """All clients' models, each heard by how little it says "unknown"."""

    heard: Annotated[int, Range(0)] = 0  # how many clients are heard about a sample, those with the least p_ku; 0: all

    called: ClassVar[str] = "votes"
    needs: ClassVar[frozenset[str]] = frozenset({UNKNOWN})
    sends: ClassVar[dict[str, str]] = {"model": "model", "unknown": "model"}
    releases: ClassVar[frozenset[str]] = frozenset()
    cites: ClassVar[str] = "diao2023towards"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model and its unknown."""
        models, unknown = split_unknown(w, cohort.task.network.layout)
        return Update(send={"model": models, "unknown": unknown})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> OpenModels:
        """Keep the models."""
        return OpenModels(uploads(replies, "model"), uploads(replies, "unknown"))

    def deploy(self, training: LocalTraining, start: Start, answer: OpenModels) -> Predictor:
        """Return the models with their unknown."""
        beside = Params.of(weight=answer.unknown["weight"], bias=answer.unknown["bias"])
        return ensemble(answer.models, beside, partial(vote, heard=self.heard))


def vote(model: Params, beside: Params, batch: Batch, *, heard: int) -> Tensor:  # noqa: ARG001
    """Return the logarithm of the clients' votes."""
    each = []
    for member, weight, bias in zip(members_of(beside), beside["weight"], beside["bias"], strict=True):
        features, outputs, _ = features_and_outputs(batch, member)
        each.append(join_unknown(features, outputs, weight, bias))
    return open_votes(torch.stack(each), heard)
