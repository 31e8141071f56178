"""RGA, reliability-guided aggregation: features are standardised client by client before they are added up.

    F(x) = sum_k sqrt(n_k) (f_k(x) - m_k) / s_k,        answer: argmax_c  cos(F(x), P_c)

m_k and s_k are mean and standard deviation of every feature over the client's own training samples, sent once; or over
public samples, found by the server. Without them, clients with long features would outvote all others.

    frame:  P_c are the directions of FedETF's fixed frame; clients train to it, and f_k are the network's outputs.
    means:  clients train by cross-entropy, f_k is what enters the head; P_c is the sum over the owners of class c of
            sqrt(n_k) (c_kc - m_k) / s_k, where c_kc is the mean of f_k over the client's samples of class c.

Statistics of the test batch, the third form of the released code, are not here: an answer would depend on the others.

Reference: FedSRA's released code, 2026, as it is described there. https://github.com/UpcNlp/FedSRA
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from atoll.algorithms.answers.rga import Standardised
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.algorithms.trainings.etf import ToFrame
from atoll.toolbox.pairs import LocalTraining, Pair


@dataclass(frozen=True, kw_only=True)
class RGA(Pair, training=CrossEntropy, answering=Standardised):
    """Nearest prototypes of standardised features."""

    prototypes: Literal["frame", "means"] = "frame"  # P_c: a fixed frame that clients train to, or means of their own

    cites: ClassVar[str] = "fedsra2026"

    @cached_property
    def training(self) -> LocalTraining:
        """Training to the frame, or by cross-entropy."""
        by_loss = super().training
        assert isinstance(by_loss, CrossEntropy)
        return ToFrame(epochs=by_loss.epochs) if self.prototypes == "frame" else by_loss
