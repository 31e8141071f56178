"""FedPFT: clients send mixtures of Gaussians of their features; the server draws from these and trains a head.

    client:  for each class c, the mixture that makes its features phi(x) most likely, by EM:

                 p_kc(z) = sum_j weight_kcj N(z; mean_kcj, diag variance_kcj)

    server:  min_{W, b}  sum_kc sum_{z ~ p_kc, n_kc times} loss(W z + b, c)

phi is frozen. A class with few samples has fewer components, down to one Gaussian; variances are drawn to those within
all classes of the client.

Reference: Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang. "Parametric Feature Transfer: One-shot Federated
Learning with Foundation Models." 2024. https://arxiv.org/abs/2402.01862
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.fedpft import Mixtures
from atoll.algorithms.trainings.frozen import Frozen
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FedPFT(Pair, training=Frozen, answering=Mixtures):
    """A head trained on features drawn from the clients' mixtures."""

    cites: ClassVar[str] = "beitollahi2024parametric"
