"""Local training by stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack, Tree
from atoll.kernel.record import Each, record
from atoll.toolbox.client.descent import Found, MeanLoss, descend, zero_velocity
from atoll.toolbox.client.penalties import Penalty
from atoll.toolbox.client.private import find_private
from atoll.toolbox.client.sharpness import Radius, sharp_gradient, sharpen

Gradient = Callable[..., Found]  # of a model, a batch (a tuple of them where there are several streams), and `given`


@record
class Pull:
    """Where each client is drawn to in every step, and how strongly."""

    lam: Each
    center: Stack


@record
class Carry:
    """A model on its way."""

    w: Each
    velocity: Each
    loss: MeanLoss


@record
class Given:
    """What does not change on the way."""

    lr: Tensor
    penalty: Tree
    radius: Tree
    pull: Pull | None
    more: tuple[Tree, ...]


def sgd(
    cohort: Cohort,
    start: Params | Stack,
    *,
    epochs: int,
    penalty: Penalty | None = None,
    only: Part | Iterable[str] = "all",
    lr: Tensor | None = None,
    stream: str | tuple[str, ...] = "main",
    gradient: Gradient | None = None,
    given: Tree = None,
    draws: bool = False,
    radius: Radius = 0.0,
    adaptive: bool = False,
    pull: Pull | None = None,
) -> Stack:
    """Train every client's model from `start`, for `epochs` passes over its training data.

    Step size, batch size, momentum, weight decay and clipping are the task's (`cohort.training`); momentum starts
    at zero. `only` restricts training to a part of the model, or to the leaves it names. Two calls with the same
    `stream` see the same batches. With `gradient`, steps go along gradient(w, batch) and not along that of the loss;
    with `given`, along gradient(w, batch, given). It may draw if `draws` says so. With a `radius`, the gradient is
    sharpness-aware (`client.sharpness`); a `penalty` is added to it. With a `pull`, each
    step of w ends with - lr lam (w - center), w before the step, outside of momentum, weight decay and clipping.
    """
    rule = replace(cohort.training, lr=1.0, lr_decay=1.0)  # their size is given, so steps of any size are one program
    layout = cohort.task.network.layout
    names = layout.part(only) if isinstance(only, str) else frozenset(only)
    of: frozenset[str] | None = None
    for change in cohort.changes:
        if change.term is not None:
            penalty = change.term(start) if penalty is None else penalty + change.term(start)
        if change.radius is not None:
            radius, adaptive = change.radius(start), change.adaptive
            of = None if change.part == "all" else layout.part(change.part)
    private, home = find_private(cohort), cohort
    if private is not None:
        private.require(cohort.task, gradient=gradient, radius=radius)
        home, before = cohort.covered, len(cohort.changes[0].measured)
        if before:  # the noise of another training is another one, also on the same batches
            private = replace(private, stream=f"{private.stream} {before}")
    onto = None if penalty is None else penalty.onto

    def direction(w: Params, batch: Any, given: Given) -> Found:
        if private is not None:
            return private.gradient(w, batch, names, rule.batch_size)  # no cohort: steps of all cohorts are one program
        if gradient is None:
            return sharp_gradient(w, batch, given.radius, adaptive=adaptive, only=names, of=of)
        return sharpen(lambda v: gradient(v, batch, *given.more), w, given.radius, adaptive=adaptive, of=of)

    def step(carry: Carry, batch: Any, given: Given) -> Carry:
        before = carry.w
        g, w, loss = direction(before, batch, given)
        if onto is not None:
            g = onto(g, before, given.penalty)
        w, velocity = descend(rule, w, g, carry.velocity, given.lr)
        if given.pull is not None:
            center = given.pull.center
            w = w.moved(before.only(center) - center, -given.lr * given.pull.lam)
        return Carry(w, velocity, carry.loss.add(loss))

    end = home.scan(
        step,
        Carry(start, zero_velocity(rule, start, names), MeanLoss()),
        given=Given(
            lr=cohort.lr if lr is None else lr,
            penalty=penalty and penalty.given,
            radius=radius,
            pull=pull,
            more=() if given is None else (given,),
        ),
        epochs=epochs,
        stream=stream,
        draws=draws or private is not None,
    )
    name = stream if isinstance(stream, str) else stream[0]
    cohort.observe(**{f"loss/{name}": end.loss.value})
    trained: Stack = end.w
    for change in cohort.changes:
        change.measured.append(change.measure(start, trained))
    return trained
