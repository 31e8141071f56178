"""Terms added to a client's loss. What they need is carried in `given`, so that each client gets its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from atoll.params import Params, Scalar, Stack, Tree


@dataclass(frozen=True, eq=False)
class Penalty:
    """`term(params, given)` is added to the loss; `given` may hold a Stack, of which each client sees its own."""

    term: Callable[[Params, Tree], Tensor]
    given: Tree = None

    def __add__(self, other: Penalty) -> Penalty:
        mine, theirs = self.term, other.term
        return Penalty(lambda w, given: mine(w, given[0]) + theirs(w, given[1]), (self.given, other.given))

    def __call__(self, w: Params) -> Tensor:
        """The term, inside a step that made this penalty from one client's Params."""
        return self.term(w, self.given)


def proximal(lam: Scalar, center: Params | Stack) -> Penalty:
    """(lam / 2) ||w - center||^2 over the trained leaves that the center has; buffers are never pulled."""
    return Penalty(_proximal, {"lam": lam, "center": center.trained})


def linear(direction: Params | Stack) -> Penalty:
    """<direction, w> over the trained leaves: every gradient gets `direction` added."""
    return Penalty(_linear, direction.trained)


def _proximal(w: Params, given: Tree) -> Tensor:
    apart = w.only(given["center"]) - given["center"].only(w)
    return 0.5 * given["lam"] * apart.dot(apart)  # type: ignore[no-any-return]


def _linear(w: Params, direction: Params) -> Tensor:
    return w.dot(direction)
