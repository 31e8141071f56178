"""FL+HC, by hand: F_k(w) = (w - c_k)^2 / 2 from w = 0, with steps of 0.5."""

from collections.abc import Callable

import pytest
import torch

from atoll import Cohort, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.flhc import FLHC
from atoll.kernel.errors import HyperparameterError, LabelsNeeded
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics

AT_ONCE = FLHC(rounds_before=0, clusters=2)


def clients(*optima: float) -> Task:
    return quadratics(torch.tensor(optima, dtype=torch.float64)[:, None], lr=0.5)


@pytest.fixture
def four() -> Task:
    return clients(1.0, 9.0, 3.0, 11.0)


def values(report: object) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]  # type: ignore[arg-type]


def test_one_round_by_hand(four: Task) -> None:
    # Updates 0.5, 4.5, 1.5 and 5.5; clusters of the low and the high ones begin at their means.
    report = play(four, AT_ONCE)
    assert report.server.cluster.tolist() == [0, 1, 0, 1]
    assert report.server.models["w"].flatten().tolist() == pytest.approx([1.0, 5.0])
    assert values(report) == pytest.approx([1, 5, 1, 5])


def test_before_the_clustering_it_is_fedavg_and_after_it_each_cluster_is(four: Task) -> None:
    method = FLHC(rounds_before=2, clusters=2)
    before = play(four, method, rounds=2)
    assert torch.equal(before.server.models["w"][0], play(four, FedAvg(), rounds=2).server["w"])
    # w is at 4.5; the third round goes half the way to the cluster's mean optimum, and so does the fourth.
    assert values(play(four, method, rounds=3)) == pytest.approx([3.25, 7.25, 3.25, 7.25])
    assert values(play(four, method, rounds=4)) == pytest.approx([2.625, 8.625, 2.625, 8.625])


def test_a_client_that_misses_the_clustering_joins_with_its_next_update(four: Task) -> None:
    # The fourth client, 11, is lost in round 0. In round 1 it trains w = 0 to 5.5, which is nearest to the update 4.5
    # of the second; its update counts for no cluster. In round 2 it trains the cluster's model.
    absent = {"faults": lambda round, ids: (ids == 3) & (round == 0)}
    first = play(four, AT_ONCE, rounds=1, **absent)
    assert first.server.cluster.tolist() == [0, 1, 0, -1]
    assert values(first) == pytest.approx([1.0, 4.5, 1.0, 4.5])  # it would join the nearest cluster
    second = play(four, AT_ONCE, rounds=2, **absent)
    assert second.server.cluster.tolist() == [0, 1, 0, 1]
    assert second.server.models["w"].flatten().tolist() == pytest.approx([1.5, 6.75])  # 9 alone: 4.5 + 4.5 / 2
    third = play(four, AT_ONCE, rounds=3, **absent)
    assert third.server.models["w"].flatten().tolist() == pytest.approx([1.75, 6.75 + (10 - 6.75) / 2])


def test_a_new_client_joins_the_cluster_nearest_to_its_update(four: Task, make_cohort: Callable[..., Cohort]) -> None:
    server = play(four, AT_ONCE).server
    found = AT_ONCE.welcome(server, make_cohort(clients(100.0, 4.0, -3.0)))
    assert found["w"].flatten().tolist() == pytest.approx([5.0, 1.0, 1.0])
    early = FLHC().welcome(play(four, FLHC()).server, make_cohort(clients(100.0)))
    assert early["w"].item() == pytest.approx(3.0)  # there is one model yet


def test_levels_begin_at_their_parents() -> None:
    # Optima 0, 2, 20, 22 and 4 clusters on 2 levels: all, two, four. Updates are half the optima.
    task = clients(0.0, 2.0, 20.0, 22.0)
    method = FLHC(rounds_before=1, clusters=4, levels=2)
    assert values(play(task, method, rounds=1)) == pytest.approx([5.5] * 4)
    assert values(play(task, method, rounds=2)) == pytest.approx([3.25, 3.25, 13.25, 13.25])
    assert values(play(task, method, rounds=3)) == pytest.approx([1.625, 2.625, 16.625, 17.625])
    report = play(task, method, rounds=4)
    assert report.server.models.clients == 4
    assert values(report) == pytest.approx([0.8125, 2.3125, 18.3125, 19.8125])


def test_the_tree_is_kept(four: Task) -> None:
    tree = play(four, AT_ONCE).server.tree.merges
    assert tree.shape == (3, 4)
    assert tree[:, 2].tolist() == pytest.approx([1.0, 1.0, 5.0])  # heights of the merges, complete linkage


def test_the_tree_has_the_numbers_of_the_clients_that_were_there(four: Task) -> None:
    # Client 2 misses the clustering: 9 and 11 merge at 1, then 1 with them at 5. It joins in the next round.
    report = play(four, AT_ONCE, rounds=2, faults=lambda round, ids: (ids == 2) & (round == 0))
    found = AT_ONCE.found_clusters(report.server)
    assert found.of_client.tolist() == [0, 1, 0, 1]
    assert found.merges is not None
    assert found.merges.ravel().tolist() == pytest.approx([1, 3, 1, 2, 0, 4, 5, 3])
    assert found.height == "l2 distance of updates, complete linkage"
    early = FLHC().found_clusters(play(four, FLHC()).server)
    assert (early.number, early.merges) == (1, None)


def test_clusters_say_who_learns_from_whom(four: Task) -> None:
    report = play(four, AT_ONCE)
    assert report.algorithm.mixing(report.server).tolist() == [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]] * 2  # type: ignore[union-attr]


def test_one_model_travels_each_way_and_its_number_down(four: Task) -> None:
    report = play(four, AT_ONCE, rounds=2)
    assert report.ledger.bytes("down") == 2 * 4 * (len(to_bytes(four.network.initial)) + 144)
    assert report.ledger.by_kind()["up", "model"] == 2 * 4 * len(to_bytes(four.network.initial))


def test_settings_that_do_not_go_together_are_refused(four: Task) -> None:
    with pytest.raises(HyperparameterError, match="must be 'l2' with ward linkage. Got 'cosine'"):
        FLHC(linkage="ward", metric="cosine")
    with pytest.raises(HyperparameterError, match="must be None if there are `clusters`. Got both"):
        FLHC(clusters=2, threshold=1.0)
    with pytest.raises(
        HyperparameterError, match=r"`clusters` of FLHC must be at most the number of clients, 4\. Got 5"
    ):
        play(four, FLHC(clusters=5))


@pytest.mark.parametrize("strategy", ["chunk:3", "loop"])
def test_clusters_do_not_depend_on_how_clients_are_run(four: Task, strategy: str) -> None:
    one, other = (play(four, AT_ONCE, 3, strategy=how).server for how in ("whole", strategy))
    assert torch.equal(one.cluster, other.cluster)
    assert torch.equal(one.models["w"], other.models["w"])


def test_an_embedding_needs_no_labels_and_an_update_does(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    method = FLHC(rounds_before=0, clusters=2, signature="embedding")
    server, cohort = play(task, method, rounds=2).server, make_cohort(task, clients=[3, 1])
    with_labels, without = (method.welcome(server, one) for one in (cohort, cohort.without("labels")))
    assert server.models.clients == 2
    assert all(torch.equal(with_labels[name], leaf) for name, leaf in without.items())
    with pytest.raises(LabelsNeeded):
        AT_ONCE.welcome(play(task, AT_ONCE).server, cohort.without("labels"))
