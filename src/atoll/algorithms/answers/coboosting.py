"""Co-Boosting: DENSE whose samples and ensemble improve each other.

    generator:  min_G  E (1 - p_y(x)) CE(z(x), y) + BN(x) - E KL_3( z(x) || s(x) ),      x = G(noise)
    ensemble:   v <- clip(v - mu decay^t sign grad_v E CE(z(x), y), 0, 1),      z(x) = sum_k v_k z_k(x) / sum_k v_k
    student:    min_w  E KL_4( z(x') || s(x'; w) ),      x' = x + eps sign grad_x u . softmax(z(x) / 4)

Samples count the more, the less the ensemble sees their class in them (p_y, which is not differentiated). The clients'
votes v begin alike and follow, in epoch t, what was made up before. The student is shown samples that were moved to
where the ensemble's answers change (output diversified sampling), with u from U(-1, 1) for every sample and class.

Reference: Dai, Zhang, Li, Liu, Yang, Han. "Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting." ICLR 2024. https://arxiv.org/abs/2402.15070
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import NonNegative, Range, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import LocalTraining, Start
from atoll.toolbox.server.distillation import disagreement
from atoll.toolbox.server.synthesis import (
    ADVERSARIAL,
    Cost,
    FromMadeUp,
    Lesson,
    Pool,
    Teachers,
    answers,
    answers_and_distance,
    combine_logits,
    diversify,
)


@record
class Revision:
    """What votes are revised by."""

    models: Params
    step: Tensor  # mu in this epoch


@dataclass(frozen=True, kw_only=True)
class BoostedStudent(FromMadeUp):
    """Distillation on hard samples from an ensemble with votes."""

    vote_lr: NonNegative = 0.01  # mu: step size of the votes; 0 leaves them equal
    vote_decay: Annotated[float, Range(0, 1, open_low=True)] = 0.99  # factor on mu per epoch
    diversity: NonNegative = 8 / 255  # eps: how far samples are moved before the student sees them

    called: ClassVar[str] = "coboosting"
    cites: ClassVar[str] = "dai2024enhancing"

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Teach a student, who begins as all clients did, what they know together."""
        return self.learn(replies.workbench, start.model, uploads(replies, "model"))

    def votes(self, pool: Pool, given: Teachers, epoch: int) -> Tensor:
        """Return the votes after a pass over what was made up before."""
        if not pool.size:
            return given.votes
        cohort = pool.cohort()
        by = Revision(given.models, cohort.lr.new_tensor(self.vote_lr * self.vote_decay**epoch))
        votes = Params.of(votes=given.votes)
        revised: Stack = cohort.scan(revise, votes, given=by, stream=f"votes {epoch}", train=False)
        return revised.client(0).value

    @property
    def cost(self) -> Cost:
        """As DENSE, but for hard samples, and whether or not the student agrees."""
        return functools.partial(cost, statistics=self.statistics, adversarial=self.adversarial)

    @property
    def lesson(self) -> Lesson:
        """As DENSE, on samples that were moved."""
        return functools.partial(lesson, temperature=self.temperature, diversity=self.diversity)


def cost(batch: Batch, given: Teachers, *, statistics: float, adversarial: float) -> Tensor:
    """Return a cost: of samples not surely of their class, unlike the clients' own, or easy for the student."""
    logits, distance = answers_and_distance(given.models, batch)
    wanted = combine_logits(logits, given.votes)
    unsure = 1 - wanted.softmax(1).gather(1, batch.y[:, None])[:, 0].detach()
    apart = disagreement(batch.outputs(given.learner), wanted, ADVERSARIAL)
    return (unsure * cross_entropy(wanted, batch.y)).mean() + statistics * distance - adversarial * apart.mean()


def revise(votes: Params, batch: Batch, given: Revision) -> Params:
    """Take one step of the votes, by the sign of the gradient of the ensemble's loss."""
    logits = answers(given.models, batch)

    def objective(at: Params) -> tuple[Tensor, None]:
        return batch.mean(cross_entropy(combine_logits(logits, at.value), batch.y)), None

    g, _ = batch.differentiate(objective, votes)
    return votes.moved(g.map(torch.sign), -given.step).map(lambda leaf: leaf.clamp(0, 1))


def lesson(w: Params, batch: Batch, given: Teachers, *, temperature: float, diversity: float) -> tuple[Tensor, Params]:
    """Return how far the student answers from the ensemble, where the ensemble's answers change."""

    def ask(shown: Batch) -> Tensor:
        return combine_logits(answers(given.models, shown.deployed), given.votes)

    shown = diversify(batch, ask, diversity, temperature)
    outputs, after = shown.forward(w)
    return batch.mean(disagreement(outputs, ask(shown), temperature)), after
