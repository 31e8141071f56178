"""Federated averaging, training alone, and what stands nearest to them."""

from oracles.tools import Federation, Outcome, grad, mean, oracle


@oracle("fedavg", epochs=2)
@oracle("fedavg", weighting="uniform")
def fedavg(fed: Federation, epochs: int = 1, weighting: str = "samples") -> Outcome:
    """McMahan et al., AISTATS 2017, Algorithm 1."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            w_k = w
            for x, y in t.batches(k, epochs):
                w_k = w_k - t.lr * grad(w_k, x, y)
            t.send(k, delta=w_k - w)
        if t.replies:
            p = (lambda one: fed.n[one.client]) if weighting == "samples" else (lambda one: 1)
            w = w + mean(t.replies, lambda one: one.delta, p)
    return Outcome(models=[w] * len(fed.clients), shared=w)
