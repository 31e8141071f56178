"""Tests of Example: run them with `pytest test_example.py`."""

from pathlib import Path
from typing import Any

import torch

from atoll.algorithms import load_file
from atoll.testing.conformance import check, personal_models, play, quadratics

Example: Any = load_file(Path(__file__).with_name("example.py"))


def test_conformance() -> None:
    """Check what every method must do; `atoll check ./example.py` shows the same as a table."""
    failed = [f"{result.name}: {result.message}" for result in check(Example) if not result.passed]
    assert not failed, "\n".join(failed)


def test_one_round_by_hand() -> None:
    """Follow F_k(w) = (w - c_k)^2 / 2 with c = 1, 3: a step of 0.5 from w = 0 gives w_k = 0.5, 1.5, so w = 1."""
    task = quadratics(torch.tensor([[1.0], [3.0]], dtype=torch.float64), lr=0.5)
    report = play(task, Example(personal_epochs=1), rounds=1)
    assert report.server["w"].tolist() == [1.0]
    # the personal step goes half of the way from w to c_k
    assert [v["w"].tolist() for v in personal_models(report)] == [[1.0], [2.0]]
