"""Methods as a survey describes them, and interpolation by a bandit."""

import math

import numpy as np
import torch
from oracles.tools import CLASSES, Federation, Outcome, grad, loss, oracle, sgd
from torch import Tensor

SHARES = [step / 10 for step in range(11)]


def best_share(fed: Federation, k: int, of: Tensor, rest: Tensor) -> float:
    """Return the share of a model in a mixture that has the smallest validation loss; of equal ones, the smallest."""
    found = [float(loss(rest + share * (of - rest), *fed.data(k, "val"))) for share in SHARES]
    return SHARES[int(np.argmin(found))]


@oracle("apfl-survey", epochs=2)
@oracle("apfl-survey", alpha=0.3, adaptive=False)
def apfl_survey(fed: Federation, alpha: float = 0.5, adaptive: bool = True, epochs: int = 1) -> Outcome:
    """Mix a share of the shared model into the own one in every step."""
    w, own = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            w_k, v = w, own.get(k, w)
            a = best_share(fed, k, of=w, rest=v) if adaptive else alpha
            for x, y in t.batches(k, epochs):
                w_k, v = w_k - t.lr * grad(w_k, x, y), v - t.lr * grad(v, x, y)
                v = a * w_k + (1 - a) * v
            own[k] = v
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[own.get(k, w) for k in fed.clients], shared=w)


@oracle("pfedme-survey", lam=1.5, epochs=2)
@oracle("pfedme-survey", lam=1.5, follow=1.0, weighting="samples")
def pfedme_survey(
    fed: Federation, lam: float, follow: float = 0.5, weighting: str = "uniform", epochs: int = 1
) -> Outcome:
    """Hold what clients train near a shadow of the shared model, and average it."""
    w, own = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            last = own.get(k, w)
            shadow, theta = last + follow * (w - last), w
            for x, y in t.batches(k, epochs):
                theta = theta - t.lr * (grad(theta, x, y) + lam * (theta - shadow))
            own[k] = theta
            t.send(k, delta=theta - w)
        if t.replies:
            w = w + t.mean("delta", weighting)
    return Outcome(models=[own.get(k, w) for k in fed.clients], shared=w)


@oracle("interp", epochs=2)
@oracle("interp", adapt="grid")
@oracle("interp", adapt="grid", begin="own")
@oracle("interp", share=0.3)
def interp(
    fed: Federation, share: float | None = None, adapt: str = "data", begin: str = "mixture", epochs: int = 1
) -> Outcome:
    """Mix an own model and the shared one, as classes and losses say, and train the own one on from there."""
    w, own = fed.w0, dict[int, Tensor]()
    told = torch.zeros(CLASSES, dtype=torch.float64)  # of every round the mean, added up
    classes = {k: torch.bincount(fed.data(k)[1], minlength=CLASSES).double() / fed.n[k] for k in fed.clients}

    def mixture(k: int) -> Tensor:
        v = own.get(k, w)
        if share is not None:
            a = share
        elif adapt == "grid":
            a = best_share(fed, k, of=v, rest=w)
        else:
            d = 0.5 * float((classes[k] - told / max(float(told.sum()), 1.0)).abs().sum())
            of_w, of_v = (float(loss(one, *fed.data(k, "val"))) for one in (w, v))
            a = d * of_w / (d * of_w + (1 - d) * of_v)
        return w + a * (v - w)

    for t in fed.rounds:
        started = {k: mixture(k) if begin == "mixture" else own.get(k, fed.w0) for k in t.asked}
        for k in t.asked:
            own[k] = sgd(started[k], t.batches(k, epochs), t.lr)
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr) - w, classes=classes[k])
        if t.replies:
            w = w + t.mean("delta")
            told = told + t.mean("classes")
    return Outcome(models=[mixture(k) for k in fed.clients], shared=w)


@oracle("interp-bandit", arms=3, explore=0.3, fade=0.8, rounds=6)
def interp_bandit(fed: Federation, arms: int, explore: float, fade: float) -> Outcome:
    """Try one share per round; a discounted upper confidence bound says which (Garivier, Moulines, ALT 2011)."""
    w, own, shares = fed.w0, dict[int, Tensor](), np.linspace(1, 0, arms)
    rewards, counts = {k: np.zeros(arms) for k in fed.clients}, {k: np.zeros(arms) for k in fed.clients}
    for t in fed.rounds:
        for k in t.asked:
            R, N = rewards[k], counts[k]
            if (N == 0).any():
                arm = int(np.argmin(N > 0))
            else:
                arm = int(np.argmax(R / N + explore * np.sqrt(2 * max(math.log(N.sum()), 0.0) / N)))
            own[k] = sgd(own.get(k, fed.w0), t.batches(k), t.lr)
            mixed = shares[arm] * own[k] + (1 - shares[arm]) * w
            R, N = R * fade, N * fade
            R[arm] += math.exp(-float(loss(mixed, *fed.data(k, "val"))))
            N[arm] += 1
            rewards[k], counts[k] = R, N
            t.send(k, delta=sgd(w, t.batches(k), t.lr) - w)
        if t.replies:
            w = w + t.mean("delta")
    models = []
    for k in fed.clients:
        tried = counts[k] > 0
        best = (
            shares[np.argmax(np.where(tried, rewards[k] / np.where(tried, counts[k], 1), -1))] if tried.any() else 0.0
        )
        models.append(best * own.get(k, w) + (1 - best) * w)
    return Outcome(models=models, shared=w)
