"""Hyperparameters are fields of an algorithm: their types, ranges and choices are read from the annotations."""

from __future__ import annotations

import functools
import math
import types
import typing
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from atoll.kernel.errors import HyperparameterError


@dataclass(frozen=True)
class Range:
    """The values a hyperparameter may take; the ends belong to it unless `open_low` or `open_high`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        left = "(" if self.open_low or self.low == -math.inf else "["
        right = ")" if self.open_high or self.high == math.inf else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


@dataclass(frozen=True)
class Words:
    """The words a hyperparameter may be; N in `last:N` stands for a count, LAYER in `from:LAYER` for a name."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Lasts:
    """Marks how long a part of a method lasts; `enough` of it shows that the part works, and what comes after it."""

    enough: int


@dataclass(frozen=True)
class Search:
    """Where tuning looks for good values: from `low` to `high`, evenly in factors if `log`; or `among` these.

    Without any of them, among all choices of the field.
    """

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    among: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.among:
            return ", ".join(map(str, self.among))
        return f"{self.low:g} to {self.high:g}{' in factors' if self.log else ''}"

    def place(self, share: float) -> Any:
        """Return the value that this share of the way leads to, 0 <= share < 1; two digits are enough."""
        if self.among:
            return self.among[int(share * len(self.among))]
        value = self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)
        return float(f"{value:.2g}")


def among(*values: Any) -> Search:
    """Have tuning look among these values."""
    return Search(among=values)


NonNegative = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(low=0, open_low=True)]
Share = Annotated[float, Range(low=0, high=1)]
Count = Annotated[int, Range(low=1)]
Natural = Annotated[int, Range(low=0)]
Epochs = Annotated[int, Range(low=0), Lasts(enough=2)]
Steps = Annotated[int, Range(low=1), Lasts(enough=2)]
Rounds = Annotated[int, Range(low=0), Lasts(enough=1)]  # before something else begins
Weighting = Literal["samples", "batches", "uniform"]


@dataclass(frozen=True)
class Hyperparameter:
    """A field of an algorithm: its type, its range or choices, and its default."""

    name: str
    type: type
    range: Range | None
    choices: tuple[Any, ...]
    optional: bool
    default: Any
    words: tuple[str, ...] = ()  # that may stand for a number
    enough: int | None = None  # of what lasts that long, to see that it works
    search: Search | None = None  # where tuning looks; None: it is not tuned

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        kind = {"int": "an int", "float": "a float", "bool": "True or False", "str": "a string"}[self.type.__name__]
        words = kind if self.range is None else f"{kind} in {self.range}"
        besides = [*map(repr, self.words), *(["None"] if self.optional else [])]
        return ", or ".join([words, *besides])

    def means_the_same_as(self, other: Hyperparameter) -> bool:
        """Return whether both are of one type; their ranges and defaults may differ."""
        return (self.type, self.choices, self.optional, self.words) == (
            other.type, other.choices, other.optional, other.words
        )  # fmt: skip

    def check(self, owner: str, value: Any) -> None:
        """Raise unless `value` is allowed."""
        if (value is None and self.optional) or (isinstance(value, str) and value in self.words):
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": number,
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
        }[self.type.__name__]
        if self.choices:
            fits = any(_matches(value, choice) for choice in self.choices)
        if not fits or (self.range is not None and value not in self.range):
            raise HyperparameterError(f"`{self.name}` of {owner} must be {self.expected}. Got {value!r} instead.")

    def parse(self, owner: str, text: str) -> Any:
        """Read a value from the command line."""
        if self.optional and text.lower() == "none":
            return None
        if text in self.words:
            return text
        try:
            if self.type is bool:
                return {"true": True, "false": False}[text.lower()]
            return self.type(text)
        except (ValueError, KeyError):
            raise HyperparameterError(
                f"`{self.name}` of {owner} must be {self.expected}. Got {text!r} instead."
            ) from None


def hyperparameters(method: Any) -> list[Hyperparameter]:
    """Read the fields of a method's class, or of a method, those of the methods inside it in their places."""
    kind = method if isinstance(method, type) else type(method)
    found: dict[str, Hyperparameter] = {}
    for name, one in _read_fields(kind).items():
        if one is not None:
            found[name] = one
        elif kind is not method:
            found |= {one.name: one for one in hyperparameters(getattr(method, name))}
    return [*found.values()]


@functools.lru_cache(maxsize=1024)  # of classes: the methods of a pair or a piece are made while Atoll runs
def _read_fields(kind: type) -> dict[str, Hyperparameter | None]:
    """Read the fields of a class by name; None for a method inside it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        entry.name: None
        if is_dataclass(hints[entry.name])
        else _hyperparameter(entry.name, hints[entry.name], entry.default)
        for entry in fields(kind)
    }


def _hyperparameter(name: str, hint: Any, default: Any) -> Hyperparameter:
    """Read an annotation: the first part of a union is the type, then may come None and the words of a Literal."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        first, *others = typing.get_args(hint)
        words = tuple(word for part in others for word in typing.get_args(part))
        return replace(_hyperparameter(name, first, default), optional=types.NoneType in others, words=words)
    if typing.get_origin(hint) is Annotated:
        hint, *extras = typing.get_args(hint)
        allowed = next((extra for extra in extras if isinstance(extra, Range)), None)
        words = next((extra.words for extra in extras if isinstance(extra, Words)), ())
        enough = next((extra.enough for extra in extras if isinstance(extra, Lasts)), None)
        search = next((extra for extra in extras if isinstance(extra, Search)), None)
        of_hint = _hyperparameter(name, hint, default)
        if search == Search():
            search = Search(among=of_hint.choices)
        return replace(of_hint, range=allowed, choices=words or of_hint.choices, enough=enough, search=search)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return Hyperparameter(name, type(choices[0]), None, choices, False, default)
    return Hyperparameter(name, hint, None, (), False, default)


def _matches(value: Any, choice: Any) -> bool:
    """Return whether a value is the choice, or of its form: `last:2` of `last:N`."""
    word, colon, stands_for = str(choice).partition(":")
    if not colon or not isinstance(value, str):
        return bool(value == choice)
    given, colon, rest = value.partition(":")
    return given == word and (rest.isdecimal() and int(rest) > 0 if stands_for == "N" else bool(rest))
