"""What methods are called in tables."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from atoll.algorithms import file_of, name_of
from atoll.kernel.algorithm import Algorithm


def label(algorithm: Algorithm, name: str | None = None) -> str:
    """What a method is called in tables, as the command line takes it: `ditto`, `ditto:lam=0.1`, `mine.py`."""
    values = [
        f"{field.name}={getattr(algorithm, field.name)}"
        for field in fields(algorithm)
        if getattr(algorithm, field.name) != field.default
    ]
    return ":".join([name or _name(algorithm), *filter(None, [",".join(values)])])


def _name(algorithm: Algorithm) -> str:
    file, here = file_of(type(algorithm)), Path.cwd()
    if file is None:
        return name_of(type(algorithm))
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}{algorithm.added}"
