"""The methods that are checked: with their defaults or with asked hyperparameters, and shortened."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from atoll import algorithms, compose
from atoll.kernel.algorithm import Algorithm, hyperparameters

Method = type[Algorithm]
P = ParamSpec("P")
R = TypeVar("R")

TOGETHER = (
    "fedper+prox", "ditto+sam", "ditto+fsa", "scaffold+tune", "fedper+gate",
    "ditto@ifca", "fedper@ifca", "fedrep@ifca", "fedprox@cfl", "local@flhc",
)  # fmt: skip


def everything() -> dict[str, Method]:
    """Return every method by name, and some that are put together: with a piece, or inside clusters."""
    return algorithms.found() | {name: compose.find(name) for name in TOGETHER}


def configured(algorithm: Algorithm) -> Method:
    """Make a method whose defaults are the hyperparameters of this one; of other ones it declares no limits."""
    method = type(algorithm)
    if algorithm == method():
        return method
    values = {one.name: getattr(algorithm, one.name) for one in fields(method) if one.init}
    changed = {name: value for name, value in values.items() if value != getattr(method(), name)}
    made = with_defaults(method, changed)
    made.limits = {}
    ASKED[made] = frozenset(changed)
    return made


ASKED: dict[Method, frozenset[str]] = {}  # the hyperparameters that were chosen by whoever asks
FULL: dict[Method, Method] = {}  # the method that each shortened one was made from


def remember(size: int | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a function returned the last times: the checks of a method look at the same runs."""
    return cast("Callable[[Callable[P, R]], Callable[P, R]]", functools.lru_cache(maxsize=size))


@remember(None)
def shorten(method: Method) -> Method:
    """Return the method with just enough of everything that lasts, unless its length was asked for."""
    asked = ASKED.get(method, frozenset())
    enough = {
        one.name: one.enough
        for one in hyperparameters(method)
        if one.enough is not None and isinstance(one.default, int) and one.default > one.enough
    }
    made = with_defaults(method, {name: value for name, value in enough.items() if name not in asked})
    FULL[made] = method
    return made


def with_defaults(method: Method, values: Mapping[str, Any]) -> Method:
    """Return the method with other defaults; its annotations are resolved, because it may not be in their module."""
    if not values:
        return method
    hints = get_type_hints(method, include_extras=True)
    changed = [(name, hints[name], value) for name, value in values.items()]
    space = {"__module__": method.__module__, "__doc__": method.__doc__}
    return make_dataclass(method.__name__, changed, bases=(method,), namespace=space, frozen=True, kw_only=True)
