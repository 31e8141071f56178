"""FAFI's clients: they train encoders and class prototypes by contrast.

    min  CE(l, y) + a SupCon(z, y) + b CE(s cos(p, p), (0, ..., C - 1)),     l_c = s z . p_c / |p_c|

z is what enters the head of client k's network, of unit length, on two augmented views of every sample; the prototypes
p_c are the rows of the head's weight, which has no other use. A model answers by l. `toolbox.objectives.prototypical`
has the objective and its step. Pieces add to it (`trainings.pieces`).

``profile = "faithful"`` has the settings of the released code; every difference is an option of its own, filled in by
the profile where it is None.

Reference: Zeng, Huang, Zhou, Wu, Wan, Chen, Cai. "Does One-shot Give the Best Shot? Mitigating Model Inconsistency in
One-shot Federated Learning." ICML 2025. https://openreview.net/forum?id=2XvF67vbCK
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Epochs, NonNegative, Positive
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import Answer
from atoll.kernel.task import Facts
from atoll.toolbox.objectives.prototypical import Objective, Step, prototype_leaf, require_prototypes, train
from atoll.toolbox.pairs import FEATURES, PROTOTYPES, LocalTraining, Start

Profile = Literal["clean", "faithful"]
PROFILES: dict[str, dict[str, Any]] = {
    "clean": {
        "temperature": 0.1, "scale": 16.0, "double_ce": False, "normal_start": False, "momentum_reset": False,
        "drop_last": False,
    },
    "faithful": {
        "temperature": 0.07, "scale": 0.0, "double_ce": True, "normal_start": True, "momentum_reset": True,
        "drop_last": True,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrototypeContrast(LocalTraining):
    """Encoders and prototypes, trained by contrast."""

    epochs: Epochs = 10  # E: local epochs
    profile: Profile = "clean"  # the values of those options that are None
    contrast: NonNegative = 1.0  # a: weight of the contrast
    separation: NonNegative = 1.0  # b: weight of the term that keeps prototypes apart
    temperature: Positive | None = None  # temperature of the contrast; clean: 0.1, faithful: 0.07
    scale: NonNegative | None = None  # s; 0: l = z . p, with p not normalised; clean: 16, faithful: 0
    double_ce: bool | None = None  # whether the classification loss counts twice; faithful
    normal_start: bool | None = None  # begin prototypes at N(0, 1), not at the head's weights; faithful
    momentum_reset: bool | None = None  # whether momentum is reset after every epoch; faithful
    drop_last: bool | None = None  # whether to skip all incomplete batches, not only those of one sample; faithful
    falling: bool = False  # whether the step size falls to 0 over all epochs, by half a cosine

    called: ClassVar[str] = "fafi"
    offers: ClassVar[frozenset[str]] = frozenset({FEATURES, PROTOTYPES})
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "zeng2025does"

    def value_of(self, option: str) -> Any:
        """Return the value of an option, the profile's where it is None."""
        value = getattr(self, option)
        return PROFILES[self.profile][option] if value is None else value

    def start(self, task: Facts) -> Start:
        """Return the initial model, whose head is the prototypes."""
        require_prototypes(self, task)
        return super().start(task)

    def equip(self, start: Start, bench: Workbench) -> Start:
        """Draw the prototypes, if they do not begin where the head does, which has no bias from now on."""
        w = start.model
        name = prototype_leaf(w.layout)
        head = w.part("head").map(torch.zeros_like) | w.only([name])
        if self.value_of("normal_start"):
            drawn = bench.generator("prototypes").normal(size=w[name].shape)
            head = head | Params({name: torch.from_numpy(drawn).to(w[name])})
        return replace(start, model=w | head)

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Return each client's encoder and prototypes."""
        return train(cohort, w, self.step(cohort), epochs=self.epochs)

    def step(self, cohort: Cohort, objective: Objective | None = None) -> Step:
        """Return what clients do with a batch."""
        afresh, drop_last = self.value_of("momentum_reset"), self.value_of("drop_last")
        settings = {"afresh": afresh, "drop_last": drop_last, "falling": self.falling}
        return Step(objective or self.objective, cohort.training, **settings)

    @property
    def objective(self) -> Objective:
        """What clients minimise."""
        return Objective(**self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The values of the objective."""
        return {
            "classification": 2.0 if self.value_of("double_ce") else 1.0,
            "contrast": self.contrast,
            "separation": self.separation,
            "temperature": self.value_of("temperature"),
            "scale": self.value_of("scale"),
        }

    # -- how its models answer -----------------------------------------------------------------------------------
    @property
    def read(self) -> Answer:
        """What one model answers by its own prototypes."""
        return functools.partial(by_prototypes, scale=self.value_of("scale"))

    def outputs(self, bench: Workbench, start: Start, models: Stack, x: Tensor) -> Tensor:
        """Return what each model answers by its own prototypes."""
        z = F.normalize(bench.answers(models, x, features=True), dim=-1)
        objective, rows = Objective(scale=self.value_of("scale")), models[prototype_leaf(models.layout)]
        return torch.stack([objective.logits(one, p) for one, p in zip(z, rows, strict=True)])


def by_prototypes(model: Params, beside: Params, batch: Batch, *, scale: float) -> Tensor:  # noqa: ARG001
    """Return the logits of unit features by the rows of the head."""
    z = F.normalize(batch.features(model), dim=1)
    return Objective(scale=scale).logits(z, model[prototype_leaf(model.layout)])
