"""One shot: clients train alone, and the server answers with what they upload.

Written from the pages of the papers and of the specification; models are flat vectors, all sums are loops.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from oracles.tools import (
    CLASSES,
    FEATURES,
    HIDDEN,
    SIZES,
    Federation,
    Outcome,
    deal,
    features,
    gradient,
    head,
    logits,
    loss,
    make_task,
    oracle,
    sgd,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from atoll import Task
from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.etf import simplex_etf

ONCE = ("everybody", "some")


def train_alone(fed: Federation, epochs: int, of=loss) -> dict[int, Tensor]:
    """Return the models of the clients that are asked, each trained alone from the initial one."""
    (t,) = fed.rounds
    if of is loss:
        return {k: sgd(fed.w0, t.batches(k, epochs), t.lr) for k in t.asked}
    return {
        k: sgd(fed.w0, t.batches(k, epochs), t.lr, lambda w, x, y: gradient(lambda v: of(v, x, y), w)) for k in t.asked
    }


def count_classes(fed: Federation, k: int) -> Tensor:
    """Return how many training samples of each class a client has."""
    return one_hot(fed.data(k)[1], CLASSES).sum(0).double()


def share_out(n: dict[int, float]) -> dict[int, float]:
    """Return shares of 1."""
    return {k: size / sum(n.values()) for k, size in n.items()}


def by_samples(fed: Federation, models: dict[int, Tensor], how: str = "samples") -> dict[int, float]:
    """Return how much each client counts."""
    return share_out({k: {"samples": fed.n[k], "sqrt": fed.n[k] ** 0.5, "uniform": 1}[how] for k in models})


def everywhere(fed: Federation, answer: Tensor) -> Outcome:
    """All clients answer the same."""
    return Outcome(answers=[answer] * len(fed.clients))


def deploy(fed: Federation, w: Tensor) -> Outcome:
    """All clients deploy one model."""
    return Outcome(models=[w] * len(fed.clients), shared=w)


# -- models that are averaged or answer together -----------------------------------------------------------------------
@oracle("oneshot-avg", rounds=1, cases=ONCE, epochs=3)
@oracle("oneshot-avg", rounds=1, cases=ONCE, epochs=2, weighting="sqrt")
def oneshot_avg(fed: Federation, epochs: int, weighting: str = "samples") -> Outcome:
    """Guha, Talwalkar, Smith, 2019: w = sum_k p_k w_k."""
    models = train_alone(fed, epochs)
    p = by_samples(fed, models, weighting)
    return deploy(fed, sum(p[k] * w for k, w in models.items()))


@oracle("ensemble", rounds=1, cases=ONCE, epochs=3)
@oracle("ensemble", rounds=1, cases=ONCE, epochs=3, weighting="classes")
@oracle("ensemble", rounds=1, cases=ONCE, epochs=3, weighting="samples", of="probs")
def ensemble(fed: Federation, epochs: int, weighting: str = "uniform", of: str = "logits") -> Outcome:
    """Guha, Talwalkar, Smith, 2019: sum_k a_kc z_kc(x), of logits less their mean or of probabilities."""
    models = train_alone(fed, epochs)
    return everywhere(fed, vote(fed, models, {k: logits(w, fed.probes) for k, w in models.items()}, weighting, of))


def vote(fed: Federation, models: dict, said: dict[int, Tensor], weighting: str, of: str) -> Tensor:
    """Return what an ensemble answers, from what its members say."""
    if weighting == "classes":
        n = {k: count_classes(fed, k) for k in models}
        total = sum(n.values())
        a = {k: torch.where(total > 0, n[k] / total.clamp(min=1), 1 / len(models)) for k in models}
    else:
        a = by_samples(fed, models, weighting)
    if of == "logits":
        return sum(a[k] * (said[k] - said[k].mean(1, keepdim=True)) for k in models)
    found = sum(a[k] * said[k].softmax(1) for k in models)
    return (found / found.sum(1, keepdim=True)).log()


@oracle("otfusion", rounds=1, cases=ONCE, epochs=3)
@oracle("otfusion", rounds=1, cases=ONCE, epochs=6, weighting="uniform")
def otfusion(fed: Federation, epochs: int, weighting: str = "samples") -> Outcome:
    """Singh, Jaggi, NeurIPS 2020: hidden neurons are matched by incoming weights and bias; all orders are tried."""
    models = train_alone(fed, epochs)
    p, largest = by_samples(fed, models, weighting), max(models, key=lambda k: fed.n[k])

    def incoming(w: Tensor) -> Tensor:
        return torch.cat([w[:12].reshape(HIDDEN, FEATURES), w[12:15, None]], 1)

    def cost(order: tuple[int, ...], w: Tensor) -> float:
        return float(sum(((incoming(models[largest])[i] - incoming(w)[j]) ** 2).sum() for i, j in enumerate(order)))

    total = torch.zeros_like(fed.w0)
    for k, w in models.items():
        order = [*min(itertools.permutations(range(HIDDEN)), key=lambda one, w=w: cost(one, w))]
        heads = w[15:24].reshape(CLASSES, HIDDEN)[:, order]
        total += p[k] * torch.cat([
            w[:12].reshape(HIDDEN, FEATURES)[order].flatten(), w[12:15][order], heads.flatten(), w[24:]
        ])  # fmt: skip
    return deploy(fed, total)


# -- layers that are merged by what enters them ------------------------------------------------------------------------
def layers(w: Tensor, x: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield where weight and bias of each layer are, its matrix with the bias last, and its inputs with a 1 last."""
    z = features(w, x)
    for weight, bias, a, size in (
        (slice(0, 12), slice(12, 15), x, (HIDDEN, FEATURES)), (slice(15, 24), slice(24, 27), z, (CLASSES, HIDDEN))
    ):  # fmt: skip
        yield weight, bias, torch.cat([w[weight].reshape(size), w[bias][:, None]], 1), with_one(a)


def identity(size: int) -> Tensor:
    """Return the identity in float64: a float32 one would round what it is multiplied by."""
    return torch.eye(size, dtype=torch.float64)


def with_one(a: Tensor) -> Tensor:
    """Return rows with a 1 at the end."""
    return torch.cat([a, torch.ones_like(a[:, :1])], 1)


def put(w: Tensor, weight: slice, bias: slice, matrix: Tensor) -> None:
    """Write a layer's matrix into a model."""
    w[weight], w[bias] = matrix[:, :-1].flatten(), matrix[:, -1]


@oracle("regmean", rounds=1, cases=ONCE, epochs=3)
@oracle("regmean", rounds=1, cases=ONCE, epochs=2, damping=1.0)
def regmean(fed: Federation, epochs: int, damping: float = 0.9) -> Outcome:
    """Jin et al., ICLR 2023: M = (sum_k M_k G_k)(sum_k G_k)^-1, off-diagonal entries of G_k damped, with a ridge."""
    models, merged = train_alone(fed, epochs), fed.w0.clone()
    parts = {k: [*layers(w, fed.data(k)[0])] for k, w in models.items()}
    for layer in range(2):
        above, below = 0.0, 0.0
        for k in models:
            weight, bias, m, a = parts[k][layer]
            gram = sum(torch.outer(row, row) for row in a)
            gram = (
                damping * gram
                + (1 - damping) * torch.diag(gram.diag())
                + 1e-6 * gram.diag().mean() * identity(len(gram))
            )
            above, below = above + m @ gram, below + gram
        put(merged, weight, bias, above @ torch.linalg.inv(below))
    return deploy(fed, merged)


@oracle("fedlpa", rounds=1, cases=ONCE, epochs=3, damping=0.1)
def fedlpa(fed: Federation, epochs: int, damping: float) -> Outcome:
    """Liu et al., NeurIPS 2024: sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k, solved as one dense system."""
    models, merged = train_alone(fed, epochs), fed.w0.clone()
    p = by_samples(fed, models)
    for layer in range(2):
        left, right = 0.0, 0.0
        for k, w in models.items():
            x, y = fed.data(k)
            weight, bias, m, a = [*layers(w, x)][layer]
            apart = head(w, features(w, x)).softmax(1) - one_hot(y, CLASSES)
            if layer == 0:
                apart = apart @ w[15:24].reshape(CLASSES, HIDDEN) * (1 - features(w, x) ** 2)
            big_a = sum(torch.outer(row, row) for row in a) / len(x) + damping * identity(a.shape[1])
            big_b = sum(torch.outer(row, row) for row in apart) / len(x) + damping * identity(apart.shape[1])
            system = p[k] * torch.kron(big_b, big_a)  # of the rows of M, one after the other
            left, right = left + system, right + system @ m.flatten()
        put(merged, weight, bias, torch.linalg.solve(left, right).reshape(m.shape))
    return deploy(fed, merged)


# -- heads from sums of features ---------------------------------------------------------------------------------------
def frozen_features(fed: Federation) -> tuple[Tensor, Tensor]:
    """Return all features of the clients that are asked under the initial model, and their classes."""
    (t,) = fed.rounds
    data = [fed.data(k) for k in t.asked]
    return torch.cat([features(fed.w0, x) for x, _ in data]), torch.cat([y for _, y in data])


@oracle("afl", rounds=1, cases=ONCE)
@oracle("afl", rounds=1, cases=ONCE, gamma=0.3)
def afl(fed: Federation, gamma: float = 1.0) -> Outcome:
    """He et al., CVPR 2025: ridge regression of indicators on frozen features, as if all samples were in one place."""
    z, y = frozen_features(fed)
    f = with_one(z)
    found = torch.linalg.lstsq(
        torch.cat([f, math.sqrt(gamma) * torch.eye(f.shape[1], dtype=f.dtype)]),
        torch.cat([one_hot(y, CLASSES).double(), torch.zeros(f.shape[1], CLASSES, dtype=f.dtype)]),
    ).solution.T
    w = fed.w0.clone()
    put(w, slice(15, 24), slice(24, 27), found)
    return deploy(fed, w)


@oracle("fedcgs", rounds=1, cases=ONCE)
@oracle("fedcgs", rounds=1, cases=ONCE, covariance="total", shrinkage=0.2)
def fedcgs(fed: Federation, covariance: str = "within", shrinkage: float = 0.01) -> Outcome:
    """Guan, Zhou, Gu, AAAI 2025: W_c = S^-1 mu_c, b_c = log(n_c / n) - mu_c' S^-1 mu_c / 2."""
    z, y = frozen_features(fed)
    means = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    around = z - (means[y] if covariance == "within" else z.mean(0))
    s = sum(torch.outer(row, row) for row in around) / len(z)
    s = (1 - shrinkage) * s + shrinkage * s.trace() / len(s) * identity(len(s))
    w = fed.w0.clone()
    for c in range(CLASSES):
        row = torch.linalg.solve(s, means[c])
        w[15 + c * HIDDEN : 15 + (c + 1) * HIDDEN] = row
        w[24 + c] = math.log(float((y == c).sum()) / len(y)) - float(means[c] @ row) / 2
    return deploy(fed, w)


@functools.cache
def make_nested_task() -> Task:
    """Make the task in which a client has the samples of those before it as well: enough for several Gaussians."""
    task, ends = make_task(), [*itertools.accumulate(map(sum, zip(*SIZES.values(), strict=True)))]
    return replace(task, splits={**task.splits, "train": deal([torch.arange(end) for end in ends])})


def fit_mixtures(z: Tensor, y: Tensor, draws: Tensor, iterations: int, nu: float) -> dict[int, list[tuple]]:
    """Return weight, mean and variances of the Gaussians of each class: EM from rows that are far apart (k-means++)."""
    pooled = sum(((z[y == c] - z[y == c].mean(0)) ** 2).sum(0) for c in y.unique().tolist()) / len(z)
    found = {}
    for c in y.unique().tolist():
        rows = z[y == c]
        live = min(len(draws), max(1, len(rows) // 10))
        centers: list[Tensor] = []
        for draw in draws[:live, c].tolist():
            apart = [min((float(((row - one) ** 2).sum()) for one in centers), default=1.0) for row in rows]
            reached = [*itertools.accumulate(apart)]
            centers.append(rows[next(i for i, chance in enumerate(reached) if chance > draw * reached[-1])])
        mixture = [(1 / live, center, pooled.clamp(min=1e-9)) for center in centers]
        for _ in range(iterations):
            density = torch.stack([
                weight * torch.exp(-((rows - mean) ** 2 / variance).sum(1) / 2) / (2 * math.pi * variance).prod().sqrt()
                for weight, mean, variance in mixture
            ])  # fmt: skip
            mixture = []
            for share in density / density.sum(0):
                mass = share.sum()
                mean = sum(a * row for a, row in zip(share, rows, strict=True)) / mass
                scatter = sum(a * (row - mean) ** 2 for a, row in zip(share, rows, strict=True))
                mixture.append((float(mass) / len(rows), mean, ((scatter + nu * pooled) / (mass + nu)).clamp(min=1e-9)))
        found[c] = mixture
    return found


@oracle("fedpft", task=make_nested_task, rounds=1, cases=ONCE, server_epochs=3, server_batch=16)
@oracle(
    "fedpft", task=make_nested_task, rounds=1, cases=ONCE,
    components=2, iterations=4, shrinkage=0.3, server_epochs=2, server_batch=25, server_lr=0.1, momentum=0.5,
)  # fmt: skip
def fedpft(
    fed: Federation, server_epochs: int, server_batch: int, components: int = 10, iterations: int = 30,
    shrinkage: float = 1.0, server_lr: float = 0.01, momentum: float = 0.9,
) -> Outcome:  # fmt: skip
    """Beitollahi et al., 2024: a head for features drawn from mixtures of Gaussians, which travel in half precision."""
    (t,) = fed.rounds
    drawing, each = t.server_draws("features"), []
    for k in sorted(t.asked):
        (x, y), *_ = t.batches(k, stream="store", size=fed.n[k])
        first = torch.from_numpy(generator(fed.settings.seed, "mixtures", k).random((components, CLASSES)))
        mixtures = fit_mixtures(features(fed.w0, x), y, first, iterations, shrinkage)
        each += [(c, mixtures[c]) for c in sorted(y.tolist())]
    level, noise = drawing.random(len(each)), torch.from_numpy(drawing.normal(size=(len(each), HIDDEN)))
    drawn = []
    for (_, mixture), share, normal in zip(each, level.tolist(), noise, strict=True):
        weights = [float(torch.tensor(weight).half()) for weight, *_ in mixture]
        reached = [*itertools.accumulate(weights)]
        _, mean, variance = mixture[next(j for j, one in enumerate(reached) if one >= share * reached[-1])]
        drawn.append(mean.half().double() + variance.half().double().sqrt() * normal)
    z, y = torch.stack(drawn), torch.tensor([c for c, _ in each])
    center, scale = z.mean(0), z.std(0, correction=0)
    x, h, velocity = with_one((z - center) / scale), torch.zeros(CLASSES, HIDDEN + 1).double(), 0.0
    for rows in t.server_batches(len(z), server_batch, "head", server_epochs):
        g = ((x[rows] @ h.T).softmax(1) - one_hot(y[rows], CLASSES)).T @ x[rows] / len(rows)
        velocity = momentum * velocity + g
        h = h - server_lr * velocity
    w = fed.w0.clone()
    weight = h[:, :-1] / scale
    put(w, slice(15, 24), slice(24, 27), torch.cat([weight, (h[:, -1] - weight @ center)[:, None]], 1))
    return deploy(fed, w)


# -- features of all models, fused -------------------------------------------------------------------------------------
@oracle("oneshot-proto", rounds=1, cases=ONCE, epochs=3)
@oracle("oneshot-proto", rounds=1, cases=ONCE, epochs=3, encoder="average", prototypes="samples", weighting="sqrt")
def oneshot_proto(
    fed: Federation, epochs: int, encoder: str = "ensemble", weighting: str = "samples", prototypes: str = "uniform"
) -> Outcome:
    """Tan et al., AAAI 2022, in one shot: minus the mean squared distance of fused features to mean class means."""
    models = train_alone(fed, epochs)
    p = by_samples(fed, models, weighting)
    sums, total = torch.zeros(CLASSES, HIDDEN, dtype=torch.float64), torch.zeros(CLASSES, dtype=torch.float64)
    for k, w in models.items():
        x, y = fed.data(k)
        for c in y.unique().tolist():
            share = 1.0 if prototypes == "uniform" else float((y == c).sum())
            sums[c] += share * features(w, x)[y == c].mean(0)
            total[c] += share
    means = sums / total[:, None]
    if encoder == "ensemble":
        f = sum(p[k] * features(w, fed.probes) for k, w in models.items())
    else:
        f = features(sum(p[k] * w for k, w in models.items()), fed.probes)
    return everywhere(fed, -((f[:, None] - means) ** 2).mean(2))


def unit(rows: Tensor) -> Tensor:
    """Return rows of length 1."""
    return rows / rows.norm(dim=-1, keepdim=True)


def deviations(f: Tensor) -> Tensor:
    """Return standard deviations, at least a hundredth of their mean."""
    found = f.std(0, correction=0)
    return torch.maximum(found, 0.01 * found.mean())


@oracle("rga", rounds=1, cases=ONCE, epochs=3, prototypes="means")
@oracle("rga", rounds=1, cases=ONCE, epochs=3, prototypes="means", moments="public", weighting="uniform")
def rga_of_means(
    fed: Federation, epochs: int, prototypes: str, moments: str = "training", weighting: str = "sqrt"
) -> Outcome:
    """Standardised features, added up by the root of samples, against class means that were standardised alike."""
    models = train_alone(fed, epochs)
    fused, means = 0.0, torch.zeros(CLASSES, HIDDEN, dtype=torch.float64)
    for k, w in models.items():
        x, y = fed.data(k)
        seen = features(w, x if moments == "training" else fed.public[0])
        m, s = seen.mean(0), deviations(seen)
        p = {"samples": fed.n[k], "sqrt": fed.n[k] ** 0.5, "uniform": 1.0}[weighting]
        fused = fused + p * (features(w, fed.probes) - m) / s
        for c in y.unique().tolist():
            means[c] += p * (features(w, x)[y == c].mean(0) - m) / s
    return everywhere(fed, 16 * unit(fused) @ unit(means).T)


def margin_logits(fed: Federation, models: dict[int, Tensor], scale: float, gamma: float) -> Tensor:
    """l_c = s sum_k a_kc w.(z - r) / w.(mu - r), w = S^-1 (mu - r), a ~ sqrt(n_kc (n_k - n_kc) / n_k)."""
    said = torch.zeros(len(fed.probes), CLASSES, dtype=torch.float64)
    total = torch.zeros(CLASSES, dtype=torch.float64)
    for k, w in models.items():
        x, y = fed.data(k)
        z, probes, n = unit(features(w, x)), unit(features(w, fed.probes)), len(x)
        s = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
        for c in y.unique():
            for row in z[y == c] - z[y == c].mean(0):
                s += torch.outer(row, row) / n
        s = (1 - gamma) * s + gamma * s.trace() / HIDDEN * identity(HIDDEN)
        for c in y.unique().tolist():
            own = int((y == c).sum())
            if own == n:
                continue
            mu, r = z[y == c].mean(0), z[y != c].mean(0)
            direction = torch.linalg.solve(s, mu - r)
            vote = math.sqrt(own * (n - own) / n)
            said[:, c] += vote * (probes - r) @ direction / (direction @ (mu - r))
            total[c] += vote
    return scale * said / total


@oracle("oneshot-margins", rounds=1, cases=ONCE, epochs=3)
@oracle("oneshot-margins", rounds=1, cases=ONCE, epochs=3, shrinkage=0.6, scale=2.0)
def margins(fed: Federation, epochs: int, scale: float = 16.0, shrinkage: float = 0.25) -> Outcome:
    """Fisher's discriminants of each client on its own features, on one scale."""
    return everywhere(fed, margin_logits(fed, train_alone(fed, epochs), scale, shrinkage))


# -- objectives --------------------------------------------------------------------------------------------------------
def supcon(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Khosla et al., NeurIPS 2020: minus the mean log-share of the positives of each sample; 0 without any."""
    total = 0.0
    for i in range(len(z)):
        positives = [p for p in range(len(z)) if p != i and y[p] == y[i]]
        if positives:
            below = sum(torch.exp(z[i] @ z[a] / temperature) for a in range(len(z)) if a != i)
            total = total - sum(torch.log(torch.exp(z[i] @ z[p] / temperature) / below) for p in positives) / len(
                positives
            )
    return total / len(z)


@oracle("ce-supcon", rounds=1, cases=ONCE, epochs=2, lam=0.5, temperature=0.3)
def ce_supcon(fed: Federation, epochs: int, lam: float, temperature: float) -> Outcome:
    """Cross-entropy and contrast; without augmentation both views are the sample itself."""

    def objective(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = unit(features(w, x))
        return loss(w, x, y) + lam * supcon(torch.cat([z, z]), torch.cat([y, y]), temperature)

    models = train_alone(fed, epochs, objective)
    return everywhere(
        fed, vote(fed, models, {k: logits(w, fed.probes) for k, w in models.items()}, "uniform", "logits")
    )


def simplex() -> Tensor:
    """Return the corners of a simplex: A A' = C / (C - 1) (I - J / C). Which one is a draw that everybody makes."""
    corners = simplex_etf(CLASSES, CLASSES, generator(0, "FedETF's frame"))
    gram = CLASSES / (CLASSES - 1) * (identity(CLASSES) - 1 / CLASSES)
    assert float((corners @ corners.T - gram).abs().max()) < 1e-12
    return corners


def train_to_frame(
    fed: Federation, epochs: int, scale: float = 1.0, balanced: bool = True
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Train outputs of unit length to a fixed frame, by cross-entropy of z + log(n_kc + 1); return models and z."""

    def z(w: Tensor, x: Tensor) -> Tensor:
        return scale * unit(logits(w, x)) @ simplex().T

    (t,) = fed.rounds
    models = {}
    for k in t.asked:
        prior = (count_classes(fed, k) + 1).log() if balanced else 0.0
        models[k] = sgd(
            fed.w0, t.batches(k, epochs), t.lr,
            lambda w, x, y, prior=prior: gradient(lambda v: cross_entropy(z(v, x) + prior, y), w),
        )  # fmt: skip
    return models, {k: z(w, fed.probes) for k, w in models.items()}


@oracle("fedetf", rounds=1, cases=ONCE, epochs=3, scale=4.0)
@oracle("fedetf", rounds=1, cases=ONCE, epochs=3, balanced=False, weighting="classes")
def fedetf(fed: Federation, epochs: int, weighting: str = "uniform", **how: object) -> Outcome:
    """Li et al., ICCV 2023: an ensemble of models trained to one frame."""
    models, said = train_to_frame(fed, epochs, **how)
    return everywhere(fed, vote(fed, models, said, weighting, "logits"))


@oracle("rga", rounds=1, cases=ONCE, epochs=3)
@oracle("rga", rounds=1, cases=ONCE, epochs=2, moments="public", weighting="samples")
def rga_in_a_frame(fed: Federation, epochs: int, moments: str = "training", weighting: str = "sqrt") -> Outcome:
    """Standardised outputs, added up by the root of samples, against the directions that all clients trained to."""
    models, _ = train_to_frame(fed, epochs)
    fused = 0.0
    for k, w in models.items():
        seen = logits(w, fed.data(k)[0] if moments == "training" else fed.public[0])
        share = {"samples": fed.n[k], "sqrt": fed.n[k] ** 0.5}[weighting]
        fused = fused + share * (logits(w, fed.probes) - seen.mean(0)) / deviations(seen)
    return everywhere(fed, 16 * unit(fused) @ unit(simplex()).T)


PROTOTYPES = slice(15, 24)  # the head's weight, a row for each class


def prototypes_of(w: Tensor) -> Tensor:
    """Return a model's prototypes."""
    return w[PROTOTYPES].reshape(CLASSES, HIDDEN)


CLEAN = {
    "temperature": 0.1,
    "scale": 16.0,
    "double_ce": False,
    "averaging": "owners",
    "fusion": "uniform",
    "normalise": True,
}
RELEASED = {
    "temperature": 0.07,
    "scale": 0.0,
    "double_ce": True,
    "averaging": "all",
    "fusion": "size",
    "normalise": False,
}


def fafi_objective(w: Tensor, x: Tensor, y: Tensor, how: dict) -> Tensor:
    """CE(l, y) + SupCon(z, y) + CE(s cos(p, p), (0, ..., C - 1)), of two views of every sample."""
    z, p = unit(features(w, x)), prototypes_of(w)
    z, y = torch.cat([z, z]), torch.cat([y, y])
    s, p = (how["scale"], unit(p)) if how["scale"] else (1.0, p)
    ce = cross_entropy(s * z @ p.T, y)
    apart = cross_entropy(s * p @ p.T, torch.arange(CLASSES))
    return (2 if how["double_ce"] else 1) * ce + supcon(z, y, how["temperature"]) + apart


def train_fafi(fed: Federation, epochs: int, how: dict, least: int) -> dict[int, Tensor]:
    """Train encoders and prototypes; batches of fewer than so many samples are left out."""
    (t,) = fed.rounds
    start = fed.w0.clone()
    start[24:] = 0.0
    models = {}
    for k in t.asked:
        w = start
        for x, y in t.batches(k, epochs):
            if len(x) >= least:
                g = gradient(lambda v, x=x, y=y: fafi_objective(v, x, y, how), w)
                g[24:] = 0.0
                w = w - t.lr * g
        models[k] = w
    return models


@oracle("fafi", rounds=1, cases=ONCE, epochs=2, fusion="uniform")
@oracle("fafi", rounds=1, cases=ONCE, epochs=2, fusion="size")
@oracle("fafi", rounds=1, cases=ONCE, epochs=2, profile="faithful", normal_start=False)
def fafi(fed: Federation, epochs: int, profile: str = "clean", **values: object) -> Outcome:
    """Zeng et al., ICML 2025: fused features against mean prototypes; clean, and as released (but for the start)."""
    how = {**(CLEAN if profile == "clean" else RELEASED), **values}
    models = train_fafi(fed, epochs, how, least=2 if profile == "clean" else 4)
    weight = by_samples(fed, models, {"size": "samples"}.get(how["fusion"], how["fusion"]))
    fused, rows, owners = 0.0, torch.zeros(CLASSES, HIDDEN, dtype=torch.float64), torch.zeros(CLASSES)
    for k, w in models.items():
        f, p = features(w, fed.probes), prototypes_of(w)
        fused = fused + weight[k] * (unit(f) if how["normalise"] else f)
        has = count_classes(fed, k) > 0 if how["averaging"] == "owners" else torch.ones(CLASSES, dtype=torch.bool)
        rows[has] += (unit(p) if how["scale"] else p)[has]
        owners += has
    rows = rows / owners[:, None]
    if profile == "clean":
        return everywhere(fed, how["scale"] * unit(fused) @ unit(rows).T)
    return everywhere(fed, unit(fused) @ rows.T)


@oracle("fafi/margins", rounds=1, cases=ONCE, epochs=1, shrinkage=0.9)
def fafi_by_margins(fed: Federation, epochs: int, shrinkage: float) -> Outcome:
    """The same clients, who answer by margins."""
    return everywhere(fed, margin_logits(fed, train_fafi(fed, epochs, CLEAN, least=2), 16.0, shrinkage))


# -- a student of a calibrated ensemble --------------------------------------------------------------------------------
class Adam:
    """Adam, as in its paper."""

    def __init__(self, w: Tensor) -> None:
        self.w, self.m, self.s, self.steps = w, torch.zeros_like(w), torch.zeros_like(w), 0

    def step(self, g: Tensor, lr: float) -> None:
        """Take a step along g."""
        self.steps += 1
        self.m, self.s = 0.9 * self.m + 0.1 * g, 0.999 * self.s + 0.001 * g**2
        self.w = self.w - lr * (self.m / (1 - 0.9**self.steps)) / ((self.s / (1 - 0.999**self.steps)).sqrt() + 1e-8)


@oracle("fedic", rounds=1, cases=ONCE, epochs=3, labelled=0.6, fit_epochs=4, fit_batch=3, server_epochs=5)
@oracle(
    "fedic", rounds=1, cases=ONCE, epochs=3, labelled=0.4, fit_epochs=10, server_epochs=4, server_batch=3,
    server_lr=0.02, temperature=1.5, student="average",
)  # fmt: skip
def fedic(
    fed: Federation, epochs: int, labelled: float, fit_epochs: int, server_epochs: int, fit_batch: int = 20,
    server_batch: int = 128, server_lr: float = 1e-3, temperature: float = 2.0, student: str = "fresh",
) -> Outcome:  # fmt: skip
    """Shang, Lu, Cheung, ICME 2022, the server's step: tune the average, calibrate the ensemble, teach a student."""
    models = train_alone(fed, epochs)
    p, (t,) = by_samples(fed, models), fed.rounds
    average = sum(p[k] * w for k, w in models.items())
    (x, y), order = fed.public, generator(fed.settings.seed, "server labels").permutation(len(fed.public[1])).tolist()
    turn = [sum(int(y[j] == y[i]) for j in order[:place]) for place, i in enumerate(order)]  # within its class
    order = [order[place] for place in sorted(range(len(order)), key=lambda place: turn[place])]
    size = math.ceil(labelled * len(y))
    known, others = order[:size], x[order[size:]]

    tuned = Adam(average)
    for rows in t.server_batches(size, fit_batch, "server, fit", fit_epochs):
        chosen = [known[row] for row in rows]
        tuned.step(gradient(lambda w, i=chosen: loss(w, x[i], y[i]), tuned.w) + 2e-4 * tuned.w, server_lr)

    def teach(c: Tensor, x: Tensor) -> Tensor:
        u, b, s, shift, v, gate = c.split([CLASSES, 1, CLASSES, CLASSES, HIDDEN, 1])
        a = [torch.sigmoid(logits(w, x) @ u + b) for w in models.values()]
        together = sum(one[:, None] * logits(w, x) for one, w in zip(a, models.values(), strict=True)) / sum(a)[:, None]
        g = torch.sigmoid(sum(features(w, x) for w in models.values()) / len(models) @ v + gate)[:, None]
        return g * (s * together + shift) + (1 - g) * logits(tuned.w, x)

    c = torch.zeros(3 * CLASSES + HIDDEN + 2, dtype=torch.float64)
    c[CLASSES + 1 : 2 * CLASSES + 1] = 1.0
    calibration = Adam(c)
    for rows in t.server_batches(size, fit_batch, "server, calibrate", fit_epochs):
        chosen = [known[row] for row in rows]
        calibration.step(gradient(lambda c, i=chosen: cross_entropy(teach(c, x[i]), y[i]), calibration.w), server_lr)
    lesson = (teach(calibration.w, others) / temperature).softmax(1)

    learner, drawn = Adam(average if student == "average" else fed.w0), min(fit_batch, size)
    batches = t.server_batches(len(others), server_batch, "server, learn", server_epochs)
    uniform = t.draws(None, "labelled", len(batches), drawn, "server, learn")
    for step, rows in enumerate(batches):
        i = [known[int(share * size)] for share in uniform[step]]

        def objective(w: Tensor, i: list[int] = i, rows: Tensor = rows) -> Tensor:
            apart = lesson[rows] * (lesson[rows].log() - (logits(w, others[rows]) / temperature).log_softmax(1))
            return (apart.sum(1).mean() + loss(w, x[i], y[i])) / 2

        learner.step(gradient(objective, learner.w), server_lr * (1 + math.cos(math.pi * step / len(batches))) / 2)
    return deploy(fed, learner.w)


# -- experts under a gate ----------------------------------------------------------------------------------------------
@oracle("intactofl", rounds=1, cases=ONCE, epochs=3, data="public", server_epochs=4, server_batch=16, server_lr=0.3)
@oracle("intactofl", rounds=1, cases=ONCE, epochs=3, data="public", server_epochs=4, server_batch=16, gate="linear")
def intactofl(
    fed: Federation, epochs: int, data: str, server_epochs: int, server_batch: int, server_lr: float = 0.01,
    gate: str = "softmax",
) -> Outcome:  # fmt: skip
    """Zeng et al., ACM MM 2024: z(x) = mean_k g_k(x) z_k(x); the gate is trained on public samples, all at a time."""
    models = [*train_alone(fed, epochs).values()]
    x, y = fed.public
    count = len(models)

    def answers(theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = x @ theta[:, :-1].T + theta[:, -1]
        g = count * scores.softmax(1) if gate == "softmax" else scores
        z = torch.stack([logits(w, x) for w in models], 1)
        return g, (g[:, :, None] * z).mean(1), z.mean(1)

    def objective(flat: Tensor) -> Tensor:
        g, said, plain = answers(flat.reshape(count, FEATURES + 1), x)
        lesson = (plain / 4).log_softmax(1)
        kl = (lesson.exp() * (lesson - (said / 4).log_softmax(1))).sum(1).mean() * 16
        variance = ((g - g.mean()) ** 2).mean()
        uneven = variance.sqrt() if variance > 1e-20 else 0.0
        return cross_entropy(said, y) + 0.01 * uneven + kl

    theta = torch.zeros(count, FEATURES + 1, dtype=torch.float64)
    if gate == "linear":
        theta[:, -1] = 1.0
    theta, velocity = theta.flatten(), 0.0
    for epoch in range(server_epochs):
        g = gradient(objective, theta)
        g = g * min(1.0, 10 / float(g.norm())) + 1e-4 * theta
        velocity = 0.9 * velocity + g
        theta = theta - server_lr * (1 + math.cos(math.pi * epoch / server_epochs)) / 2 * velocity
    return everywhere(fed, answers(theta.reshape(count, FEATURES + 1), fed.probes)[1])


@oracle("fedov", rounds=1, cases=ONCE, epochs=3, destroyed=0.0, adversarial=0.0, placeholder=0.7)
@oracle("fedov", rounds=1, cases=ONCE, epochs=3, destroyed=0.0, adversarial=0.0, heard=1)
def fedov(
    fed: Federation, epochs: int, destroyed: float, adversarial: float, placeholder: float = 1.0, heard: int = 0
) -> Outcome:
    """Diao, Li, He, ICLR 2023, without outliers, which are drawn: "unknown" is the second answer to every sample."""
    (t,) = fed.rounds

    def open_logits(w: Tensor, x: Tensor) -> Tensor:
        z = features(w, x)
        return torch.cat([head(w, z), (z @ w[27:30] + w[30])[:, None]], 1)

    def objective(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        o = open_logits(w, x)
        others = torch.stack([torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(o, y.tolist(), strict=True)])
        last = torch.full_like(y, CLASSES - 1)
        return cross_entropy(o, y) + placeholder * cross_entropy(others, last)

    start = torch.cat([fed.w0, torch.zeros(HIDDEN + 1, dtype=torch.float64)])
    said = []
    for k in t.asked:
        w = sgd(start, t.batches(k, epochs), t.lr, lambda w, x, y: gradient(lambda v: objective(v, x, y), w))
        said.append(open_logits(w, fed.probes).softmax(1))
    answers = []
    for i in range(len(fed.probes)):
        rows = sorted((p[i] for p in said), key=lambda row: float(row[-1]))
        total = sum(rows[: heard or len(rows)])[:-1]
        answers.append((total / total.sum()).log())
    return everywhere(fed, torch.stack(answers))
