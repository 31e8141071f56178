"""FAFI in two stages: what the first one leaves alone, and that there is one switch."""

from collections.abc import Callable

import pytest
import torch
from samples import with_public

from atoll import Cohort, Stack, Task
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_two_stage import FAFITwoStage
from atoll.kernel.errors import HyperparameterError
from atoll.testing.conformance import play
from atoll.toolbox.objectives.prototypical import train

WEIGHT = "head.weight"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(sizes=(6, 6), dtype=torch.float64, batch_size=6))


@pytest.mark.closed_form("fafi-two-stage")
def test_in_the_first_stage_prototypes_stay_where_they_are(task: Task) -> None:
    models = play(task, FAFITwoStage(epochs=3, stage_share=1.0)).server.answer.models
    assert all(torch.equal(one, task.network.initial[WEIGHT]) for one in models[WEIGHT])
    assert not torch.equal(models["body.1.weight"][0], task.network.initial["body.1.weight"])


@pytest.mark.parametrize(("epochs", "share"), [(1, 0.2), (2, 0.9)])
def test_a_first_stage_leaves_the_second_an_epoch(task: Task, epochs: int, share: float) -> None:
    # catches: a share that is rounded up to all epochs, after which prototypes were never trained.
    models = play(task, FAFITwoStage(epochs=epochs, stage_share=share)).server.answer.models
    assert not any(torch.equal(one, task.network.initial[WEIGHT]) for one in models[WEIGHT])


def test_one_epoch_that_recurs_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="`epochs` must be at least 2 where stages recur. Got 1"):
        FAFITwoStage(epochs=1, stages="recurring")
    FAFITwoStage(epochs=0, stages="recurring")


@pytest.mark.limit("fafi-two-stage")
@pytest.mark.parametrize(("after", "contrast"), [(None, 1.0), (0.0, 0.0), (0.25, 0.25)])
def test_after_the_switch_it_is_fafi(
    task: Task, make_cohort: Callable[..., Cohort], after: float | None, contrast: float
) -> None:
    # One full batch per epoch and no momentum: five epochs are one of the first stage and four of FAFI from there.
    report = play(task, FAFITwoStage(epochs=5, contrast_after=after))
    cohort, algorithm = make_cohort(task), FAFITwoStage(epochs=1, stage_share=1.0)
    first: Stack = algorithm.training.train(report.algorithm.broadcast(report.server), cohort)
    then = train(cohort, first, FAFI(contrast=contrast).training.step(cohort), epochs=4)
    for name, leaf in report.server.answer.models.items():
        torch.testing.assert_close(leaf, then[name], rtol=0, atol=1e-10)


def test_what_was_run_is_something_else(task: Task) -> None:
    proposed, run = (
        play(task, FAFITwoStage(epochs=7, stages=stages)).server.answer.models  # type: ignore[arg-type]
        for stages in ("once", "recurring")
    )
    assert not torch.allclose(proposed[WEIGHT], run[WEIGHT])
