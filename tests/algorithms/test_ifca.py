"""IFCA, by hand: F_k(w) = (w - c_k)^2 / 2, where the nearest model has the smallest loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from atoll import Cohort, Task
from atoll.algorithms.ifca import IFCA, State, mean_over_clusters
from atoll.compose import create
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params, Stack, stack
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task


@dataclass(frozen=True, kw_only=True)
class From(IFCA):
    """IFCA from models at 0 and 4."""

    clusters: int = 2

    def start(self, task: Task) -> State:
        begin = [
            Params({"w": torch.full_like(task.network.initial["w"], at)}, task.network.layout) for at in (0.0, 4.0)
        ]
        return replace(super().start(task), models=stack(begin))


@pytest.fixture
def three_clients() -> Task:
    """Optima 1, 2 and 3; the third client has 3 samples; steps are 0.5."""
    return quadratics(torch.tensor([[1.0], [1.5], [3.0]], dtype=torch.float64), samples=[1, 2, 3], lr=0.5)


def test_one_round_by_hand(three_clients: Task) -> None:
    # 1 and 1.5 are nearer to 0, 3 to 4. From there everybody goes half the way: 0.5, 0.75 and 3.5.
    report = play(three_clients, From())
    assert report.server.models["w"].flatten().tolist() == pytest.approx([(1 * 0.5 + 2 * 0.75) / 3, 3.5])
    assert report.server.cluster.tolist() == [0, 0, 1]
    assert [model["w"].item() for model in personal_models(report)] == pytest.approx([2 / 3, 2 / 3, 3.5])


def test_the_mean_may_be_unweighted(three_clients: Task) -> None:
    report = play(three_clients, From(weighting="uniform"))
    assert report.server.models["w"].flatten().tolist() == pytest.approx([(0.5 + 0.75) / 2, 3.5])


def test_clients_may_change_their_cluster(three_clients: Task) -> None:
    # After a round the models are at 2/3 and 3.5; later 1.5 stays nearer to the lower one, which goes to its mean.
    report = play(three_clients, From(), rounds=60)
    assert report.server.models["w"].flatten().tolist() == pytest.approx([(1 + 2 * 1.5) / 3, 3.0])


def test_a_cluster_that_nobody_joins_stays_as_it_is() -> None:
    # catches: a mean over no clients (0 or NaN).
    task = quadratics(torch.tensor([[1.0], [1.5]], dtype=torch.float64), lr=0.5)
    report = play(task, From(), rounds=3)
    assert report.server.models["w"][1].item() == 4.0
    assert report.server.cluster.tolist() == [0, 0]


def test_who_did_not_reply_keeps_the_cluster_it_was_in(three_clients: Task) -> None:
    report = play(three_clients, From(), rounds=2, faults=lambda round, clients: (clients == 2) & (round == 1))
    assert report.server.cluster.tolist() == [0, 0, 1]
    assert report.server.models["w"][1].item() == pytest.approx(3.5)  # as the first round left it
    never = play(three_clients, From(), faults=lambda round, clients: clients == 2)
    assert never.server.cluster.tolist() == [0, 0, -1]
    assert personal_models(never)[2]["w"].item() == 4.0  # it chooses without having replied


def test_clusters_say_who_learns_from_whom(three_clients: Task) -> None:
    report = play(three_clients, From())
    expected = torch.tensor([[1 / 3, 2 / 3, 0], [1 / 3, 2 / 3, 0], [0, 0, 1]])
    torch.testing.assert_close(report.algorithm.mixing(report.server), expected)


def test_the_choices_are_the_clusters(three_clients: Task) -> None:
    report = play(three_clients, From(), faults=lambda round, clients: clients == 1)
    found = report.algorithm.found_clusters(report.server)
    assert found is not None
    assert found.of_client.tolist() == [0, -1, 1]
    assert found.merges is None


def test_all_models_go_down_and_one_with_its_number_goes_up(three_clients: Task) -> None:
    report = play(three_clients, IFCA(clusters=3))
    one = three_clients.network.initial
    assert report.ledger.bytes("down") == 3 * len(to_bytes(stack([one] * 3)))
    up = {message.field: message.bytes for message in report.ledger.messages() if message.direction == "up"}
    assert up["delta"] == len(to_bytes(one))
    assert up["cluster"] == len(to_bytes(Params.of(cluster=torch.tensor(0))))
    assert not [message for message in report.ledger.messages() if message.round < 0]  # nothing before the first round


@pytest.mark.parametrize(("options", "fields"), [({"restarts": 4}, "choices"), ({"starts": "kmeans++"}, "delta")])
def test_what_is_exchanged_before_the_first_round_is_counted(
    three_clients: Task, options: dict[str, Any], fields: str
) -> None:
    before = [
        message for message in play(three_clients, IFCA(clusters=2, **options)).ledger.messages() if message.round < 0
    ]
    models = 8 if "restarts" in options else 1
    down = len(to_bytes(stack([three_clients.network.initial] * models)))
    assert [message.bytes for message in before if message.direction == "down"] == [down] * 3
    assert {message.field for message in before if message.direction == "up"} == {fields, "weight"}


def test_more_clusters_than_clients_are_refused(three_clients: Task) -> None:
    with pytest.raises(
        HyperparameterError, match=r"`clusters` of IFCA must be at most the number of clients, 3\. Got 4"
    ):
        play(three_clients, IFCA(clusters=4))


def test_a_new_client_without_labels_joins_where_the_model_is_surest(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    w = task.network.initial
    models = stack([w, w * 3.0, w * 0.0])  # larger logits, more of a decision
    server = State(models, torch.zeros(0), torch.zeros(0))
    found = IFCA().welcome(server, make_cohort(task).without("labels"))
    assert all(torch.equal(found.client(k)[name], models.client(1)[name]) for k in range(4) for name in w)


def test_what_is_common_is_averaged_over_all_clients() -> None:
    """catches: common leaves that drift apart, or a mean of the clusters' means that forgets how many they are."""
    many = play(build_task(), create("ifca:clusters=3,common=body"), rounds=2)
    models = many.server.models
    assert len(set(many.server.cluster.tolist())) > 1
    assert models["head.weight"].unique(dim=0).shape[0] > 1
    for name in ("body.0.weight", "body.0.bias"):
        torch.testing.assert_close(models[name], models[name][:1].expand_as(models[name]), rtol=0, atol=0)


@pytest.mark.parametrize("starts", ["random", "kmeans++"])
@pytest.mark.parametrize("kind", ["plain", "odd"])
def test_with_everything_in_common_it_is_fedavg(kind: str, starts: str) -> None:
    texts = ("fedavg", f"ifca:clusters=3,common=all,starts={starts}")
    plain, common = (personal_models(play(build_task(kind), create(text), rounds=3)) for text in texts)
    for mine, theirs in zip(common, plain, strict=True):
        for name, leaf in theirs.items():
            torch.testing.assert_close(mine[name], leaf, rtol=0, atol=1e-12)


def test_means_of_clusters_count_by_their_weight() -> None:
    means = Stack.of(a=torch.tensor([[1.0], [4.0], [100.0]]), n=torch.tensor([3, 5, 4]))
    found = mean_over_clusters(means, torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 3.0]))
    assert found["a"].flatten().tolist() == pytest.approx([21 / 6] * 3)
    assert found["n"].tolist() == [5, 5, 5]


def test_gradients_are_divided_by_all_clients_that_replied() -> None:
    """catches: a mean within the cluster, with which small clusters step as far as large ones."""
    task = quadratics(torch.tensor([[1.0], [-1.0], [5.0]], dtype=torch.float64), samples=[1, 2, 1], lr=0.4)
    found = play(task, From(averaging="gradients")).server
    assert found.cluster.tolist() == [0, 0, 1]
    gradients = [1 / 4 * (0 - 1) + 2 / 4 * (0 + 1), 1 / 4 * (4 - 5)]
    wanted = [at - 0.4 * g for at, g in zip((0, 4), gradients, strict=True)]
    assert found.models["w"].flatten().tolist() == pytest.approx(wanted, abs=1e-12)
