"""Federated averaging, training alone, and what changes the steps of one model for all."""

from functools import partial

import torch
from oracles.tools import HEAD, Federation, Outcome, grad, make_task, oracle, sgd
from torch import Tensor

from atoll import Training

EVERY_OPTION = Training(lr=0.2, batch_size=3, lr_decay=0.9, momentum=0.5, weight_decay=0.01, clip=0.7)


@oracle("fedavg", epochs=2)
@oracle("fedavg", weighting="uniform")
def fedavg(fed: Federation, epochs: int = 1, weighting: str = "samples") -> Outcome:
    """McMahan et al., AISTATS 2017, Algorithm 1."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr) - w)
        if t.replies:
            w = w + t.mean("delta", weighting)
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("fedavg", task=partial(make_task, training=EVERY_OPTION), note="momentum, decay and clipping")
def fedavg_with_every_option(fed: Federation) -> Outcome:
    """Take FedAvg's steps by the whole rule of a task: weight decay, clipping, then momentum, new in every round."""
    w, rule = fed.w0, EVERY_OPTION
    for t in fed.rounds:
        for k in t.asked:
            w_k, velocity = w, torch.zeros_like(w)
            for x, y in t.batches(k):
                g = grad(w_k, x, y) + rule.weight_decay * w_k
                velocity = rule.momentum * velocity + g * min(1.0, rule.clip / float(g.norm()))
                w_k = w_k - t.lr * velocity
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("local", epochs=2)
def local(fed: Federation, epochs: int) -> Outcome:
    """Train every client alone, whenever it is asked."""
    v = [fed.w0 for _ in fed.clients]
    for t in fed.rounds:
        for k in t.asked:
            v[k] = sgd(v[k], t.batches(k, epochs), t.lr)
            t.send(k)
    return Outcome(models=v)


@oracle("fedavg-ft", tune_epochs=2)
@oracle("fedavg-ft", tune="head", tune_epochs=3)
def fedavg_ft(fed: Federation, tune_epochs: int, tune: str = "all") -> Outcome:
    """Wang et al., 2019: FedAvg; then everybody tunes the newest model on its own samples."""
    w = fedavg(fed).shared
    tuned = slice(None) if tune == "all" else HEAD

    def tuning_gradient(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        g = torch.zeros_like(v)
        g[tuned] = grad(v, x, y)[tuned]
        return g

    t = fed.end
    models = [sgd(w, t.batches(k, tune_epochs, stream="tune"), t.lr, tuning_gradient) for k in fed.clients]
    return Outcome(models=models, shared=w)


@oracle("fedprox", mu=0.7, epochs=2)
def fedprox(fed: Federation, mu: float, epochs: int) -> Outcome:
    """Li et al., MLSys 2020, Algorithm 2: every step is pulled to the model that was received."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            w_k = w
            for x, y in t.batches(k, epochs):
                w_k = w_k - t.lr * (grad(w_k, x, y) + mu * (w_k - w))
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("scaffold", epochs=2, server_lr=0.6)
def scaffold(fed: Federation, epochs: int, server_lr: float) -> Outcome:
    """Karimireddy et al., ICML 2020, Algorithm 1, option II."""
    w, c = fed.w0, torch.zeros_like(fed.w0)
    c_k = [torch.zeros_like(w) for _ in fed.clients]
    for t in fed.rounds:
        for k in t.asked:
            y_k, batches = w, t.batches(k, epochs)
            for x, y in batches:
                y_k = y_k - t.lr * (grad(y_k, x, y) - c_k[k] + c)
            c_new = c_k[k] - c + (w - y_k) / (len(batches) * t.lr)
            t.send(k, dy=y_k - w, dc=c_new - c_k[k])
            c_k[k] = c_new
        if t.replies:
            w = w + server_lr * t.mean("dy", "uniform")
            c = c + sum(one.dc for one in t.replies) / len(fed.clients)
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("feddyn", alpha=0.4, epochs=2)
def feddyn(fed: Federation, alpha: float, epochs: int) -> Outcome:
    """Acar et al., ICLR 2021, Algorithm 1, with the local problem solved by SGD."""
    w, h = fed.w0, torch.zeros_like(fed.w0)
    q = [torch.zeros_like(w) for _ in fed.clients]
    for t in fed.rounds:
        for k in t.asked:
            theta = w
            for x, y in t.batches(k, epochs):
                theta = theta - t.lr * (grad(theta, x, y) - q[k] + alpha * (theta - w))
            q[k] = q[k] - alpha * (theta - w)
            t.send(k, moved=theta - w)
        if t.replies:
            h = h - alpha / len(fed.clients) * sum(one.moved for one in t.replies)
            w = w + t.mean("moved", "uniform") - h / alpha
    return Outcome(models=[w] * len(fed.clients), shared=w)
