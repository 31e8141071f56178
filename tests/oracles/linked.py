"""Recommenders whose users learn from those like them: GPFedRec by tables of items, FEDORA by the items they know."""

import torch
from oracles.recommenders import (
    ITEMS,
    PULL,
    RANK,
    RATE,
    draw_others,
    errors,
    known,
    make_task,
    move_rows,
    pairs_of,
    scores,
    table_of,
)  # fmt: skip
from oracles.tools import Federation, Outcome, Reply, Round, oracle
from torch import Tensor

from atoll.kernel.randomness import Keys, generator


def zeros(*shape: int) -> Tensor:
    """Return zeros in float64."""
    return torch.zeros(*shape, dtype=torch.float64)


@oracle("gpfedrec", task=make_task)
@oracle("gpfedrec", task=make_task, epochs=2, reg=0.3, threshold=0.9999, rate=0.5)
@oracle("gpfedrec", task=make_task, graph="official", reg=2.0, crowd=2, rows="shared")
def gpfedrec(
    fed: Federation, epochs: int = 1, reg: float = 1.0, threshold: float = 1.0, graph: str = "similar",
    rate: float = RATE, crowd: int = 1, rows: str = "own",
) -> Outcome:  # fmt: skip
    """Zhang et al., KDD 2024: users are drawn to the mean rows of those whose tables point the same way as theirs."""
    q, b = table_of(fed)
    p = {k: zeros(RANK) for k in fed.clients}
    wanted: dict[int, tuple[Tensor, Tensor]] = {}  # R_k of those who replied last

    def train(k: int, when: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        v, q_k, b_k, count = p[k], q.clone(), b.clone(), zeros(ITEMS)
        r, r_b = wanted.get(k, (q, b))
        for epoch in range(epochs):
            pairs = pairs_of(fed, k, when, epoch)
            e = errors(v, q_k, b_k, pairs)
            of_v = sum(one * q_k[i] for one, (i, _) in zip(e, pairs, strict=True)) / len(pairs) + PULL * v
            new_q, new_b = q_k.clone(), b_k.clone()
            for i in {i for i, _ in pairs}:
                mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
                g = sum(mine) / len(mine)
                new_q[i] -= rate * (g * v + PULL * q_k[i] + 2 * reg * (q_k[i] - r[i]) / (RANK + 1))
                new_b[i] -= rate * (g + 2 * reg * (b_k[i] - r_b[i]) / (RANK + 1))
                count[i] += len(mine)
            v, q_k, b_k = v - rate * of_v, new_q, new_b
        return v, q_k, b_k, count

    def link(tables: list[Tensor]) -> list[list[int]]:
        """Return to whom each table is linked: those whose cosine, or distance, is above its mean."""
        alike = [[float(one @ other / one.norm() / other.norm()) for other in tables] for one in tables]
        if graph == "official":
            alike = [[1 - cosine for cosine in row] for row in alike]
        mean = sum(map(sum, alike)) / len(tables) ** 2
        found = [[j for j, score in enumerate(row) if score > threshold * mean] for row in alike]
        return [some or [k] for k, some in enumerate(found)]

    def mix(replies: list[Reply], shares: list[float], otherwise: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of every row over those who touched it, by these shares and their pairs."""
        made_q, made_b = otherwise[0].clone(), otherwise[1].clone()
        for i in range(ITEMS):
            a = [share * float(one.count[i]) * one.discount for share, one in zip(shares, replies, strict=True)]
            if sum(a) > 0:
                made_q[i] = q[i] + sum(c * one.q[i] for c, one in zip(a, replies, strict=True)) / sum(a)
                made_b[i] = b[i] + sum(c * one.b[i] for c, one in zip(a, replies, strict=True)) / sum(a)
        return made_q, made_b

    for t in fed.rounds:
        for k in t.asked:
            p[k], q_k, b_k, count = train(k, t.number)
            t.send(k, q=q_k - q, b=b_k - b, count=count)
        if not t.replies:
            continue
        here = t.replies
        near = link([torch.cat([(q + one.q).flatten(), b + one.b]) for one in here])
        h = [sum(1 / len(some) for some in near if j in some) for j in range(len(here))]
        moved = mix(here, h, (q, b))
        few = [i for i in range(ITEMS) if sum(float(one.count[i]) > 0 for one in here) < crowd]
        moved[0][few], moved[1][few] = q[few], b[few]
        wanted = {
            one.client: mix(here, [float(j in some) for j in range(len(here))], moved)
            for one, some in zip(here, near, strict=True)
        }
        q, b = moved
    found = []
    for k in fed.clients:
        v, own_q, own_b, _ = (p[k], q, b, None) if rows == "shared" else train(k, fed.settings.rounds)
        found.append(own_q @ v + own_b)
    return scores(fed, found)


@oracle("fedora-items", task=make_task)
@oracle("fedora-items", task=make_task, topk=2, alpha=0.5, temperature=3.0, sketch=16, noise=0.1, hold=0.5, epochs=2)
@oracle("fedora-items", task=make_task, lam_max=0.4, sketch=64)
def fedora_items(
    fed: Federation, topk: int = 200, alpha: float = 0.8, temperature: float = 10.0, sketch: int = 1024,
    noise: float = 0.0, hold: float = 0.1, lam_max: float = 1 / RATE, epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Wu et al., KDD 2023, for vectors of users: drawn to what reaches them where that ranks held-back items better."""
    everybody, (q, b) = len(fed.clients), table_of(fed)
    p, last = dict[int, Tensor](), dict[int, Tensor]()  # at the clients, and as the server knows them
    signs = torch.from_numpy(1 - 2.0 * generator(fed.settings.seed, "sketch").integers(2, size=(ITEMS, sketch)))
    told: dict[int, Tensor] = {}

    def describe(k: int) -> Tensor:
        """Return z = R x / |x|, of signs over the root of their number, and noise."""
        x = zeros(ITEMS)
        x[known(fed, k)] = 1
        drawn = generator(fed.settings.seed, "sketch noise", k).normal(size=sketch)
        return signs.T @ x / (x.sum() * sketch) ** 0.5 + noise * torch.from_numpy(drawn)

    def links(k: int, others: list[int]) -> Tensor:
        """Return a softmax over the likeness to the nearest others."""
        likeness = {j: float(describe(k) @ told[j]) for j in others}
        nearest = sorted(likeness, key=lambda j: -likeness[j])[:topk]
        row = zeros(everybody)
        row[nearest] = torch.tensor([temperature * likeness[j] for j in nearest], dtype=torch.float64).softmax(0)
        return row

    def propagate(k: int) -> Tensor:
        """Return what reaches a client: a row of (1 - alpha) sum_n (alpha S)^n over those who have sent a vector."""
        S = torch.stack(
            [
                links(i, [j for j in told if j != i]) if i in told and len(told) > 1 else zeros(everybody)
                for i in fed.clients
            ]
        )
        step, row = torch.eye(everybody, dtype=torch.float64)[k] if k in told else links(k, [*told]), zeros(everybody)
        for _ in range(300):
            row, step = row + (1 - alpha) * step, alpha * step @ S
        row = row * torch.tensor([float(j in last) for j in fed.clients])
        if not row.sum() > 0:
            return p.get(k, zeros(RANK))
        return sum(row[j] / row.sum() * vector for j, vector in last.items())

    def hold_back(k: int) -> list[int]:
        """Return the last of a user's items."""
        mine = known(fed, k)
        return mine[-max(1, int(hold * len(mine))) :] if len(mine) > 1 else []

    def gate_loss(t: Round, k: int, v: Tensor) -> float:
        """Return the mean cross-entropy of each held-back item among 99 others."""
        free = [item for item in range(ITEMS) if item not in known(fed, k)]
        keys = Keys.of(torch.tensor([k]), fed.settings.seed, "gate", t.number).fold(0)
        held = sorted(hold_back(k))
        bits, total = keys.bits(torch.arange(99 * len(held))).tolist(), 0.0
        for place, item in enumerate(held):
            asked = [item, *(free[one % len(free)] for one in bits[99 * place : 99 * (place + 1)])]
            total -= float((q[asked] @ v + b[asked]).log_softmax(0)[0])
        return total / max(1, len(held))

    for t in fed.rounds:
        told |= {k: describe(k) for k in t.new}
        for k in t.asked:
            reached, before = propagate(k), p.get(k, zeros(RANK))
            v = p.get(k, reached)
            own, received = gate_loss(t, k, v), gate_loss(t, k, reached)
            lam = min(lam_max, float(torch.tensor((own - received) / 2).exp())) if received < own else 0.0
            q_k, b_k, count = q.clone(), b.clone(), zeros(ITEMS)
            for epoch in range(epochs):
                drawn = dict(zip(sorted(known(fed, k)), draw_others(fed, k, t.number, epoch), strict=True))
                pairs = [
                    (i, y)
                    for item, others in drawn.items()
                    if item not in hold_back(k)
                    for i, y in [(item, 1.0), *((other, 0.0) for other in others)]
                ]
                e = errors(v, q_k, b_k, pairs)
                of_v = sum(one * q_k[i] for one, (i, _) in zip(e, pairs, strict=True)) / len(pairs)
                new_q, new_b = q_k.clone(), b_k.clone()
                for i in {i for i, _ in pairs}:
                    mine = [one for one, (item, _) in zip(e, pairs, strict=True) if item == i]
                    new_q[i] -= RATE * (sum(mine) / len(mine) * v + PULL * q_k[i])
                    new_b[i] -= RATE * sum(mine) / len(mine)
                    count[i] += len(mine)
                v, q_k, b_k = v - RATE * (of_v + PULL * v + lam * (v - reached)), new_q, new_b
            p[k] = v
            t.send(k, q=q_k - q, b=b_k - b, count=count, vector=v - before)
        for one in t.replies:
            last[one.client] = last.get(one.client, zeros(RANK)) + one.vector
        q, b = move_rows(q, b, t.replies)
    return scores(fed, [q @ (p[k] if k in p else propagate(k)) + b for k in fed.clients])
