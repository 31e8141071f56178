"""A method inside the clusters that another one finds."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from atoll import LocalEngine, federate
from atoll.algorithms import name_of
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.ifca import IFCA, State
from atoll.algorithms.local import Local
from atoll.compose import create
from atoll.compose.architectures import InArchitectures
from atoll.compose.hybrids import InClusters
from atoll.data.partition import Natural
from atoll.data.synthetic import Gaussian
from atoll.data.task import Task, Training
from atoll.federation.labels import label
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, Arrival, Count, Replies
from atoll.kernel.errors import CohortError, HyperparameterError, TaskError, UnknownName
from atoll.kernel.params import Stack, spread, stack
from atoll.runtime.serialise import size_of
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import check, personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import find_difference
from atoll.toolbox.client import sgd


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine(dtype=torch.float64)


def test_one_cluster_is_the_method_after_as_many_rounds_of_fedavg(make_task, engine) -> None:
    """With one cluster the clustering is FedAvg, and so is FedAvg inside it."""
    task = make_task(dtype=torch.float64)
    hybrid = create("fedavg@ifca:clusters=1,cluster_rounds=2")
    found = federate(task, hybrid, rounds=5, engine=engine, evaluation="none").server
    plain = federate(task, create("fedavg"), rounds=5, engine=engine, evaluation="none").server
    assert found.rounds == 2
    for name, leaf in plain.items():
        torch.testing.assert_close(found.fixed.inside[0][name], leaf, rtol=0, atol=1e-15)


def test_clusters_are_found_and_kept_apart(engine) -> None:
    """Planted groups are recovered; then each cluster's server is as if its clients were the whole federation."""
    data = Gaussian(groups=2).dataset()
    task = Task.build(data, Natural(), model="linear", training=Training(lr=0.05, batch_size=20))
    hybrid = create("fedavg@flhc:clusters=2,rounds_before=1,cluster_rounds=3")
    server = federate(task, hybrid, rounds=6, engine=engine, evaluation="none").server
    assert adjusted_rand_score(task.groups, server.fixed.cluster) == 1

    mine = np.flatnonzero(server.fixed.cluster.numpy() == 0)
    before = federate(task, hybrid, rounds=4, engine=engine, evaluation="none").server
    alone = engine.place(task).of(mine)
    assert alone.clients == len(mine)
    # batches are drawn by client number and round, so that the comparison is of the size of the step only
    moved, other = (server.fixed.inside[j] - before.fixed.inside[j] for j in (0, 1))
    assert moved.norm() > 0
    assert (moved - other).norm() > 0.1 * moved.norm()


def test_its_clusters_are_those_of_the_clustering(make_task, engine) -> None:
    """Client 3 misses the clustering; when the clusters are fixed it joins the largest."""
    task = make_task(dtype=torch.float64)
    hybrid = create("fedavg@flhc:clusters=2,rounds_before=0,cluster_rounds=1")
    report = federate(
        task, hybrid, rounds=2, engine=engine, evaluation="none", faults=lambda round, ids: (ids == 3) & (round == 0)
    )
    found, before = hybrid.found_clusters(report.server), report.server.clustering.cluster.tolist()
    assert before[3] == -1
    assert found.of_client[:3].tolist() == before[:3]
    assert found.of_client[3] == np.bincount(before[:3]).argmax()
    assert len(found.merges) == 2  # of the three that were there
    assert 3 not in found.merges[:, :2]


def test_personal_models_live_inside_the_clusters(make_task, engine) -> None:
    task = make_task(shares=(0.6, 0.2, 0.2), sizes=(10, 12, 9, 14), dtype=torch.float64)
    report = federate(task, create("ditto@ifca:clusters=2,cluster_rounds=2,lam=0.5"), rounds=4, engine=engine)
    assert np.isfinite(report.scores()).all()
    assert report.server.fixed is not None
    assert len(report.server.fixed.inside) == 2


def test_the_last_step_is_taken_inside_the_clusters(make_task, make_cohort) -> None:
    """FedRep ends with epochs on the head: those from where the same run ends without them."""
    task = make_task(sizes=(10, 12, 9, 14), dtype=torch.float64)
    hybrid = "fedrep@ifca:clusters=2,cluster_rounds=1,head_epochs=1,final_epochs="
    before, after = (personal_models(play(task, create(f"{hybrid}{epochs}"), rounds=3)) for epochs in (0, 3))
    expected = sgd(make_cohort(task, round=3), stack(before), epochs=3, only="head", stream="final")
    for client, model in enumerate(after):
        assert find_difference(model, before[client]) is not None
        assert find_difference(model, expected.client(client), 1e-15) is None


def test_it_is_a_method_like_any_other() -> None:
    method = create("ditto@ifca:clusters=3,lam=0.5")
    assert name_of(method) == "ditto@ifca"
    assert label(method) == "ditto@ifca:clusters=3,lam=0.5"
    assert method == create("ditto@ifca:clusters=3,lam=0.5") != create("ditto@ifca:clusters=3")
    assert (method.lam, method.clusters, method.epochs) == (0.5, 3, 1)
    assert name_of(create("ditto+prox@flhc")) == "ditto+prox@flhc"
    assert "Fair and Robust" in method.cites
    assert "Clustered Federated Learning" in method.cites


@pytest.mark.parametrize("name", ["ditto@ifca", "fedper@flhc"])
def test_it_passes_the_battery(name: str) -> None:
    """The battery plays one round of clustering; then clusters are fixed."""
    results = list(check(create(name)))
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
    assert Report.read(tmp_path / "run").label == "fedper@ifca:cluster_rounds=2,clusters=2"


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(UnknownName, match="must come a method that finds clusters. fedavg does not"):
        create("ditto@fedavg")
    with pytest.raises(UnknownName, match="must send the same to all of its clients. fedamp does not"):
        create("fedamp@ifca")
    with pytest.raises(UnknownName, match="ensemble uploads once"):
        create("ensemble@ifca")


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

    def start(self, task: Task) -> State:
        at = torch.tensor([4.0, -9.0, 0.0], dtype=torch.float64)
        models = spread(task.network.initial, 3).map(lambda leaf: leaf + at[:, None])
        return replace(super().start(task), models=models)


def test_a_cluster_that_is_empty_is_not_joined(make_cohort) -> None:
    hybrid = InClusters(inner=FedAvg(), finder=From(), cluster_rounds=1)
    server = play(clients(1.0, 5.0, 1.0), hybrid, rounds=2).server  # 0.5 and 4.5, then 0.75 and 4.75
    found = hybrid.welcome(server, make_cohort(clients(4.4, -8.0, 0.3, 5.0)))
    assert found["w"].flatten().tolist() == pytest.approx([4.75, 0.75, 0.75, 4.75])


def test_a_new_client_is_tuned_as_the_method_does_it(make_cohort) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stubborn(FedAvg):
        def tune_newcomer(self, given, model, cohort, *, epochs, stream):  # type: ignore[no-untyped-def]
            return given

    cohort = make_cohort(clients(1.0, 2.0))
    given, model = cohort.stacked(cohort.initial), cohort.stacked(cohort.initial + cohort.initial)
    hybrid, plain = (InClusters(inner=method, finder=IFCA()) for method in (Stubborn(), FedAvg()))
    assert hybrid.tune_newcomer(given, model, cohort, epochs=1, stream="tune") is given
    assert plain.tune_newcomer(given, model, cohort, epochs=1, stream="tune") is None


def test_before_the_clusters_are_fixed_the_clustering_welcomes(make_cohort) -> None:
    hybrid = InClusters(inner=FedAvg(), finder=From(), cluster_rounds=9)
    server = hybrid.start(clients(1.0, 5.0, 1.0).public_facts())
    found = hybrid.welcome(server, make_cohort(clients(4.4, -8.0, 0.3, 5.0)))
    assert found["w"].flatten().tolist() == pytest.approx([4.0, -9.0, 0.0, 4.0])


# -- what the method inside goes on from -------------------------------------------------------------------------------


def test_personal_models_begin_at_what_the_cluster_has_learned() -> None:
    """Clusters are at 0.5 and 4.5 when they are fixed, and a client goes half the way to its optimum; one is absent."""
    task, hybrid = clients(1.0, 5.0, 1.0, 5.0), InClusters(inner=Local(), finder=From(), cluster_rounds=1)
    report = play(task, hybrid, rounds=2, faults=lambda round, ids: (ids == 3) & (round == 1))
    assert [start["w"].item() for start in report.server.fixed.starts] == pytest.approx([4.5, 0.5])
    models = [model["w"].item() for model in personal_models(report)]
    assert models == pytest.approx([0.75, 4.75, 0.75, 4.5])


@pytest.mark.parametrize(("name", "own"), [("fedper", "head"), ("lg-fedavg", "body")])
def test_private_parts_begin_at_what_the_cluster_has_learned(name: str, own: str) -> None:
    """A client that is not asked inside the clusters has its cluster's leaves, whatever others made of theirs."""
    hybrid = create(f"{name}@ifca:clusters=2,cluster_rounds=2")
    report = play(build_task(), hybrid, rounds=4, faults=lambda round, ids: (ids == 0) & (round > 1))
    start = report.server.fixed.starts[int(report.server.fixed.cluster[0])]
    initial, mine = build_task().network.initial, personal_models(report)[0]
    for part, leaf in start.part(own).items():
        assert torch.equal(mine[part], leaf), part
        assert not torch.equal(initial[part], leaf), part


def test_what_a_client_starts_from_is_sent_once_and_kept() -> None:
    """Four clients, each asked in some rounds only: the ledger has one start for each that was asked."""
    hybrid = create("local@ifca:clusters=2,cluster_rounds=1")
    report = play(build_task(), hybrid, rounds=6, cohort=2)
    start = size_of({"sent": None, "start": build_task().network.initial})
    downs = [entry for entry in report.ledger.entries if entry.field == "unicast" and entry.bytes == start]
    told = [client for entry in downs for client in entry.clients]
    inside = {client for entry in report.ledger.entries if entry.field == "unicast" for client in entry.clients}
    assert sorted(told) == sorted(inside)
    assert 2 <= len(inside) < 6


INSIDE = ["fedproto", "fedcr", "fedgen", "fedgen-local", "fedper", "feddf", "scaffold", "apfl"]


@pytest.mark.parametrize("settings", [{"cohort": 2}, {"late": 0.5, "delay": 2}], ids=["cohort", "late"])
@pytest.mark.parametrize("name", INSIDE)
def test_it_works_inside_clusters(name: str, settings: dict[str, Any]) -> None:
    report = play(build_task(), create(f"{name}@ifca:clusters=2,cluster_rounds=2"), rounds=6, **settings)
    assert report.server.fixed is not None
    assert all(torch.isfinite(leaf).all() for model in personal_models(report) for leaf in model.values())


def test_what_is_late_from_the_time_of_the_clustering_does_not_count_inside() -> None:
    """A reply to what the clustering sent leaves the clusters' servers as they are."""
    hybrid = create("fedavg@ifca:clusters=1,cluster_rounds=1")
    server = hybrid.start(build_task().public_facts())
    report = play(build_task(), hybrid, rounds=2)
    bench = Workbench(report.population, report.engine, 1)
    fixed = play(build_task(), hybrid, rounds=2, faults=lambda round, ids: np.full(len(ids), round == 1)).server
    delta = Stack(
        {name: leaf[None] for name, leaf in build_task().network.initial.items()}, build_task().network.layout
    )
    old = Arrival(np.array([0]), {"delta": delta}, torch.ones(1), late=1, broadcast=hybrid.broadcast(server))
    after = hybrid.aggregate(fixed, Replies([old], keep=True, workbench=bench))
    assert all(torch.equal(leaf, fixed.fixed.inside[0][name]) for name, leaf in after.fixed.inside[0].items())
    assert not after.fixed.told.any()


# -- what is refused before the first round ----------------------------------------------------------------------------


def test_the_method_must_have_rounds_left() -> None:
    with pytest.raises(CohortError, match="`rounds` must be at least 11: with less, a part of ditto@ifca never runs"):
        play(build_task(), create("ditto@ifca"), rounds=10)


def test_a_method_that_needs_public_data_says_so_before_the_first_round() -> None:
    with pytest.raises(TaskError, match="needs public data"):
        play(replace(build_task(), public=None), create("feddf@ifca:cluster_rounds=1"), rounds=2)


def test_hyperparameters_of_one_name_must_mean_the_same() -> None:
    with pytest.raises(UnknownName, match="fedala and flhc mean different things by threshold"):
        create("fedala@flhc")


def test_hyperparameters_of_one_name_must_have_one_value() -> None:
    assert create("fedavg@ifca:epochs=3") == InClusters(inner=FedAvg(epochs=3), finder=IFCA(epochs=3))
    with pytest.raises(HyperparameterError, match="fedavg and ifca have different values of epochs"):
        InClusters(inner=FedAvg(epochs=3), finder=IFCA(epochs=2))


def test_no_hook_that_gets_the_servers_state_is_left_to_the_method_inside() -> None:
    """catches: a new hook, which would pass the state of all clusters to a method that knows its own one."""
    hooks = {name for name, hook in vars(Algorithm).items() if "server" in getattr(hook, "__annotations__", ())}
    assert hooks - vars(InClusters).keys() == {"joined"}  # it finds no clusters that another method could be in
    # methods that need one of these are refused: they send each client something else, or something before and after
    assert hooks - vars(InArchitectures).keys() == {"absorb", "groups", "joined", "last_broadcast"}


def test_a_pull_inside_clusters_can_overshoot() -> None:
    assert create("ditto@ifca:lam=100").pulls(0.1) == {"lr * lam": 10.0}
