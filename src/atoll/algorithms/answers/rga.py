"""RGA, reliability-guided aggregation: features are standardised client by client before they are added up.

    F(x) = sum_k sqrt(n_k) (f_k(x) - m_k) / s_k,        answer: argmax_c  cos(F(x), P_c)

m_k and s_k are mean and standard deviation of every feature over the client's own training samples, sent once; or over
public samples, found by the server. Without them, clients with long features would outvote all others.

    a training to a frame:  P_c are the directions of the frame, and f_k are the network's outputs.
    any other:              f_k is what enters the head; P_c is the sum over the owners of class c of
                            sqrt(n_k) (c_kc - m_k) / s_k, where c_kc is the mean of f_k over the client's samples of c.

Statistics of the test batch, the third form of the released code, are not here: an answer would depend on the others.

Reference: FedSRA's released code, 2026, as it is described there. https://github.com/UpcNlp/FedSRA
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.algorithms.fedproto import FAR
from atoll.kernel.algorithm import Predictor, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size, membership
from atoll.toolbox.oneshot import Votes, require_public, shares, uploads
from atoll.toolbox.pairs import FRAME, LocalTraining, Models, ServerAnswer, Start, keep_models

SHARPNESS = 16.0  # logits are so many times the cosines
Features = Callable[[Batch, Params], Tensor]
LEAST = 0.01  # of the mean deviation: what varies less, such as a unit that is nearly dead, is divided by this


@record
class Described(Models):
    """All models, and what their features are like."""

    features: Stack  # their `mean`, `deviation` and, without a frame, those of `classes`


@dataclass(frozen=True, kw_only=True)
class Standardised(ServerAnswer):
    """Nearest prototypes of standardised features."""

    moments: Literal["training", "public"] = "training"  # m_k and s_k: of the client's own samples, or of public ones
    weighting: Votes = "sqrt"  # of clients in F: by samples, by their square root, or the same for all

    called: ClassVar[str] = "rga"
    sends: ClassVar[dict[str, str]] = {**ServerAnswer.sends, "features": "statistic"}
    cites: ClassVar[str] = "fedsra2026"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise without the public samples or the features that are needed."""
        if self.moments == "public":
            require_public(self, task)
        if not has_frame(training):
            feature_size(self, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and what its features are like."""
        classes, size = self.sizes(training, cohort.task)
        start = Params.of(sum=torch.zeros(classes, size), square=torch.zeros(size), counts=torch.zeros(classes))
        add = partial(_add, features_of(training))
        seen = cohort.scan(add, start, given=w, shuffle=False, train=False, exact=True)
        mean, square = (total / cohort.samples.clamp(min=1)[:, None] for total in (seen["sum"].sum(1), seen["square"]))
        sent = Stack.of(mean=mean, deviation=(square - mean**2).clamp(min=0).sqrt())
        if not has_frame(training):
            sent = sent | Stack.of(classes=seen["sum"] / seen["counts"].clamp(min=1)[..., None])
        return Update(send={"model": w, "labels": Stack.of(counts=seen["counts"]), "features": sent})

    def sizes(self, training: LocalTraining, task: Facts) -> tuple[int, int]:
        """Return how many classes there are, and how many features: of the frame as many as classes."""
        assert task.classes is not None, "the task has classes"
        features = task.classes if has_frame(training) else feature_size(self, task)
        return task.classes, features

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Described:
        """Hold the models with the moments of their features."""
        kept, features = keep_models(replies), uploads(replies, "features")
        if self.moments == "public":
            bench = replies.workbench
            there = bench.answers(kept.models, bench.public[0], features=not has_frame(training))
            features = features | Stack.of(mean=there.mean(1), deviation=there.std(1, correction=0))
        return Described(kept.models, kept.counts, features)

    def deploy(self, training: LocalTraining, start: Start, answer: Described) -> Predictor:
        """Return all models with the moments of their features, and the prototypes."""
        features, counts = answer.features, answer.counts
        share = shares(counts, self.weighting)
        if has_frame(training):
            prototypes, possible = training.beside(start)["directions"], torch.ones_like(counts[0])
        else:
            owned = (counts > 0).to(counts.dtype)
            own = standardise(features["classes"], features["mean"], features["deviation"])
            prototypes, possible = torch.einsum("kc,kcd->cd", owned * share[:, None], own), owned.amax(0)
        moments = Params.of(mean=features["mean"], deviation=features["deviation"], shares=share)
        beside = moments | Params.of(prototypes=prototypes, possible=possible)
        return ensemble(answer.models, beside, partial(_nearest, features_of(training)))


def has_frame(training: LocalTraining) -> bool:
    """Return whether clients train to a frame."""
    return FRAME in training.offers


def features_of(training: LocalTraining) -> Features:
    """Return what is compared with a class's prototype: outputs with directions of a frame, features with means."""
    return Batch.outputs if has_frame(training) else Batch.features


def standardise(features: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return (f - m) / s of features [client, sample, d]; 0 for a client whose features do not vary at all."""
    apart, deviation = features - mean[:, None], deviation[:, None]
    by = torch.maximum(deviation, LEAST * deviation.mean(2, keepdim=True))
    return torch.where(by > 0, apart / torch.where(by > 0, by, 1), 0)


def _add(features: Features, seen: Params, batch: Batch, w: Params) -> Params:
    """Add up one batch's features, by class, and their squares."""
    f, same = features(batch, w), membership(batch, len(seen["counts"]))
    real = same.sum(1, keepdim=True)  # 0 for padding
    return Params.of(
        sum=seen["sum"] + same.T @ f, square=seen["square"] + (real * f**2).sum(0), counts=seen["counts"] + same.sum(0)
    )


def _nearest(features: Features, model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return the cosine of the fused features with each prototype; far lower for classes that nobody has."""
    each = torch.stack([features(batch, member) for member in members_of(beside)])
    fused = torch.tensordot(beside["shares"], standardise(each, beside["mean"], beside["deviation"]), dims=1)
    cosines = F.normalize(fused, dim=1) @ F.normalize(beside["prototypes"], dim=1).T
    return SHARPNESS * torch.where(beside["possible"] > 0, cosines, -FAR)
