"""DENSE: the server makes up samples that the clients' models agree on and a student does not yet, and distils on them.

    generator:  min_G  E CE(z(x), y) + BN(x) - E 1[decisions differ] KL_3( z(x) || s(x) ),      x = G(noise)
    student:    min_w  E KL_4( z(x) || s(x; w) )         over everything made up so far

z(x) is the mean of the clients' logits, s(x) are the student's; KL_T is that of softmaxes at temperature T, times T^2.
BN(x) is the distance of a batch's statistics from those that BatchNorm layers of the clients' models remember. In every
epoch a fresh generator makes one batch, and the student passes over all batches. The last student is deployed.

Reference: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. "DENSE: Data-Free One-Shot Federated Learning." NeurIPS 2022.
https://arxiv.org/abs/2112.12371
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.dense import Student
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Dense(Pair, training=CrossEntropy, answering=Student):
    """Data-free distillation of the clients' ensemble into one student."""

    cites: ClassVar[str] = "zhang2022dense"
