"""Fused features: encoders are kept, their features are fused, and compared with prototypes in common.

    p_c = mean of p_kc / |p_kc| over the clients that own class c,     F(x) = sum_k w_k(x) f_k(x) / |f_k(x)|
    answer:  the c with the largest  cos(F(x), p_c)

`atoll.toolbox.server.fusion` has the rules for w_k; with ``fusion = "iffi"`` a client counts the more, the less a
sample looks like noise to its encoder. Clients must have been trained with prototypes.

Reference: Zeng, Huang, Zhou, Wu, Wan, Chen, Cai. "Does One-shot Give the Best Shot? Mitigating Model Inconsistency in
One-shot Federated Learning." ICML 2025. https://openreview.net/forum?id=2XvF67vbCK
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Count, NonNegative, Predictor, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.objectives.prototypical import Objective, prototype_leaf
from atoll.toolbox.oneshot import shares
from atoll.toolbox.pairs import PROTOTYPES, LocalTraining, Models, ServerAnswer, Start, keep_models
from atoll.toolbox.server import prototypes
from atoll.toolbox.server.fusion import Fusion, fuse, stack_features

PROFILES: dict[str, dict[str, Any]] = {
    "clean": {"scale": 16.0, "batch_statistics": False, "averaging": "owners", "fusion": "iffi", "normalise": True},
    "faithful": {"scale": 0.0, "batch_statistics": True, "averaging": "all", "fusion": "size", "normalise": False},
}
Averaging = Literal["all", "owners", "volume"]
TEST_BATCH = 256  # samples that share statistics, where a profile says so


@record
class Encoders(Models):
    """All encoders, and what their fused features are compared with."""

    prototypes: Tensor  # in common, [class, feature]
    noise: Params | Stack  # `images`, or the mean `features` that encoders see in these; empty if nothing is compared


@dataclass(frozen=True, kw_only=True)
class FusedFeatures(ServerAnswer):
    """Fused features, and the nearest of common prototypes."""

    profile: Literal["clean", "faithful"] = "clean"  # what those options are that are None
    scale: NonNegative | None = None  # s; 0: l = z . p, with p as long as it is; clean: 16, faithful: 0
    batch_statistics: bool | None = None  # BatchNorm uses the statistics of 256 test samples at test time; faithful
    averaging: Averaging | None = None  # whose prototypes count; clean: owners, faithful: all; volume: owners by n_kc
    least: Count = 1  # how many samples of a class make a client its owner
    fusion: Fusion | None = None  # the rule for w_k; clean: iffi, faithful: size
    normalise: bool | None = None  # whether features are scaled to unit length before fusion; clean
    noise: Count = 8  # how many noise images, whose mean feature iffi compares with

    called: ClassVar[str] = "features"
    needs: ClassVar[frozenset[str]] = frozenset({PROTOTYPES})
    cites: ClassVar[str] = "zeng2025does"

    def value_of(self, option: str) -> Any:
        """Return the value of an option, the profile's where it is None."""
        value = getattr(self, option)
        return PROFILES[self.profile][option] if value is None else value

    @property
    def transductive(self) -> bool:
        """Whether BatchNorm sees the other samples of the batch."""
        return bool(self.value_of("batch_statistics"))

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise where samples are to be compared with noise and are no numbers."""
        if self.value_of("fusion").startswith("iffi") and not task.sample.is_floating_point():
            raise TaskError(f"Informativeness compares samples with noise. Those of {task.name} are no numbers.")

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Encoders:
        """Hold the encoders; average the prototypes; and see what noise looks like to every encoder."""
        kept = keep_models(replies)
        rows = kept.models[prototype_leaf(kept.models.layout)]
        noise = self.see_noise(replies.workbench, kept.models)
        return Encoders(kept.models, kept.counts, self.average(rows, kept.counts), noise)

    def see_noise(self, bench: Workbench, models: Stack) -> Params | Stack:
        """Return what noise looks like to every encoder, where samples are compared with it."""
        if not self.value_of("fusion").startswith("iffi"):
            return Params({})
        sample = bench.task.sample
        images = torch.from_numpy(bench.generator("noise").normal(size=(self.noise, *sample.shape))).to(sample)
        if self.value_of("batch_statistics"):  # what noise looks like depends on what it is seen with
            return Params.of(images=images)
        return Stack.of(features=bench.answers(models, images, features=True).mean(1))

    def average(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the prototypes for all, [C, d], of everybody's, [K, C, d]; one that nobody owns is the mean of all."""
        if self.value_of("scale"):
            rows = F.normalize(rows, dim=-1)
        weights = torch.full_like(counts, 1 / len(counts))
        if self.value_of("averaging") != "all":
            by_volume = 1.0 if self.value_of("averaging") == "volume" else 0.0
            owned = prototypes.weights(counts, powers=(by_volume, 0.0, 0.0), least=self.least)
            weights = torch.where(owned.sum(0) > 0, owned, weights)
        return torch.einsum("kc,kcd->cd", weights, rows)

    def deploy(self, training: LocalTraining, start: Start, answer: Encoders) -> Predictor:
        """Return all encoders, and the prototypes that their fused features are compared with."""
        return ensemble(answer.models, self.beside(answer), functools.partial(answer_fused, how=self.how))

    def beside(self, answer: Encoders) -> Params:
        """Return what stands beside the encoders."""
        beside = Params.of(prototypes=answer.prototypes, shares=shares(answer.counts, "samples"))
        return beside | Params({f"noise.{name}": leaf for name, leaf in answer.noise.items()})

    @property
    def how(self) -> "How":
        """How the encoders answer together."""
        return How(*(self.value_of(option) for option in ("fusion", "normalise", "scale", "batch_statistics")))


@dataclass(frozen=True)
class How:
    """What decides an answer, beside numbers."""

    fusion: Fusion
    normalise: bool
    scale: float
    batch_statistics: bool

    def features(self, beside: Params, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the features of all clients, [client, sample, d], and those of noise, where it is compared with."""
        if not self.batch_statistics:
            return stack_features([batch.features(w) for w in members_of(beside)]), beside.get("noise.features")
        images, shown = beside.get("noise.images"), list(in_training(batch))
        if images is None:
            return stack_features([torch.cat([one.features(w) for one in shown]) for w in members_of(beside)]), None
        each = [features_beside_noise(one, images, w) for w in members_of(beside) for one in shown]
        parts = [torch.cat(part).reshape(-1, len(batch.x), part[0].shape[1]) for part in zip(*each, strict=True)]
        return parts[0], parts[1]

    def fuse(self, features: Tensor, noise: Tensor | None, shares: Tensor) -> Tensor:
        """Fuse the features to one row per sample, of unit length."""
        return F.normalize(fuse(features, self.fusion, shares=shares, noise=noise, normalise=self.normalise), dim=1)

    def logits(self, features: Tensor, noise: Tensor | None, beside: Params) -> Tensor:
        """Return the logits of fused features."""
        return Objective(scale=self.scale).logits(self.fuse(features, noise, beside["shares"]), beside["prototypes"])


def answer_fused(model: Params, beside: Params, batch: Batch, *, how: How) -> Tensor:  # noqa: ARG001
    """Return the logits of fused features."""
    return how.logits(*how.features(beside, batch), beside)


def features_beside_noise(batch: Batch, images: Tensor, w: Params) -> tuple[Tensor, Tensor]:
    """Return the features of samples, and the mean one of noise, repeated for each of them.

    Both by the statistics of the samples: noise passes the network with them, and is padding to its BatchNorm.
    """
    count = len(batch.x)
    real = torch.ones_like(batch.x[:, :1]).flatten() if batch.mask is None else batch.mask
    mask = torch.cat([real, real.new_zeros(len(images))])
    features = replace(batch, x=torch.cat([batch.x, images]), mask=mask).features(w)
    return features[:count], features[count:].mean(0).expand_as(features[:count])


def in_training(batch: Batch) -> Iterator[Batch]:
    """Yield pieces of a batch for a network that is, wrongly, still in training when it is tested."""
    pieces = torch.split(batch.x, TEST_BATCH)
    masks = [None] * len(pieces) if batch.mask is None else torch.split(batch.mask, TEST_BATCH)
    variant = replace(batch.variant, train=True)
    for x, mask in zip(pieces, masks, strict=True):
        yield replace(batch, x=x, mask=mask, variant=variant)
