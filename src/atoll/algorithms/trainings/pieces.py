"""What can be added to FAFI's training: terms of the objective, and what they are made of.

A piece sets values of `toolbox.objectives.terms.Composed`, and makes what its terms read. Whatever comes from the
server is sent once, before training. Each piece has a file of its own: `bank`, `queue`, `stages`, `frame`, `hard`,
`balance`, `reference`, `conflict`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import Answer
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.objectives.prototypical import Step, train
from atoll.toolbox.objectives.terms import Composed, Given
from atoll.toolbox.pairs import PROTOTYPES, LocalTraining, Start, TrainingPiece
from atoll.toolbox.server.pools import teacher


@record
class Supplied(Start):
    """What clients begin with, and what pieces send with it, once."""

    pool: Params | None = None  # further negatives, or what they are made of
    reference: Params | None = None  # a teacher's features of public samples


class ContrastPiece(TrainingPiece):
    """Base of what can be added to this training: terms of the objective, and what they are made of."""

    needs: ClassVar[frozenset[str]] = frozenset({PROTOTYPES})

    def add_to(self, half: "PrototypeContrast | Supplemented") -> "Supplemented":
        """Return the training with the piece in it."""
        if isinstance(half, Supplemented):
            return Supplemented(half.plain, (*half.pieces, self))
        return Supplemented(half, (self,))

    def require(self, training: PrototypeContrast, task: Facts) -> None:
        """Raise unless the task has what the piece needs."""

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return the values of the objective that it sets; raises if the training cannot take them."""
        raise NotImplementedError(f"{type(self).__name__} must define settings().")

    @property
    def taught_for(self) -> int | None:
        """For how many epochs the server trains on public samples what clients begin with; None: it does not."""
        return None

    def equip(self, start: Supplied, bench: Workbench, first: Params) -> Supplied:
        """Return what is sent once, before training, with this in it; `first` is the model before it was taught."""
        return start

    def provide(self, given: Given, w: Params, cohort: Cohort) -> Given:
        """Return what the objective reads beside the batch, with what everybody can make in it."""
        return given

    def change(self, step: Step) -> Step:
        """Return what clients do with a batch."""
        return step


@dataclass(frozen=True)
class Supplemented(LocalTraining):
    """FAFI's training with pieces in it."""

    plain: PrototypeContrast
    pieces: tuple[ContrastPiece, ...]

    offers: ClassVar[frozenset[str]] = PrototypeContrast.offers
    trains_by_sgd: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.objective  # noqa: B018  # raises for pieces that do not fit the training

    @property
    def objective(self) -> Composed:
        """What clients minimise."""
        added = {name: value for piece in self.pieces for name, value in piece.settings(self.plain).items()}
        return Composed(**self.plain.settings, **added)

    def start(self, task: Facts) -> Supplied:
        """Return the initial model, whose head is the prototypes."""
        for piece in self.pieces:
            piece.require(self.plain, task)
        return Supplied(self.plain.start(task).model)

    def equip(self, start: Supplied, bench: Workbench) -> Supplied:
        """Train what clients begin with on public samples, if a piece asks for it; make what is sent."""
        first = self.plain.equip(start, bench).model
        lessons = [piece.taught_for for piece in self.pieces if piece.taught_for is not None]
        taught = teacher(bench, first, lessons[0]).without_part("head") if lessons else Params({})
        start = replace(start, model=first | taught)
        for piece in self.pieces:
            start = piece.equip(start, bench, first)
        return start

    def broadcast(self, start: Supplied) -> Supplied | Params:
        """Return the model, and what pieces send with it, once."""
        return start.model if start.pool is None and start.reference is None else start

    def train(self, received: Supplied | Params, cohort: Cohort) -> Stack:
        """Return each client's encoder and prototypes."""
        sent = Supplied(received) if isinstance(received, Params) else received
        counts = label_counts(cohort).value if self.objective.counts else None
        given = Given(counts, sent.pool, sent.reference)
        for piece in self.pieces:
            given = piece.provide(given, sent.model, cohort)
        return train(cohort, sent.model, self.step(cohort), epochs=self.plain.epochs, given=given)

    def step(self, cohort: Cohort) -> Step:
        """Return what clients do with a batch."""
        step = self.plain.step(cohort, self.objective)
        for piece in self.pieces:
            step = piece.change(step)
        return step

    @property
    def read(self) -> Answer:
        """What one model answers."""
        return self.plain.read

    def outputs(self, bench: Workbench, start: Supplied, models: Stack, x: Tensor) -> Tensor:
        """Return what each model answers."""
        return self.plain.outputs(bench, start, models, x)
