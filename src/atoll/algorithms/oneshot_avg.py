"""One-shot FedAvg: every client trains alone until it is done, and the server averages once.

    w = sum_k p_k w_k,       w_k = the initial model after `epochs` local epochs

The further clients train, the less their average is a model at all: it is the reference that other one-shot methods are
measured by. Statistics of BatchNorm are those of all clients' samples together, from means and E[x^2]:

    m = sum_k p_k m_k,   v = sum_k p_k (v_k + m_k^2) - m^2

or plain means of both, or they are found anew in the averaged model, on public samples without labels.

Reference: Guha, Talwalkar, Smith. "One-Shot Federated Learning." 2019. https://arxiv.org/abs/1902.11175 (the setting);
McMahan et al., AISTATS 2017, Algorithm 1 with a single round. https://arxiv.org/abs/1602.05629
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.average import Average
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class OneShotAvg(Pair, training=CrossEntropy, answering=Average):
    """The average of models that were trained apart."""

    cites: ClassVar[str] = "guha2019one"
