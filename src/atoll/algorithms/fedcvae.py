"""FedCVAE: every client sends a generator of its samples, the server trains a classifier on what they make together.

    client:  max over encoder, D_k  E_{x,y} E_{e ~ q(x, y)} log N(x; D_k(y, e), sigma^2) - KL( q || N(center, I) )
    server:  (k, y) ~ share of samples with class y at client k,    e ~ N(center, I) cut at reach,    x = D_k(y, e)
             min_w  E_{x,y} CE(w; x, y)

D_k are decoders of conditional variational autoencoders, which all begin alike. ``variant = "ens"`` is FedCVAE-Ens, as
above. In FedCVAE-KD one decoder D learns what all of them make, min_D E |D(y, e) - x|^2, and makes the classifier's
samples, of all known classes alike. Whoever does not know `center` draws from the wrong prior. Encoders never leave.

Reference: Heinbaugh, Luz-Ricca, Shao. "Data-Free One-Shot Federated Learning Under Very High Statistical
Heterogeneity." ICLR 2023.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.fedcvae import Generated
from atoll.algorithms.trainings.cvae import Autoencoder
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FedCVAE(Pair, training=Autoencoder, answering=Generated):
    """One classifier, trained on samples from all clients' decoders."""

    cites: ClassVar[str] = "heinbaugh2023data"
