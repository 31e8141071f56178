"""Models with more than plain layers: with buffers, and with random draws."""

from __future__ import annotations

from torch import Tensor

from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.methods import remember
from atoll.testing.conformance.playing import gather_outcome, require_sound, train
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import list_leaves, require_same
from atoll.testing.conformance.tries import PURE

ODD_ROUNDS = 2


def batchnorm_and_dropout_work(method: Algorithm) -> str | None:
    """Check that a model with BatchNorm and dropout trains and answers, buffers keep their type, strategies agree."""
    if method.items_by:
        return "its networks score items, and have no such layers"
    task, report = build_task("odd"), train_odd_model(method)
    whole, loop = gather_outcome(report), gather_outcome(train(method, task, rounds=ODD_ROUNDS, strategy="loop"))
    require_sound(report, "on a model with BatchNorm and dropout")
    types = {name: leaf.dtype for name, leaf in task.network.initial.items()}
    for place, leaf in list_leaves(whole):
        name = place.rpartition("/")[2]
        if isinstance(leaf, Tensor) and types.get(name, leaf.dtype) != leaf.dtype:
            raise ConformanceError(
                f"Leaves must keep their type. {place} was {types[name]}, now it is {leaf.dtype}.",
                hint="integer buffers are not averaged; `replies.mean` takes their maximum.",
            )
    message = "On a model with BatchNorm and dropout, `whole` and `loop` must give the same numbers."
    require_same(whole, loop, message, PURE, tolerance=1e-8)  # as sums over a batch are rounded
    return None


@remember(2)
def train_odd_model(method: Algorithm) -> Report:
    """Run a model with BatchNorm and dropout, in which every client comes back once."""
    return train(method, build_task("odd"), rounds=ODD_ROUNDS)
