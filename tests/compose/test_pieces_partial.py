"""Clients that do a part of their work: how many steps they take, where that leads, and what corrects it."""

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Task, federate
from atoll.compose import create
from atoll.compose.pieces import Partial
from atoll.kernel.cohort import cut_short
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import find_difference

ETA, EPOCHS = 0.3, 5
C = torch.tensor([[1.0], [-2.0], [4.0], [0.5]], dtype=torch.float64)
P = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def clients() -> Task:
    return quadratics(C, samples=(1, 2, 3, 4), lr=ETA)


def taken(method: Partial, task: Task, round: int = 0) -> torch.Tensor:
    """The steps of every client of so many."""
    shares = np.array([method.share(task.public_facts(0).seed, round, client) for client in range(4)])
    return torch.from_numpy(cut_short(np.full(4, EPOCHS), shares)).double()


def made(words: str) -> Partial:
    method = create(f"{words},epochs={EPOCHS}")
    assert isinstance(method, Partial)
    return method


def test_a_part_of_a_step_is_a_whole_one() -> None:
    assert cut_short(np.array([10, 10, 10, 30, 4, 0]), np.array([1, 0.55, 0.01, 0.1, 0.5, 0.5])).tolist() == [
        10, 6, 1, 3, 2, 0,
    ]  # fmt: skip


def test_one_round_by_hand() -> None:
    """catches: work that is cut per epoch, not of all steps."""
    method = made("fedavg+partial:slowest=0.1")
    steps = taken(method, clients())
    assert len(steps.unique()) > 1
    moved = (1 - (1 - ETA) ** steps) * C[:, 0]
    torch.testing.assert_close(play(clients(), method).server["w"], (P * moved).sum()[None], rtol=0, atol=1e-12)


def test_where_fedavg_and_fedprox_end() -> None:
    """Federated averaging is pulled to those who do more, sum p_k a_k (c_k - w) = 0; mu makes up for little of it."""
    method = made("fedavg+partial:slowest=0.1")
    a = 1 - (1 - ETA) ** taken(method, clients())
    expected = (P * a * C[:, 0]).sum() / (P * a).sum()
    assert play(clients(), method, rounds=60).server["w"].item() == pytest.approx(expected.item(), abs=1e-9)
    # With mu, a step is contracted by q = 1 - eta (1 + mu), towards (c + mu w) / (1 + mu).
    prox = made("fedprox+partial:slowest=0.1,mu=1")
    b = (1 - (1 - 2 * ETA) ** taken(prox, clients())) / 2
    expected = (P * b * C[:, 0]).sum() / (P * b).sum()
    assert play(clients(), prox, rounds=60).server["w"].item() == pytest.approx(expected.item(), abs=1e-9)


def test_scaffold_corrects_for_unequal_steps() -> None:
    """catches: control variates that count the steps a client was asked for, not those that it took."""
    w = play(clients(), made("scaffold+partial:slowest=0.1"), rounds=200).server.w["w"]
    assert w.item() == pytest.approx(C.mean().item(), abs=1e-6)


def test_stragglers_stop_in_some_rounds() -> None:
    method = made("fedavg+partial:slowest=1,stragglers=0.5")
    shares = np.array([[method.share(3, round, client) for client in range(50)] for round in range(40)])
    assert (shares == 1).mean() == pytest.approx(0.5, abs=0.03)
    assert shares[shares < 1].mean() == pytest.approx(0.5, abs=0.03)
    assert shares.min() > 0
    assert not (shares[0] == shares[1]).all()


def test_a_speed_is_a_clients_own() -> None:
    method = made("fedavg+partial:slowest=0.4")
    shares = np.array([[method.share(3, round, client) for client in range(200)] for round in range(2)])
    assert (shares[0] == shares[1]).all()
    assert shares.min() >= 0.4
    assert shares[0].mean() == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(
    ("name", "given"), [("ditto{}", ""), ("apfl{}", ""), ("fedper+sam{}", ""), ("ditto{}@ifca", "cluster_rounds=1")]
)
def test_with_neutral_values_it_is_the_method_alone(name: str, given: str) -> None:
    values = ("slowest=1", "slowest=0.05,stragglers=1")
    texts = [name.format("+partial") + ":" + ",".join(filter(None, (given, one))) for one in values]
    texts = [name.format("") + f":{given}" * bool(given), *texts]
    plain, neutral, part = (personal_models(play(build_task(), create(text), 3)) for text in texts)
    assert find_difference(plain, neutral) is None
    assert find_difference(plain, part) is not None


def test_gradients_are_counted_as_they_are_taken() -> None:
    reports = {
        words: federate(clients(), create(f"fedavg{words}"), rounds=2, engine=LocalEngine(dtype=torch.float64))
        for words in (f":epochs={EPOCHS}", f"+partial:epochs={EPOCHS},slowest=0.1")
    }
    whole, part = ([line["gradients"] for line in report.history] for report in reports.values())
    assert whole == [4 * EPOCHS] * 2
    assert part == [int(taken(made("fedavg+partial:slowest=0.1"), clients()).sum())] * 2
