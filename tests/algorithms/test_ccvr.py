"""CCVR: what clients say of their features, which model is calibrated, and classes that nobody has for a while."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import own

from atoll import Batch, Cohort, Task, federate
from atoll.algorithms.ccvr import CCVR, renew
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.errors import CohortError, ModelError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.models import BodyAndHead
from atoll.testing.conformance import play
from atoll.toolbox.server.triangles import symmetric

CLASSES = 3


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def features(task: Task, w: Params, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = own(task, k)
    return Batch(x, y, None, None, task.network, Variant(train=False)).features(w), y


def test_a_client_sends_means_of_products_by_class(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    w = task.network.initial
    sent = CCVR().local(w, make_cohort(task)).send["moments"]
    for k in range(task.clients):
        z, y = features(task, w, k)
        for c in range(CLASSES):
            mine = z[y == c]
            assert float(sent["share"][k, c]) == pytest.approx(len(mine) / len(z))
            torch.testing.assert_close(sent["sum"][k, c], mine.sum(0) / len(z))
            torch.testing.assert_close(symmetric(sent["square"][k, c]), mine.T @ mine / len(z))


def test_the_average_is_that_of_fedavg(task: Task) -> None:
    """catches: clients that go on from the calibrated head, which is for deployment only."""
    found, average = play(task, CCVR(), rounds=3).server, play(task, FedAvg(), rounds=3).server
    assert all(torch.equal(found.w[name], leaf) for name, leaf in average.items())


def test_what_is_deployed_is_the_average_that_was_described(task: Task) -> None:
    """catches: a new body under a head that was fitted to the old one."""
    found, before = play(task, CCVR(), rounds=3).server, play(task, FedAvg(), rounds=2).server
    body, head = before.without_part("head"), before.part("head")
    assert all(torch.equal(found.deployed[name], leaf) for name, leaf in body.items())
    assert not any(torch.equal(found.deployed[name], leaf) for name, leaf in head.items())


def test_a_class_that_nobody_sends_keeps_its_gaussian(make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(4, 4, 4), dtype=torch.float64)
    task = replace(task, y=torch.arange(CLASSES).repeat_interleave(4))  # client k has class k and no other
    first = play(task, CCVR(), rounds=1).server.gaussians
    alone = play(task, CCVR(), rounds=2, faults=lambda round, clients: (clients > 0) & (round > 0)).server.gaussians
    assert [torch.equal(alone["mean"][c], first["mean"][c]) for c in range(CLASSES)] == [False, True, True]


def test_a_class_of_one_sample_can_be_drawn(make_task: Callable[..., Task]) -> None:
    model = play(make_task(sizes=(1, 1), dtype=torch.float64), CCVR(), rounds=2).server.deployed
    assert all(leaf.isfinite().all() for leaf in model.values())


def test_a_head_of_two_layers_is_refused(make_task: Callable[..., Task]) -> None:
    def network() -> BodyAndHead:
        return BodyAndHead(torch.nn.Linear(4, 5), torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)))

    with pytest.raises(ModelError, match="CCVR must be given a network whose head is one linear layer with a bias"):
        play(make_task(network), CCVR())


def test_a_head_calibrated_once_is_that_of_the_last_round(task: Task) -> None:
    """catches: moments that travel before anybody needs them, and clients that go on from a calibrated head."""
    once, always = play(task, CCVR(rounds_before=2), rounds=3), play(task, CCVR(), rounds=3)
    assert all(torch.equal(once.server.deployed[name], leaf) for name, leaf in always.server.deployed.items())
    weights = play(task, FedAvg(), rounds=3).bytes["up", "statistic"]  # they travel in every round
    assert 0 < 3 * (once.bytes["up", "statistic"] - weights) == always.bytes["up", "statistic"] - weights


@pytest.mark.parametrize("aggregate", ["mean", "krum:0"])
def test_late_replies_of_the_rounds_before_bring_no_moments(task: Task, aggregate: str) -> None:
    report = play(task, CCVR(rounds_before=1), rounds=4, late=0.5, delay=1, seed=1, aggregate=aggregate)
    found = report.server.gaussians["covariance"]
    assert float(found.abs().sum()) > 0
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-12
    assert not any(torch.equal(report.server.deployed[name], leaf) for name, leaf in report.server.w.items())


def test_a_late_reply_without_moments_does_not_change_those_of_others() -> None:
    """catches: a mean of features that is too small, because some replies count and bring none."""
    share = torch.tensor([0.5, 0.5], dtype=torch.float64)
    mean = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    moments = Params.of(share=share, sum=share[:, None] * mean, square=torch.ones(2, 3))
    none = Params.of(share=share * 0, mean=mean * 0, covariance=mean.new_zeros(2, 2, 2))
    torch.testing.assert_close(renew(none, moments * 0.25)["mean"], mean)
    torch.testing.assert_close(renew(none, moments * 0.25)["covariance"], renew(none, moments)["covariance"])


@pytest.mark.parametrize(
    "words", [{"aggregate": "median"}, {"attack": "gaussian:0.4"}, {"dp": "client:noise=0.5,clip=5"}]
)
def test_products_that_are_no_sums_over_samples_become_covariances(
    words: dict[str, str], make_task: Callable[..., Task]
) -> None:
    """Medians of products, entry by entry, forged ones and those with noise have negative variances."""
    task = make_task(sizes=(2, 3, 4, 5, 6), dtype=torch.float64)
    server = play(task, CCVR(shrinkage=1e-9), rounds=2, **words).server
    assert bool((torch.linalg.eigvalsh(server.gaussians["covariance"]) < -1e-3).any())
    assert all(leaf.isfinite().all() for leaf in server.deployed.values())


def test_there_must_be_a_round_that_calibrates(task: Task) -> None:
    with pytest.raises(CohortError, match="`rounds` must be at least 4"):
        play(task, CCVR(rounds_before=3), rounds=3)


def test_rounding_of_float32_products_is_no_negative_variance(make_task: Callable[..., Task]) -> None:
    """catches: features far from 0 that hardly vary, whose products lose the variance when they are rounded."""
    task = make_task(sizes=(6, 5), shape=(64,))
    shifted = replace(task, x=100 + 1e-4 * task.x)
    server = federate(shifted, CCVR(shrinkage=1e-9), rounds=2, evaluation="none").server
    assert all(leaf.isfinite().all() for leaf in server.deployed.values())
