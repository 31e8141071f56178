"""Local training by stochastic gradient descent."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.batch import Batch
from atoll.cohort import Cohort
from atoll.local.penalties import Penalty
from atoll.params import Params, Part, Stack


def sgd(
    cohort: Cohort,
    start: Params | Stack,
    *,
    epochs: int,
    penalty: Penalty | None = None,
    only: Part = "all",
    lr: Tensor | None = None,
    stream: str = "main",
) -> Stack:
    """Every client's model after `epochs` passes over its training data, from `start`.

    Step size, batch size, momentum, weight decay and clipping are the task's (`cohort.training`); momentum starts
    at zero. `only` restricts training to a part of the model. Two calls with the same `stream` see the same batches.
    """
    rule = cohort.training
    names = cohort.population.task.network.layout.part(only)
    term = None if penalty is None else penalty.term

    def step(carry: dict[str, Params], batch: Batch, given: dict[str, Any]) -> dict[str, Params]:
        pull = None if term is None else (lambda w: term(w, given["penalty"]))
        g, w, loss = batch.gradient(carry["w"], pull, names)
        if rule.weight_decay:
            g = g.moved(w.only(g), rule.weight_decay)
        if rule.clip is not None:
            g = g * (rule.clip / (g.norm() + 1e-12)).clamp(max=1.0)
        if rule.momentum:
            g = carry["velocity"] * rule.momentum + g
        seen = Params.of(loss=carry["seen"]["loss"] + loss, steps=carry["seen"]["steps"] + 1)
        after = {"w": w.moved(g, -given["lr"]), "seen": seen}
        return after | {"velocity": g} if rule.momentum else after

    carry: dict[str, Any] = {"w": start, "seen": Params.of(loss=0.0, steps=0.0)}
    if rule.momentum:
        carry["velocity"] = start.trained.only(names).zeros()
    given = {"lr": cohort.lr if lr is None else lr, "penalty": penalty and penalty.given}
    end = cohort.scan(step, carry, given=given, epochs=epochs, stream=stream)
    cohort.observe(**{f"loss/{stream}": end["seen"]["loss"] / end["seen"]["steps"].clamp(min=1)})
    trained: Stack = end["w"]
    return trained
