"""Shared models that are starting points: Per-FedAvg, Reptile, MAML."""

import torch
from oracles.tools import Federation, Outcome, grad, gradient, loss, oracle, sgd
from torch import Tensor


@oracle("perfedavg", order="fo", alpha=0.3, adapt_steps=2)
@oracle("perfedavg", order="hf", alpha=0.3, delta=0.01)
@oracle("perfedavg", order="full", alpha=0.3, weighting="samples")
def perfedavg(
    fed: Federation, order: str, alpha: float, delta: float = 0.0, adapt_steps: int = 1, weighting: str = "uniform"
) -> Outcome:
    """Fallah et al., NeurIPS 2020, Algorithm 1, with beta the task's step size."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            w_k = w
            D, D1, D2 = (t.batches(k, stream=name) for name in ("step", "main", "curvature"))
            for own, after, curvature in zip(D, D1, D2, strict=True):
                g = grad(w_k - alpha * grad(w_k, *own), *after)
                if order == "hf":
                    rise = grad(w_k + delta * g, *curvature) - grad(w_k - delta * g, *curvature)
                    g = g - alpha / (2 * delta) * rise
                if order == "full":
                    g = through_steps(w_k, [own], after, alpha)
                w_k = w_k - t.lr * g
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta", weighting)
    return Outcome(models=[adapt(fed, k, w, alpha, adapt_steps) for k in fed.clients], shared=w)


def through_steps(w: Tensor, steps: list, after: tuple[Tensor, Tensor], alpha: float) -> Tensor:
    """Return the gradient in w of the loss after steps of size alpha on other batches."""

    def loss_after(v: Tensor) -> Tensor:
        for x, y in steps:
            v = v - alpha * torch.autograd.grad(loss(v, x, y), v, create_graph=True)[0]
        return loss(v, *after)

    return gradient(loss_after, w)


def adapt(fed: Federation, k: int, w: Tensor, alpha: float, steps: int) -> Tensor:
    """Take steps of size alpha along the gradient of all training samples of a client."""
    return sgd(w, [fed.data(k)] * steps, alpha)


@oracle("maml", alpha=0.3, beta=0.5, adapt_steps=2)
@oracle("maml", alpha=0.3, beta=0.5, order="fo", weighting="samples")
def maml(
    fed: Federation, alpha: float, beta: float, adapt_steps: int = 1, order: str = "full", weighting: str = "uniform"
) -> Outcome:
    """Finn et al., ICML 2017, Algorithm 1, with clients as tasks: they send a gradient, the server takes the step."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            g_k = torch.zeros_like(w)
            for own, after in zip(t.batches(k, stream="step"), t.batches(k), strict=True):
                steps = [own] * adapt_steps
                g = through_steps(w, steps, after, alpha) if order == "full" else grad(sgd(w, steps, alpha), *after)
                g_k = g_k + g * len(after[1]) / fed.n[k]
            t.send(k, g=g_k)
        if t.replies:
            w = w - beta * t.mean("g", weighting)
    return Outcome(models=[adapt(fed, k, w, alpha, adapt_steps) for k in fed.clients], shared=w)


@oracle("reptile", beta=0.5, adapt_epochs=2)
def reptile(fed: Federation, beta: float, adapt_epochs: int) -> Outcome:
    """Nichol et al., 2018, Algorithm 2, batched; clients go on training from the newest model."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            t.send(k, delta=sgd(w, t.batches(k), t.lr) - w)
        if t.replies:
            w = w + beta * t.mean("delta", "uniform")
    t = fed.end
    models = [sgd(w, t.batches(k, adapt_epochs, stream="tune"), t.lr) for k in fed.clients]
    return Outcome(models=models, shared=w)
