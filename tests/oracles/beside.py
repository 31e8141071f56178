"""A model of one's own beside a shared one: Ditto, APFL, pFedMe, MTL-Reg, FedPHP, FML, FedALA, interpolation."""

import math

import numpy as np
import torch
from oracles.tools import BODY, HEAD, Federation, Outcome, features, grad, gradient, logits, loss, oracle, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy


@oracle("ditto", lam=0.8, epochs=2, personal_epochs=3)
def ditto(fed: Federation, lam: float, epochs: int, personal_epochs: int) -> Outcome:
    """Li et al., ICML 2021, Algorithm 1."""
    w, v = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            v_k = v.get(k, w)
            for x, y in t.batches(k, personal_epochs):
                v_k = v_k - t.lr * (grad(v_k, x, y) + lam * (v_k - w))
            v[k] = v_k
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr) - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[v.get(k, w) for k in fed.clients], shared=w)


@oracle("apfl", alpha=0.3, epochs=2)
@oracle("apfl", alpha=0.95, adaptive=True)
def apfl(fed: Federation, alpha: float, epochs: int = 1, adaptive: bool = False) -> Outcome:
    """Deng et al., 2020, Algorithm 1, with the gradient of the mixture in alpha at every step."""
    w, own = fed.w0, dict[int, tuple[Tensor, float]]()
    for t in fed.rounds:
        for k in t.asked:
            w_k, (v, a) = w, own.get(k, (w, alpha))
            for x, y in t.batches(k, epochs):
                g, g_mixed = grad(w_k, x, y), grad(a * v + (1 - a) * w_k, x, y)
                slope = float((v - w_k) @ g_mixed)
                w_k, v = w_k - t.lr * g, v - t.lr * a * g_mixed
                if adaptive:
                    a = min(max(a - t.lr * slope, 0.0), 1.0)
            own[k] = v, a
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    mixed = [a * v + (1 - a) * w for v, a in (own.get(k, (w, alpha)) for k in fed.clients)]
    return Outcome(models=mixed, shared=w)


@oracle("pfedme", lam=2.0, inner_steps=3, eta=0.2, beta=0.7)
def pfedme(fed: Federation, lam: float, inner_steps: int, eta: float, beta: float) -> Outcome:
    """Dinh et al., NeurIPS 2020, Algorithm 1; theta goes on from batch to batch."""
    w, own = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            w_k = theta = w
            for x, y in t.batches(k):
                for _ in range(inner_steps):
                    theta = theta - t.lr * (grad(theta, x, y) + lam * (theta - w_k))
                w_k = w_k - eta * lam * (w_k - theta)
            own[k] = theta
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + beta * t.mean("delta")
    return Outcome(models=[own.get(k, w) for k in fed.clients], shared=w)


@oracle("mtl-reg", lam=0.4, epochs=2)
def mtl_reg(fed: Federation, lam: float, epochs: int) -> Outcome:
    """Hold private heads q_k near their shared copy q, under a shared body r: w is (r, q)."""
    w, private = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            mine = torch.cat([w[BODY], private.get(k, w[HEAD])])
            for x, y in t.batches(k, epochs):
                g = grad(mine, x, y)
                g[HEAD] += 2 * lam * (mine[HEAD] - w[HEAD])
                mine = mine - t.lr * g
            common = w
            for x, y in t.batches(k, epochs):
                common = torch.cat([w[BODY], common[HEAD] - t.lr * grad(common, x, y)[HEAD]])
            private[k] = mine[HEAD]
            t.send(k, delta=torch.cat([mine[BODY], common[HEAD]]) - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[torch.cat([w[BODY], private.get(k, w[HEAD])]) for k in fed.clients], shared=w)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the mean of KL(softmax(teacher) || softmax(student)) over samples."""
    p = teacher.softmax(-1)
    return (p * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1).mean()


def discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy: five Gaussian kernels around the mean squared distance."""
    both = torch.cat([a, b])
    apart = ((both[:, None] - both[None]) ** 2).sum(-1)
    n = len(both)
    width = apart.detach().sum() / (n * n - n)
    kernel = sum(torch.exp(-apart / (width * 2.0**power)) for power in (-2, -1, 0, 1, 2))
    m = len(a)
    return kernel[:m, :m].mean() + kernel[m:, m:].mean() - kernel[:m, m:].mean() - kernel[m:, :m].mean()


@oracle("fedphp", lam=0.3, temperature=3.0, mu=0.8, ramp=3)
@oracle("fedphp", way="mmd", lam=0.3, mu=0.8, ramp=2, epochs=2)
def fedphp(
    fed: Federation, lam: float, mu: float, ramp: int, temperature: float = 1.0, way: str = "kd", epochs: int = 1
) -> Outcome:
    """Li et al., ECML PKDD 2021, Algorithm 1."""
    w, inherited, visits = fed.w0, dict[int, Tensor](), dict[int, int]()
    for t in fed.rounds:
        for k in t.asked:
            h = inherited.get(k, w)

            def objective(v: Tensor, x: Tensor, y: Tensor, h: Tensor = h) -> Tensor:
                if way == "kd":
                    lesson = divergence(logits(h, x) / temperature, logits(v, x))
                else:
                    lesson = discrepancy(features(v, x), features(h, x))
                return (1 - lam) * loss(v, x, y) + lam * lesson

            w_k = w
            for x, y in t.batches(k, epochs):
                w_k = w_k - t.lr * gradient(lambda v, x=x, y=y: objective(v, x, y), w_k)
            share = mu * min(1.0, visits.get(k, 0) / ramp)
            inherited[k] = share * h + (1 - share) * w_k
            visits[k] = visits.get(k, 0) + 1
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[inherited.get(k, w) for k in fed.clients], shared=w)


@oracle("fml", alpha=0.6, beta=0.3, epochs=2)
def fml(fed: Federation, alpha: float, beta: float, epochs: int) -> Outcome:
    """Shen et al., 2020: a shared and a personal model teach each other."""
    w, own = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            w_k, v = w, own.get(k, w)
            for x, y in t.batches(k, epochs):
                of_w, of_v = logits(w_k, x), logits(v, x)
                g_v = gradient(
                    lambda u: alpha * cross_entropy(logits(u, x), y) + (1 - alpha) * divergence(of_w, logits(u, x)), v
                )
                g_w = gradient(
                    lambda u: beta * cross_entropy(logits(u, x), y) + (1 - beta) * divergence(of_v, logits(u, x)), w_k
                )
                w_k, v = w_k - t.lr * g_w, v - t.lr * g_v
            own[k] = v
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[own.get(k, w) for k in fed.clients], shared=w)


@oracle("fedala", weights_lr=2.0, share=0.7, threshold=0.02, first_epochs=14, epochs=2, rounds=5)
@oracle("fedala", layers="all", weights_lr=0.5, initial_weight=0.6, first_epochs=4)
def fedala(
    fed: Federation, weights_lr: float, first_epochs: int, share: float = 0.8, threshold: float = 0.1,
    layers: str = "last:1", initial_weight: float = 1.0, epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Zhang et al., AAAI 2023, Algorithm 1: clients learn, weight by weight, how much of the shared model to take."""
    upper = slice(None) if layers == "all" else HEAD
    w, own, W, visits = fed.w0, dict[int, Tensor](), dict[int, Tensor](), dict.fromkeys(fed.clients, 0)
    for t in fed.rounds:
        for k in t.asked:
            v, part = own.get(k, w), W.get(k, torch.full_like(w, initial_weight)[upper])

            def mixed(part: Tensor) -> Tensor:
                theta = w.clone()
                theta[upper] = v[upper] + (w - v)[upper] * part
                return theta

            left, sample = math.ceil(share * fed.n[k]), list[tuple[Tensor, Tensor]]()
            for x, y in t.batches(k, stream="weights"):  # the first of them are the share
                sample += [(x[:left], y[:left])] if left > 0 else []
                left -= len(y)
            losses: list[float] = []
            for _ in range([0, first_epochs][visits[k]] if visits[k] < 2 else 1):
                total = 0.0
                for x, y in sample:
                    total += float(loss(mixed(part), x, y)) * len(y)
                    part = (part - weights_lr * (grad(mixed(part), x, y) * (w - v))[upper]).clamp(0, 1)
                losses.append(total)
                if len(losses) >= 10 and np.std(losses[-10:]) / sum(len(y) for _, y in sample) < threshold:
                    break
            own[k], W[k], visits[k] = sgd(mixed(part), t.batches(k, epochs), t.lr), part, visits[k] + 1
            t.send(k, delta=own[k] - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[own.get(k, w) for k in fed.clients], shared=w)
