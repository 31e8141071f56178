"""FCF: the user's vector is the least-squares solution, and the message its gradient; newcomers are solved for."""

import numpy as np
import pytest
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fcf import FCF, describe_user, moments_of, solve_user
from atoll.kernel.errors import ModelError
from atoll.kernel.params import Params


def loss_of(p, q, b, x, alpha, lam):
    return ((1 + alpha * x) * (x - q @ p - b) ** 2).sum() + lam * (p**2).sum()


def test_the_vector_minimises_and_the_message_is_the_gradient():
    draw = torch.from_numpy(np.random.Generator(np.random.Philox(1)).normal(size=(9, 4)))
    q, b, alpha, lam = draw[:, :3].clone(), draw[:, 3].clone(), 7.0, 0.5
    known, x = torch.tensor([1, 4, 6, 9]), torch.zeros(9, dtype=torch.float64)
    x[known[:-1]] = 1
    table, knows = Params({"body.vector": q, "body.bias": b}), Params.of(item=known)
    p = solve_user(alpha, lam, table, moments_of(table), knows)["p"].requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(p, q, b, x, alpha, lam), p)
    assert slope.abs().max() < 1e-9
    q, b = q.requires_grad_(), b.requires_grad_()
    of_q, of_b = torch.autograd.grad(loss_of(p.detach(), q, b, x, alpha, lam), (q, b))
    sent = describe_user(alpha, lam, True, table, moments_of(table), knows)
    torch.testing.assert_close(sent["body.vector"], -of_q / 2)
    torch.testing.assert_close(sent["body.bias"], -of_b / 2)


def test_one_round_is_one_step_along_the_sum():
    task, seen = make_ratings(), []
    report = recommend(task, FCF(server="sgd", rate=0.01, lam=2.0), 1, on_reply=lambda _, arrival: seen.append(arrival))
    start = task.network.initial["body.vector"].double()
    total = sum(arrival.fields["gradient"]["body.vector"].sum(0) for arrival in seen)
    torch.testing.assert_close(report.server.table["body.vector"], start + 0.01 * (total - 2.0 * start))


def test_without_biases_there_are_none():
    report = recommend(make_ratings(), FCF(bias=False), 2)
    assert (report.server.table["body.bias"] == 0).all()


def test_it_learns_and_keeps_nothing():
    task = make_ratings()
    report = recommend(task, FCF(), 30, metric="mrr")
    losses = [line["loss"]["loss/main"] for line in report.history]
    assert losses[-1] < losses[0]
    assert np.isfinite(report.scores()).all()
    assert {message.kind for message in report.ledger.messages() if message.direction == "up"} >= {"model"}
    assert FCF.sums_suffice


def test_other_networks_are_refused():
    with pytest.raises(ModelError, match="FCF shares a table of items and nothing else. NeuralItems shares"):
        recommend(make_ratings(model="neural-items"), FCF(), 1)
