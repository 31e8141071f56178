"""FedETF in one shot: all clients are given the same fixed classifier, so that their features learn to point its way.

    z_c(x) = s <u(x) / |u(x)|, a_c>,         a_1..a_C a simplex frame: <a_c, a_c'> = -1 / (C - 1)

u(x) are the network's own outputs, which serve as a projection to C numbers; the frame A is never trained and never
sent: everybody makes it alike. Clients minimise the cross-entropy of z, or of z + log(n_kc + 1), which keeps frequent
classes from pushing all others away. Models trained apart then agree on where a class lies, and answer together by
their z; one model of averaged weights is the other form.

Reference: Li, Shang, He, Lin, Wu. "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier." ICCV 2023. https://arxiv.org/abs/2303.10058
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Positive, Predictor
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.randomness import generator
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.objectives.balance import balanced_softmax
from atoll.toolbox.objectives.etf import simplex_etf
from atoll.toolbox.oneshot import ClassVotes, OneShot, Server, averaged, class_shares, shares
from atoll.toolbox.server.voting import together


@dataclass(frozen=True, kw_only=True)
class FedETF(OneShot):
    """Models that were trained to one fixed classifier."""

    scale: Positive = 1.0  # s: how sharp answers can become
    balanced: bool = True  # whether clients minimise the cross-entropy of z + log(n_kc + 1), or of z
    answer: Literal["ensemble", "average"] = "ensemble"  # all models together, or one of averaged weights
    weighting: ClassVotes = "uniform"  # in the ensemble: alike, by samples, their square root, or samples of the class

    deploys_a_model: ClassVar[bool] = False
    cites: ClassVar[str] = "li2023no"

    def trained(self, w: Params, cohort: Cohort) -> Stack:
        """Each client's model after training to the frame."""
        given = {
            "frame": self.frame(cohort.lr, cohort.task.classes),
            "counts": label_counts(cohort) if self.balanced else None,
        }
        return sgd(cohort, start=w, epochs=self.epochs, gradient=to_frame, given=given)

    def frame(self, like: Tensor, classes: int | None) -> Params:
        """The frame times s; it is no secret, and the same in every run."""
        assert classes is not None, "the task has classes"
        rows = simplex_etf(classes, classes, generator(0, "FedETF's frame"))
        return Params.of(directions=self.scale * rows.to(like.device, like.dtype))

    def fused(self, server: Server) -> Predictor:
        """All models, or the average, with the frame."""
        labels = server["labels"]
        beside = self.frame(labels["counts"], labels["counts"].shape[1])
        if self.answer == "average":
            return Predictor(averaged(server["models"], shares(labels, "samples")), beside, in_frame)
        share = Params.of(shares=class_shares(labels, self.weighting))
        return ensemble(server["models"], beside | share, in_frame_together)


def to_frame(w: Params, batch: Batch, given: dict[str, Any]) -> Found:
    """The gradient of the cross-entropy of the answers in the frame."""
    counts = given["counts"]

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        z = _in(given["frame"], outputs)
        each = (
            F.cross_entropy(z, batch.y, reduction="none")
            if counts is None
            else balanced_softmax(z, batch.y, counts["counts"])
        )
        loss = batch.mean(each)
        return loss, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def in_frame(model: Params, beside: Params, batch: Batch) -> Tensor:
    """What one model answers."""
    return _in(beside, batch.outputs(model))


def in_frame_together(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """What the members answer together."""
    each = torch.stack([_in(beside, batch.outputs(member)) for member in members_of(beside)])
    return together(each, beside["shares"], "logits")


def _in(frame: Params, outputs: Tensor) -> Tensor:
    return F.normalize(outputs, dim=1) @ frame["directions"].T
