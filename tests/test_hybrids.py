"""A method inside the clusters that another one finds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from atoll import LocalEngine, federate
from atoll.algorithm import Count
from atoll.algorithms import create, find, name_of
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.ifca import IFCA
from atoll.conformance import _difference, check, configured, personal_models, play, quadratics
from atoll.data.partition import Natural
from atoll.data.synthetic import Gaussian
from atoll.data.task import Task, Training
from atoll.errors import UnknownName
from atoll.hybrids import within_clusters
from atoll.local import sgd
from atoll.params import spread, stack
from atoll.results import Outcome, label


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine(dtype=torch.float64)


def test_one_cluster_is_the_method_after_as_many_rounds_of_fedavg(make_task, engine) -> None:
    """With one cluster the clustering is FedAvg, and so is FedAvg inside it."""
    task = make_task(dtype=torch.float64)
    hybrid = create("fedavg@ifca:clusters=1,cluster_rounds=2")
    found = federate(task, hybrid, rounds=5, engine=engine, evaluation="none").server
    plain = federate(task, create("fedavg"), rounds=5, engine=engine, evaluation="none").server
    assert found["rounds"] == 2
    for name, leaf in plain.items():
        torch.testing.assert_close(found["inside"][0][name], leaf, rtol=0, atol=1e-15)


def test_clusters_are_found_and_kept_apart(engine) -> None:
    """Planted groups are recovered; then each cluster's server is as if its clients were the whole federation."""
    data = Gaussian(groups=2).dataset()
    task = Task.build(data, Natural(), model="linear", training=Training(lr=0.05, batch_size=20))
    hybrid = create("fedavg@flhc:clusters=2,rounds_before=1,cluster_rounds=3")
    server = federate(task, hybrid, rounds=5, engine=engine, evaluation="none").server
    assert adjusted_rand_score(task.groups, server["cluster"]) == 1

    mine = np.flatnonzero(server["cluster"].numpy() == 0)
    before = federate(task, hybrid, rounds=3, engine=engine, evaluation="none").server
    alone = engine.place(task).of(mine, before["inside"][0])
    assert alone.clients == len(mine)
    # batches are drawn by client number and round, so that the comparison is of the size of the step only
    moved, other = (server["inside"][j] - before["inside"][j] for j in (0, 1))
    assert moved.norm() > 0
    assert (moved - other).norm() > 0.1 * moved.norm()


def test_its_clusters_are_those_of_the_clustering(make_task, engine) -> None:
    """Client 3 misses the clustering; when the clusters are fixed it joins the largest."""
    task = make_task(dtype=torch.float64)
    hybrid = create("fedavg@flhc:clusters=2,rounds_before=0,cluster_rounds=1")
    report = federate(
        task, hybrid, rounds=2, engine=engine, evaluation="none", faults=lambda round, ids: (ids == 3) & (round == 0)
    )
    found, before = hybrid.found_clusters(report.server), report.server["clustering"]["cluster"].tolist()
    assert before[3] == -1
    assert found.of_client[:3].tolist() == before[:3]
    assert found.of_client[3] == np.bincount(before[:3]).argmax()
    assert len(found.merges) == 2  # of the three that were there
    assert 3 not in found.merges[:, :2]


def test_personal_models_live_inside_the_clusters(make_task, engine) -> None:
    task = make_task(shares=(0.6, 0.2, 0.2), sizes=(10, 12, 9, 14), dtype=torch.float64)
    report = federate(task, create("ditto@ifca:clusters=2,cluster_rounds=2,lam=0.5"), rounds=4, engine=engine)
    assert np.isfinite(report.scores()).all()
    assert report.server["inside"] is not None
    assert len(report.server["inside"]) == 2


def test_the_last_step_is_taken_inside_the_clusters(make_task, make_cohort) -> None:
    """FedRep ends with epochs on the head: those from where the same run ends without them."""
    task = make_task(sizes=(10, 12, 9, 14), dtype=torch.float64)
    hybrid = "fedrep@ifca:clusters=2,cluster_rounds=1,head_epochs=1,final_epochs="
    before, after = (personal_models(play(task, create(f"{hybrid}{epochs}"), rounds=3)) for epochs in (0, 3))
    expected = sgd(make_cohort(task, round=3), stack(before), epochs=3, only="head", stream="final")
    for client, model in enumerate(after):
        assert _difference(model, before[client]) is not None
        assert _difference(model, expected.client(client), 1e-15) is None


def test_it_is_a_method_like_any_other() -> None:
    method = create("ditto@ifca:clusters=3,lam=0.5")
    assert name_of(type(method)) == "ditto@ifca"
    assert label(method) == "ditto@ifca:clusters=3,lam=0.5"
    assert find("ditto@ifca") is find("ditto@ifca")
    assert name_of(find("ditto+prox@flhc")) == "ditto+prox@flhc"
    assert "Fair and Robust" in type(method).cites
    assert "Clustered Federated Learning" in type(method).cites


@pytest.mark.parametrize("name", ["ditto@ifca", "fedper@flhc", "ditto@ifca:cluster_rounds=10"])
def test_it_passes_the_battery(name: str) -> None:
    """The battery plays one round of clustering, unless it is asked for more: there the clusters are never fixed."""
    results = list(check(configured(create(name))))
    assert [(result.name, result.message) for result in results if not result.passed] == []


def test_runs_are_resumed_across_the_change(make_task, tmp_path, engine) -> None:
    task = make_task(shares=(0.6, 0.2, 0.2), sizes=(10, 12, 9), dtype=torch.float64)
    method = create("fedper@ifca:clusters=2,cluster_rounds=2")

    def stop(line) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(task, method, rounds=4, engine=engine, folder=tmp_path / "run", eval_every=1, on_round=stop)
    resumed = federate(task, method, rounds=4, engine=engine, folder=tmp_path / "run", eval_every=1, resume=True)
    whole = federate(task, method, rounds=4, engine=engine, eval_every=1)
    np.testing.assert_array_equal(resumed.scores(), whole.scores())
    assert Outcome.read(tmp_path / "run").label == "fedper@ifca:cluster_rounds=2,clusters=2"


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(UnknownName, match="must stand a method that finds clusters. fedavg does not"):
        find("ditto@fedavg")
    with pytest.raises(UnknownName, match="must send the same to all of its clients. fedamp does not"):
        find("fedamp@ifca")
    with pytest.raises(UnknownName, match="ensemble uploads once"):
        find("ensemble@ifca")


# -- new clients: more of them than there are clients ------------------------------------------------------------------


def clients(*optima: float) -> Task:
    return quadratics(torch.tensor(optima, dtype=torch.float64)[:, None], lr=0.5)


def test_a_new_client_joins_a_cluster_as_the_clustering_welcomes_it(make_cohort) -> None:
    # Updates 0.5, 4.5, 1.5 and 5.5 make two clusters, with models 1 and 5; FedAvg inside them goes half the way to the
    # mean optima 2 and 10. The updates of new clients from w = 0 are half their optima.
    hybrid = create("fedavg@flhc:clusters=2,rounds_before=0,cluster_rounds=1")
    server = play(clients(1.0, 9.0, 3.0, 11.0), hybrid, rounds=2).server
    found = hybrid.welcome(server, make_cohort(clients(100.0, 4.0, -3.0, 7.0, 8.0, 5.0)))
    assert found["w"].flatten().tolist() == pytest.approx([7.5, 1.5, 1.5, 7.5, 7.5, 1.5])


@dataclass(frozen=True, kw_only=True)
class From(IFCA):
    """IFCA from models at 4, -9 and 0, the second of which nobody wants."""

    clusters: Count = 3

    def start(self, task: Task) -> dict[str, Any]:
        at = torch.tensor([4.0, -9.0, 0.0], dtype=torch.float64)
        return super().start(task) | {"models": spread(task.network.initial, 3).map(lambda leaf: leaf + at[:, None])}


def test_a_cluster_that_is_empty_is_not_joined(make_cohort) -> None:
    hybrid = within_clusters(FedAvg, From)(cluster_rounds=1)
    server = play(clients(1.0, 5.0, 1.0), hybrid, rounds=2).server  # 0.5 and 4.5, then 0.75 and 4.75
    found = hybrid.welcome(server, make_cohort(clients(4.4, -8.0, 0.3, 5.0)))
    assert found["w"].flatten().tolist() == pytest.approx([4.75, 0.75, 0.75, 4.75])


def test_before_the_clusters_are_fixed_the_clustering_welcomes(make_cohort) -> None:
    hybrid = within_clusters(FedAvg, From)(cluster_rounds=9)
    server = play(clients(1.0, 5.0, 1.0), hybrid).server
    found = hybrid.welcome(server, make_cohort(clients(4.4, -8.0, 0.3, 5.0)))
    assert found["w"].flatten().tolist() == pytest.approx([4.5, -9.0, 0.5, 4.5])
