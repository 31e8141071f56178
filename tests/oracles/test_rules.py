"""Rules agree with plain loops on tables of any kind: more replies than hostile ones, ties, rows far away."""

import numpy as np
import pytest
import torch
from oracles.rules import combine

from atoll.kernel.params import Stack
from atoll.kernel.randomness import generator
from atoll.kernel.replies import Arrival
from atoll.protect.rules import parse_rule

WORDS = (
    "median", "trimmed:1", "trimmed:2", "meamed:1", "meamed:2", "krum:1", "krum:2", "multi-krum:1", "multi-krum:2",
    "centered-clip", "norm-bound", "norm-bound:1.5", "nnm:1+trimmed:1", "nnm:2+krum:1", "nnm:2+median",
)  # fmt: skip


def make_table(number: int) -> np.ndarray:
    """Make 7 to 9 rows of 3 numbers; some tables have equal numbers, some a row far away."""
    draw = generator(number, "tables of replies")
    rows = draw.normal(size=(7 + number % 3, 3))
    if number % 3 == 1:
        rows = np.round(2 * rows) / 2
    if number % 3 == 2:
        rows[draw.integers(len(rows))] *= 40.0
    return rows


@pytest.mark.parametrize("words", WORDS)
def test_rule_agrees_with_its_loops(words: str) -> None:
    rule = parse_rule(words)
    assert rule is not None
    for number in range(24):
        rows = make_table(number)
        if number % 3 == 1 and "krum" in words:
            continue  # of rows with equal scores either may be taken
        arrival = Arrival(np.arange(len(rows)), {"delta": Stack.of(x=torch.from_numpy(rows))}, torch.ones(len(rows)))
        found = rule.combine([arrival], None)["delta"]["x"].numpy()
        np.testing.assert_allclose(found, combine(words, rows), rtol=1e-9, atol=1e-9, err_msg=f"table {number}")
