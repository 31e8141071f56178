"""FAFI with what was proposed to improve it: everything is an option, and everything can be combined.

    min  CE(l, y) + a SupCon(z, y; batch, queue, pool, mixtures) + b CE(s cos(p, p), (0, ..., C - 1))
         + lambda anchor(z, p) + fading distances to a teacher

Nothing is added by default: this is FAFI then, bit for bit. Whatever comes from the server is sent once, before
training, so that it stays one shot. The terms are in `toolbox.objectives.terms`, the pools in `toolbox.server.pools`.

On the server, what clients answer by themselves may be added to what their fused features say (`own`),

    l_c = (1 - own) s cos(F(x), p_c) + own s sum_k a_kc cos(f_k(x), p_kc),       a_kc ~ sqrt(n_kc (n_k - n_kc) / n_k),

with their prototypes or, on one scale for all, by the margins of `objectives.margins` (`own_by`). On the server also
prototypes may be weighted by what clients know of their classes (`dynamic`), and refined on public
samples with the encoders as they are (`refine`): min_p CE(s cos(F(x), p), y) + gamma |p - p_0|^2, or without labels, so
that answers become sure and classes stay as frequent as each other.

Reference: none for the whole; Zeng et al., ICML 2025, for FAFI, and for the parts those that are named in
`contrastive`, `negatives`, `balance` and `alignment` of `atoll.toolbox.objectives`.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.algorithms.fafi import FAFI, TEST_BATCH, How
from atoll.algorithms.fafi_etf import FAFIETF, Anchors
from atoll.algorithms.fafi_queue import FAFIQueue
from atoll.algorithms.fafi_two_stage import FAFITwoStage
from atoll.kernel.algorithm import Epochs, Limits, Natural, NonNegative, Predictor, Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import ensemble, members_of
from atoll.toolbox.client.evidence import evidence
from atoll.toolbox.objectives.margins import SCALE, margins, own_moments, said
from atoll.toolbox.objectives.prototypical import Conflict, Objective, Step, prototype_leaf
from atoll.toolbox.objectives.terms import Prior, RarityBy, Reference, ReferenceBy, Stages
from atoll.toolbox.oneshot import Server, uploads
from atoll.toolbox.server import prototypes
from atoll.toolbox.server.adam import adam, unmoved
from atoll.toolbox.server.fusion import discernment
from atoll.toolbox.server.pools import Pool, directions, sample

REFINE_LR, REFINE_PULL = 0.01, 0.1  # step size and gamma of refined prototypes
NOTHING: dict[str, Any] = {
    "queue": 0, "pool": "none", "hardness": 0.0, "synthetic": False, "balanced": False, "prior": "none", "rarity": 0.0,
    "stages": "never", "anchors": "none", "reference": "none", "conflict": "ignored", "own": 0.0, "dynamic": False,
    "refine": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FAFIPlus(FAFIQueue, FAFITwoStage, FAFIETF):
    """FAFI and everything that can be added to it."""

    queue: Natural = 0  # places for earlier features, at most a quarter of the client's samples; 0: no queue
    pool: Pool = "none"  # what is sent of public samples
    masked: bool = True  # a pool's items of the anchor's class are left out, and are not negatives
    mass: NonNegative = 1.0  # queue and pool each weigh as much as so many batches; 0: as much as they have items
    stages: Stages = "never"  # contrast alone once, in the first epochs, then no pool; recurring: in every fifth epoch
    anchors: Anchors = "none"  # directions of classes that everybody has
    hardness: NonNegative = 0.0  # beta: negatives weigh more the more alike they are
    synthetic: bool = False  # mixtures of hard negatives, after a tenth of all steps
    balanced: bool = False  # every class counts the same in the contrast, absent ones by their prototypes
    prior: Prior = "none"  # logits + log(n_c + 1) in the cross-entropy; restricted: absent classes' logits are halved
    rarity: Share = 0.0  # q: samples weigh n_y^-q
    rarity_by: RarityBy = "weights"  # how: by weights of losses, or drawn so from their batch, with replacement
    reference: Reference = "none"  # distance of the client's features to those of a teacher
    reference_weight: NonNegative = 1.0  # of that distance, fading to 0
    reference_by: ReferenceBy = "prior"  # how it minds classes: the teacher's are as frequent as the client's, or each
    # is compared with its own
    conflict: Conflict = "ignored"  # of contrast and the rest: their gradients' cosine measured, or projected apart
    own: Share = 0.0  # share of what clients answer by themselves, by class, beside that of fused features
    own_by: Literal["prototypes", "margins"] = "prototypes"  # how: by these, or by what each can tell apart
    dynamic: bool = False  # prototypes weigh by volume, confidence and reliability, which clients upload
    refine: Epochs = 0  # steps of the server on prototypes, with public samples
    refine_labels: bool = True  # with their labels, or without

    needs_public_data: ClassVar[bool] = False  # by default
    reads_validation: ClassVar[bool] = True  # with dynamic prototypes
    sends: ClassVar[dict[str, str]] = {**FAFI.sends, "evidence": "statistic", "moments": "statistic"}
    limits: ClassVar[Limits] = {"fafi": NOTHING}

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        mine = (
            "hardness", "synthetic", "balanced", "prior", "rarity", "rarity_by", "reference", "reference_weight",
            "reference_by",
        )  # fmt: skip
        return {**super().settings, **{name: getattr(self, name) for name in mine}}

    @property
    def starts_taught(self) -> bool:
        """Whether clients begin with the teacher."""
        return super().starts_taught or self.reference != "none"

    def equip(self, server: Server, workbench: Workbench) -> Server:
        """Make the pool and the reference, if there are to be any."""
        server = super().equip(server, workbench)
        if self.reference == "none":
            return server
        x, y = sample(workbench, self.pool_size)
        return {**server, "reference": Params.of(features=directions(workbench, server["model"], x), y=y)}

    def local(self, received: Tree, cohort: Cohort) -> Update:
        """Train alone; send the model, and what the client knows of its classes if that is asked for."""
        update = super().local(received, cohort)
        w, more = update.send["model"], dict[str, Stack]()
        if self.dynamic:
            more["evidence"] = evidence(cohort, w, cohort.initial[prototype_leaf(cohort.initial.layout)].shape[1])
        if self.by_margins:
            more["moments"] = own_moments(cohort, w)
        return Update(send={**update.send, **more})

    @property
    def by_margins(self) -> bool:
        """Whether margins have a say."""
        return self.own > 0 and self.own_by == "margins"

    def step(self, cohort: Cohort) -> Step:
        """As FAFI, minding conflicts."""
        return replace(super().step(cohort), conflict=self.conflict)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """As FAFI; prototypes by what clients know, and refined, if asked."""
        after = super().aggregate(server, replies)
        if self.dynamic:
            after["prototypes"] = Params.of(rows=self._by_evidence(after, uploads(replies, "evidence")))
        if self.refine:
            after["prototypes"] = Params.of(rows=self._refined(after, replies.workbench))
        if self.by_margins:
            after["margins"] = margins(uploads(replies, "moments")) * (self.says("scale") or SCALE)
        return after

    def fused(self, server: Server) -> Predictor:
        """As FAFI, and with the answers of every client for itself if asked."""
        if not self.own:
            return super().fused(server)
        votes = Params.of(votes=discernment(server["labels"]["counts"]))
        beside = self.beside(server) | (server["margins"] if self.by_margins else votes)
        rule = answer_with_margins if self.by_margins else answer_with_own
        return ensemble(server["models"], beside, functools.partial(rule, how=self.how, own=self.own))

    def _by_evidence(self, server: Server, known: Stack) -> Tensor:
        rows, counts = server["models"][prototype_leaf(server["models"].layout)], known["count"]
        weights = prototypes.weights(
            counts,
            prototypes.reliability(known["correct"], known["tested"]),
            prototypes.confidence(known["sum"], counts, least=self.least),
            least=self.least,
        )
        nobody = weights.sum(0) == 0
        return prototypes.fused(rows, torch.where(nobody, 1 / len(rows), weights))

    def _refined(self, server: Server, bench: Workbench) -> Tensor:
        """Prototypes after steps on the fused features of public samples, which stay as they are."""
        deployed: Any = super().fused(server).beside
        x, y = bench.public
        with torch.no_grad():
            each = [
                self.how.fuse(*self.how.features(deployed, bench.batch(some)), deployed["shares"])
                for some in torch.split(x, TEST_BATCH)
            ]
        return refined(torch.cat(each), y if self.refine_labels else None, server["prototypes"]["rows"], self.refine)


def answer_with_own(model: Params, beside: Params, batch: Batch, *, how: How, own: float) -> Tensor:  # noqa: ARG001
    """The logits of fused features, mixed with those that each client has by itself, by class."""
    (features, noise), members = how.features(beside, batch), members_of(beside)
    objective = Objective(scale=how.scale)
    each = [
        objective.logits(F.normalize(f, dim=1), w[prototype_leaf(w.layout)])
        for f, w in zip(features, members, strict=True)
    ]
    alone = torch.einsum("kc,ksc->sc", beside["votes"], torch.stack(each))
    return torch.lerp(how.logits(features, noise, beside), alone, own)


def answer_with_margins(model: Params, beside: Params, batch: Batch, *, how: How, own: float) -> Tensor:  # noqa: ARG001
    """The logits of fused features, mixed with the margins of all clients."""
    features, noise = how.features(beside, batch)
    return torch.lerp(how.logits(features, noise, beside), said(features, beside), own)


def refined(z: Tensor, y: Tensor | None, first: Tensor, steps: int, scale: float = 16.0) -> Tensor:
    """Directions that classify unit features z, near the first ones; without labels, surely and evenly."""
    start = F.normalize(first, dim=1)
    w, past = Params.of(p=start), unmoved(Params.of(p=start))
    for _ in range(steps):
        with torch.enable_grad():
            p = w["p"].detach().requires_grad_()
            logits = scale * z @ F.normalize(p, dim=1).T
            if y is None:
                mean = logits.softmax(1).mean(0)
                loss = torch.special.entr(logits.softmax(1)).sum(1).mean() - torch.special.entr(mean).sum()
            else:
                loss = F.cross_entropy(logits, y)
            (g,) = torch.autograd.grad(loss + REFINE_PULL * (p - start).square().sum(), p)
        w, past = adam(w, Params.of(p=g), past, REFINE_LR)
    return w["p"]
