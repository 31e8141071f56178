"""Which mixture of two models serves a client best."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll import Cohort, Params, Stack
from atoll.testing.conformance import quadratics
from atoll.toolbox.client import best_share

C = torch.tensor([[1.0], [3.0], [-1.0], [0.0]], dtype=torch.float64)


@pytest.fixture
def cohort(make_cohort: Callable[..., Cohort]) -> Cohort:
    """Four quadratics; all samples of a client are the same, so that training samples can be validation samples."""
    task = quadratics(C, samples=[1, 2, 3, 1])
    return make_cohort(replace(task, splits={**task.splits, "val": task.splits["train"]}))


def test_each_client_has_its_own_model(cohort: Cohort) -> None:
    layout = cohort.initial.layout
    w = Params({"w": torch.zeros(1, dtype=torch.float64)}, layout)
    v = Stack({"w": torch.tensor([[5.0], [3.0], [1.0], [-2.0]], dtype=torch.float64)}, layout)
    assert best_share(cohort, w, v, otherwise=0.5).tolist() == pytest.approx([0.2, 1, 0, 0])


def test_without_validation_samples_the_given_share(make_cohort: Callable[..., Cohort]) -> None:
    cohort = make_cohort(quadratics(C))
    shares = best_share(cohort, cohort.initial, cohort.stacked(cohort.initial), otherwise=0.25)
    assert shares.tolist() == [0.25] * 4
