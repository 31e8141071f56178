"""Clients that look for flat minima: FedSAM, MoFedSAM, FedFSA, FedSpeed, FedSMOO."""

import torch
from oracles.parts import train_head
from oracles.tools import Federation, Outcome, grad, oracle, sgd
from torch import Tensor

LAYERS = (slice(0, 12), slice(15, 24))  # W1 and W2: biases are no layers


def uphill(w: Tensor, x: Tensor, y: Tensor, rho: Tensor | float, *, adaptive: bool = False) -> Tensor:
    """Return g(w + rho g / ||g||) of one batch; `adaptive` scales the neighbourhood by |w|."""
    g = grad(w, x, y)
    direction = w**2 * g / ((w.abs() * g).norm() + 1e-7) if adaptive else g / (g.norm() + 1e-7)
    return grad(w + rho * direction, x, y)


@oracle("fedsam", rho=0.3, epochs=2)
@oracle("fedsam", rho=0.5, adaptive=True, weighting="uniform")
def fedsam(fed: Federation, rho: float, epochs: int = 1, adaptive: bool = False, weighting: str = "samples") -> Outcome:
    """Qu et al., ICML 2022, Algorithm 1; ASAM by Kwon et al., ICML 2021."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            steep = lambda v, x, y: uphill(v, x, y, rho, adaptive=adaptive)
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr, steep) - w)
        if t.replies:
            w = w + t.mean("delta", weighting)
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("mofedsam", rho=0.3, alpha=0.4, epochs=2)
@oracle("mofedsam", rho=0.1, alpha=0.2, weighting="uniform")
def mofedsam(fed: Federation, rho: float, alpha: float, epochs: int = 1, weighting: str = "samples") -> Outcome:
    """Qu et al., ICML 2022, Algorithm 2: steps mostly follow the mean direction of the round before."""
    w, direction = fed.w0, torch.zeros_like(fed.w0)
    for t in fed.rounds:
        for k in t.asked:
            mixed = lambda v, x, y, d=direction: alpha * uphill(v, x, y, rho) + (1 - alpha) * d
            batches = t.batches(k, epochs)
            t.send(k, delta=sgd(w, batches, t.lr, mixed) - w, path=len(batches) * t.lr)
        if t.replies:
            move = t.mean("delta", weighting)
            w, direction = w + move, -move / t.mean("path", weighting)
    return Outcome(models=[w] * len(fed.clients), shared=w)


def measure(way: str, end: Tensor, start: Tensor, g: Tensor) -> Tensor:
    """Return how sensitive a layer is, from its weights before and after a round, or from all its gradient."""
    if way == "minmax":
        scaled = [(w - w.min()) / (w.max() - w.min()) for w in (end, start)]
        return ((scaled[0] - scaled[1]) ** 2).mean()
    if way == "raw":
        return ((end - start) ** 2).mean()
    if way == "relative":
        return ((end - start) ** 2).sum() / (start**2).sum()
    return g @ g


@oracle("fedfsa", rho=0.1, rho_larger=0.6, top_c=1, alpha=0.9, head_epochs=2)
@oracle("fedfsa", rho=0.1, rho_larger=0.6, top_c=1, alpha=1.0, head_epochs=2, sensitivity="minmax")
@oracle("fedfsa", rho=0.1, rho_larger=0.6, top_c=1, alpha=1.0, head_epochs=2, sensitivity="relative")
@oracle("fedfsa", rho=0.1, rho_larger=0.6, top_c=1, alpha=0.4, head_epochs=2, sensitivity="loss")
def fedfsa(
    fed: Federation, rho: float, rho_larger: float, top_c: int, alpha: float, head_epochs: int, sensitivity: str = "raw"
) -> Outcome:
    """Xing et al., AAAI 2025: MoFedSAM with a larger radius for the layers that a client is most sensitive to."""
    w, direction = fed.w0, torch.zeros_like(fed.w0)
    radius = {k: torch.full_like(w, rho) for k in fed.clients}
    for t in fed.rounds:
        for k in t.asked:
            w_k, batches = w, t.batches(k)
            for x, y in batches:
                w_k = w_k - t.lr * (alpha * uphill(w_k, x, y, radius[k]) + (1 - alpha) * direction)
            g = grad(w_k, *fed.data(k))
            s = [float(measure(sensitivity, w_k[layer], w[layer], g[layer])) for layer in LAYERS]
            radius[k] = torch.full_like(w, rho)
            for place in sorted(range(len(LAYERS)), key=lambda one: -s[one])[:top_c]:
                radius[k][LAYERS[place]] = rho_larger
            t.send(k, delta=w_k - w, path=len(batches) * t.lr)
        if t.replies:
            move = t.mean("delta")
            w, direction = w + move, -move / t.mean("path")
    t = fed.end
    models = [sgd(w, t.batches(k, head_epochs, stream="tune"), t.lr, train_head) for k in fed.clients]
    return Outcome(models=models, shared=w)


@oracle("fedspeed", alpha=0.4, rho=0.3, epochs=2)
@oracle("fedspeed", alpha=0.4, rho=0.3, mix=0.6)
def fedspeed(fed: Federation, alpha: float, rho: float, mix: float = 1.0, epochs: int = 1) -> Outcome:
    """Sun et al., ICLR 2023, Algorithm 1: FedDyn along gradients taken uphill."""
    w, h = fed.w0, torch.zeros_like(fed.w0)
    q = [torch.zeros_like(w) for _ in fed.clients]
    for t in fed.rounds:
        for k in t.asked:
            theta = w
            for x, y in t.batches(k, epochs):
                g = (1 - mix) * grad(theta, x, y) + mix * uphill(theta, x, y, rho)
                theta = theta - t.lr * (g - q[k] + alpha * (theta - w))
            q[k] = q[k] - alpha * (theta - w)
            t.send(k, moved=theta - w)
        if t.replies:
            h = h - alpha / len(fed.clients) * sum(one.moved for one in t.replies)
            w = w + t.mean("moved", "uniform") - h / alpha
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("fedsmoo", alpha=0.4, rho=0.3, epochs=2)
def fedsmoo(fed: Federation, alpha: float, rho: float, epochs: int) -> Outcome:
    """Sun et al., ICML 2023, Algorithm 1: FedSpeed with perturbations that are pulled to a common one."""
    w, h, s = fed.w0, torch.zeros_like(fed.w0), torch.zeros_like(fed.w0)
    q = [torch.zeros_like(w) for _ in fed.clients]
    mu = [torch.zeros_like(w) for _ in fed.clients]
    for t in fed.rounds:
        for k in t.asked:
            theta = w
            for x, y in t.batches(k, epochs):
                d = grad(theta, x, y) - mu[k] - s
                perturbation = rho * d / (d.norm() + 1e-7)
                mu[k] = mu[k] + perturbation - s
                g = grad(theta + perturbation, x, y)
                theta = theta - t.lr * (g - q[k] + alpha * (theta - w))
            q[k] = q[k] - alpha * (theta - w)
            t.send(k, moved=theta - w, mu=mu[k])
        if t.replies:
            h = h - alpha / len(fed.clients) * sum(one.moved for one in t.replies)
            w = w + t.mean("moved", "uniform") - h / alpha
            m = t.mean("mu", "uniform")
            s = rho * m / (m.norm() + 1e-7)
    return Outcome(models=[w] * len(fed.clients), shared=w)
