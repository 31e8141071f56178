"""Methods that find groups of clients: closed forms on quadratics, identities, and planted groups that are recovered.

Agreement with the planted groups is the adjusted Rand index: 1 if both are the same partition, 0 by chance.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from atoll import Algorithm, Task, Training
from atoll.algorithms.cfl import CFL
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.flhc import FLHC
from atoll.algorithms.ifca import IFCA, State
from atoll.algorithms.local import Local
from atoll.data import partition
from atoll.data.synthetic import Gaussian, Linear
from atoll.experiments.comparison import compare, run_name
from atoll.federation.report import Report
from atoll.kernel.params import Params, stack
from atoll.testing.conformance import personal_models, play, quadratics

STARTS: tuple[Literal["kmeans++", "random"], ...] = ("kmeans++", "random")


def signs(*optima: float, lr: float = 1.0, start: float = 0.0) -> Task:
    """F_k(w) = (w - c_k)^2 / 2; with lr = 1 one epoch solves a client's problem exactly."""
    begin = torch.tensor([start], dtype=torch.float64)
    return quadratics(torch.tensor(optima, dtype=torch.float64)[:, None], lr=lr, start=begin)


def personal(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


@dataclass(frozen=True, kw_only=True)
class TwoStarts(IFCA):
    """IFCA from two given models."""

    clusters: int = 2
    first: float = 0.1
    second: float = -0.1

    def start(self, task: Task) -> State:
        models = [
            Params({"w": torch.tensor([at], dtype=torch.float64)}, task.network.layout)
            for at in (self.first, self.second)
        ]
        return replace(super().start(task), models=stack(models))


# -- IFCA --------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("ifca")
def test_ifca_solves_two_opposed_groups_in_one_round() -> None:
    report = play(signs(1, -1, 1, -1, -1), TwoStarts())
    assert report.server.models["w"].flatten().tolist() == [1.0, -1.0]
    assert report.server.cluster.tolist() == [0, 1, 0, 1, 1]


@pytest.mark.closed_form("ifca")
def test_ifca_from_two_equal_starts_uses_one_cluster() -> None:
    # Ties go to the lowest number; the cluster that nobody joins stays where it is. This is why starts must differ.
    report = play(signs(1, -1, 1), TwoStarts(first=0.1, second=0.1))
    assert report.server.cluster.tolist() == [0, 0, 0]
    assert report.server.models["w"].flatten().tolist() == [pytest.approx(1 / 3), 0.1]


@pytest.mark.limit("ifca")
def test_ifca_puts_identical_clients_in_one_cluster() -> None:
    report = play(signs(1, 1, 1, 1, lr=0.3), TwoStarts(), rounds=5)
    assert len(set(report.server.cluster.tolist())) == 1


@pytest.mark.closed_form("ifca")
def test_ifca_by_kmeans_plus_plus_begins_with_separate_groups_though_all_models_begin_at_0() -> None:
    # One step from 0 takes clients to +-0.3. The starts are one of each, so that the first choice is right.
    apart, together = (play(signs(1, -1, 1, -1, -1, lr=0.3), IFCA(clusters=2, starts=one)) for one in STARTS)
    assert adjusted_rand_score([0, 1, 0, 1, 1], apart.server.cluster) == 1
    assert set(together.server.cluster.tolist()) == {0}  # at random points: all at 0, which nothing shuffles


# -- CFL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("cfl")
@pytest.mark.parametrize("eps1", [1e-9, 1.0])
@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_cfl_splits_opposed_groups_at_their_joint_optimum_for_any_eps1(
    eps1: float, linkage: Literal["complete", "single"]
) -> None:
    # At 0 the updates are +-0.3: their mean is 0, the longest is 0.3, and their cosines are +-1.
    task = signs(1, -1, 1, -1, 1, -1, lr=0.3)
    report = play(task, CFL(eps1=eps1, eps2=0.29, rounds_before=0, linkage=linkage), rounds=120)
    assert adjusted_rand_score([0, 1] * 3, report.server.cluster) == 1
    assert personal(report) == pytest.approx([1, -1] * 3, abs=1e-12)
    assert play(task, CFL(eps1=eps1, eps2=0.31, rounds_before=0), rounds=3).server.models.clients == 1


@pytest.mark.closed_form("cfl")
def test_cfl_waits_until_averaging_has_come_to_rest() -> None:
    # From w = 8 the mean update is -0.3 w: below eps1 = 0.01 when 0.7^t 8 < 1/30, that is from round 16 on.
    task = signs(1, -1, 1, -1, lr=0.3, start=8.0)
    method = CFL(eps1=0.01, eps2=0.1, rounds_before=0)
    assert play(task, method, rounds=16).server.models.clients == 1
    assert play(task, method, rounds=17).server.models.clients == 2


# -- FL+HC -------------------------------------------------------------------------------------------------------------


@pytest.mark.limit("flhc")
def test_flhc_cut_at_the_root_is_fedavg_and_at_the_leaves_local_after_the_first_rounds() -> None:
    task = signs(1, 2, -3, 5, lr=0.3)
    root = play(task, FLHC(rounds_before=2, threshold=1e9), rounds=5)
    assert torch.equal(root.server.models["w"][0], play(task, FedAvg(), rounds=5).server["w"])
    leaves = play(task, FLHC(rounds_before=0, threshold=0.0), rounds=5)
    assert personal(leaves) == pytest.approx(personal(play(task, Local(), rounds=5)), abs=1e-12)
    # After two rounds w = (1 - 0.7^2) mean(c); three more leave 0.7^3 of the way to each client's own optimum.
    common = (1 - 0.7**2) * 1.25
    late = play(task, FLHC(rounds_before=2, threshold=0.0), rounds=5)
    assert personal(late) == pytest.approx([c + 0.7**3 * (common - c) for c in (1, 2, -3, 5)], abs=1e-12)


@pytest.mark.closed_form("flhc", "ifca")
def test_clusters_converge_to_their_own_fedavg() -> None:
    # Groups 1, 3 and -2, -6, weighted by samples: clusters stop at (1 * 1 + 3 * 3) / 4 and (-2 * 2 - 6 * 2) / 4.
    optima = torch.tensor([[1.0], [-2.0], [3.0], [-6.0]], dtype=torch.float64)
    task = quadratics(optima, samples=[1, 2, 3, 2], lr=0.3)
    for method in (FLHC(rounds_before=3, clusters=2), IFCA(clusters=2, starts="kmeans++")):
        found = personal(play(task, method, rounds=120))
        assert found == pytest.approx([2.5, -4.0, 2.5, -4.0], abs=1e-12)


# -- planted groups ----------------------------------------------------------------------------------------------------


def planted(made: Linear | Gaussian, batch_size: int = 10) -> Task:
    """Every client has its own samples, every group its own truth."""
    training = Training(lr=0.05, batch_size=batch_size)
    return Task.build(made.dataset(), partition.parse("natural"), training=training, seed=made.seed)


def agreement(task: Task, algorithm: Algorithm, rounds: int) -> float:
    return float(adjusted_rand_score(task.groups, play(task, algorithm, rounds).server.cluster))


@pytest.mark.purpose("cfl", "flhc", "ifca")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "algorithm",
    [IFCA(clusters=3, starts="kmeans++", restarts=10), FLHC(rounds_before=3, clusters=3), CFL(eps1=0.1, eps2=0.2)],
    ids=lambda one: type(one).__name__,
)
def test_groups_of_linear_regressions_are_recovered(algorithm: Algorithm, seed: int) -> None:
    # CFL needs full batches, so that the mean update can come to rest; 20 rounds pass before its first split.
    task = planted(Linear(clients=12, groups=3, seed=seed), batch_size=100)
    assert agreement(task, algorithm, 50 if isinstance(algorithm, CFL) else 5) == 1


@pytest.mark.purpose("flhc", "ifca")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "algorithm",
    [
        IFCA(clusters=4, starts="kmeans++", restarts=10),
        IFCA(clusters=4, restarts=20),
        FLHC(rounds_before=3),
        FLHC(rounds_before=3, metric="cosine", linkage="average"),
        FLHC(rounds_before=3, signature="embedding", levels=2, clusters=4),
    ],
)
def test_groups_of_classifiers_are_recovered(algorithm: Algorithm, seed: int) -> None:
    task = planted(Gaussian(clients=12, seed=seed))
    assert agreement(task, algorithm, 12) == 1


@pytest.mark.purpose("flhc")
@pytest.mark.parametrize("method", ["flhc:rounds_before=2", "ditto@flhc:rounds_before=1,cluster_rounds=3"])
def test_the_report_says_that_groups_are_recovered(method: str, tmp_path: Path) -> None:
    task = planted(Linear(clients=8, groups=2), batch_size=100)
    comparison = compare(task, [method], seeds=1, rounds=4, folder=tmp_path)
    *_, (outcome,) = comparison.outcomes.values()  # the references come first
    assert '"clusters": {"of_client": [' in (tmp_path / run_name(outcome.algorithm, 0) / "metrics.jsonl").read_text()
    assert outcome.agreement == comparison.results[-1]["adjusted_rand"] == 1
    text = comparison.save(tmp_path)["report"].read_text()
    assert "found 2 clusters, in exact agreement with the planted groups (adjusted Rand 1.00)." in text
    assert 'aria-label="Clusters of clients with' in text
    assert 'class="branch' in text


@pytest.mark.purpose("ifca")
def test_random_starts_may_miss_a_group() -> None:
    # Which is why there are restarts and k-means++: with four groups two clients of different groups share a start.
    assert agreement(planted(Gaussian(clients=12, seed=1)), IFCA(clusters=4), 12) < 0.5


@pytest.mark.purpose("flhc")
def test_embeddings_are_blind_to_groups_that_differ_in_their_targets_only() -> None:
    # In linear regression all groups have the same inputs; updates tell them apart, embeddings cannot.
    task = planted(Linear(clients=12, groups=2))
    assert agreement(task, FLHC(rounds_before=2, clusters=2), 4) == 1
    assert agreement(task, FLHC(rounds_before=2, clusters=2, signature="embedding"), 4) < 0.5


@pytest.mark.purpose("flhc", "ifca")
def test_a_model_per_group_beats_one_for_all() -> None:
    task = planted(Gaussian(clients=12))
    scores = [
        play(task, one, 12, evaluation="all", eval_every=12).summary()["macro"]
        for one in (FedAvg(), IFCA(clusters=4, starts="kmeans++"), FLHC(rounds_before=3))
    ]
    assert min(scores[1:]) > scores[0] + 0.2
