"""Sparse networks of one's own inside a common one: Sub-FedAvg and FedMask."""

import torch
from oracles.sharpness import LAYERS
from oracles.tools import Federation, Outcome, grad, logits, oracle, sgd
from torch import Tensor

START = 0.01  # of a score: FedMask's page does not name the number


def smallest(values: Tensor, kept: Tensor, share: float) -> Tensor:
    """Return what is left of a layer without a share of the smallest of the values that were kept."""
    left, order = kept.clone(), values.masked_fill(kept == 0, float("inf")).argsort()
    left[order[: int(share * float(kept.sum()))]] = 0
    return left


@oracle("sub-fedavg", prune=0.3, target=0.4, least=0.3)
@oracle("sub-fedavg", prune=0.2, target=0.9, least=0.0, epochs=2, weighting="uniform")
def sub_fedavg(
    fed: Federation, prune: float, target: float, least: float, epochs: int = 1, weighting: str = "samples"
) -> Outcome:
    """Vahidian et al., ICDCS Workshops 2021, unstructured: a weight is averaged over those who keep it."""
    w, masks = fed.w0, {k: torch.ones_like(fed.w0) for k in fed.clients}
    weights = sum(layer.stop - layer.start for layer in LAYERS)
    for t in fed.rounds:
        for k in t.asked:
            m = masks[k]
            w_k = sgd(m * w, t.batches(k, epochs), t.lr, lambda v, x, y: m * grad(v, x, y))
            x, y = fed.data(k, "val")
            accuracy = float((logits(w_k, x).argmax(1) == y).double().mean())
            pruned = float((1 - m).sum()) / weights
            if accuracy >= least and pruned < target:
                masks[k] = m.clone()
                for layer in LAYERS:
                    masks[k][layer] = smallest(w_k[layer].abs(), m[layer], prune)
            t.send(k, kept=masks[k], change=masks[k] * (w_k - w))
        if t.replies:
            kept = t.mean("kept", weighting)
            w = w + torch.where(kept > 0, t.mean("change", weighting) / kept.clamp(min=1e-300), 0)
    return Outcome(models=[masks[k] * w for k in fed.clients], shared=w)


@oracle("fedmask", score_lr=3.0, prune=0.25, epochs=2)
@oracle("fedmask", score_lr=10.0, prune=0.4, weighting="uniform")
def fedmask(fed: Federation, score_lr: float, prune: float, epochs: int = 1, weighting: str = "samples") -> Outcome:
    """Li et al., SenSys 2021: weights stay, masks are learned, and a vote makes the common one."""
    W, u = fed.w0, torch.ones_like(fed.w0)
    layers = torch.cat([torch.arange(layer.start, layer.stop) for layer in LAYERS])
    scores = {k: torch.full_like(W, START) for k in fed.clients}
    possible = {k: torch.ones_like(W) for k in fed.clients}
    met: set[int] = set()
    for t in fed.rounds:
        for k in t.asked:
            P, s = possible[k], scores[k]
            m = P * (s > 0)
            s = torch.where(u == m, s, torch.where(u == 1, START, -START))
            rate = score_lr * fed.task.training.lr_decay**t.number
            for x, y in t.batches(k, epochs):
                g = grad(masked(W, P * (s > 0), layers), x, y)
                s = s - rate * s.sigmoid() * (1 - s.sigmoid()) * W * g
            scores[k] = s
            if k not in met:
                possible[k] = P.clone()
                for layer in LAYERS:
                    possible[k][layer] = smallest(s[layer], P[layer], prune)
                met.add(k)
            t.send(k, m=possible[k] * (s > 0), P=possible[k])
        if t.replies:
            had = t.mean("P", weighting)  # what nobody has keeps its last vote
            u = torch.where(had > 0, (t.mean("m", weighting) >= 0.5 * had).double(), u)
    own = {k: possible[k] * (scores[k] > 0) if k in met else u for k in fed.clients}
    return Outcome(models=[masked(W, own[k], layers) for k in fed.clients], shared=masked(W, u, layers))


def masked(W: Tensor, mask: Tensor, layers: Tensor) -> Tensor:
    """Return a network of which a mask keeps weights; biases stay."""
    w = W.clone()
    w[layers] *= mask[layers]
    return w
