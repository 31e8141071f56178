"""Networks with BatchNorm: FedAvg, FedBN, MTFL and MTFL-Adam."""

from functools import partial

import torch
from oracles.tools import CLASSES, FEATURES, HIDDEN, Federation, Outcome, gradient, make_task, oracle
from torch import Tensor
from torch.nn.functional import cross_entropy

make_norm_task = partial(make_task, "norm")

# Where the numbers of the model stand: W1, then gamma and beta, W2, b2; running mean and variance, and a count.
SIZE, TRAINED, GAMMA_BETA, STATISTICS, COUNT = 37, slice(0, 30), slice(12, 18), slice(30, 37), 36


def forward(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits by the statistics of the batch, and these: the mean and the unbiased variance."""
    a = x @ w[:12].reshape(HIDDEN, FEATURES).T
    average, variance = a.mean(0), a.var(0, unbiased=False)
    normal = (a - average) / (variance + 1e-5).sqrt() * w[12:15] + w[15:18]
    z = torch.tanh(normal) @ w[18:27].reshape(CLASSES, HIDDEN).T + w[27:30]
    return z, average, variance * len(x) / (len(x) - 1)


def pass_over(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of what is trained, and the running statistics after the pass."""
    g = gradient(lambda v: cross_entropy(forward(v, x)[0], y), w)[TRAINED]
    _, average, variance = forward(w, x)
    running = torch.cat([0.9 * w[30:33] + 0.1 * average, 0.9 * w[33:36] + 0.1 * variance, w[COUNT:] + 1])
    return g, running


def patch_of(private: str) -> Tensor:
    """Return which numbers never leave a client."""
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[GAMMA_BETA] = "yb" in private
    mask[STATISTICS] = "us" in private
    return mask


def train_around_patches(fed: Federation, mask: Tensor, epochs: int) -> tuple[Tensor, list[Tensor]]:
    """Average all but the clients' patches; return what is shared, and everybody's model."""
    w, patches = fed.w0, dict.fromkeys(fed.clients, fed.w0[mask])
    for t in fed.rounds:
        for k in t.asked:
            w_k = w.masked_scatter(mask, patches[k])
            for x, y in t.batches(k, epochs):
                g, statistics = pass_over(w_k, x, y)
                w_k = torch.cat([w_k[TRAINED] - t.lr * g, statistics])
            patches[k] = w_k[mask]
            t.send(k, delta=w_k - w)
        if t.replies:
            passes = w[COUNT] + max(one.delta[COUNT] for one in t.replies)  # whole numbers are not averaged
            w = w + t.mean("delta")
            w[COUNT] = passes
    return w, [w.masked_scatter(mask, patches[k]) for k in fed.clients]


@oracle("fedavg", task=make_norm_task, note="BatchNorm")
def fedavg(fed: Federation) -> Outcome:
    """Average running statistics as everything else."""
    w, models = train_around_patches(fed, patch_of("none"), epochs=1)
    return Outcome(models=models, shared=w)


@oracle("fedbn", task=make_norm_task, epochs=2)
def fedbn(fed: Federation, epochs: int) -> Outcome:
    """Li et al., ICLR 2021, Algorithm 1: all of BatchNorm stays."""
    return Outcome(models=train_around_patches(fed, patch_of("usyb"), epochs)[1])


@oracle("mtfl", task=make_norm_task, private="yb")
@oracle("mtfl", task=make_norm_task, private="us")
@oracle("mtfl", task=make_norm_task, private="usyb")
def mtfl(fed: Federation, private: str) -> Outcome:
    """Mills et al., TPDS 2022, Algorithm 1, with SGD."""
    return Outcome(models=train_around_patches(fed, patch_of(private), epochs=1)[1])


@oracle("mtfl-adam", task=make_norm_task, private="yb", adam_lr=0.05, epochs=2)
@oracle("mtfl-adam", task=make_norm_task, private="usyb", adam_lr=0.05, weighting="uniform")
def mtfl_adam(fed: Federation, private: str, adam_lr: float, epochs: int = 1, weighting: str = "samples") -> Outcome:
    """Mills et al., TPDS 2022: FedAvg-Adam, whose moments are averaged as the model is."""
    mask = patch_of(private)
    inside = mask[TRAINED]
    w, m, s, steps = fed.w0, torch.zeros(30).double(), torch.zeros(30).double(), torch.zeros(()).double()
    patches = dict.fromkeys(fed.clients, (w[mask], m[inside], s[inside]))
    for t in fed.rounds:
        for k in t.asked:
            patch, m_patch, s_patch = patches[k]
            w_k, step = w.masked_scatter(mask, patch), steps
            m_k, s_k = m.masked_scatter(inside, m_patch), s.masked_scatter(inside, s_patch)
            for x, y in t.batches(k, epochs):
                g, statistics = pass_over(w_k, x, y)
                step = step + 1
                m_k, s_k = 0.9 * m_k + 0.1 * g, 0.999 * s_k + 0.001 * g**2
                towards = m_k / (1 - 0.9**step) / ((s_k / (1 - 0.999**step)).sqrt() + 1e-8)
                rate = adam_lr * fed.task.training.lr_decay**t.number
                w_k = torch.cat([w_k[TRAINED] - rate * towards, statistics])
            patches[k] = w_k[mask], m_k[inside], s_k[inside]
            t.send(k, dw=w_k - w, dm=m_k - m, ds=s_k - s, dt=step - steps)
        if t.replies:
            passes = w[COUNT] + max(one.dw[COUNT] for one in t.replies)
            w = w + t.mean("dw", weighting)
            w[COUNT] = passes
            m, s = m + t.mean("dm", weighting), (s + t.mean("ds", weighting)).clamp(min=0)
            steps = steps + t.mean("dt", weighting)
    return Outcome(models=[w.masked_scatter(mask, patches[k][0]) for k in fed.clients])
