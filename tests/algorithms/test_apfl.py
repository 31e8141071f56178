"""APFL, by hand: c = 1, 3, both models begin at 0, steps are 0.5, weights 1 and 3."""

import pytest
import torch

from atoll import Report, Task
from atoll.algorithms.apfl import APFL
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


def kept(report: Report, name: str) -> list[float]:
    """What both clients have: v or alpha."""
    tree = report.population.memory.save(round=0)["kept"]
    return (tree.v["w"] if name == "v" else tree.alpha).flatten().tolist()


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_one_round_by_hand(two_clients: Task) -> None:
    # At the mixture 0 the gradient is -c: v = 0.5 * alpha * c. Without the chain rule's alpha it would be 0.5 c.
    # catches: PFLlib (v becomes the mixture), fluke (v gets no gradient), FedJAX (no factor alpha).
    report = play(two_clients, APFL(alpha=0.5))
    assert report.server["w"] == pytest.approx(1.25)
    assert kept(report, "v") == pytest.approx([0.25, 0.75])
    assert deployed(report) == pytest.approx([0.5 * 0.25 + 0.5 * 1.25, 0.5 * 0.75 + 0.5 * 1.25])


def test_the_second_round_takes_the_gradient_at_the_mixture(two_clients: Task) -> None:
    # The mixtures 0.75 and 1 have gradients -0.25 and -2; at v they would be -0.75 and -2.25.
    # catches: PFLlib (gradient at v), and a mixture with the w_k of after the step.
    report = play(two_clients, APFL(alpha=0.5), rounds=2)
    assert kept(report, "v") == pytest.approx([0.25 + 0.25 * 0.25, 0.75 + 0.25 * 2])
    assert kept(report, "alpha") == [0.5, 0.5]


def test_alpha_follows_its_gradient_and_stays_a_share(two_clients: Task) -> None:
    # Round 1: v = w, no slope. Round 2: <v - w, g> = (0.25 - 1.25) (-0.25) = 0.25 and (0.75 - 1.25) (-2) = 1.
    report = play(two_clients, APFL(alpha=0.5, adaptive=True), rounds=2)
    assert kept(report, "alpha") == pytest.approx([0.5 - 0.5 * 0.25, 0])
    assert deployed(report)[1] == pytest.approx(report.server["w"].item())
    # From alpha = 0.25 the second client would go below 0: v = 0.375, mixture 1.03125, 0.5 * 0.875 * 1.96875 > 0.25.
    report = play(two_clients, APFL(alpha=0.25, adaptive=True), rounds=2)
    assert kept(report, "alpha")[1] == 0


@pytest.mark.parametrize(
    ("apfl", "other"),
    [
        (APFL(alpha=1.0, epochs=2), Local(epochs=2)),
        (APFL(alpha=0.0, epochs=2), FedAvg(epochs=2)),
    ],
)
def test_ends_of_the_mixture(two_clients: Task, apfl: APFL, other: Local | FedAvg) -> None:
    mine, theirs = (personal_models(play(two_clients, one, rounds=3)) for one in (apfl, other))
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_the_shared_model_is_that_of_fedavg(two_clients: Task) -> None:
    apfl, plain = (play(two_clients, one, rounds=3) for one in (APFL(adaptive=True), FedAvg()))
    assert torch.equal(apfl.server["w"], plain.server["w"])
    assert apfl.ledger.entries == plain.ledger.entries


def test_a_client_that_never_took_part_uses_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, APFL(), rounds=2, faults=lambda round, clients: clients == 1)
    assert deployed(report)[1] == pytest.approx(report.server["w"].item())


def test_a_lost_client_mixes_its_old_model_with_the_new_shared_one(two_clients: Task) -> None:
    report = play(two_clients, APFL(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert deployed(report)[1] == pytest.approx(0.5 * 0.75 + 0.5 * report.server["w"].item())


@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip": 0.3}])
@pytest.mark.parametrize(("alpha", "other"), [(1.0, Local()), (0.0, FedAvg())])
def test_the_tasks_rule_holds_for_both_models(make_task, training, alpha, other) -> None:
    task = make_task(dtype=torch.float64, **training)
    mine, theirs = (personal_models(play(task, one, rounds=2)) for one in (APFL(alpha=alpha), other))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


def test_alpha_can_be_adapted_in_a_vectorised_cohort(make_task) -> None:
    task = make_task(dtype=torch.float64, shares=(0.6, 0.4, 0.0))
    runs = (play(task, APFL(adaptive=True), rounds=2, strategy=one) for one in ("whole", "loop"))
    whole, loop = map(personal_models, runs)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, loop, strict=True) for name in b)
