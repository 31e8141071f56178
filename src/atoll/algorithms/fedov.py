"""FedOV: clients learn to say "unknown" to outliers made from their own samples, and vote with what they know.

    client:  min_w_k  E CE(o(x), y)  +  a E CE(o(x~), u)  +  b E CE(o(x'), u)  +  c E CE(o(x) without o_y, u)
    server:  answer(x) ~ sum_k p_kc(x),        (p_k1, ..., p_kC, p_ku) = softmax o_k(x)

o(x) are the outputs for all classes and one more, u, for unknown samples. x~ is a sample of the client that was
destroyed: cropped, blurred, erased, parts of it copied, swapped or turned. x' is x~ after some steps to where the model
would take it for one of its classes. A client that is sure not to know a sample has no vote about it.

Reference: Diao, Li, He. "Towards Addressing Label Skews in One-Shot Federated Learning." ICLR 2023.
https://openreview.net/forum?id=rzrqh85f4Sc
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.votes import OpenVotes
from atoll.algorithms.trainings.openset import OpenSet
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FedOV(Pair, training=OpenSet, answering=OpenVotes):
    """All clients' models, each heard by how little it says "unknown"."""

    cites: ClassVar[str] = "diao2023towards"
