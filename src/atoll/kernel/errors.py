"""The errors Atoll raises: what must hold, what was given, and what to do on a last line `hint: ...`.

Each one is also the builtin that fits it, so `except ValueError` works as well as `except AtollError`::

    AtollError
    ├── UnknownName          LookupError      a name that nothing answers to
    ├── HyperparameterError  ValueError       a field of an algorithm out of range
    ├── TaskError            ValueError       data, partition, model and metric do not fit together
    ├── PartitionError       ValueError       the samples cannot be dealt to the clients as asked
    ├── ModelError           ValueError       a network that cannot be built or used as asked
    ├── DataError            ValueError       files that are missing or not what they should be
    ├── DivergedError        ArithmeticError  training reached a value that is not finite
    ├── RunError             RuntimeError     a run's folder cannot be written, read or continued
    │   └── CheckpointError                   a checkpoint is missing, damaged or of another run
    ├── OneShotError         ValueError       a one-shot method asked for more than one upload
    ├── PayloadError         ValueError       a reply that is not what the server expects
    ├── EngineError          RuntimeError     an engine cannot do what it is asked to
    ├── DeployError          RuntimeError     a federation of sites cannot go on as asked
    │   └── RefusedError                      a message or a site that is not accepted, and why
    └── CohortError          ValueError       values that do not belong to the cohort they are used with
        └── LabelsNeeded                      a step reads targets of clients that have none
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Self


class AtollError(Exception):
    """Base of all errors raised on purpose; `hint` says what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.hint is None else f"{message}\nhint: {self.hint}"


class UnknownName(AtollError, LookupError):
    """A name that nothing answers to; built by `unknown`."""


class HyperparameterError(AtollError, ValueError):
    """A field of an algorithm is out of range."""


class TaskError(AtollError, ValueError):
    """Data, partition, model and metric do not fit together."""


class PartitionError(AtollError, ValueError):
    """The samples cannot be dealt to the clients as asked."""


class ModelError(AtollError, ValueError):
    """A network cannot be built or used as asked."""


class DataError(AtollError, ValueError):
    """Files of a data set are missing or not what they should be."""


class DivergedError(AtollError, ArithmeticError):
    """Training of `client` in `round` reached a value that is not finite."""

    # Both are optional because an error that crosses a process boundary is rebuilt from its message first.
    def __init__(
        self,
        message: str,
        *,
        client: int | str | None = None,
        round: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.client = client
        self.round = round


class RunError(AtollError, RuntimeError):
    """A run's folder cannot be written, read or continued."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged or belongs to another run."""


class OneShotError(AtollError, ValueError):
    """A one-shot method was asked for more than one upload."""


class PayloadError(AtollError, ValueError):
    """A reply is not what the server expects."""


class PrivacyError(AtollError, ValueError):
    """A promise of privacy that would not hold."""


class UncoveredRead(PrivacyError):
    """Samples were read where sample-level privacy covers nothing of what is made of them."""

    def __init__(self, split: str) -> None:
        super().__init__(
            f"Under sample-level privacy samples may be read by `sgd` and `release` only. Here {split} samples are "
            "read as they are."
        )
        self.split = split


class SumLost(PrivacyError):
    """Too few clients are left of a round to read the sum of what they sent."""


class EngineError(AtollError, RuntimeError):
    """An engine cannot do what it is asked to."""


class DeployError(AtollError, RuntimeError):
    """A federation of sites cannot go on as asked."""


class RefusedError(DeployError):
    """A message or a site is not accepted."""


class CohortError(AtollError, ValueError):
    """Values do not belong to the cohort they are used with."""


class LabelsNeeded(CohortError):
    """A step reads targets of clients that have none."""


def name_in_messages(owner: object) -> str:
    """Return what a message calls a method or a part of one: by its title, or else by its class."""
    return getattr(owner, "title", "") or type(owner).__name__


def unknown(kind: str, given: str, available: Iterable[str]) -> UnknownName:
    """Make the error for a name that nothing answers to, with the nearest names there are.

    >>> print(unknown("algorithm", "dito", ["ditto", "apfl"]))
    Unknown algorithm 'dito'. Did you mean: ditto?
    Available: apfl, ditto
    """
    names = sorted(available)
    near = get_close_matches(given.lower(), names)
    question = f" Did you mean: {', '.join(near)}?" if near else ""
    return UnknownName(f"Unknown {kind} {given!r}.{question}\nAvailable: {', '.join(names)}")


def require_keywords(
    called: str, given: Iterable[str], *functions: Callable[..., Any], also: Iterable[str] = ()
) -> None:
    """Raise UnknownName for a keyword that none of these functions takes by name, with the nearest ones."""
    kinds = [one for function in functions for one in inspect.signature(function).parameters.values()]
    known = {one.name for one in kinds if one.kind is one.KEYWORD_ONLY} | {*also}
    for name in given:
        if name not in known:
            raise unknown(f"argument of {called}", name, known)


class NamesChecked:
    """A dataclass that answers an unknown name with the nearest ones it has, rather than a TypeError."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Check the names; `__init__` takes the values."""
        own: Any = cls
        known = [one.name for one in fields(own) if one.init]
        for name in given:
            if name not in known:
                raise unknown(f"argument of {cls.__name__}", name, known)
        return super().__new__(cls)


def first_line(error: Exception) -> str:
    """Return the first line of another library's error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe_given(value: object) -> str:
    """Describe what was given instead of what is needed: `the class Ditto`, `3 (int)`, `a DataFrame`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | int | float):
        return f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return f"a {type(value).__name__}"
