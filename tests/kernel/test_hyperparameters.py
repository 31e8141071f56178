"""Hyperparameters are read from annotations."""

from dataclasses import dataclass
from typing import Literal

import pytest

from atoll.kernel.algorithm import Algorithm, Positive, hyperparameters
from atoll.kernel.errors import HyperparameterError


@dataclass(frozen=True, kw_only=True)
class Kernel(Algorithm):
    width: Positive | Literal["median"] | None = "median"


def test_a_word_may_stand_for_a_number() -> None:
    (width,) = hyperparameters(Kernel)
    assert width.expected == "a float in (0, inf), or 'median', or None"
    assert [width.parse("Kernel", text) for text in ("median", "0.5", "none")] == ["median", 0.5, None]
    assert [Kernel(width=value).width for value in ("median", 2.0, None)] == ["median", 2.0, None]


@pytest.mark.parametrize("value", ["mean", 0.0, True])
def test_other_words_and_numbers_are_refused(value) -> None:
    with pytest.raises(HyperparameterError, match="must be a float in"):
        Kernel(width=value)
