"""FAFI with a public bank: features of public samples, sent once, are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t)  +  sum_{j in bank} exp(z_i . b_j / t)

As it was run (V5 of the notes): the server trains a network of its own on the public samples, and sends its unit
features of 4096 of them; their labels are not looked at, so a bank's item of the anchor's own class is a negative,
too. ``masked = True`` leaves these out, ``mass = 1`` lets the bank weigh as much as the batch. Other forms of ``pool``
have no features of a foreign network: ``images``, ``anchored`` and ``means`` (`server.pools`); ``pool_from`` has
controls: an untrained network, random directions, images of noise.

With ``pool = "none"`` this is FAFI.

Reference: none; the plan of the notes that Atoll is built from. The contrast: Khosla et al. "Supervised Contrastive
Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.trainings.bank import Bank
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FAFIBank(Pair, training=(PrototypeContrast, Bank), answering=FusedFeatures):
    """FAFI with a bank of public features among the negatives."""

    limits: ClassVar[Limits] = {"fafi": {"pool": "none"}}
    cites: ClassVar[str] = "zeng2025does"
