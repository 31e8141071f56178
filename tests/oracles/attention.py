"""Clients that learn from single others, whose models the server holds: FedAMP, MOCHA, FedFomo."""

import math

import torch
from oracles.tools import Federation, Outcome, grad, loss, oracle, sgd
from torch import Tensor


@oracle("fedamp", alpha=0.3, lam=0.6, sigma=0.5)
@oracle("fedamp", alpha=50.0, lam=40.0)
@oracle("fedamp", variant="heur", alpha=0.5, lam=0.6, sharpness=8.0, self_weight=0.2, begin="received")
def fedamp(
    fed: Federation, alpha: float, lam: float, sigma: float | str = "median", variant: str = "amp",
    sharpness: float = 0.0, self_weight: float = 0.0, begin: str = "own",
) -> Outcome:  # fmt: skip
    """Huang et al., AAAI 2021, Algorithm 1; the server keeps everybody's last model."""
    own, last = dict[int, Tensor](), dict[int, Tensor]()

    def attention() -> dict[int, dict[int, float]]:
        """Return xi_ij of all clients that have replied."""
        if variant == "heur":
            xi = {}
            for i in last:
                towards = {j: float(torch.exp(sharpness * torch.cosine_similarity(last[i], last[j], 0))) for j in last}
                others = sum(towards[j] for j in last if j != i)
                xi[i] = {j: (1 - self_weight) * towards[j] / others for j in last if j != i}
        else:
            apart = {i: {j: float(((last[i] - last[j]) ** 2).sum()) for j in last if j != i} for i in last}
            pairs = sorted(apart[i][j] for i in last for j in last if i < j)
            width = pairs[(len(pairs) - 1) // 2] if sigma == "median" else sigma
            slope = {i: {j: math.exp(-x / width) / width for j, x in apart[i].items()} for i in last}
            steepest = max(sum(one.values()) for one in slope.values())
            most = min(alpha, 1 / steepest) if steepest > 0 else alpha
            xi = {i: {j: most * s for j, s in slope[i].items()} for i in last}
        return xi

    def message(i: int) -> Tensor:
        """Return u_i; for a client without a model, the mean of the others."""
        if i not in last:
            return sum(last.values()) / len(last) if last else fed.w0
        xi = attention()[i]
        return (1 - sum(xi.values())) * last[i] + sum(share * last[j] for j, share in xi.items())

    for t in fed.rounds:
        for k in t.asked:
            u = message(k)
            w_k = own.get(k, u) if begin == "own" else u
            for x, y in t.batches(k):
                w_k = w_k - t.lr * (grad(w_k, x, y) + lam / alpha * (w_k - u))
            own[k] = w_k
            t.send(k, model=w_k)
        for one in t.replies:
            last[one.client] = one.model
    return Outcome(models=[own[k] if k in own else message(k) for k in fed.clients])


@oracle("mocha", lam=0.5, floor=0.2, epochs=2)
def mocha(fed: Federation, lam: float, floor: float, epochs: int) -> Outcome:
    """Smith et al., NeurIPS 2017, in the primal: models are measured from the initial one."""
    start, own, last = fed.w0, dict[int, Tensor](), dict[int, Tensor]()

    def relationship() -> Tensor:
        """Return Omega of the clients that have replied: the inverse of M R / tr R + floor I, R = (W' W)^1/2."""
        W = torch.stack([w - start for w in last.values()])
        values, vectors = torch.linalg.eigh(W @ W.T)
        R = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
        return torch.linalg.inv(len(last) * R / R.trace() + floor * torch.eye(len(last), dtype=torch.float64))

    def pull(k: int) -> tuple[float, Tensor]:
        """Return Omega_kk and u_k; a client without a model is pulled to the mean of the others."""
        if k not in last:
            away = sum(last.values()) / len(last) - start if last else torch.zeros_like(start)
            return 1 / (1 + floor), -away / (1 + floor)
        omega, place = relationship(), [*last].index(k)
        others = [omega[place, i] * (last[j] - start) for i, j in enumerate(last) if j != k]
        return float(omega[place, place]), sum(others, torch.zeros_like(start))

    def begin(k: int) -> Tensor:
        return sum(last.values()) / len(last) if last else start

    for t in fed.rounds:
        for k in t.asked:
            (strength, u), w_k = pull(k), own[k] if k in own else begin(k)
            for x, y in t.batches(k, epochs):
                w_k = w_k - t.lr * (grad(w_k, x, y) + lam * (strength * (w_k - start) + u))
            own[k] = w_k
            t.send(k, model=w_k)
        for one in t.replies:
            last[one.client] = one.model
    return Outcome(models=[own[k] if k in own else begin(k) for k in fed.clients])


@oracle("fedfomo", models=2, explore=0.5)
@oracle("fedfomo", models=4, norm="l1", epochs=2)
def fedfomo(
    fed: Federation, models: int, norm: str = "l2", epochs: int = 1, explore: float = 0.3, explore_decay: float = 0.05
) -> Outcome:
    """Zhang et al., ICLR 2021, Section 3: clients move to models of others that lower their validation loss."""
    own, last = dict[int, Tensor](), dict[int, Tensor]()
    affinity = {k: dict.fromkeys(fed.clients, 0.0) for k in fed.clients}
    sent: dict[int, list[int]] = {k: [] for k in fed.clients}

    def move(k: int) -> tuple[Tensor, dict[int, float]]:
        """Move a client's model to those that help it; return it with omega."""
        v, (x, y) = own.get(k, fed.w0), fed.data(k, "val")
        length = 1 if norm == "l1" else 2
        omega = {j: float((loss(v, x, y) - loss(last[j], x, y)) / (last[j] - v).norm(p=length)) for j in sent[k]}
        good = {j: worth for j, worth in omega.items() if worth > 0}
        return v + sum(worth / sum(good.values()) * (last[j] - v) for j, worth in good.items()), omega

    for t in fed.rounds:
        for k in t.asked:
            begun, omega = move(k)
            own[k] = sgd(begun, t.batches(k, epochs), t.lr)
            t.send(k, model=own[k], omega=omega)
        for one in t.replies:
            last[one.client] = one.model
            for j, worth in one.omega.items():
                affinity[one.client][j] += worth
        if t.replies:
            explore, draw = explore - explore_decay, t.server_draws("models to send")
            for k in fed.clients:  # all are sent as many
                others, count = sorted(j for j in last if j != k), min(models, len(last) - 1)
                luck = dict(zip(others, draw.random(len(others)), strict=True))
                best = sorted(others, key=lambda j, k=k, luck=luck: (-affinity[k][j], luck[j]))
                anybody, sent[k] = [int(j) for j in draw.permutation(others)], []
                for exploring in draw.random(max(count, 0)) < explore:
                    sent[k].append(next(j for j in (anybody if exploring else best) if j not in sent[k]))
    return Outcome(models=[own[k] if k in own else move(k)[0] for k in fed.clients])
