"""FedETF in one shot: all clients are given the same fixed classifier, so their features learn to point its way.

    z_c(x) = s <u(x) / |u(x)|, a_c>,         a_1..a_C a simplex frame: <a_c, a_c'> = -1 / (C - 1)

u(x) are the network's own outputs, which serve as a projection to C numbers; the frame A is never trained and never
sent: everybody makes it alike. Clients minimise the cross-entropy of z, or of z + log(n_kc + 1), which keeps frequent
classes from pushing all others away. Models trained apart then agree on where a class lies, and answer together by
their z; one model of averaged weights is the other form.

Reference: Li, Shang, He, Lin, Wu. "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier." ICCV 2023. https://arxiv.org/abs/2303.10058
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from atoll.algorithms.answers.average import Average
from atoll.algorithms.answers.ensemble import Together
from atoll.algorithms.trainings.etf import ToFrame
from atoll.toolbox.pairs import Pair, ServerAnswer


@dataclass(frozen=True, kw_only=True)
class FedETF(Pair, training=ToFrame, answering=Together, fixed={"of": "logits"}):
    """Models that were trained to one fixed classifier."""

    answer: Literal["ensemble", "average"] = "ensemble"  # all models together, or one of averaged weights

    cites: ClassVar[str] = "li2023no"

    @cached_property
    def answering(self) -> ServerAnswer:
        """All models together, or their average."""
        return Average() if self.answer == "average" else super().answering
