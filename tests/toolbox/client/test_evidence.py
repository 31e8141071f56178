"""What clients say about their classes."""

from collections.abc import Callable

import torch
from samples import own

from atoll import Cohort, Task
from atoll.toolbox.client.evidence import evidence
from atoll.toolbox.server.prototypes import unit

CLASSES = 3


def test_evidence_by_hand(make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]) -> None:
    task = make_task(dtype=torch.float64, sizes=(14, 3, 9), shares=(0.6, 0.4, 0.0))
    cohort, module = make_cohort(task), task.network._original
    found = evidence(cohort, task.network.initial, 6)
    for k in range(3):
        (x, y), (held, wanted) = own(task, k), own(task, k, "val")
        z, hit = unit(module.features(x)).detach(), module(held).argmax(1) == wanted
        for c in range(CLASSES):
            torch.testing.assert_close(found["sum"][k, c], z[y == c].sum(0))
            assert found["count"][k, c] == (y == c).sum()
            assert found["tested"][k, c] == (wanted == c).sum()
            assert found["correct"][k, c] == (hit & (wanted == c)).sum()


def test_who_holds_out_nothing_was_not_tested(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64, sizes=(1, 5))
    found = evidence(make_cohort(task), task.network.initial, 6)
    assert found["count"].sum(1).tolist() == [1, 5]
    assert found["tested"].sum() == 0
