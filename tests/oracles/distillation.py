"""Models that learn each other's answers to public samples: FedDF, FedMD, KT-pFL."""

import math

import torch
from oracles.beside import divergence
from oracles.tools import BATCH, SEED, Federation, Outcome, Round, gradient, logits, oracle, sgd
from torch import Tensor

from atoll.kernel.randomness import generator


def adam(w: Tensor, gradients: list, lr: float) -> Tensor:
    """Take a step of Adam for each function that returns a gradient; their size falls to 0 as a cosine."""
    m = s = torch.zeros_like(w)
    for step, g in enumerate(gradients):
        g_now = g(w)
        m, s = 0.9 * m + 0.1 * g_now, 0.999 * s + 0.001 * g_now**2
        rate = lr * (1 + math.cos(math.pi * step / len(gradients))) / 2
        w = w - rate * (m / (1 - 0.9 ** (step + 1))) / ((s / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    return w


@oracle("feddf", server_epochs=3, server_batch=3, server_lr=0.02)
@oracle("feddf", target="avg_probs", epochs=2, server_epochs=2, server_batch=7, server_lr=0.02)
def feddf(
    fed: Federation,
    server_epochs: int,
    server_batch: int,
    server_lr: float,
    epochs: int = 1,
    target: str = "avg_logits",
) -> Outcome:
    """Lin et al., NeurIPS 2020, Algorithm 1: the average is taught the answers of those it is made of."""
    w, (x, _) = fed.w0, fed.public
    for t in fed.rounds:
        for k in t.asked:
            w_k = sgd(w, t.batches(k, epochs), t.lr)
            t.send(k, delta=w_k - w, model=w_k)
        if not t.replies:
            continue
        answers = torch.stack([logits(one.model, x) for one in t.replies])
        lesson = answers.mean(0) if target == "avg_logits" else answers.softmax(-1).mean(0).log()
        steps = [
            lambda v, rows=rows, lesson=lesson: gradient(lambda u: divergence(lesson[rows], logits(u, x[rows])), v)
            for epoch in range(server_epochs)
            for rows in t.server_batches(len(x), server_batch, f"distil {epoch}")
        ]
        w = adam(w + t.mean("delta"), steps, server_lr)
    return Outcome(models=[w] * len(fed.clients), shared=w)


def choose_public(fed: Federation, most: int) -> Tensor:
    """Return the public samples that all clients answer: a draw, the same in all rounds."""
    x, _ = fed.public
    return x[torch.from_numpy(generator(SEED, "public samples").permutation(len(x))[:most])]


def digest(t: Round, k: int, v: Tensor, x: Tensor, wanted: Tensor, epochs: int) -> Tensor:
    """Take as many steps towards wanted probabilities as a client has batches, on public samples drawn anew."""
    batches = t.batches(k, epochs, stream="digest")
    drawn = t.draws(k, "places", len(batches), BATCH, "digest")
    for places in (drawn * len(x)).long():
        lesson = wanted[places].log()
        v = v - t.lr * gradient(lambda u, places=places, lesson=lesson: divergence(lesson, logits(u, x[places])), v)
    return v


@oracle("fedmd", samples=6, epochs=1, digest_epochs=2)
@oracle("fedmd", samples=6, send="probs", weighting="samples", server_epochs=2, server_batch=4, server_lr=0.02)
def fedmd(
    fed: Federation, samples: int, epochs: int = 1, digest_epochs: int = 1,
    send: str = "logits", weighting: str = "uniform",
    server_epochs: int = 0, server_batch: int = 0, server_lr: float = 0.0,
) -> Outcome:  # fmt: skip
    """Li, Wang, 2019, Algorithm 1; with `server_epochs` the server teaches a model of its own."""
    x, v, wanted, student = choose_public(fed, samples), dict.fromkeys(fed.clients, fed.w0), None, fed.w0
    for t in fed.rounds:
        for k in t.asked:
            if wanted is not None:
                v[k] = digest(t, k, v[k], x, wanted, digest_epochs)
            v[k] = sgd(v[k], t.batches(k, epochs), t.lr)
            said = logits(v[k], x)
            t.send(k, answers=said if send == "logits" else said.softmax(-1))
        if not t.replies:
            continue
        wanted = t.mean("answers", weighting)
        wanted = wanted.softmax(-1) if send == "logits" else wanted
        steps = [
            lambda w, rows=rows, q=wanted: gradient(lambda u: divergence(q[rows].log(), logits(u, x[rows])), w)
            for epoch in range(server_epochs)
            for rows in t.server_batches(len(x), server_batch, f"distil {epoch}")
        ]
        student = adam(student, steps, server_lr)
    return Outcome(models=list(v.values()), shared=student if server_epochs else None)


def onto_simplex(c: Tensor) -> Tensor:
    """Return the nearest point whose entries are at least 0 and sum to 1."""
    ordered = c.sort(descending=True).values
    above = (ordered.cumsum(0) - 1) / torch.arange(1, len(c) + 1)
    return (c - above[(ordered > above).nonzero().max()]).clamp(min=0)


@oracle("kt-pfl", samples=6, coefficient_lr=0.2, coefficient_steps=3, coefficient_pull=0.5)
@oracle("kt-pfl", samples=7, coefficient_lr=0.9, coefficient_steps=4, coefficient_pull=0.1, digest_epochs=2)
def kt_pfl(
    fed: Federation, samples: int, coefficient_lr: float, coefficient_steps: int, coefficient_pull: float,
    digest_epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Zhang et al., NeurIPS 2021: every client has its own mixture of all clients' answers."""
    x, v, n = choose_public(fed, samples), dict.fromkeys(fed.clients, fed.w0), len(fed.clients)
    c, said = torch.full((n, n), 1 / n, dtype=torch.float64), dict[int, Tensor]()

    def mix(row: Tensor) -> Tensor:
        """Return what those who have answered say together; their coefficients sum to 1."""
        return torch.einsum("j,jxc->xc", row, torch.stack([*said.values()]))

    for t in fed.rounds:
        for k in t.asked:
            if said:
                heard = c[k, [*said]]
                v[k] = digest(t, k, v[k], x, mix(heard / heard.sum()), digest_epochs)
            v[k] = sgd(v[k], t.batches(k), t.lr)
            t.send(k, answers=logits(v[k], x).softmax(-1))
        for one in t.replies:
            said[one.client] = one.answers
        for k in said:  # the share of those who have never answered stays
            mass, m = c[k, [*said]].sum(), len(said)
            row = c[k, [*said]] / mass
            for _ in range(coefficient_steps):

                def objective(row: Tensor, k: int = k, m: int = m) -> Tensor:
                    q = mix(row)
                    return (q * (q / said[k]).log()).sum(-1).mean() + coefficient_pull * ((row - 1 / m) ** 2).sum()

                row = onto_simplex(row - coefficient_lr * gradient(objective, row))
            c[k, [*said]] = mass * row
    return Outcome(models=list(v.values()))
