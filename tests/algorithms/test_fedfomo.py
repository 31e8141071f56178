"""FedFomo, by hand: c = 1, 2, -4, all begin at 0, steps are 0.5; training samples are the validation samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import Report, Task
from atoll.algorithms.fedfomo import FedFomo, choose
from atoll.algorithms.local import Local
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics

OPTIMA = torch.tensor([[1.0], [2.0], [-4.0]], dtype=torch.float64)
# After one round v = 0.5, 1, -2. Row k: (L_k(v_k) - L_k(v_j)) / |v_j - v_k| with L_k(v) = (v - c_k)^2 / 2.
OMEGA = torch.tensor([[0.0, 0.25, -1.75], [-1.25, 0.0, -2.5], [-3.25, -3.5, 0.0]], dtype=torch.float64)


def validated(task: Task) -> Task:
    """All samples of a client are the same here, so that the training samples can also be the validation samples."""
    return replace(task, splits={**task.splits, "val": task.splits["train"]})


@pytest.fixture
def three_clients() -> Task:
    return validated(quadratics(OPTIMA, lr=0.5))


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_everybody_trains_alone_at_first(three_clients: Task) -> None:
    report = play(three_clients, FedFomo())
    assert deployed(report) == pytest.approx([0.5, 1, -2])
    assert torch.equal(report.algorithm.mixing(report.server), torch.eye(3).double())


def test_a_client_moves_to_those_whose_models_help(three_clients: Task) -> None:
    # Only the first client is helped, by the second one's model: it begins at 1, its optimum, and stays.
    report = play(three_clients, FedFomo(), rounds=2)
    assert deployed(report) == pytest.approx([1, 1.5, -3])
    torch.testing.assert_close(report.server.affinity, OMEGA)
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(report.algorithm.mixing(report.server), expected)


def test_several_that_help_are_weighed_by_how_much_per_distance() -> None:
    # v = 2, 2.5, 3. For the first client, c = 4: (2 - 1.125) / 0.5 = 1.75 and (2 - 0.5) / 1 = 1.5.
    optima = torch.tensor([[4.0], [5.0], [6.0]], dtype=torch.float64)
    report = play(validated(quadratics(optima, lr=0.5)), FedFomo(), rounds=2)
    assert report.server.affinity[0].tolist() == pytest.approx([0, 1.75, 1.5])
    assert report.algorithm.mixing(report.server)[0].tolist() == pytest.approx([0, 1.75 / 3.25, 1.5 / 3.25])
    start = (1.75 * 2.5 + 1.5 * 3) / 3.25
    assert deployed(report)[0] == pytest.approx((start + 4) / 2)


@pytest.mark.parametrize(("norm", "distance"), [("l2", 2**0.5), ("l1", 2.0)])
def test_the_distance_can_be_measured_in_two_ways(norm: str, distance: float) -> None:
    # v = (0, 0), (1, 1): the first client is worse off by 1 at the other's model.
    optima = torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    report = play(validated(quadratics(optima, lr=0.5)), FedFomo(norm=norm), rounds=2)  # type: ignore[arg-type]
    assert report.server.affinity[0, 1] == pytest.approx(-1 / distance)


def test_without_validation_data_everybody_trains_alone() -> None:
    task = quadratics(OPTIMA, lr=0.5)
    assert deployed(play(task, FedFomo(), rounds=3)) == deployed(play(task, Local(), rounds=3))


def test_models_that_are_the_own_one_say_nothing() -> None:
    task = validated(quadratics(OPTIMA[:1].expand(3, 1), lr=0.5))  # all the same: distances are 0
    report = play(task, FedFomo(), rounds=3)
    assert not report.server.affinity.any()
    assert deployed(report) == deployed(play(task, Local(), rounds=3))


def test_m_models_go_down_and_one_comes_up(three_clients: Task) -> None:
    report = play(three_clients, FedFomo(models=2), rounds=3)
    model = three_clients.network.initial
    down = {(entry.round, entry.bytes) for entry in report.ledger.entries if entry.direction == "down"}
    two = {"models": [model, model], "others": Params.of(others=torch.tensor([1, 2]))}
    assert down == {(round, len(to_bytes(two))) for round in (1, 2)}
    up = [entry for entry in report.ledger.entries if entry.direction == "up" and entry.field == "delta"]
    assert {entry.bytes for entry in up} == {len(to_bytes(model))}


def test_nobody_is_sent_the_model_of_one_that_was_never_heard_of(three_clients: Task) -> None:
    report = play(three_clients, FedFomo(), rounds=2, faults=lambda round, clients: clients == 1)
    assert report.server.chosen.shape == (3, 1)  # all that there is for those who were heard
    assert report.server.chosen[[0, 2]].flatten().tolist() == [2, 0]
    assert report.algorithm.mixing(report.server)[1].tolist() == [0, 1, 0]


def test_a_client_that_never_trained_makes_a_model_of_those_that_it_would_be_sent() -> None:
    # The second client, c = 2, compares 0.5, -2 and 1.5 with 0; it would be sent two of them.
    four = validated(quadratics(torch.tensor([[1.0], [2.0], [-4.0], [3.0]], dtype=torch.float64), lr=0.5))
    report = play(four, FedFomo(), faults=lambda round, clients: clients == 1)
    v = {0: 0.5, 2: -2.0, 3: 1.5}
    gains = {k: max(0.0, (2 - 0.5 * (value - 2) ** 2) / abs(value)) for k, value in v.items()}
    chosen = report.server.chosen[1].tolist()
    expected = sum(gains[k] * v[k] for k in chosen) / sum(gains[k] for k in chosen)
    assert deployed(report) == pytest.approx([0.5, expected, -2, 1.5])


def test_without_validation_data_that_model_is_their_mean() -> None:
    task = quadratics(torch.tensor([[1.0], [2.0], [-4.0], [3.0]], dtype=torch.float64), lr=0.5)
    report = play(task, FedFomo(), faults=lambda round, clients: clients == 1)
    v = {0: 0.5, 2: -2.0, 3: 1.5}
    mean = sum(v[k] for k in report.server.chosen[1].tolist()) / 2
    assert deployed(report)[1] == pytest.approx(mean)
    late = play(task, FedFomo(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 0))
    assert deployed(late)[1] == pytest.approx((mean + 2) / 2)  # and it trains from there


def test_the_last_model_of_an_absent_client_can_still_be_sent(three_clients: Task) -> None:
    report = play(three_clients, FedFomo(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert deployed(report) == pytest.approx([1, 1, -3])


def test_the_best_are_sent_and_nobody_gets_its_own() -> None:
    affinity = torch.tensor([[9.0, 1, 3, 2], [0, 9, -1, -2], [5, 6, 9, 7], [1, 0, 2, 9]], dtype=torch.float64)
    everybody = torch.ones(4, dtype=torch.bool)
    chosen = choose(affinity, everybody, 2, 0.0, generator(0, "test"))
    assert chosen.tolist() == [[2, 3], [0, 2], [3, 1], [2, 0]]
    assert choose(affinity, everybody, 9, 0.0, generator(0, "test")).shape == (4, 3)
    assert choose(affinity, everybody, 0, 0.0, generator(0, "test")).shape == (4, 0)
    nearly_nobody = torch.tensor([True, False, False, False])
    assert choose(affinity, nearly_nobody, 2, 0.0, generator(0, "test")).shape == (4, 0)


def test_who_explores_gets_anybody_and_nobody_twice() -> None:
    affinity = torch.arange(6.0).expand(6, 6)
    draw = generator(0, "test")
    drawn = [choose(affinity, torch.ones(6, dtype=torch.bool), 3, 1.0, draw) for _ in range(60)]
    assert all(len(set(row)) == 3 for chosen in drawn for row in chosen.tolist())
    counts = np.bincount(torch.stack(drawn)[:, 0].flatten().numpy(), minlength=6)
    assert counts[0] == 0
    assert (counts[1:] > 18).all()  # 36 each are expected
    some = torch.stack([choose(affinity, torch.ones(6, dtype=torch.bool), 1, 0.3, draw)[0] for _ in range(300)])
    assert 0.65 < (some == 5).double().mean() < 0.87  # 0.7 greedily, and a fifth of the rest


def test_equal_affinities_are_no_order() -> None:
    draw = generator(0, "test")
    first = {int(choose(torch.zeros(5, 5), torch.ones(5, dtype=torch.bool), 1, 0.0, draw)[0, 0]) for _ in range(50)}
    assert first == {1, 2, 3, 4}


def test_exploring_ends(three_clients: Task) -> None:
    # 0.3 - 0.05 t: from round 6 on the best is sent, which for the first client is the second one.
    for rounds in (8, 9, 10):
        chosen = play(three_clients, FedFomo(models=1), rounds=rounds).server.chosen
        affinity = play(three_clients, FedFomo(models=1), rounds=rounds).server.affinity.fill_diagonal_(-torch.inf)
        assert torch.equal(chosen[:, 0], affinity.argmax(1))


def test_statistics_of_batchnorm_stay_with_the_client(make_task) -> None:
    body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    task = make_task(lambda: body, dtype=torch.float64)
    report = play(task, FedFomo(), rounds=2)
    assert set(report.server.w) == set(task.network.initial.trained)
    means = [model["1.running_mean"] for model in personal_models(report)]
    assert not torch.equal(means[0], means[2])


def test_a_new_client_trains_alone_once(three_clients: Task, make_cohort) -> None:
    model = FedFomo().welcome({}, make_cohort(three_clients))
    assert model["w"].flatten().tolist() == pytest.approx([0.5, 1, -2])
