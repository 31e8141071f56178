"""The methods that are checked: with their defaults or with asked hyperparameters, and shortened."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from atoll import algorithms, compose
from atoll.kernel.algorithm import Algorithm, hyperparameters
from atoll.kernel.wrapper import values_of, with_values

Method = Algorithm | type[Algorithm]  # as it is asked for: a class stands for its default values
P = ParamSpec("P")
R = TypeVar("R")

TOGETHER = (
    "fedper+prox", "ditto+sam", "ditto+fsa", "scaffold+tune", "fedper+gate",
    "fafi/margins", "etf/average", "supcon/margins", "fafi/feddf", "fafi+frame/ensemble",
    "ditto@ifca", "fedper@ifca", "fedrep@ifca", "fedprox@cfl", "local@flhc",
)  # fmt: skip


def everything() -> dict[str, Algorithm]:
    """Return every method by name, and some that are put together: with a piece, of two halves, or inside clusters."""
    return {name: compose.create(name) for name in (*algorithms.list_methods(), *TOGETHER)}


def remember(size: int | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a function returned the last times: the checks of a method look at the same runs."""
    return cast("Callable[[Callable[P, R]], Callable[P, R]]", functools.lru_cache(maxsize=size))


def list_asked(method: Algorithm) -> set[str]:
    """List the hyperparameters whose values were chosen by whoever asks."""
    values = values_of(method)
    return {one.name for one in hyperparameters(method) if values[one.name] != one.default}


@remember(None)
def shorten(method: Algorithm) -> Algorithm:
    """Return the method with just enough of everything that lasts, unless its length was asked for."""
    enough = {
        one.name: one.enough
        for one in hyperparameters(method)
        if one.enough is not None and isinstance(one.default, int) and one.default > one.enough
    }
    return with_values(method, **{name: enough[name] for name in enough.keys() - list_asked(method)})
