"""What can be added to FAFI's training: terms of the objective, and what they are made of.

A piece sets values of `toolbox.objectives.terms.Composed`, and makes what its terms read. Whatever comes from the
server is sent once, before training. Each piece has a file of its own: `bank`, `queue`, `stages`, `frame`, `hard`,
`balance`, `reference`, `conflict`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Answer
from atoll.kernel.task import Facts
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.objectives.prototypical import Step, train
from atoll.toolbox.objectives.terms import Composed
from atoll.toolbox.oneshot import Server
from atoll.toolbox.pairs import PROTOTYPES, LocalTraining, Piece
from atoll.toolbox.server.pools import teacher

SENT = ("model", "pool", "reference")  # of the server's state, where pieces have put the latter there


class ContrastPiece(Piece):
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

    def equip(self, server: Server, bench: Workbench, first: Params) -> Server:
        """Return the state with what is sent once, before training; `first` is the model before it was taught."""
        return server

    def provide(self, w: Params, cohort: Cohort) -> dict[str, Any]:
        """Return what the objective reads beside the batch, and everybody can make."""
        return {}

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

    def start(self, task: Facts) -> Server:
        """Return the initial model, whose head is the prototypes."""
        for piece in self.pieces:
            piece.require(self.plain, task)
        return self.plain.start(task)

    def equip(self, server: Server, bench: Workbench) -> Server:
        """Train what clients begin with on public samples, if a piece asks for it; make what is sent."""
        server = self.plain.equip(server, bench)
        first: Params = server["model"]
        lessons = [piece.taught_for for piece in self.pieces if piece.taught_for is not None]
        if lessons:
            taught = teacher(bench, first, lessons[0])
            server = {**server, "model": first | taught.without_part("head")}
        for piece in self.pieces:
            server = piece.equip(server, bench, first)
        return server

    def broadcast(self, server: Server) -> Tree:
        """Return the model, and what pieces send with it, once."""
        sent = {name: server[name] for name in SENT if name in server}
        return sent if len(sent) > 1 else server["model"]

    def train(self, received: Tree, cohort: Cohort) -> Stack:
        """Return each client's encoder and prototypes."""
        w, sent = (received, {}) if isinstance(received, Params) else (received["model"], received)
        objective, step = self.objective, self.step(cohort)
        given: dict[str, Any] = {"counts": label_counts(cohort)} if objective.counts else {}
        given |= {name: value for name, value in sent.items() if name != "model"}
        for piece in self.pieces:
            given |= piece.provide(w, cohort)
        return train(cohort, w, step, epochs=self.plain.epochs, given=given or None)

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

    def outputs(self, bench: Workbench, server: Server, models: Stack, x: Tensor) -> Tensor:
        """Return what each model answers."""
        return self.plain.outputs(bench, server, models, x)
