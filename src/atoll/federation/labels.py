"""What methods are called in tables."""

from __future__ import annotations

from pathlib import Path

from atoll.algorithms import file_of, name_of
from atoll.kernel.algorithm import Algorithm, hyperparameters
from atoll.kernel.wrapper import values_of

REFERENCES = ("local", "fedavg")  # what every method is compared with: each client alone, and one model for all


def label(algorithm: Algorithm, name: str | None = None) -> str:
    """Return a method's name in tables, as the command line takes it: `ditto`, `ditto:lam=0.1`, `mine.py`."""
    values = values_of(algorithm)
    chosen = [f"{one.name}={values[one.name]}" for one in hyperparameters(algorithm) if values[one.name] != one.default]
    return ":".join([name or _name(algorithm), *filter(None, [",".join(chosen)])])


def _name(algorithm: Algorithm) -> str:
    file, here = file_of(algorithm), Path.cwd()
    if file is None:
        return name_of(algorithm)
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}{algorithm.added}"
