"""A method around a method: a value with the same interface that calls the one inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.hyperparameters import hyperparameters

M = TypeVar("M", bound=Algorithm)
T = TypeVar("T")


def fact(function: Callable[[Any], T]) -> T:
    """Make a property of what is a class attribute of other methods; a wrapper works it out from the method inside."""
    return property(function)  # type: ignore[return-value]


class Wrapper(Algorithm):
    """Base of what wraps a method. Whatever a subclass does not define is the method's: facts, hooks, hyperparameters.

    A subclass is a frozen dataclass with a field `inner`, and fields for what it adds. Of several methods inside, the
    hyperparameters of one name must have one value.
    """

    inner: Algorithm

    def __post_init__(self) -> None:
        for one in hyperparameters(type(self)):
            one.check(title_of(self), getattr(self, one.name))

    def __getattr__(self, name: str) -> Any:
        """Return a hyperparameter of a method inside."""
        half_made = name in {one.name for one in fields(self)} or name.startswith("__")  # asked for by copies
        values = {} if half_made else values_of(self)
        if name not in values:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return values[name]

    def defines(self, hook: str) -> bool:
        """Return whether this or the method inside has a hook of its own."""
        return getattr(type(self), hook) is not getattr(Wrapper, hook) or self.inner.defines(hook)


def _forward(name: str) -> None:
    setattr(Wrapper, name, property(lambda self: getattr(self.inner, name)))


for _name in vars(Algorithm).keys() - vars(Wrapper).keys():
    if not _name.startswith("_"):
        _forward(_name)


def core_of(method: Algorithm) -> Algorithm:
    """Return the innermost method: it has the name and the file."""
    return core_of(method.inner) if isinstance(method, Wrapper) else method


def title_of(method: Algorithm) -> str:
    """Return what messages call a method: `Ditto`, `Ditto+gate`."""
    return type(core_of(method)).__name__ + method.added


def values_of(method: Algorithm) -> dict[str, Any]:
    """Return the values of all hyperparameters, those of the methods inside in their places."""
    values: dict[str, Any] = {}
    for one in fields(method):
        value = getattr(method, one.name)
        values |= values_of(value) if isinstance(value, Algorithm) else {one.name: value}
    return values


def with_values(method: M, **values: Any) -> M:
    """Return the same method with other values of some hyperparameters, also of the methods inside."""
    changed = {}
    for one in fields(method):
        value = getattr(method, one.name)
        if isinstance(value, Algorithm):
            theirs = values.keys() & values_of(value).keys()
            changed[one.name] = with_values(value, **{name: values[name] for name in theirs})
        elif one.name in values:
            changed[one.name] = values[one.name]
    return replace(method, **changed)
