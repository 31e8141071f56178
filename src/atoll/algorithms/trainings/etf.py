"""To a frame: all clients are given the same fixed classifier, and their features learn to point its way.

    z_c(x) = s <u(x) / |u(x)|, a_c>,         a_1..a_C a simplex frame: <a_c, a_c'> = -1 / (C - 1)

u(x) are the network's own outputs, which serve as a projection to C numbers; the frame A is never trained and never
sent: everybody makes it alike. Clients minimise the cross-entropy of z, or of z + log(n_kc + 1), which keeps frequent
classes from pushing all others away. A model answers by z.

Reference: Li, Shang, He, Lin, Wu. "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier." ICCV 2023. https://arxiv.org/abs/2303.10058
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Epochs, Positive
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import Answer
from atoll.kernel.randomness import generator
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.objectives.balance import balanced_softmax
from atoll.toolbox.objectives.etf import simplex_etf
from atoll.toolbox.pairs import FEATURES, FRAME, LocalTraining, Start


@record
class InFrame(Start):
    """What clients begin with, and the classifier that they are given."""

    directions: Tensor  # the frame times s, [class, output]


@record
class Given:
    """What a step reads beside the batch."""

    directions: Tensor
    counts: Each  # samples of each class, if the loss is balanced


@dataclass(frozen=True, kw_only=True)
class ToFrame(LocalTraining):
    """Training to one fixed classifier."""

    epochs: Epochs = 10  # E: local epochs
    scale: Positive = 1.0  # s: how sharp answers can become
    balanced: bool = True  # whether clients minimise the cross-entropy of z + log(n_kc + 1), or of z

    called: ClassVar[str] = "etf"
    follows_samples: ClassVar[bool] = False
    offers: ClassVar[frozenset[str]] = frozenset({FEATURES, FRAME})
    cites: ClassVar[str] = "li2023no"

    def start(self, task: Facts) -> InFrame:
        """Return the initial model and the frame."""
        model = super().start(task).model
        return InFrame(model, self.directions(next(iter(model.floating.values())), task.classes))

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Return each client's model after training to the frame."""
        counts = label_counts(cohort).value if self.balanced else None
        given = Given(self.directions(cohort.lr, cohort.task.classes), counts)
        return sgd(cohort, start=w, epochs=self.epochs, gradient=frame_gradient, given=given)

    def directions(self, like: Tensor, classes: int | None) -> Tensor:
        """Return the frame times s; it is no secret, and the same in every run."""
        assert classes is not None, "the task has classes"
        rows = simplex_etf(classes, classes, generator(0, "FedETF's frame"))
        return self.scale * rows.to(like.device, like.dtype)

    @property
    def read(self) -> Answer:
        """What one model answers in the frame."""
        return in_frame

    def beside(self, start: InFrame) -> Params:
        """Return the frame."""
        return Params.of(directions=start.directions)

    def outputs(self, bench: Workbench, start: InFrame, models: Stack, x: Tensor) -> Tensor:
        """Return what each model answers in the frame."""
        return _frame_logits(start.directions, bench.answers(models, x))


def frame_gradient(w: Params, batch: Batch, given: Given) -> Found:
    """Return the gradient of the cross-entropy of the answers in the frame."""
    counts = given.counts

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        z = _frame_logits(given.directions, outputs)
        each = F.cross_entropy(z, batch.y, reduction="none") if counts is None else balanced_softmax(z, batch.y, counts)
        loss = batch.mean(each)
        return loss, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def in_frame(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Return what one model answers."""
    return _frame_logits(beside["directions"], batch.outputs(model))


def _frame_logits(directions: Tensor, outputs: Tensor) -> Tensor:
    return F.normalize(outputs, dim=-1) @ directions.T
