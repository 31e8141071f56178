"""What a piece changes in the local training of a method, without the method knowing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.kernel.params import Params, Part, Stack
from atoll.toolbox.client.penalties import Penalty
from atoll.toolbox.client.private import Private
from atoll.toolbox.client.sharpness import Radius


def _measure_nothing(start: Params | Stack, end: Stack) -> None:
    """Measure nothing."""


@dataclass(frozen=True, eq=False)
class Change:
    """One change of every call of `sgd` on a cohort that has it in `changes`."""

    term: Callable[[Params | Stack], Penalty] | None = None  # added to the loss, made from the call's start
    radius: Callable[[Params | Stack], Radius] | None = None  # of a sharpness-aware gradient, in place of the method's
    # own, made from the call's start
    adaptive: bool = False  # the same for that radius
    part: Part = "all"  # which leaves are perturbed within it
    private: Private | None = None  # gradients of samples are cut, and noise is added to their sum
    measure: Callable[[Params | Stack, Stack], Any] = _measure_nothing  # of a call's start and end
    measured: list[Any] = field(default_factory=list)  # by every call so far
    released: list[tuple[str, ...]] = field(default_factory=list)  # the fields that each `release` has covered
