"""DENSE: the server makes up samples that the clients' models agree on and a student does not yet, and distils on them.

    generator:  min_G  E CE(z(x), y) + BN(x) - E 1[decisions differ] KL_3( z(x) || s(x) ),      x = G(noise)
    student:    min_w  E KL_4( z(x) || s(x; w) )         over everything made up so far

z(x) is the mean of the clients' logits, s(x) are the student's; KL_T is that of softmaxes at temperature T, times T^2.
BN(x) is the distance of a batch's statistics from those that BatchNorm layers of the clients' models remember. In every
epoch a fresh generator makes one batch, and the student passes over all batches. The last student is deployed.

Reference: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. "DENSE: Data-Free One-Shot Federated Learning." NeurIPS 2022.
https://arxiv.org/abs/2112.12371
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Replies
from atoll.kernel.batch import Batch
from atoll.kernel.params import Params
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import LocalTraining, Start
from atoll.toolbox.server.distillation import disagreement
from atoll.toolbox.server.synthesis import (
    Cost,
    FromMadeUp,
    Lesson,
    Teachers,
    answers,
    combine_logits,
    teaching_cost,
)


@dataclass(frozen=True, kw_only=True)
class Student(FromMadeUp):
    """Data-free distillation of the clients' ensemble into one student."""

    called: ClassVar[str] = "dense"
    cites: ClassVar[str] = "zhang2022dense"

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Teach a student, who begins as all clients did, what they know together."""
        return self.learn(replies.workbench, start.model, uploads(replies, "model"))

    @property
    def cost(self) -> Cost:
        """What samples should have little of."""
        return functools.partial(teaching_cost, statistics=self.statistics, adversarial=self.adversarial)

    @property
    def lesson(self) -> Lesson:
        """What a student should have little of."""
        return functools.partial(lesson, temperature=self.temperature)


def lesson(w: Params, batch: Batch, given: Teachers, *, temperature: float) -> tuple[Tensor, Params]:
    """Return how far the student answers from the ensemble."""
    wanted = combine_logits(answers(given.models, batch.deployed), given.votes)
    outputs, after = batch.forward(w)
    return batch.mean(disagreement(outputs, wanted, temperature)), after
