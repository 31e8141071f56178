"""Terms of a client's loss that are known functions of its model, and so are their gradients.

They are added to the gradient of the data's loss in closed form: differentiated with it, they would cost a good part of
a step. What they need is carried in `given`, so each client gets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.kernel.params import Params, Scalar, Stack, Tree
from atoll.kernel.record import Each, record

Onto = Callable[[Params, Params, Tree], Params]


@dataclass(frozen=True, eq=False)
class Penalty:
    """`onto(g, w, given)` is g plus the term's gradient at w, for the leaves of g.

    `given` may hold a Stack, of which each client sees its own.
    """

    onto: Onto
    given: Tree = None

    def __add__(self, other: Penalty) -> Penalty:
        mine, theirs = self.onto, other.onto
        return Penalty(lambda g, w, given: theirs(mine(g, w, given[0]), w, given[1]), (self.given, other.given))

    def __call__(self, g: Params, w: Params) -> Params:
        """Return the sum, inside a step that made this penalty from one client's Params."""
        return self.onto(g, w, self.given)


@record
class Near:
    """Where a model is held, and how strongly."""

    lam: Scalar
    center: Each


def proximal(lam: Scalar, center: Params | Stack) -> Penalty:
    """Return the penalty (lam / 2) ||w - center||^2 over the trained leaves of the center; buffers are never pulled."""
    return Penalty(_proximal, Near(lam, center.trained))


def linear(direction: Params | Stack) -> Penalty:
    """Return the penalty <direction, w> over the trained leaves: every gradient gets `direction` added."""
    return Penalty(_linear, direction.trained)


def _proximal(g: Params, w: Params, given: Near) -> Params:
    center = given.center.only(g)
    return g.moved(w.only(center) - center, given.lam)


def _linear(g: Params, w: Params, direction: Params) -> Params:  # noqa: ARG001 - its gradient is the same everywhere
    return g + direction.only(g)
