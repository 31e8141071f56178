"""CFL, by hand: F_k(w) = (w - c_k)^2 / 2 from w = 0, which is the joint optimum of opposed clients."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from atoll import Cohort, Task
from atoll.algorithms.cfl import CFL
from atoll.algorithms.fedavg import FedAvg
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics

AT_ONCE = CFL(eps1=0.1, eps2=0.4, rounds_before=0)


@pytest.fixture
def opposed() -> Task:
    """Optima 1, -1, 1, -1; steps are 0.5. From 0 the updates are +-0.5 and their mean is 0."""
    return quadratics(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64), lr=0.5)


def test_one_round_by_hand(opposed: Task) -> None:
    report = play(opposed, AT_ONCE)
    assert report.server.cluster.tolist() == [0, 1, 0, 1]
    assert report.server.models["w"].flatten().tolist() == pytest.approx([0.5, -0.5])
    assert [model["w"].item() for model in personal_models(report)] == pytest.approx([0.5, -0.5, 0.5, -0.5])


@pytest.mark.parametrize(
    "algorithm",
    [
        CFL(eps1=0.0, eps2=0.0, rounds_before=0),  # never at rest
        CFL(eps1=0.1, eps2=0.6, rounds_before=0),  # no client wants to move so far
        CFL(eps1=0.1, eps2=0.4, rounds_before=3),  # too early
    ],
)
def test_what_is_not_to_be_split_is_fedavg(opposed: Task, algorithm: CFL) -> None:
    report, plain = play(opposed, algorithm, 3), play(opposed, FedAvg(), 3)
    assert report.server.models.clients == 1
    assert torch.equal(report.server.models["w"][0], plain.server["w"])


def test_a_cluster_that_moves_is_not_split() -> None:
    # Updates 0.5, -0.5 and 1.5 have a mean of 0.5, not below eps1.
    task = quadratics(torch.tensor([[1.0], [-1.0], [3.0]], dtype=torch.float64), lr=0.5)
    assert play(task, AT_ONCE).server.models.clients == 1


def test_two_clients_are_not_split() -> None:
    task = quadratics(torch.tensor([[1.0], [-1.0]], dtype=torch.float64), lr=0.5)
    assert play(task, AT_ONCE).server.models.clients == 1


def test_clients_that_are_equally_far_apart_are_split_into_two_halves() -> None:
    # Optima on the corners of a triangle around 0: all cosines are -1/2. catches: a cut by height, which cannot tell
    # two merges of one height apart and leaves a half empty.
    corners = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    report = play(quadratics(corners, lr=0.5), AT_ONCE)
    assert sorted(report.server.cluster.tolist()) in ([0, 0, 1], [0, 1, 1])
    assert report.server.models.clients == 2
    assert torch.isfinite(report.server.models["w"]).all()


def test_clients_that_want_the_same_are_not_split(caplog: pytest.LogCaptureFixture) -> None:
    # eps1 above eps2: the mean update 0.5 counts as rest, though all four clients go there together.
    task = quadratics(torch.ones(4, 1, dtype=torch.float64), lr=0.5)
    with caplog.at_level(logging.INFO, "atoll"):
        report = play(task, CFL(eps1=0.6, eps2=0.4, rounds_before=0))
    assert report.server.models.clients == 1
    assert report.server.models["w"].item() == pytest.approx(0.5)
    assert "cluster 0 is not split, because all of its updates point the same way" in caplog.text


def test_splits_of_splits_move_the_right_clients() -> None:
    # Optima on the corners of a rectangle, in an order in which positions inside a cluster are no client numbers.
    # The first split is by the sign of the long side; each half stops at its middle, where the short side splits it.
    # catches: the authors' notebook and FL-bench take positions in the sub-matrix for client numbers from the second
    # split on.
    corners = torch.tensor([[4.0, 1.0], [-4.0, 1.0], [4.0, -1.0], [-4.0, -1.0]], dtype=torch.float64)
    kinds = [1, 0, 3, 1, 2, 0, 0, 3, 2, 1, 2, 3]
    task = quadratics(corners[kinds], lr=0.5)
    report = play(task, CFL(eps1=1e-3, eps2=0.4, rounds_before=0), rounds=40)
    assert report.server.models.clients == 4
    assert len(report.server.splits) == 3
    for kind in range(4):
        assert len({int(report.server.cluster[k]) for k in range(12) if kinds[k] == kind}) == 1
    models = torch.stack([model["w"] for model in personal_models(report)])
    torch.testing.assert_close(models, corners[kinds], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["chunk:2", "loop"])
def test_splits_do_not_depend_on_how_clients_are_run(strategy: str) -> None:
    corners = torch.tensor([[4.0, 1.0], [-4.0, 1.0], [4.0, -1.0], [-4.0, -1.0]], dtype=torch.float64).repeat(3, 1)
    one, other = (
        play(quadratics(corners, lr=0.5), CFL(eps1=1e-3, eps2=0.4, rounds_before=0), 20, strategy=how).server
        for how in ("whole", strategy)
    )
    assert torch.equal(one.cluster, other.cluster)
    assert torch.equal(one.models["w"], other.models["w"])


def test_a_cluster_is_split_only_when_all_of_it_has_replied(opposed: Task, caplog: pytest.LogCaptureFixture) -> None:
    # Two clients that agree would be split from two that do not, but a fifth is missing, which is of neither kind.
    five = quadratics(torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [0.0]], dtype=torch.float64), lr=0.5)
    with caplog.at_level(logging.INFO, "atoll"):
        report = play(five, AT_ONCE, rounds=2, faults=lambda round, clients: (clients == 4) & (round == 0))
    assert "cluster 0 is not split, because not all of its clients have replied" in caplog.text
    assert report.server.models.clients == 2  # in the second round it is
    late = play(five, AT_ONCE, rounds=2, faults=lambda round, clients: clients == 4)
    assert late.server.models.clients == 1


def test_each_client_gets_the_model_of_its_cluster_only(opposed: Task) -> None:
    report = play(opposed, AT_ONCE, rounds=2)
    assert report.ledger.bytes("down") == 2 * 4 * len(to_bytes(opposed.network.initial))


def test_a_new_client_goes_down_the_tree(make_cohort: Callable[..., Cohort]) -> None:
    corners = torch.tensor([[4.0, 1.0], [-4.0, 1.0], [4.0, -1.0], [-4.0, -1.0]], dtype=torch.float64)
    server = play(quadratics(corners.repeat(3, 1), lr=0.5), CFL(eps1=1e-3, eps2=0.4, rounds_before=0), 40).server
    new = quadratics(corners[[2, 0, 3, 3, 1]] * 1.1, lr=0.5)
    found = AT_ONCE.welcome(server, make_cohort(new))["w"]
    torch.testing.assert_close(found, corners[[2, 0, 3, 3, 1]], rtol=0, atol=1e-5)


def test_clusters_say_who_learns_from_whom(opposed: Task) -> None:
    matrix = AT_ONCE.mixing(play(opposed, AT_ONCE).server)
    assert np.array_equal(matrix.numpy(), [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]] * 2)


def test_splits_are_a_tree(opposed: Task) -> None:
    found = AT_ONCE.found_clusters(play(opposed, AT_ONCE).server)
    assert found.of_client.tolist() == [0, 1, 0, 1]
    assert found.merges is not None
    assert found.merges.tolist() == [[0, 2, 0, 2], [1, 3, 0, 2], [4, 5, 1, 4]]
    whole = AT_ONCE.found_clusters(play(opposed, CFL()).server)
    assert (whole.number, whole.merges) == (1, None)
