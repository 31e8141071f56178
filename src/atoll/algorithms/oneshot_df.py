"""FedDF in one shot: what the clients' models answer together is distilled into one model, on public samples.

    min_w  E_x KL( softmax(z(x)) || softmax(z(x; w)) ),        z(x) = sum_k a_kc z_kc(x)

z is the answer of the ensemble (`ensemble`, with its options, or `oneshot-margins`), x are public samples without
labels, and w begins at the average of the models, at the one that answers most like the ensemble, or at the initial
model. One model is deployed where the ensemble has K.

With ``server_epochs = 0`` this is one-shot FedAvg.

Reference: Lin, Kong, Stich, Jaggi. "Ensemble Distillation for Robust Model Fusion in Federated Learning."
NeurIPS 2020, Algorithm 1 with a single round. https://arxiv.org/abs/2006.07242
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.feddf import Distilled
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class OneShotDF(Pair, training=CrossEntropy, answering=Distilled):
    """One model that was taught the ensemble's answers."""

    limits: ClassVar[Limits] = {"oneshot-avg": {"server_epochs": 0}}
    cites: ClassVar[str] = "lin2020ensemble"
