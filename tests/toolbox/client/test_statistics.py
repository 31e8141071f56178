"""Statistics of norm layers without labels."""

import torch
from torch import nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.params import Stack
from atoll.models import BodyAndHead
from atoll.testing.conformance import play
from atoll.toolbox.client.statistics import refresh_statistics

X = torch.tensor([[1.0, 4.0], [3.0, 4.0], [5.0, 10.0]], dtype=torch.float64)


def newcomers(model: nn.Module) -> tuple[Stack, Stack]:
    """The models of two clients without labels, whose samples are X and 10 X, before and after."""
    data = {str(k): (X * 10**k, torch.tensor([0, 1, 1])) for k in range(2)}
    task = Task.of_clients(data, model.double(), classes=2, training=Training(batch_size=3), shares=(1.0, 0.0, 0.0))
    found: list[tuple[Stack, Stack]] = []

    class Watching(FedAvg):
        def local(self, w, cohort):  # type: ignore[no-untyped-def]
            found[:] = [(cohort.stacked(w), refresh_statistics(cohort.without("labels"), w))]
            return super().local(w, cohort)

    play(task, Watching())
    return found[0]


def test_batchnorm_meets_the_samples() -> None:
    before, after = newcomers(BodyAndHead(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    left = 0.9**25
    for k in range(2):
        expected = (1 - left) * (X * 10**k).mean(0)
        torch.testing.assert_close(after["body.running_mean"][k], expected)
        expected = left + (1 - left) * (X * 10**k).var(0)
        torch.testing.assert_close(after["body.running_var"][k], expected)
    assert all(torch.equal(after[name], leaf) for name, leaf in before.trained.items())


def test_nothing_to_find_out() -> None:
    before, after = newcomers(BodyAndHead(nn.Identity(), nn.Linear(2, 2)))
    assert all(torch.equal(after[name], leaf) for name, leaf in before.items())
