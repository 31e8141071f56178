"""pFedMe as a survey has it, by hand: c = 1, 3, steps are 0.5, weights 1 and 3."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedprox import FedProx
from atoll.algorithms.pfedme_survey import PFedMeSurvey
from atoll.testing.conformance import personal_models, play


def test_the_proximal_points_are_averaged(two_clients: Task) -> None:
    # lam = 0.5, two steps: theta = 0.5 c, then 0.625 c; w is their mean, whatever their samples.
    report = play(two_clients, PFedMeSurvey(lam=0.5, epochs=2))
    assert [model["w"].item() for model in personal_models(report)] == pytest.approx([0.625, 1.875])
    assert report.server["w"] == pytest.approx((0.625 + 1.875) / 2)
    by_samples = play(two_clients, PFedMeSurvey(lam=0.5, epochs=2, weighting="samples"))
    assert by_samples.server["w"] == pytest.approx((1 * 0.625 + 3 * 1.875) / 4)


@pytest.mark.closed_form("pfedme-survey")
def test_the_shadow_stands_between_what_was_sent_and_the_shared_model(two_clients: Task) -> None:
    # From w, a step goes half the way to c and lam / 2 of the way to the shadow v. Round 1: w = v = 0, so theta is
    # c / 2, and w = 1. Round 2: v is the mean of theta and w, 0.75 and 1.25.
    report = play(two_clients, PFedMeSurvey(lam=0.5), rounds=2)
    expected = [1 + 0.5 * (c - 1) + 0.25 * (v - 1) for c, v in ((1, 0.75), (3, 1.25))]
    assert [model["w"].item() for model in personal_models(report)] == pytest.approx(expected)


def test_a_shadow_that_never_follows_is_what_was_sent_last(two_clients: Task) -> None:
    report = play(two_clients, PFedMeSurvey(lam=0.5, follow=0.0), rounds=2)
    expected = [1 + 0.5 * (c - 1) + 0.25 * (c / 2 - 1) for c in (1, 3)]
    assert [model["w"].item() for model in personal_models(report)] == pytest.approx(expected)


def test_with_a_shadow_at_the_shared_model_the_server_is_that_of_fedprox(two_clients: Task) -> None:
    mine, theirs = (
        play(two_clients, one, rounds=3).server["w"]
        for one in (PFedMeSurvey(lam=0.5, follow=1.0, weighting="samples", epochs=2), FedProx(mu=0.5, epochs=2))
    )
    assert torch.equal(mine, theirs)


def test_who_is_absent_keeps_theta_and_who_never_came_uses_w(two_clients: Task) -> None:
    method = PFedMeSurvey(lam=0.5)
    first = personal_models(play(two_clients, method))[1]
    absent = play(two_clients, method, rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert torch.equal(personal_models(absent)[1]["w"], first["w"])
    never = play(two_clients, method, rounds=2, faults=lambda round, clients: clients == 1)
    assert torch.equal(personal_models(never)[1]["w"], never.server["w"])


def test_a_new_client_finds_its_proximal_point(two_clients: Task, make_cohort) -> None:
    w = two_clients.network.initial.map(lambda leaf: leaf + 1.0)
    found = PFedMeSurvey(lam=1.0).welcome(w, make_cohort(two_clients))
    assert found["w"].flatten().tolist() == pytest.approx([1.0, 2.0])
