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


def proximal(lam: Scalar, center: Params | Stack) -> Penalty:
    """(lam / 2) ||w - center||^2 over the trained leaves; buffers are never pulled."""
    return Penalty(_proximal, {"lam": lam, "center": center.trained})


def _proximal(w: Params, given: Tree) -> Tensor:
    apart = w - given["center"].only(w)
    return 0.5 * given["lam"] * apart.dot(apart)  # type: ignore[no-any-return]
