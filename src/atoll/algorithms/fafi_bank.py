"""FAFI with a public bank: features of public samples, sent once, are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t)  +  sum_{j in bank} exp(z_i . b_j / t)

As it was run (V5 of the notes): the server trains a network of its own on the public samples, and sends its unit
features of 4096 of them; their labels are not looked at, so that a bank's item of the anchor's own class is a negative,
too. ``masked = True`` leaves these out, ``mass = 1`` lets the bank weigh as much as the batch. Other forms of ``pool``
have no features of a foreign network: ``images``, ``anchored`` and ``means`` (`server.pools`); ``pool_from`` has
controls: an untrained network, random directions, images of noise.

With ``pool = "none"`` this is FAFI.

Reference: none; the plan of the notes that Atoll is built from. The contrast: Khosla et al. "Supervised Contrastive
Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.fafi import FAFI
from atoll.kernel.algorithm import Count, Epochs, Limits, NonNegative
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params, Tree
from atoll.toolbox.objectives.prototypical import Objective
from atoll.toolbox.objectives.terms import Composed
from atoll.toolbox.oneshot import Server
from atoll.toolbox.server.pools import CONTROLS, Pool, Source, pool, redrawn, teacher


@dataclass(frozen=True, kw_only=True)
class FAFIBank(FAFI):
    """FAFI with a bank of public features among the negatives."""

    pool: Pool = "features"  # what is sent of public samples
    pool_from: Source = "teacher"  # whose features, or what images: of a trained network, or of a control
    pool_size: Count = 4096  # public samples in the pool
    pool_draw: Count = 256  # of which a step encodes so many, where clients do
    masked: bool = False  # items of the anchor's class are left out, and are not negatives
    mass: NonNegative = 0.0  # the pool weighs as much as so many batches; 0: as much as it has items
    teacher_epochs: Epochs = 20  # of the server on public samples

    minimises: ClassVar[type[Objective]] = Composed
    needs_public_data: ClassVar[bool] = True
    limits: ClassVar[Limits] = {"fafi": {"pool": "none"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = ("teacher", *CONTROLS.get(self.pool, ()))
        if self.pool_from not in sources:
            raise HyperparameterError(
                f"`pool_from` of a pool of {self.pool!r} must be {' or '.join(map(repr, sources))}. Got "
                f"{self.pool_from!r} instead."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        mine = {"pool": self.pool, "pool_draw": self.pool_draw, "masked": self.masked, "mass": self.mass}
        return {**super().settings, **mine}

    @property
    def starts_taught(self) -> bool:
        """Whether clients begin with the teacher, so that its features mean something to them."""
        return self.pool in ("anchored", "means")

    def equip(self, server: Server, workbench: Workbench) -> Server:
        """Train a teacher and make the pool; prototypes stay the clients' business."""
        server = super().equip(server, workbench)
        w: Params = server["model"]
        if self.starts_taught:
            taught = teacher(workbench, w, self.teacher_epochs)
            server = {**server, "model": w | taught.without_part("head")}
        if self.pool == "none":
            return server
        other = self.another(workbench, w) if self.pool == "features" and self.pool_from != "random" else None
        made = pool(workbench, self.pool, self.pool_from, size=self.pool_size, start=server["model"], other=other)
        return {**server, "pool": made}

    def another(self, workbench: Workbench, w: Params) -> Params:
        """A network that is not the clients': untrained, or trained on the public samples as they are."""
        other = redrawn(workbench, w)
        return (
            other if self.pool_from == "untrained" else teacher(workbench, other, self.teacher_epochs, augmented=False)
        )

    def broadcast(self, server: Server) -> Tree:
        """The model, and with it the pool, once."""
        sent = {name: server[name] for name in ("model", "pool", "reference") if name in server}
        return sent if len(sent) > 1 else server["model"]

    def given(self, received: Tree, cohort: Cohort) -> dict[str, Any]:
        """The pool."""
        sent = {} if isinstance(received, Params) else received
        return {**super().given(received, cohort), **{name: sent[name] for name in sent if name != "model"}}
