"""Class means: the clients' features are averaged, and compared with the mean features of each class.

    argmin_c |F(x) - P_c|^2,     F(x) = sum_k p_k f_k(x),     P_c = mean of c_kc over the clients that have class c

f_k(x) is what enters the head of client k's model, and c_kc the mean of f_k over its training samples of class c, sent
with the model. Features of models that were trained apart have little in common but where they began; the other form,
features of the averaged model, has even less.

Reference: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. "FedProto: Federated Prototype Learning across Heterogeneous
Clients." AAAI 2022. https://arxiv.org/abs/2105.00243; in one shot as a baseline of FAFI's released code.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.algorithms.fedproto import FAR, nearest
from atoll.kernel.algorithm import Predictor, Replies, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import SUM_POWERS, class_sums, feature_size, squared_distances
from atoll.toolbox.client.private import release
from atoll.toolbox.oneshot import Votes, average_models, class_shares, shares, uploads
from atoll.toolbox.pairs import LocalTraining, Models, ServerAnswer, Start, keep_models


@record
class Means(Models):
    """All models, and what their features of each class are in the mean."""

    means: Tensor  # c_kc, [client, class, feature]


@dataclass(frozen=True, kw_only=True)
class ClassMeans(ServerAnswer):
    """Nearest prototypes of fused features."""

    encoder: Literal["ensemble", "average"] = "ensemble"  # F: the mean of all features, or those of the mean model
    weighting: Votes = "samples"  # p_k: by training samples, by their square root, or the same for all
    prototypes: Weighting = "uniform"  # P_c: owners count by their samples of class c, or the same

    called: ClassVar[str] = "means"
    sends: ClassVar[dict[str, str]] = {**ServerAnswer.sends, "prototypes": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset({"labels", "prototypes"})
    cites: ClassVar[str] = "tan2022fedproto"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: prototypes stand beside it."""
        return False

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless the network has features."""
        feature_size(self, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and the mean features of each class."""
        size = feature_size(self, cohort.task)
        own = release(cohort, ("labels", "prototypes"), lambda some: class_sums(some, w, size), SUM_POWERS)
        mean = Stack.of(mean=own["sum"] / own["count"].clamp(min=1)[..., None])
        return Update(send={"model": w, "labels": Stack.of(counts=own["count"]), "prototypes": mean})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Means:
        """Hold the models and everybody's prototypes."""
        kept = keep_models(replies)
        return Means(kept.models, kept.counts, uploads(replies, "prototypes").value)

    def deploy(self, training: LocalTraining, start: Start, answer: Means) -> Predictor:
        """Return all models and one prototype of each class; or the averaged model and these."""
        share, counts = shares(answer.counts, self.weighting), answer.counts
        owned = (counts > 0).to(counts.dtype)
        parts = class_shares(owned if self.prototypes == "uniform" else counts, "classes")
        mean = torch.einsum("kc,kcd->cd", parts, answer.means)
        beside = Params.of(mean=mean, possible=owned.amax(0))
        if self.encoder == "average":
            return Predictor(average_models(answer.models, share), beside, nearest)
        return ensemble(answer.models, beside | Params.of(shares=share), nearest_together)


def nearest_together(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return minus the mean squared distance of fused features to each prototype; far lower if nobody has the class."""
    features = torch.stack([batch.features(member) for member in members_of(beside)])
    fused = torch.tensordot(beside["shares"], features, dims=1)
    closeness = -squared_distances(fused, beside["mean"]) / fused.shape[1]
    return torch.where(beside["possible"] > 0, closeness, closeness.amin(1, keepdim=True) - FAR)
