"""FedAMP, by hand: c = 1, 3, both models begin at 0, steps are 0.5."""

import logging
import math

import pytest
import torch

from atoll import Report, Task
from atoll.algorithms.fedamp import FedAMP
from atoll.algorithms.local import Local
from atoll.compose import create
from atoll.kernel.errors import HyperparameterError
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics

THREE = torch.tensor([[0.0], [2.0], [10.0]], dtype=torch.float64)


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def attention(task: Task, algorithm: FedAMP, rounds: int = 1, **more) -> torch.Tensor:
    report = play(task, algorithm, rounds, **more)
    return report.algorithm.mixing(report.server)


def test_one_round_by_hand(two_clients: Task) -> None:
    # From 0 with u = 0 nobody feels a pull: w = 0.5, 1.5, apart^2 = 1, A' = exp(-1 / sigma) / sigma.
    report = play(two_clients, FedAMP(alpha=0.5, sigma=2.0))
    xi = 0.5 * math.exp(-0.5) / 2
    assert deployed(report) == pytest.approx([0.5, 1.5])
    torch.testing.assert_close(report.server.xi, torch.tensor([[1 - xi, xi], [xi, 1 - xi]]).double())


def test_the_second_round_draws_towards_the_mixture(two_clients: Task) -> None:
    # w <- w - eta ((w - c) + (lam / alpha) (w - u)) with u = w + xi (other - w).
    # catches: PFLlib's FedAMP, whose penalty has no gradient, so that clients train alone (0.75 and 2.25).
    xi, pull = 0.5 * math.exp(-0.5) / 2, 0.3 / 0.5
    expected = [0.5 - 0.5 * ((0.5 - 1) - pull * xi), 1.5 - 0.5 * ((1.5 - 3) + pull * xi)]
    assert deployed(play(two_clients, FedAMP(lam=0.3, alpha=0.5, sigma=2.0), rounds=2)) == pytest.approx(expected)


def test_training_may_begin_at_the_mixture(two_clients: Task) -> None:
    # With lam = 0 only the start differs from training alone.
    xi = 0.5 * math.exp(-0.5) / 2
    algorithm = FedAMP(lam=0.0, alpha=0.5, sigma=2.0, begin="received")
    expected = [(0.5 + xi + 1) / 2, (1.5 - xi + 3) / 2]
    assert deployed(play(two_clients, algorithm, rounds=2)) == pytest.approx(expected)


def test_lam_zero_is_training_alone(two_clients: Task) -> None:
    mine, theirs = (personal_models(play(two_clients, one, rounds=3)) for one in (FedAMP(lam=0.0), Local()))
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_no_self_weight_is_negative_however_large_alpha_is(caplog: pytest.LogCaptureFixture) -> None:
    # catches: implementations that let xi_ii fall below 0 and extrapolate.
    with caplog.at_level(logging.INFO, logger="atoll.algorithms"):
        xi = attention(quadratics(THREE, lr=0.5), FedAMP(alpha=1e6, sigma=5.0))
    assert "self-weights would be negative with alpha=1e+06" in caplog.text
    assert xi.min() == 0  # of the client in the middle: the largest alpha that is possible
    torch.testing.assert_close(xi.sum(1), torch.ones(3).double())


def test_a_small_alpha_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="atoll.algorithms"):
        xi = attention(quadratics(THREE, lr=0.5), FedAMP(alpha=0.1, sigma=5.0))
    assert not [record for record in caplog.records if record.name == "atoll.algorithms"]
    assert xi[0, 1] == pytest.approx(0.1 * math.exp(-1 / 5) / 5)


def test_the_median_of_the_squared_distances_can_be_the_scale() -> None:
    # Models 0, 1, 5: squared distances 1, 16, 25.
    task = quadratics(THREE, lr=0.5)
    torch.testing.assert_close(
        attention(task, FedAMP(alpha=0.1, sigma="median")), attention(task, FedAMP(alpha=0.1, sigma=16.0))
    )


def test_attention_does_not_depend_on_the_scale_of_the_models() -> None:
    # With alpha large enough to be lowered, only ratios of distances matter.
    small, large = (attention(quadratics(THREE * scale, lr=0.5), FedAMP(alpha=1e9)) for scale in (1.0, 1000.0))
    torch.testing.assert_close(small, large)


def test_heur_attends_by_angle() -> None:
    optima = torch.tensor([[2.0, 0.0], [0.0, 4.0], [-6.0, 0.0]], dtype=torch.float64)
    xi = attention(quadratics(optima, lr=0.5), FedAMP(variant="heur", sharpness=2.0, self_weight=0.4))
    # Cosines with the first client: 0 and -1; with the second: 0 and 0.
    one, two = 1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2))
    torch.testing.assert_close(xi[0], torch.tensor([0.4, 0.6 * one, 0.6 * two]).double())
    torch.testing.assert_close(xi[1], torch.tensor([0.3, 0.4, 0.3]).double())


def test_only_clients_that_were_heard_of_are_attended_to() -> None:
    for variant in ("amp", "heur"):
        xi = attention(quadratics(THREE, lr=0.5), FedAMP(variant=variant), faults=lambda round, clients: clients == 1)  # type: ignore[arg-type]
        assert xi[:, 1].tolist() == [0, 0, 0]
        assert xi[0, 2] > 0
        assert xi[1].tolist() == [0.5, 0, 0.5]  # it has no model to compare, so that all others count alike


def test_a_client_that_never_trained_has_the_mean_of_the_others() -> None:
    # c = 0, 2, 10 and the second one is never heard of: the others have 0, 5 and are not drawn to each other.
    report = play(quadratics(THREE, lr=0.5), FedAMP(sigma=1e-9), faults=lambda round, clients: clients == 1)
    assert deployed(report) == pytest.approx([0, 2.5, 5])


@pytest.mark.parametrize("begin", ["own", "received"])
def test_a_client_that_trains_for_the_first_time_begins_at_what_it_receives(begin: str) -> None:
    # u = 2.5, where there is no pull: 2.5 - 0.5 (2.5 - 2).
    algorithm = FedAMP(sigma=1e-9, begin=begin)  # type: ignore[arg-type]
    faults = lambda round, clients: (clients == 1) & (round == 0)  # noqa: E731
    report = play(quadratics(THREE, lr=0.5), algorithm, rounds=2, faults=faults)
    assert deployed(report)[1] == pytest.approx(2.25)
    assert report.server.w["w"][1].item() == pytest.approx(2.25)


def test_the_last_model_of_an_absent_client_still_counts(two_clients: Task) -> None:
    report = play(two_clients, FedAMP(), rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0))
    assert report.server.w["w"][1].item() == pytest.approx(1.5)
    assert report.server.xi[0, 1] > 0
    assert deployed(report)[1] == pytest.approx(1.5)


def test_one_client_alone_attends_to_itself() -> None:
    for variant in ("amp", "heur"):
        task = quadratics(THREE[1:2], lr=0.5)
        report = play(task, FedAMP(variant=variant, lam=0.0), rounds=2)  # type: ignore[arg-type]
        assert report.server.xi.tolist() == [[1]]
        assert deployed(report) == pytest.approx([1.5])


def test_a_mixture_goes_down_and_a_model_comes_up(two_clients: Task) -> None:
    report = play(two_clients, FedAMP(), rounds=2)
    model = len(to_bytes(two_clients.network.initial))
    assert report.ledger.by_kind() == {("down", "model"): 2 * 2 * model, ("up", "model"): 2 * 2 * model}


def test_statistics_of_batchnorm_stay_with_the_client(make_task) -> None:
    body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    task = make_task(lambda: body, dtype=torch.float64)
    report = play(task, FedAMP(), rounds=2)
    assert set(report.server.w) == set(task.network.initial.trained)
    means = [model["1.running_mean"] for model in personal_models(report)]
    assert not torch.equal(means[0], means[2])


def test_a_new_client_trains_alone_once(two_clients: Task, make_cohort) -> None:
    model = FedAMP().welcome({}, make_cohort(two_clients))
    assert model["w"].flatten().tolist() == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize("algorithm", [FedAMP(variant="heur"), FedAMP(begin="received"), FedAMP(sigma=1.0)])
def test_every_variant_can_be_cut_into_chunks(make_task, algorithm: FedAMP) -> None:
    task = make_task(dtype=torch.float64)
    whole, chunks = (personal_models(play(task, algorithm, rounds=3, strategy=one)) for one in ("whole", "chunk:3"))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, chunks, strict=True) for name in b)


def test_a_pull_that_overshoots_is_named() -> None:
    assert FedAMP(lam=3.0, alpha=0.5).pulls(lr=0.5) == {"lr * lam / alpha": pytest.approx(3.0)}


def test_the_surveys_method_of_this_name_is_pointed_to() -> None:
    with pytest.raises(HyperparameterError, match="a method of its own: `interp`"):
        create("fedamp:variant=interp")
