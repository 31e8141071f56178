"""What can be added to fused features: the clients' own answers, prototypes by evidence, and steps on public samples.

    l_c = (1 - own) s cos(F(x), p_c) + own s sum_k a_kc cos(f_k(x), p_kc),       a_kc ~ sqrt(n_kc (n_k - n_kc) / n_k),

Clients answer by themselves with their prototypes or, on one scale for all, by the margins of `objectives.margins`
(`own_by`). Prototypes may be weighted by what clients know of their classes (`dynamic`), and refined on public samples
with the encoders as they are (`refine`): min_p CE(s cos(F(x), p), y) + gamma |p - p_0|^2, or without labels, so answers
become sure and classes stay as frequent as each other.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.algorithms.answers.features import TEST_BATCH, Encoders, FusedFeatures, How
from atoll.kernel.algorithm import Epochs, Predictor, Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.evidence import evidence
from atoll.toolbox.objectives.margins import SCALE, margin_logits, margins, own_moments
from atoll.toolbox.objectives.prototypical import Objective, prototype_leaf
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import PROTOTYPES, AnswerPiece, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server import prototypes
from atoll.toolbox.server.adam import adam, no_past
from atoll.toolbox.server.fusion import discernment

REFINE_LR, REFINE_PULL = 0.01, 0.1  # step size and gamma of refined prototypes


@dataclass(frozen=True, kw_only=True)
class Refinements(AnswerPiece):
    """Own answers, prototypes by evidence, and refined ones."""

    own: Share = 0.5  # share of the clients' own answers, by class; the rest is that of fused features
    own_by: Literal["prototypes", "margins"] = "prototypes"  # how clients answer: by their prototypes, or by margins
    dynamic: bool = False  # whether prototypes are weighted by volume, confidence and reliability, which clients upload
    refine: Epochs = 0  # steps of the server on prototypes, with public samples
    refine_labels: bool = True  # whether with their labels or without

    called: ClassVar[str] = "refined"
    needs: ClassVar[frozenset[str]] = frozenset({PROTOTYPES})
    sends: ClassVar[dict[str, str]] = {"evidence": "statistic", "moments": "statistic"}
    reads_validation: ClassVar[bool] = True  # with dynamic prototypes

    @property
    def adds(self) -> bool:
        """Whether anything is refined."""
        return self.own > 0 or self.dynamic or self.refine > 0

    def add_to(self, half: ServerAnswer) -> "Refined":
        """Return the answer with refinements; raise unless it is that of fused features."""
        if not isinstance(half, FusedFeatures):
            raise HyperparameterError(
                f"The piece `{self.called}` must be added to the answer `{FusedFeatures.called}`. Got `{half.title}`.",
                hint=f"write fafi/{FusedFeatures.called}+{self.called}.",
            )
        return Refined(half, self)

    @property
    def by_margins(self) -> bool:
        """Whether margins have a say."""
        return self.own > 0 and self.own_by == "margins"


@record
class WithMargins(Encoders):
    """All encoders, and the margins by which each answers alone."""

    margins: Params


@dataclass(frozen=True)
class Refined(ServerAnswer):
    """Fused features with refinements."""

    plain: FusedFeatures
    more: Refinements

    sends: ClassVar[dict[str, str]] = {**FusedFeatures.sends, **Refinements.sends}

    def __post_init__(self) -> None:
        """Check nothing: both parts have checked their values."""

    @property
    def transductive(self) -> bool:
        """Whether fused features are."""
        return self.plain.transductive

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return self.plain.deploys_a_model(training)

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise without what fused features need."""
        self.plain.require(training, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and what the client knows of its classes if that is asked for."""
        update, found = self.plain.upload(training, w, cohort), dict[str, Stack]()
        if self.more.dynamic:
            found["evidence"] = evidence(cohort, w, cohort.initial[prototype_leaf(cohort.initial.layout)].shape[1])
        if self.more.by_margins:
            found["moments"] = own_moments(cohort, w)
        return Update(send={**update.send, **found})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Encoders:
        """Conclude as without refinements; then weigh prototypes by what clients know, and refine them."""
        found = self.plain.conclude(training, start, replies)
        if self.more.dynamic:
            found = replace(found, prototypes=self.by_evidence(found.models, uploads(replies, "evidence")))
        if self.more.refine:
            found = replace(found, prototypes=self.refine(training, start, found, replies.workbench))
        if not self.more.by_margins:
            return found
        own = margins(uploads(replies, "moments")) * (self.plain.value_of("scale") or SCALE)
        return WithMargins(found.models, found.counts, found.prototypes, found.noise, own)

    def deploy(self, training: LocalTraining, start: Start, answer: Encoders) -> Predictor:
        """Return fused features, with the answers of every client for itself if asked."""
        how, own = self.plain.how, self.more.own
        if not own:
            return self.plain.deploy(training, start, answer)
        if isinstance(answer, WithMargins):
            more, rule = answer.margins, answer_with_margins
        else:
            more, rule = Params.of(votes=discernment(answer.counts)), answer_with_own
        beside = self.plain.beside(answer) | more
        return ensemble(answer.models, beside, functools.partial(rule, how=how, own=own))

    def by_evidence(self, models: Stack, known: Stack) -> Tensor:
        """Return prototypes weighted by what clients know of their classes."""
        counts, least = known["count"], self.plain.least
        rows = models[prototype_leaf(models.layout)]
        weights = prototypes.weights(
            counts,
            prototypes.reliability(known["correct"], known["tested"]),
            prototypes.confidence(known["sum"], counts, least=least),
            least=least,
        )
        nobody = weights.sum(0) == 0
        return prototypes.fuse(rows, torch.where(nobody, 1 / len(rows), weights))

    def refine(self, training: LocalTraining, start: Start, found: Encoders, bench: Workbench) -> Tensor:
        """Return prototypes after steps on the fused features of public samples, which stay as they are."""
        deployed, how = self.plain.deploy(training, start, found).beside, self.plain.how
        assert isinstance(deployed, Params)
        x, y = bench.public
        with torch.no_grad():
            each = [
                how.fuse(*how.features(deployed, bench.batch(some)), deployed["shares"])
                for some in torch.split(x, TEST_BATCH)
            ]
        labels = y if self.more.refine_labels else None
        return refine(torch.cat(each), labels, found.prototypes, self.more.refine)


def answer_with_own(model: Params, beside: Params, batch: Batch, *, how: How, own: float) -> Tensor:  # noqa: ARG001
    """Return the logits of fused features, mixed with those that each client has by itself, by class."""
    (features, noise), members = how.features(beside, batch), members_of(beside)
    objective = Objective(scale=how.scale)
    each = [
        objective.logits(F.normalize(f, dim=1), w[prototype_leaf(w.layout)])
        for f, w in zip(features, members, strict=True)
    ]
    alone = torch.einsum("kc,ksc->sc", beside["votes"], torch.stack(each))
    return torch.lerp(how.logits(features, noise, beside), alone, own)


def answer_with_margins(model: Params, beside: Params, batch: Batch, *, how: How, own: float) -> Tensor:  # noqa: ARG001
    """Return the logits of fused features, mixed with the margins of all clients."""
    features, noise = how.features(beside, batch)
    return torch.lerp(how.logits(features, noise, beside), margin_logits(features, beside), own)


def refine(z: Tensor, y: Tensor | None, first: Tensor, steps: int, scale: float = 16.0) -> Tensor:
    """Find directions that classify unit features z, near the first ones; without labels, surely and evenly."""
    start = F.normalize(first, dim=1)
    w, past = Params.of(p=start), no_past(Params.of(p=start))
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
