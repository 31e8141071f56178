"""FedBN: federated averaging of everything but batch normalisation, which each client keeps to itself.

    min_{w, b_1..b_N}  sum_k p_k F_k(w, b_k)              (b_k: scales, shifts and running statistics, never sent)

For clients whose inputs look different (another scanner, another camera): normalised by their own statistics they look
alike to the shared layers. Layers are recognised by their type, whatever they are called.

Reference: Li, Jiang, Zhang, Kamp, Dou. "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization."
ICLR 2021, Algorithm 1. https://arxiv.org/abs/2102.07623
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.algorithms.fedper import FedPer
from atoll.kernel.algorithm import Limits
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.statistics import settled


@dataclass(frozen=True, kw_only=True)
class FedBN(FedPer):
    """Shared layers between batch normalisation of one's own."""

    private: Literal["batchnorm", "norm"] = "batchnorm"  # batch norm only, or layers of every kind of normalisation

    limits: ClassVar[Limits] = {}
    cites: ClassVar[str] = "li2021fedbn"

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """A new client has the initial scales and shifts, with statistics of its own samples: it needs no labels."""
        own = cohort.initial.part(self.private)
        start = cohort.stacked(w) | own
        return start | settled(cohort, start).only(own)
