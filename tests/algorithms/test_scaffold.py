"""SCAFFOLD, by hand."""

import pytest
import torch

from atoll import Task, Training
from atoll.algorithms.scaffold import Scaffold, Sent
from atoll.kernel.errors import TaskError
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


def kept(report) -> list[float]:
    return report.population.memory.save(round=report.settings.rounds)["kept"]["w"].flatten().tolist()


def test_one_round_by_hand(two_clients: Task) -> None:
    # y = 0.5, 1.5; clients count alike. c_k = (0 - y) / (1 * 0.5) = -1, -3: their gradients at 0.
    report = play(two_clients, Scaffold())
    assert report.server.w["w"] == pytest.approx(1.0)
    assert kept(report) == pytest.approx([-1.0, -3.0])
    assert report.server.c["w"] == pytest.approx(-2.0)


def test_the_second_round_corrects_every_step(two_clients: Task) -> None:
    # From w = 1 with gradients 0, -2 and corrections c - c_k = -1, 1: y = 1 - 0.5 (0 - 1), 1 - 0.5 (-2 + 1), both 1.5.
    # c_k <- c_k - c + (1 - 1.5) / 0.5 = 0, -2: the gradients at 1.
    report = play(two_clients, Scaffold(), rounds=2)
    assert report.server.w["w"] == pytest.approx(1.5)
    assert kept(report) == pytest.approx([0.0, -2.0])
    assert report.server.c["w"] == pytest.approx(-1.0)


def test_variates_are_mean_gradients_over_the_steps(two_clients: Task) -> None:
    # Two steps: gradients -c, -c / 2, mean -3 c / 4. Catches: dividing by the batches of one epoch only.
    assert kept(play(two_clients, Scaffold(epochs=2))) == pytest.approx([-0.75, -2.25])


def test_the_servers_step(two_clients: Task) -> None:
    report = play(two_clients, Scaffold(server_lr=0.5))
    assert report.server.w["w"] == pytest.approx(0.5)
    assert report.server.c["w"] == pytest.approx(-2.0)


def test_an_absent_client_keeps_its_variate_and_counts_in_the_mean(two_clients: Task) -> None:
    # Round 2 without the second client: y = 1.5, c_0 = 0; c = (0 - 3) / 2.
    report = play(two_clients, Scaffold(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert report.server.w["w"] == pytest.approx(1.5)
    assert kept(report) == pytest.approx([0.0, -3.0])
    assert report.server.c["w"] == pytest.approx(-1.5)


def test_steps_are_counted_for_every_client_by_itself(make_task, make_cohort) -> None:
    # Batches of 4: 5, 1, 12 and 7 samples are 2, 1, 3 and 2 steps an epoch.
    task = make_task(dtype=torch.float64)
    cohort = make_cohort(task)
    assert cohort.steps(2).tolist() == [4, 2, 6, 4]
    w = task.network.initial
    sent = Scaffold(epochs=2).local(Sent(w, w.zeros()), cohort).send
    for client, steps in enumerate((4, 2, 6, 4)):
        for name, leaf in sent["change"].items():
            torch.testing.assert_close(leaf[client], -sent["delta"][name][client] / (steps * 0.1))


def test_two_models_travel_each_way(two_clients: Task) -> None:
    report = play(two_clients, Scaffold(), rounds=3)
    server = report.server
    assert report.ledger.bytes("down") == 3 * 2 * len(to_bytes({"w": server.w, "c": server.c}))
    assert report.ledger.bytes("up") == 3 * 2 * 2 * len(to_bytes(server.w))


def test_everybody_deploys_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, Scaffold())
    assert [model["w"].item() for model in personal_models(report)] == [pytest.approx(1.0)] * 2
    assert report.algorithm.shared(report.server) is report.server.w


@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"lr": 0.0}])
def test_steps_that_do_not_show_gradients_are_refused(make_task, training) -> None:
    with pytest.raises(TaskError, match=r"`momentum` must be 0 and `lr` above 0. Got "):
        play(make_task(**training), Scaffold())
    assert Training(**training)  # which is fine for others
