"""A public bank: features of public samples, sent once, are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t)  +  sum_{j in bank} exp(z_i . b_j / t)

As it was run (V5 of the notes): the server trains a network of its own on the public samples, and sends its unit
features of 4096 of them; their labels are not looked at, so a bank's item of the anchor's own class is a negative, too.
``masked = True`` leaves these out, ``mass = 1`` lets the bank weigh as much as the batch. Other forms of ``pool`` have
no features of a foreign network: ``images``, ``anchored`` and ``means`` (`server.pools`); ``pool_from`` has controls:
an untrained network, random directions, images of noise. With ``pool = "none"`` nothing is added.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece, Supplied
from atoll.kernel.algorithm import Count, Epochs, NonNegative
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params
from atoll.toolbox.server.pools import CONTROLS, Pool, Source, pool, redraw, teacher


@dataclass(frozen=True, kw_only=True)
class Bank(ContrastPiece):
    """A bank of public features among the negatives."""

    pool: Pool = "features"  # what is sent about public samples
    pool_from: Source = "teacher"  # the source of features or images: a trained network, or a control
    pool_size: Count = 4096  # public samples in the pool
    pool_draw: Count = 256  # how many of them a step encodes, if clients encode them
    masked: bool = False  # whether items of the anchor's class are left out instead of being negatives
    mass: NonNegative = 0.0  # the weight of the pool, in batches; 0: as much as it has items
    teacher_epochs: Epochs = 20  # epochs of the server on public samples

    called: ClassVar[str] = "bank"
    needs_public_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = ("teacher", *CONTROLS.get(self.pool, ()))
        if self.pool_from not in sources:
            raise HyperparameterError(
                f"`pool_from` of a pool of {self.pool!r} must be {' or '.join(map(repr, sources))}. Got "
                f"{self.pool_from!r} instead."
            )

    @property
    def adds(self) -> bool:
        """Whether there is a pool."""
        return self.pool != "none"

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return what the pool is, and how it counts."""
        return {"pool": self.pool, "pool_draw": self.pool_draw, "masked": self.masked, "mass": self.mass}

    @property
    def taught_for(self) -> int | None:
        """Whether clients begin with the teacher: then its features mean something to them."""
        return self.teacher_epochs if self.pool in ("anchored", "means") else None

    def equip(self, start: Supplied, bench: Workbench, first: Params) -> Supplied:
        """Make the pool; prototypes stay the clients' business."""
        other = self.another_network(bench, first) if self.pool == "features" and self.pool_from != "random" else None
        made = pool(bench, self.pool, self.pool_from, size=self.pool_size, start=start.model, other=other)
        return replace(start, pool=made)

    def another_network(self, bench: Workbench, w: Params) -> Params:
        """Return a network that is not the clients': untrained, or trained on the public samples as they are."""
        other = redraw(bench, w)
        if self.pool_from == "untrained":
            return other
        return teacher(bench, other, self.teacher_epochs, augmented=False)
