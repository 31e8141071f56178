"""A client whose model has diverged is named and counts as the worst of the others: a mean stays a mean."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll.algorithms.fedavg import FedAvg
from atoll.data.task import Task
from atoll.experiments.comparison import compare
from atoll.federation.loop import federate
from atoll.kernel.cohort import Cohort
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.params import Params, Stack
from atoll.report.table import notes
from atoll.runtime.engines.local import LocalEngine

CLIENTS = 9
ENGINE = {"engine": LocalEngine(device="cpu", dtype=torch.float64, strategy="whole eager")}


class Bursts(FedAvg):
    """The model of the fourth client is a factor too large: 1e20, or not a number."""

    factor = 1e20

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        factor = torch.where(cohort.ids == 3, self.factor, 1.0).to(torch.float64)
        return cohort.stacked(w) * factor


class IsNoNumber(Bursts):
    factor = float("nan")


@pytest.fixture
def regression() -> Task:
    draw = torch.Generator().manual_seed(0)
    data = {}
    for client in range(CLIENTS):
        x = torch.randn(20, 3, generator=draw, dtype=torch.float64)
        data[str(client)] = x, x.sum(1, keepdim=True) + 0.3 * torch.randn(20, 1, generator=draw, dtype=torch.float64)
    judged = {"loss": squared_error, "score": absolute_error}
    return Task.of_clients(data, nn.Linear(3, 1).double(), shares=(0.5, 0.25, 0.25), **judged)


@pytest.mark.parametrize("method", [Bursts(), IsNoNumber()])
def test_a_mean_stays_one(regression, method) -> None:
    sound, found = (federate(regression, one, rounds=2, **ENGINE).figures() for one in (FedAvg(), method))
    others = [score for client, score in enumerate(sound.clients) if client != 3]
    assert found.diverged == [3]
    assert sound.diverged is None
    assert [score for client, score in enumerate(found.clients) if client != 3] == pytest.approx(others)
    assert found.clients[3] == pytest.approx(max(others))  # of an error, the largest is the worst
    assert found.macro == pytest.approx((sum(others) + max(others)) / CLIENTS)
    assert found.worst == pytest.approx(max(others))
    assert np.isfinite(found.loss)
    assert found.std < 1


def test_a_share_of_right_answers_is_a_score_whatever_the_loss(make_task) -> None:
    task = make_task(sizes=(20,) * CLIENTS, shares=(0.5, 0.25, 0.25), dtype=torch.float64)
    found = federate(task, IsNoNumber(), rounds=1, **ENGINE).figures()
    first = task.y[task.splits["test"].of(np.array([3])).order]
    assert found.diverged == [3]
    assert found.clients[3] == pytest.approx(float((first == 0).double().mean()))  # of answers that are no numbers
    assert np.isfinite(found.loss)


def test_a_client_that_is_merely_bad_counts_as_it_is(regression) -> None:
    class IsBad(Bursts):
        factor = 5.0

    found = federate(regression, IsBad(), rounds=2, **ENGINE).figures()
    assert found.diverged is None
    assert found.clients[3] == max(found.clients)


def test_where_all_diverge_there_is_nothing_to_compare_with(regression) -> None:
    class AllBurst(FedAvg):
        def personalize(self, w: Params, cohort: Cohort) -> Params:
            return w * float("nan")

    found = federate(regression, AllBurst(), rounds=1, **ENGINE).figures()
    assert found.diverged is None
    assert np.isnan(found.macro)


def test_a_table_names_them(regression, tmp_path) -> None:
    shown = compare(regression, ["local", Bursts()], rounds=1, progress=False, **ENGINE)
    assert [row["diverged"] for row in shown.results] == [0, 0, 1]
    said = f"Diverged: the model of client 3 with {shown.results[2]['method']}. It counts as the worst of the others."
    assert said in notes(shown)
