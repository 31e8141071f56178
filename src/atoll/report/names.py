"""Names in sentences: what methods are called, and lists in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.algorithms import file_of
from atoll.kernel.wrapper import title_of

if TYPE_CHECKING:
    from atoll.federation.results import Results


def name_methods(comparison: Results) -> dict[str, str]:
    """Return the names of methods in sentences: `Ditto with lam=0.1`. A user's own method is called as in tables."""
    found = {}
    for method, (one, *_) in comparison.outcomes.items():
        values = one.label.partition(":")[2]
        name = title_of(one.algorithm) + (f" with {values.replace(',', ', ')}" if values else "")
        found[method] = name if file_of(one.algorithm) is None else method
    return found


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Join words as in a sentence: `a, b and c`."""
    return " ".join(filter(None, [", ".join(words[:-1]), last if words[1:] else "", words[-1]]))
