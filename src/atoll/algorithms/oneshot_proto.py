"""FedProto in one shot: the clients' features are averaged, and compared with the mean features of each class.

    argmin_c |F(x) - P_c|^2,     F(x) = sum_k p_k f_k(x),     P_c = mean of c_kc over the clients that have class c

f_k(x) is what enters the head of client k's model, trained by cross-entropy from the common initial model, and c_kc the
mean of f_k over its training samples of class c, sent with the model. Features of models that were trained apart have
little in common but where they began; the other form, features of the averaged model, has even less.

Reference: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. "FedProto: Federated Prototype Learning across Heterogeneous
Clients." AAAI 2022. https://arxiv.org/abs/2105.00243; in one shot as a baseline of FAFI's released code.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.means import ClassMeans
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class OneShotProto(Pair, training=CrossEntropy, answering=ClassMeans):
    """Nearest prototypes of fused features."""

    cites: ClassVar[str] = "tan2022fedproto"
