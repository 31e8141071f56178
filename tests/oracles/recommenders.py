"""Recommenders: users who share a table of items, and keep what is their own.

Pairs (k, i) of a user and an item: 1 where the user knows the item, 0 for drawn others, four for each. All items that a
user does not train on are as likely. A pair's loss is the cross-entropy of sigmoid(s_ki).
"""

import functools
from itertools import pairwise

import torch
from oracles.tools import PROBES, Federation, Outcome, oracle
from ratings import make_ratings
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from atoll import Task
from atoll.kernel.randomness import Keys

ITEMS, RANK = 11, 16
RATE, PULL, OTHERS = 1.0, 0.01, 4  # step size, l2 and negatives by default


@functools.cache
def make_task(model: str | None = None) -> Task:
    """Make eight users of unequal size, in float64."""
    return make_ratings(model=model).to(torch.device("cpu"), torch.float64)


def make_neural_task() -> Task:
    """Make the same users, whose items are scored by a network."""
    return make_task("neural-items")


def known(fed: Federation, k: int) -> list[int]:
    """Return the items that a user trains on."""
    return fed.data(k)[1].tolist()


def draw_others(fed: Federation, k: int, when: int, epoch: int) -> list[list[int]]:
    """Return, for each item that a user trains on, the items that stand against it in an epoch."""
    mine = sorted(set(known(fed, k)))
    free = [item for item in range(ITEMS) if item not in mine]
    keys = Keys.of(torch.tensor([k]), fed.settings.seed, "negatives", when).fold(epoch)
    bits = keys.bits(torch.arange(len(known(fed, k)) * OTHERS)).tolist()
    drawn = [free[one % len(free)] for one in bits]
    return [drawn[place * OTHERS : (place + 1) * OTHERS] for place in range(len(known(fed, k)))]


def pairs_of(fed: Federation, k: int, when: int, epoch: int) -> list[tuple[int, float]]:
    """Return the items of a user's pairs with their targets."""
    found = []
    for item, others in zip(known(fed, k), draw_others(fed, k, when, epoch), strict=True):
        found += [(item, 1.0), *((other, 0.0) for other in others)]
    return found


def table_of(fed: Federation) -> tuple[Tensor, Tensor]:
    """Return the initial vectors and biases of items."""
    w = fed.w0
    return w[: ITEMS * RANK].reshape(ITEMS, RANK).clone(), w[ITEMS * RANK : ITEMS * (RANK + 1)].clone()


def scores(fed: Federation, rows: list[Tensor]) -> Outcome:
    """Each user answers with its scores of all items, whatever the sample."""
    return Outcome(answers=[one.expand(PROBES, ITEMS) for one in rows])


def errors(p: Tensor, q: Tensor, b: Tensor, pairs: list[tuple[int, float]]) -> list[float]:
    """Return sigmoid(s) - y of every pair."""
    return [float(torch.sigmoid(p @ q[i] + b[i]) - y) for i, y in pairs]


@oracle("local-items", task=make_task)
def local_items(fed: Federation) -> Outcome:
    """A number for each item, moved against the mean gradient of the pairs that it is part of."""
    b = {k: torch.zeros(ITEMS, dtype=torch.float64) for k in fed.clients}
    for t in fed.rounds:
        for k in t.asked:
            pairs = pairs_of(fed, k, t.number, 0)
            e = errors(torch.zeros(RANK), torch.zeros(ITEMS, RANK), b[k], pairs)
            for i in {i for i, _ in pairs}:
                mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
                b[k][i] -= RATE * sum(mine) / len(mine)
            t.send(k)
    return scores(fed, [b[k] for k in fed.clients])


@oracle("fedmf", task=make_task)
@oracle("fedmf", task=make_task, average="all", epochs=2)
@oracle("fedmf", task=make_task, crowd=4, rate=0.5)
def fedmf(fed: Federation, average: str = "touched", epochs: int = 1, crowd: int = 1, rate: float = RATE) -> Outcome:
    """Chai et al., 2021, with ranking by cross-entropy; rows move by the mean over those who touched them."""
    q, b = table_of(fed)
    p = {k: torch.zeros(RANK, dtype=torch.float64) for k in fed.clients}
    for t in fed.rounds:
        for k in t.asked:
            q_k, b_k, count = q.clone(), b.clone(), torch.zeros(ITEMS, dtype=torch.float64)
            for epoch in range(epochs):
                pairs = pairs_of(fed, k, t.number, epoch)
                e = errors(p[k], q_k, b_k, pairs)
                of_p = sum(one * q_k[i] for one, (i, _) in zip(e, pairs, strict=True)) / len(pairs) + PULL * p[k]
                new_q, new_b = q_k.clone(), b_k.clone()
                for i in {i for i, _ in pairs}:
                    mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
                    new_q[i] -= rate * (sum(mine) / len(mine) * p[k] + PULL * q_k[i])
                    new_b[i] -= rate * sum(mine) / len(mine)
                    count[i] += len(mine)
                p[k], q_k, b_k = p[k] - rate * of_p, new_q, new_b
            t.send(k, q=q_k - q, b=b_k - b, count=count)
        q, b = move_rows(q, b, t.replies, average, crowd)
    return scores(fed, [q @ p[k] + b for k in fed.clients])


def move_rows(q: Tensor, b: Tensor, replies: list, average: str = "touched", crowd: int = 1) -> tuple[Tensor, Tensor]:
    """Return the table after rows moved by the mean over those who touched them, by their pairs; or over all."""
    q, b = q.clone(), b.clone()
    for i in range(ITEMS):
        touched = [one for one in replies if one.count[i] > 0]
        if len(touched) < crowd or not touched:
            continue
        share = [float(one.count[i]) * one.discount for one in touched]
        total = sum(share) if average == "touched" else sum(one.discount for one in replies)
        q[i] += sum(a * one.q[i] for a, one in zip(share, touched, strict=True)) / total
        b[i] += sum(a * one.b[i] for a, one in zip(share, touched, strict=True)) / total
    return q, b


@oracle("fcf", task=make_task, server="sgd", rate=0.02)
@oracle("fcf", task=make_task, alpha=3.0, lam=0.5)
@oracle("fcf", task=make_task, bias=False)
def fcf(
    fed: Federation, alpha: float = 10.0, lam: float = 1.0, rate: float = 0.03, server: str = "adam", bias: bool = True
) -> Outcome:
    """Ammad-ud-din et al., 2019: users' vectors in closed form; the server steps along sums, by Adam or plainly."""
    q, b = table_of(fed)

    def solve(k: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.zeros(ITEMS, dtype=torch.float64)
        x[known(fed, k)] = 1.0
        c = 1 + alpha * x
        left = sum(c[i] * torch.outer(q[i], q[i]) for i in range(ITEMS)) + lam * torch.eye(RANK, dtype=torch.float64)
        return torch.linalg.solve(left, sum(c[i] * (x[i] - b[i]) * q[i] for i in range(ITEMS))), x, c

    m = s = torch.zeros(ITEMS, RANK + 1, dtype=torch.float64)
    steps = 0
    for t in fed.rounds:
        for k in t.asked:
            p, x, c = solve(k)
            e = c * (x - q @ p - b)
            t.send(k, step=torch.cat([torch.outer(e, p), e[:, None] * bias], 1))
        if not t.replies:
            continue
        steps += 1
        uphill = sum(one.step for one in t.replies) - lam * torch.cat([q, torch.zeros(ITEMS, 1)], 1)
        if server == "adam":
            m, s = 0.9 * m - 0.1 * uphill, 0.999 * s + 0.001 * uphill**2
            uphill = -(m / (1 - 0.9**steps)) / ((s / (1 - 0.999**steps)).sqrt() + 1e-8)
        q, b = q + rate * uphill[:, :-1], b + rate * uphill[:, -1] * bias
    return scores(fed, [q @ solve(k)[0] + b for k in fed.clients])


WIDTHS = (2 * RANK, 2 * RANK, RANK, RANK // 2, 1)  # of the layers of FedNCF's network


@oracle("fedncf", task=make_neural_task)
@oracle("fedncf", task=make_neural_task, epochs=2, rate=0.3, l2=0.2, crowd=3)
def fedncf(fed: Federation, epochs: int = 1, rate: float = RATE, l2: float = PULL, crowd: int = 1) -> Outcome:
    """Perifanis, Efraimidis, 2022: MLP([p; q_i]) + b_i; rows are averaged by who touched them, the network by all."""
    first = ITEMS * (RANK + 1)
    (q, b), theta = table_of(fed), fed.w0[first + RANK :].clone()  # the user's vector stands between both
    p = {k: torch.zeros(RANK, dtype=torch.float64) for k in fed.clients}

    def score(theta: Tensor, p: Tensor, q: Tensor, b: Tensor) -> Tensor:
        h, start = torch.cat([p.expand_as(q), q], 1), 0
        for inputs, outputs in pairwise(WIDTHS):
            if start:
                h = h.relu()
            weight = theta[start : start + inputs * outputs].reshape(outputs, inputs)
            start += inputs * outputs
            h = h @ weight.T + theta[start : start + outputs]
            start += outputs
        return h[:, 0] + b

    for t in fed.rounds:
        for k in t.asked:
            here = [theta, p[k], q, b]
            count = torch.zeros(ITEMS, dtype=torch.float64)
            for epoch in range(epochs):
                pairs = pairs_of(fed, k, t.number, epoch)
                i, y = torch.tensor([i for i, _ in pairs]), torch.tensor([y for _, y in pairs], dtype=torch.float64)
                at = [one.clone().requires_grad_() for one in here]
                z = score(at[0], at[1], at[2][i], at[3][i])
                g = torch.autograd.grad(cross_entropy(z, y, reduction="sum"), at)
                touches = torch.bincount(i, minlength=ITEMS).double()
                each = rate / touches.clamp(min=1)
                here = [
                    here[0] - rate * g[0] / len(pairs),
                    here[1] - rate * (g[1] / len(pairs) + l2 * here[1]),
                    here[2] - each[:, None] * g[2] - rate * l2 * (touches > 0)[:, None] * here[2],
                    here[3] - each * g[3],
                ]
                count += touches
            p[k] = here[1]
            t.send(k, delta=here[0] - theta, q=here[2] - q, b=here[3] - b, count=count)
        if t.replies:
            theta = theta + t.mean("delta")
        q, b = move_rows(q, b, t.replies, crowd=crowd)
    return scores(fed, [score(theta, p[k], q, b) for k in fed.clients])


@oracle("fedrap", task=make_task)
@oracle("fedrap", task=make_task, own_rate=0.5, lam=0.3, mu=0.2)
def fedrap(fed: Federation, own_rate: float = 1.0, lam: float = 0.01, mu: float = 0.001) -> Outcome:
    """Li, Long, Zhou, ICLR 2024: p.(c + d) + b, less lam mean (d - c)^2, and mu mean |c|, over the rows of a step."""
    c, b = table_of(fed)
    p = {k: torch.zeros(RANK, dtype=torch.float64) for k in fed.clients}
    d = {k: torch.zeros(ITEMS, RANK, dtype=torch.float64) for k in fed.clients}
    for t in fed.rounds:
        for k in t.asked:
            pairs, count = pairs_of(fed, k, t.number, 0), torch.zeros(ITEMS, dtype=torch.float64)
            e = errors(p[k], c + d[k], b, pairs)
            of_p = sum(one * (c + d[k])[i] for one, (i, _) in zip(e, pairs, strict=True)) / len(pairs) + PULL * p[k]
            new_c, new_b, new_d = c.clone(), b.clone(), d[k].clone()
            rows = sorted({i for i, _ in pairs})
            for i in rows:
                mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
                g = sum(mine) / len(mine)
                apart = 2 * lam * (d[k][i] - c[i]) / RANK
                new_c[i] -= RATE * (g * p[k] + PULL * c[i] + apart + mu * c[i].sign() / RANK)
                new_d[i] -= own_rate * (g * p[k] - apart)
                new_b[i] -= RATE * g
                count[i] += len(mine)
            p[k], d[k] = p[k] - RATE * of_p, new_d
            t.send(k, q=new_c - c, b=new_b - b, count=count)
        c, b = move_rows(c, b, t.replies)
    return scores(fed, [(c + d[k]) @ p[k] + b for k in fed.clients])


@oracle("pfedrec", task=make_task, rows="shared")
@oracle("pfedrec", task=make_task)
def pfedrec(fed: Federation, rows: str = "own") -> Outcome:
    """Zhang et al., IJCAI 2023: first the score function, then the rows at its new value; own rows are tuned again."""
    q, b = table_of(fed)
    p = {k: torch.zeros(RANK, dtype=torch.float64) for k in fed.clients}

    def train(k: int, when: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pairs, count = pairs_of(fed, k, when, 0), torch.zeros(ITEMS, dtype=torch.float64)
        e = errors(v, q, b, pairs)
        v = v - RATE * (sum(one * q[i] for one, (i, _) in zip(e, pairs, strict=True)) / len(pairs) + PULL * v)
        e, new_q, new_b = errors(v, q, b, pairs), q.clone(), b.clone()
        for i in {i for i, _ in pairs}:
            mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
            new_q[i] -= RATE * (sum(mine) / len(mine) * v + PULL * q[i])
            new_b[i] -= RATE * sum(mine) / len(mine)
            count[i] += len(mine)
        return v, new_q, new_b, count

    for t in fed.rounds:
        for k in t.asked:
            p[k], q_k, b_k, count = train(k, t.number, p[k])
            t.send(k, q=q_k - q, b=b_k - b, count=count)
        q, b = move_rows(q, b, t.replies)
    found = []
    for k in fed.clients:
        v, own_q, own_b, _ = (p[k], q, b, None) if rows == "shared" else train(k, fed.settings.rounds, p[k])
        found.append(own_q @ v + own_b)
    return scores(fed, found)
