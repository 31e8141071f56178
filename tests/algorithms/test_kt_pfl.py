"""KT-pFL, by hand: who learns from whom, what a coefficient's step is, and where clients of groups end."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import biased
from scipy.optimize import minimize

from atoll import Recipe, Task
from atoll.algorithms.fedmd import FedMD
from atoll.algorithms.kt_pfl import KTpFL
from atoll.kernel.errors import EngineError, TaskError
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task


def objective(c: np.ndarray, s: torch.Tensor, k: int, rho: float) -> float:
    """What client k's coefficients minimise; s has the probabilities of each client, [client, sample, class]."""
    q = torch.einsum("j,jxc->xc", torch.from_numpy(c), s)
    apart = (q * (q.log() - s[k].log())).sum(1).mean()
    return float(apart + rho * ((torch.from_numpy(c) - 1 / len(c)) ** 2).sum())


@pytest.mark.closed_form("kt-pfl")
def test_a_step_of_the_coefficients_is_along_the_slope_of_their_objective() -> None:
    method = KTpFL(coefficient_pull=0.3, coefficient_lr=0.01, coefficient_steps=1)
    logits = torch.tensor([[[1.0, -1.0]], [[0.5, 0.2]], [[-2.0, 0.3]]], dtype=torch.float64)
    c = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    s = logits.softmax(2)
    found = method.improve(c, s, torch.ones(3, dtype=torch.bool))
    for k in range(3):
        ahead = np.eye(3) * 1e-6
        slope = [
            (objective(c[k].numpy() + e, s, k, 0.3) - objective(c[k].numpy() - e, s, k, 0.3)) / 2e-6 for e in ahead
        ]
        step = -0.01 * (np.array(slope) - np.mean(slope))  # no coefficient is cut at 0 here
        assert (found[k] - c[k]).tolist() == pytest.approx(step.tolist(), abs=1e-8)


@pytest.mark.closed_form("kt-pfl")
@pytest.mark.parametrize("rho", [0.05, 0.7])
def test_many_steps_of_the_coefficients_end_where_a_solver_ends(rho: float) -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(4, 5, 3)))
    method = KTpFL(coefficient_pull=rho, coefficient_lr=0.05, coefficient_steps=3000)
    s = logits.softmax(2)
    found = method.improve(torch.full((4, 4), 0.25, dtype=torch.float64), s, torch.ones(4, dtype=torch.bool))
    for k in range(4):
        whole = {"type": "eq", "fun": lambda c: c.sum() - 1}
        best = minimize(
            objective, np.full(4, 0.25), (s, k, rho), method="SLSQP", bounds=[(0, 1)] * 4, constraints=whole, tol=1e-12
        )
        assert found[k].tolist() == pytest.approx(best.x.tolist(), abs=1e-4)


@pytest.mark.limit("kt-pfl", "fedmd")
def test_equal_coefficients_are_fedmd_of_probabilities() -> None:
    task = build_task()
    still, theirs = (play(task, method, 3) for method in (KTpFL(coefficient_steps=0), FedMD(send="probs")))
    for mine, other in zip(personal_models(still), personal_models(theirs), strict=True):
        assert all(torch.allclose(leaf, other[name], rtol=0, atol=1e-12) for name, leaf in mine.items())
    pulled = play(task, KTpFL(coefficient_pull=1e6, coefficient_lr=1e-7), 3)
    assert torch.allclose(pulled.server.c, still.server.c, rtol=0, atol=1e-5)


@pytest.mark.purpose("kt-pfl")
def test_clients_learn_from_those_who_answer_as_they_do() -> None:
    report = play(
        biased((1, 0), (1, 0), (1, 1), (1, 1), lr=0.5),
        KTpFL(coefficient_pull=0.01, coefficient_lr=0.05, coefficient_steps=500),
        3,
    )
    mixing = report.algorithm.mixing(report.server)
    assert mixing[0].tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0.01)
    assert mixing[3].tolist() == pytest.approx([0, 0, 0.5, 0.5], abs=0.01)


def test_places_of_a_text_count_as_samples() -> None:
    """catches: a sum over places, which makes steps as many times larger."""
    method, everybody = KTpFL(coefficient_lr=0.1, coefficient_steps=1), torch.ones(2, dtype=torch.bool)
    c, s = torch.full((2, 2), 0.5, dtype=torch.float64), torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]], dtype=torch.float64)
    places = s[..., None].expand(-1, -1, -1, 7)
    torch.testing.assert_close(method.improve(c, places, everybody), method.improve(c, s, everybody))


def test_a_pull_that_overshoots_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        play(build_task(), KTpFL(samples=7, coefficient_pull=1000), 1)
    assert "2 * coefficient_lr * coefficient_pull" in caplog.text


def test_the_first_round_by_hand() -> None:
    """catches: a mixture of logits, and a client that gets another one's row."""
    task = biased((1, 0), (1, 1))
    report = play(task, KTpFL(coefficient_steps=0))
    p = float(torch.tensor([2.0, -2.0], dtype=torch.float64).softmax(0)[0])
    assert report.server.s.value[:, 0].flatten().tolist() == pytest.approx([p, 1 - p, 1 - p, p])
    method = replace(report.algorithm, coefficient_steps=1)
    c = torch.tensor([[0.75, 0.25], [0.0, 1.0]], dtype=torch.float64)
    sent = method.unicast(replace(report.server, c=c), np.array([1, 0]))
    assert sent.q.value[0, 0].tolist() == pytest.approx([1 - p, p])
    assert sent.q.value[1, 3].tolist() == pytest.approx([0.75 * p + 0.25 * (1 - p), 0.75 * (1 - p) + 0.25 * p])


def test_who_has_not_answered_counts_once_it_does() -> None:
    """Rows are distributions over those who have answered; a newcomer comes with its share of 1/N."""
    task, method = (
        biased((1, 0), (1, 0), (1, 1), (1, 1)),
        KTpFL(coefficient_pull=0.01, coefficient_lr=0.05, coefficient_steps=50),
    )
    report = play(task, method, 1, cohort=2)
    server, seen = report.server, report.server.seen
    assert seen.sum() == 2
    mixing = method.mixing(server)
    assert mixing.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert not mixing[:, ~seen].any()
    assert server.c[seen][:, ~seen].flatten().tolist() == pytest.approx([0.25] * 4)
    assert mixing[~seen][:, seen].flatten().tolist() == pytest.approx([0.5] * 4)
    assert torch.equal(replace(method, coefficient_steps=0).improve(server.c, server.s.value, seen), server.c)
    everybody = replace(server, seen=torch.ones_like(seen))
    assert method.mixing(everybody).sum(1).tolist() == pytest.approx([1.0] * 4)
    assert method.mixing(everybody)[seen][:, ~seen].flatten().tolist() == pytest.approx([0.25] * 4)


@pytest.mark.limit("kt-pfl")
def test_equal_clients_keep_equal_coefficients_and_do_what_they_do_alone() -> None:
    alike = biased((1, 0), (1, 0), lr=0.5)
    report = play(alike, KTpFL(), 3)
    assert report.server.c.flatten().tolist() == pytest.approx([0.5] * 4)
    one, other = personal_models(report)
    alone, _ = personal_models(play(alike, KTpFL(digest_epochs=0), 3))
    assert one["b"].tolist() == pytest.approx(other["b"].tolist())
    assert one["b"].tolist() == pytest.approx(alone["b"].tolist())


def test_clients_of_all_architectures_teach_each_other() -> None:
    task = Recipe(clients=4, model="mlp:8/mlp:12", public=0.1).build()
    report = play(task, KTpFL(samples=20), 3)
    one, other = report.server.states
    assert one.seen.all()
    assert torch.equal(one.c, other.c)
    assert torch.equal(one.s.value, other.s.value)
    assert not torch.allclose(one.c, torch.full_like(one.c, 0.25))
    alone = play(task, KTpFL(samples=20, digest_epochs=0), 3)
    pairs = zip(personal_models(report), personal_models(alone), strict=True)
    assert all(any(not torch.equal(leaf, theirs[name]) for name, leaf in mine.items()) for mine, theirs in pairs)


def test_no_model_travels_and_a_site_gets_nothing_of_others() -> None:
    report = play(build_task(), KTpFL(samples=7), 2)
    up = [entry for entry in report.ledger.messages() if entry.direction == "up"]
    assert {entry.kind for entry in up} <= {"answers", "statistic"}
    left = report.algorithm.state_for(report.server, np.array([1]))
    assert left.s is None
    assert left.c.unique().numel() == 1


def test_extreme_answers_are_no_fault() -> None:
    logits = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])
    c = KTpFL().improve(
        torch.full((2, 2), 0.5, dtype=torch.float64), logits.softmax(2), torch.ones(2, dtype=torch.bool)
    )
    assert c.isfinite().all()
    assert c.sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_a_task_without_classes_is_refused(two_clients: Task) -> None:
    public = (two_clients.x[:1], two_clients.y[:1])
    with pytest.raises(TaskError, match="classes"):
        play(replace(two_clients, public=public), KTpFL())


def test_too_many_clients_for_pairs_are_refused() -> None:
    facts = replace(build_task().public_facts(), clients=10_000_000)
    with pytest.raises(EngineError, match="every pair of 10000000 clients"):
        KTpFL().start(facts)
