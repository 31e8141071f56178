"""FEDIC's server step, in one shot: a few labelled samples calibrate the ensemble before it is distilled.

    l(x) = sum_k o_k(x) l_k(x),   o_k = a_k / sum_j a_j,   a_k = sigmoid(u . l_k(x) + b)             (client by client)
    l*(x) = g (s l(x) + t) + (1 - g) l_0(x),    g = sigmoid(v . mean_k f_k(x) + b')                    (class by class)

l_k and f_k are logits and features of client k's model, l_0 the logits of the average after it was trained on the
labelled public samples, which are as many of every class; u, b, s, t, v, b' are fitted there by cross-entropy, from
u, v = 0, s = 1: where the teacher l* is the mean of l_k and l_0. On the other public samples, without labels, a student
learns its answers,

    min_w  1/2 E KL( softmax(l* / T) || softmax(l(x; w) / T) )  +  1/2 E_labelled CE(l(x; w), y).

Reference: Shang, Lu, Cheung, Wang. "FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated
Distillation." ICME 2022. https://arxiv.org/abs/2205.00172
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.fedic import Calibrated
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FEDIC(Pair, training=CrossEntropy, answering=Calibrated):
    """A student of a calibrated ensemble."""

    cites: ClassVar[str] = "shang2022fedic"
