"""One gradient step as the task's rule says, weight decay, clipping, momentum; and the losses on the way."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from atoll.kernel.params import Params, Scalar, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Training

Found = tuple[Params, Params, Tensor]  # what `Batch.gradient` returns: g, w with the buffers of the pass, the loss


@record
class MeanLoss:
    """The mean of a client's losses over its steps, for a carry: `carry.loss.add(loss)`."""

    total: Each = 0.0
    steps: Each = 0.0

    def add(self, loss: Tensor) -> MeanLoss:
        """Return the mean with one more step in it."""
        return MeanLoss(self.total + loss, self.steps + 1)

    @property
    def value(self) -> Tensor:
        """Each client's mean; 0 before the first step."""
        mean: Tensor = self.total / self.steps.clamp(min=1)
        return mean


@record
class TwoModels:
    """A shared and a personal model that train together: both on their way, how fast they go, and their losses."""

    w: Each
    v: Each
    velocity_w: Each
    velocity_v: Each
    main: MeanLoss = MeanLoss()
    personal: MeanLoss = MeanLoss()

    @property
    def losses(self) -> dict[str, Tensor]:
        """The mean losses of both, by the names under which they are observed."""
        return {"loss/main": self.main.value, "loss/personal": self.personal.value}


def zero_velocity(rule: Training, w: Params | Stack, only: Iterable[str] | None = None) -> Params | Stack:
    """Return the velocity before the first step, for the trained leaves of w or those named; empty without momentum."""
    zeros = w.zeros()
    return zeros.only((zeros if only is None else only) if rule.momentum else ())


def descend(rule: Training, w: Params, g: Params, velocity: Params, lr: Scalar) -> tuple[Params, Params]:
    """Take one step along g; return the model and its velocity."""
    if rule.weight_decay:
        g = g.moved(w.only(g), rule.weight_decay)
    if rule.clip is not None:
        g = g * (rule.clip / (g.norm() + 1e-12)).clamp(max=1.0)
    if rule.momentum:
        g = velocity = velocity * rule.momentum + g
    return w.moved(g, -lr), velocity
