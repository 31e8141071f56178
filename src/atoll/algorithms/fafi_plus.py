"""FAFI with what was proposed to improve it: everything is an option, and everything can be combined.

    min  CE(l, y) + a SupCon(z, y; batch, queue, pool, mixtures) + b CE(s cos(p, p), (0, ..., C - 1))
         + lambda anchor(z, p) + fading distances to a teacher

Nothing is added by default: this is FAFI then, bit for bit. Whatever comes from the server is sent once, before
training, so it stays one shot. Clients are those of `fafi+bank+stages+queue+frame+hard+balance+reference+conflict`
in `algorithms.trainings`; the server is `features` with `refined` in `algorithms.answers`.

On the server, what clients answer by themselves may be added to what their fused features say (`own`),

    l_c = (1 - own) s cos(F(x), p_c) + own s sum_k a_kc cos(f_k(x), p_kc),       a_kc ~ sqrt(n_kc (n_k - n_kc) / n_k),

with their prototypes or, on one scale for all, by the margins of `objectives.margins` (`own_by`). On the server also
prototypes may be weighted by what clients know of their classes (`dynamic`), and refined on public
samples with the encoders as they are (`refine`): min_p CE(s cos(F(x), p), y) + gamma |p - p_0|^2, or without labels, so
that answers become sure and classes stay as frequent as each other.

Reference: none for the whole; Zeng et al., ICML 2025, for FAFI, and for the parts those that are named in
`contrastive`, `negatives`, `balance` and `alignment` of `atoll.toolbox.objectives`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.answers.refined import Refinements
from atoll.algorithms.trainings.balance import Balance
from atoll.algorithms.trainings.bank import Bank
from atoll.algorithms.trainings.conflict import OfGradients
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.frame import Anchors, Frame
from atoll.algorithms.trainings.hard import Hard
from atoll.algorithms.trainings.queue import Queue
from atoll.algorithms.trainings.reference import ToReference
from atoll.algorithms.trainings.stages import InStages
from atoll.kernel.algorithm import Limits, Natural, NonNegative, Share
from atoll.toolbox.objectives.prototypical import Conflict
from atoll.toolbox.objectives.terms import Reference, Stages
from atoll.toolbox.pairs import Pair
from atoll.toolbox.server.pools import Pool

NOTHING: dict[str, Any] = {
    "queue": 0, "pool": "none", "hardness": 0.0, "synthetic": False, "balanced": False, "prior": "none", "rarity": 0.0,
    "stages": "never", "anchors": "none", "reference": "none", "conflict": "ignored", "own": 0.0, "dynamic": False,
    "refine": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FAFIPlus(
    Pair,
    training=(PrototypeContrast, Bank, InStages, Queue, Frame, Hard, Balance, ToReference, OfGradients),
    answering=(FusedFeatures, Refinements),
):
    """FAFI and everything that can be added to it."""

    pool: Pool = "none"  # what is sent of public samples
    masked: bool = True  # whether a pool's items of the anchor's class are left out instead of being negatives
    mass: NonNegative = 1.0  # the weight of queue and of pool, in batches; 0: as much as they have items
    stages: Stages = "never"  # contrast alone once, in the first epochs, then no pool; recurring: in every fifth epoch
    queue: Natural = 0  # places for earlier features, at most a quarter of the client's samples; 0: no queue
    anchors: Anchors = "none"  # directions of classes that everybody has
    hardness: NonNegative = 0.0  # beta: negatives weigh more the more alike they are
    balanced: bool = False  # every class counts the same in the contrast, absent ones by their prototypes
    reference: Reference = "none"  # distance of the client's features to those of a teacher
    conflict: Conflict = "ignored"  # of contrast and the rest: their gradients' cosine measured, or projected apart
    own: Share = 0.0  # share of what clients answer by themselves, by class, beside that of fused features

    needs_public_data: ClassVar[bool] = False  # by default
    limits: ClassVar[Limits] = {"fafi": NOTHING}
    cites: ClassVar[str] = "zeng2025does"
