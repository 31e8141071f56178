"""Steps along a gradient of one's own, which is given values and may draw."""

from collections.abc import Callable

import torch

from atoll import Task
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, spread
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found


def test_a_gradient_sees_its_clients_own_values_and_may_draw(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    def along(w: Params, batch: Batch, given: dict[str, Params]) -> Found:
        direction = w.trained.map(torch.ones_like) * given["size"]["size"]
        return direction, w, batch.uniform("loss", 1)[0]

    task = make_task(sizes=(4, 8, 4), dtype=torch.float64)  # batches of 4
    cohort, w = make_cohort(task), task.network.initial
    sizes = spread(Params.of(size=torch.tensor(1.0, dtype=torch.float64)), 3) * torch.tensor([1.0, 2.0, 0.0]).double()
    moved = sgd(cohort, start=w, epochs=1, gradient=along, given={"size": sizes}, draws=True) - w
    for k, length in enumerate((1.0, 4.0, 0.0)):  # one step, two steps of size 2, none
        for leaf in moved.values():
            torch.testing.assert_close(leaf[k], torch.full_like(leaf[k], -0.1 * length))
    losses = cohort.notes["loss/main"]
    assert len(losses.unique()) == 3
