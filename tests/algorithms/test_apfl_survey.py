"""APFL as a survey has it, by hand: c = 1, 3, both models begin at 0, steps are 0.5, weights 1 and 3."""

from dataclasses import replace

import pytest
import torch

from atoll import Report, Task
from atoll.algorithms.apfl_survey import APFLSurvey
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def alphas(report: Report) -> list[float]:
    """The share that both clients chose in the last round."""
    return [report.history[-1]["observed"]["alpha"][client] for client in "01"]


def test_models_are_mixed_and_alpha_weighs_the_shared_one(two_clients: Task) -> None:
    # Round 1: both steps lead to c / 2. Round 2: w_k = 1.125, 2.125 and v - eta g(v) = 3/4 c, mixed 1 : 3.
    report = play(two_clients, APFLSurvey(alpha=0.25, adaptive=False), rounds=2)
    mixed = [0.25 * 1.125 + 0.75 * 0.75, 0.25 * 2.125 + 0.75 * 2.25]
    assert deployed(report) == pytest.approx(mixed)
    kept = report.population.memory.save(round=0)["kept"]  # type: ignore[index]
    assert kept["w"].flatten().tolist() == pytest.approx(mixed)


def test_alpha_is_chosen_on_validation_data(two_clients: Task) -> None:
    # All samples of a client are the same here, so that the training samples can also be the validation samples.
    task = replace(two_clients, splits={**two_clients.splits, "val": two_clients.splits["train"]})
    report = play(task, APFLSurvey(), rounds=2)
    # After round 1 v = 0.5, 1.5 and w = 1.25. (1 - alpha) v + alpha w is nearest to c = 1, 3 at 0.7 and at 0.
    assert alphas(report) == pytest.approx([0.7, 0])


def test_without_validation_data_alpha_stays_as_given(two_clients: Task) -> None:
    assert alphas(play(two_clients, APFLSurvey(alpha=0.3))) == pytest.approx([0.3, 0.3])


def test_without_the_shared_part_it_is_local(two_clients: Task) -> None:
    runs = (
        play(two_clients, one, rounds=3) for one in (APFLSurvey(alpha=0.0, adaptive=False, epochs=2), Local(epochs=2))
    )
    mine, theirs = map(personal_models, runs)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_the_shared_model_is_that_of_fedavg(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=3) for one in (APFLSurvey(), FedAvg()))
    assert torch.equal(mine.server["w"], plain.server["w"])
    assert mine.ledger.entries == plain.ledger.entries


def test_a_client_that_never_took_part_uses_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, APFLSurvey(), rounds=2, faults=lambda round, clients: clients == 1)
    assert deployed(report)[1] == report.server["w"].item()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_cohort_can_be_vectorised(make_task, adaptive: bool) -> None:
    task = make_task(dtype=torch.float64, shares=(0.6, 0.4, 0.0))
    runs = (play(task, APFLSurvey(adaptive=adaptive), rounds=2, strategy=one) for one in ("whole", "loop"))
    whole, loop = map(personal_models, runs)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, loop, strict=True) for name in b)
