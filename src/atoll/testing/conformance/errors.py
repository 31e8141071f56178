"""What a method is blamed for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.kernel.errors import AtollError
from atoll.kernel.wrapper import title_of
from atoll.testing.conformance.methods import Method


class ConformanceError(AtollError, AssertionError):
    """A method does not do what every method must."""


@contextmanager
def blame(method: Method) -> Iterator[None]:
    """Raise whatever a method raises as its failure."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        title = method.__name__ if isinstance(method, type) else title_of(method)
        raise ConformanceError(f"{title} failed: {type(error).__name__}: {error}") from error
