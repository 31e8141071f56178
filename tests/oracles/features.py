"""What clients exchange is features: FedProto, FedPAC, FedCR, kNN-Per."""

import itertools
import math

import torch
from oracles.parts import train_head
from oracles.tools import (
    BATCH,
    BODY,
    CLASSES,
    HEAD,
    HIDDEN,
    Federation,
    Outcome,
    Round,
    features,
    gradient,
    head,
    oracle,
    sgd,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus


def sums_by_class(values: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values of every class, and how many there are."""
    one_hot = torch.eye(CLASSES, dtype=values.dtype)[y]
    return one_hot.T @ values, one_hot.sum(0)


def aligned(w: Tensor, x: Tensor, y: Tensor, centers: Tensor, known: Tensor, lam: float) -> Tensor:
    """Return the loss, and how far features are from the centers of their classes, if there are any."""
    z = features(w, x)
    apart = ((z - centers[y]) ** 2).mean(1) * known[y]
    return cross_entropy(head(w, z), y) + lam * apart.mean()


@oracle("fedproto", lam=0.8, epochs=2)
@oracle("fedproto", lam=0.8, answer="all", weighting="uniform")
def fedproto(fed: Federation, lam: float, epochs: int = 1, answer: str = "own", weighting: str = "samples") -> Outcome:
    """Tan et al., AAAI 2022, Algorithm 1: mean features of classes travel, and no parameters."""
    v = dict.fromkeys(fed.clients, fed.w0)
    prototypes, known = torch.zeros(CLASSES, HIDDEN).double(), torch.zeros(CLASSES).double()
    for t in fed.rounds:
        for k in t.asked:
            pull = lambda w, x, y: gradient(lambda u: aligned(u, x, y, prototypes, known, lam), w)
            v[k] = sgd(v[k], t.batches(k, epochs), t.lr, pull)
            x, y = fed.data(k)
            total, count = sums_by_class(features(v[k], x), y)
            if weighting == "uniform":
                total, count = total / count.clamp(min=1)[:, None], (count > 0).double()
            t.send(k, total=total, count=count)
        if t.replies:
            total = sum(one.discount * one.total for one in t.replies)
            count = sum(one.discount * one.count for one in t.replies)
            seen = count > 0
            prototypes = torch.where(seen[:, None], total / count.clamp(min=1e-300)[:, None], prototypes)
            known = torch.where(seen, 1.0, known)
    answers = []
    for k in fed.clients:
        z = features(v[k], fed.probes)
        near = -((z[:, None] - prototypes[None]) ** 2).mean(2)
        own = torch.bincount(fed.data(k)[1], minlength=CLASSES) > 0
        possible = (known > 0) & own if answer == "own" else known > 0
        lowest = near.min(1, keepdim=True).values
        answers.append(torch.where(possible, near, lowest - 20))
    return Outcome(answers=answers)


def simplex_minimum(V: Tensor, M: Tensor, m: Tensor) -> Tensor:
    """Return the minimum of sum_j a_j^2 V_j + ||m - sum_j a_j M_j||^2 over distributions a: try all supports."""
    best, found = float("inf"), None
    for size in range(1, len(V) + 1):
        for support in itertools.combinations(range(len(V)), size):
            rows = M[[*support]]
            system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size] = 2 * (torch.diag(V[[*support]]) + rows @ rows.T)
            system[:size, size] = system[size, :size] = 1
            right = torch.cat([2 * rows @ m, torch.ones(1, dtype=torch.float64)])
            part = torch.linalg.lstsq(system, right).solution[:size]
            if (part >= 0).all():
                value = float((part**2 * V[[*support]]).sum() + ((m - part @ rows) ** 2).sum())
                if value < best:
                    best, found = value, torch.zeros_like(V)
                    found[[*support]] = part
    return found


@oracle("fedpac", lam=0.7, head_epochs=2, epochs=2)
@oracle("fedpac", lam=0.7, head_lr=0.4, epochs=1)
def fedpac(fed: Federation, lam: float, head_epochs: int = 1, head_lr: float | None = None, epochs: int = 5) -> Outcome:
    """Xu et al., ICLR 2023, Algorithm 1."""
    body, heads = fed.w0[BODY], dict[int, Tensor]()
    centers, known = torch.zeros(CLASSES, HIDDEN).double(), torch.zeros(CLASSES).double()

    def model(k: int) -> Tensor:
        """Return the body under a client's mixture; before its first reply under the mean of all mixtures."""
        mean_head = sum(heads.values()) / len(heads) if heads else fed.w0[HEAD]
        return torch.cat([body, heads.get(k, mean_head)])

    def pull(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the body: of the loss, and towards the centers of classes."""
        g = torch.zeros_like(w)
        g[BODY] = gradient(lambda v: aligned(v, x, y, centers, known, lam), w)[BODY]
        return g

    for t in fed.rounds:
        rate = t.lr if head_lr is None else head_lr * fed.task.training.lr_decay**t.number
        for k in t.asked:
            x, y = fed.data(k)
            z = features(model(k), x)  # of the body as it was received
            m = sums_by_class(z, y)[0] / fed.n[k]
            V = ((z**2).sum() / fed.n[k] - (m**2).sum()) / fed.n[k]
            w_k = sgd(model(k), t.batches(k, head_epochs), rate, train_head)
            w_k = sgd(w_k, t.batches(k, epochs), t.lr, pull)
            total, count = sums_by_class(features(w_k, x), y)
            t.send(k, delta=w_k[BODY] - body, h=w_k[HEAD], m=m.flatten(), V=V, total=total, count=count)
        if not t.replies:
            continue
        body = body + t.mean("delta")
        total = sum(one.discount * one.total for one in t.replies)
        count = sum(one.discount * one.count for one in t.replies)
        centers = torch.where((count > 0)[:, None], total / count.clamp(min=1e-300)[:, None], centers)
        known = torch.where(count > 0, 1.0, known)
        V, M, H = (torch.stack([one.fields[name] for one in t.replies]) for name in ("V", "m", "h"))
        for one in t.replies:
            a = simplex_minimum(V, M, one.m)
            a = torch.where(a < 1e-3, 0, a)
            heads[one.client] = a / a.sum() @ H
    return Outcome(models=[model(k) for k in fed.clients])


@oracle("knn-per", neighbours=3, epochs=2)
@oracle("knn-per", neighbours=4, lam=0.3, scale=0.2)
def knn_per(fed: Federation, neighbours: int, scale: float = 1.0, lam: float | None = None, epochs: int = 1) -> Outcome:
    """Marfoq et al., ICML 2022, Algorithm 1: FedAvg, and each client's own samples as neighbours."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr) - w)
        if t.replies:
            w = w + t.mean("delta")
    answers = []
    for k in fed.clients:
        x_k, y_k = fed.data(k)
        stored = features(w, x_k)

        def probabilities(x: Tensor) -> tuple[Tensor, Tensor]:
            """Return what the model says, and what the nearest neighbours say."""
            z = features(w, x)
            apart = ((z[:, None] - stored[None]) ** 2).sum(2)
            votes = torch.zeros(len(x), CLASSES, dtype=torch.float64)
            for row in range(len(x)):
                for i in apart[row].argsort()[:neighbours]:
                    votes[row, y_k[i]] += torch.exp(-apart[row, i] / (scale * HIDDEN))
            return head(w, z).softmax(1), votes / votes.sum(1, keepdim=True)

        x, y = fed.data(k, "val")
        model, near = probabilities(x)
        grid = [step / 100 for step in range(101)]
        right = torch.arange(len(y))
        losses = [float(-((1 - a) * model + a * near)[right, y].log().mean()) for a in grid]
        a = grid[min(range(101), key=lambda place: losses[place])] if lam is None else lam
        model, near = probabilities(fed.probes)
        mixed_up = (1 - a) * model + a * near
        answers.append(mixed_up.clamp(min=torch.finfo(torch.float64).tiny).log())  # no logarithm of 0
    return Outcome(answers=answers, shared=w)


def draw_normal(t: Round, k: int, batches: int, stream: str, *shape: int) -> list[Tensor]:
    """Return the normal numbers that a client draws in each step, by Box and Muller."""
    count = math.prod(shape)
    half = -(-count // 2)
    found = []
    for drawn in t.draws(k, "features", batches, 2 * half, stream):
        length, angle = (-2 * torch.log1p(-drawn[:half])).sqrt(), 2 * math.pi * drawn[half:]
        found.append(torch.cat([length * angle.cos(), length * angle.sin()])[:count].reshape(shape))
    return found


@oracle("fedcr", beta=0.05, draws=3, final_epochs=2)
@oracle("fedcr", beta=0.2, draws=2, offset=1.0, epochs=2, final_epochs=0)
def fedcr(fed: Federation, beta: float, draws: int, final_epochs: int, offset: float = 0.0, epochs: int = 1) -> Outcome:
    """Zhang et al., ICML 2023, Algorithm 1; a model is followed by A and b of the layer of sigma."""
    A, b, encoder = slice(27, 36), slice(36, 39), [*range(15), *range(27, 39)]
    w, heads = torch.cat([fed.w0, torch.zeros(12, dtype=torch.float64)]), dict.fromkeys(fed.clients, fed.w0[HEAD])
    center, spread = torch.zeros(CLASSES, HIDDEN).double(), torch.ones(CLASSES, HIDDEN).double()

    def distribution(v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mu = features(v, x)
        return mu, softplus(mu @ v[A].reshape(HIDDEN, HIDDEN).T + v[b] - offset)

    def objective(v: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        mu, sigma = distribution(v, x)
        z = mu + sigma * noise
        data = torch.stack([cross_entropy(head(v, one), y) for one in z]).mean()
        wide = sigma.clamp(min=1e-3)
        s_y, m_y = spread[y], center[y]
        apart = (wide / s_y).log() + (s_y**2 + (m_y - mu) ** 2) / (2 * wide**2) - 0.5
        return data + beta * apart.sum(1).mean()

    def train(t: Round, k: int, v: Tensor, epochs: int, stream: str, part: slice) -> Tensor:
        batches = t.batches(k, epochs, stream=stream)
        for (x, y), noise in zip(batches, draw_normal(t, k, len(batches), stream, draws, BATCH, HIDDEN), strict=True):
            g = gradient(lambda u: objective(u, x, y, noise[:, : len(x)]), v)
            step = torch.zeros_like(v)
            step[part] = g[part]
            v = v - t.lr * step
        return v

    for t in fed.rounds:
        for k in t.asked:
            start = w.clone()
            start[HEAD] = heads[k]
            w_k = train(t, k, start, epochs, "main", slice(None))
            heads[k] = w_k[HEAD]
            x, y = fed.data(k)
            mu, sigma = distribution(w_k, x)
            sure = sigma.clamp(min=1e-3) ** -2
            precision, count = sums_by_class(sure, y)
            t.send(k, delta=(w_k - w)[encoder], precision=precision, moment=sums_by_class(mu * sure, y)[0], count=count)
        if t.replies:
            w[encoder] = w[encoder] + t.mean("delta")
            precision, moment = (
                sum(one.discount * one.fields[name] for one in t.replies) for name in ("precision", "moment")
            )
            here = (sum(one.count for one in t.replies) > 0)[:, None]
            center = torch.where(here, moment / (1 + precision), center)
            spread = torch.where(here, (1 + precision) ** -0.5, spread)
    models = []
    for k in fed.clients:
        last = w.clone()
        last[HEAD] = heads[k]
        models.append(train(fed.end, k, last, final_epochs, "final", HEAD)[:27])
    return Outcome(models=models)


@oracle("ccvr", draws=5, server_epochs=2, server_batch=4, server_lr=0.1, shrinkage=0.2)
@oracle("ccvr", draws=4, server_epochs=1, server_batch=5, rounds_before=2, epochs=2)
def ccvr(
    fed: Federation, draws: int, server_epochs: int, server_batch: int, server_lr: float = 0.01,
    shrinkage: float = 0.01, rounds_before: int = 0, epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Luo et al., NeurIPS 2021, Algorithm 1: a head for features that are drawn from a Gaussian of each class."""
    w = deployed = fed.w0
    counts = torch.zeros(CLASSES, dtype=torch.float64)
    center, spread = torch.zeros(CLASSES, HIDDEN).double(), torch.zeros(CLASSES, HIDDEN, HIDDEN).double()
    for t in fed.rounds:
        for k in t.asked:
            x, y = fed.data(k)
            z = features(w, x)
            total, count = sums_by_class(z, y)
            square, _ = sums_by_class((z[:, :, None] * z[:, None]).flatten(1), y)
            tells = t.number >= rounds_before
            w_k = sgd(w, t.batches(k, epochs), t.lr)
            t.send(k, delta=w_k - w, tells=tells, count=count, total=total, square=square.reshape(-1, HIDDEN, HIDDEN))
        if not t.replies:
            continue
        body, w = w, w + t.mean("delta")
        deployed, telling = w, [one for one in t.replies if one.tells]
        if t.number < rounds_before:
            continue
        count, total, square = (
            sum((one.discount * one.fields[name] for one in telling), torch.zeros(()))
            for name in ("count", "total", "square")
        )
        for c in range(CLASSES):
            if telling and count[c] > 0:
                counts[c], center[c] = count[c], total[c] / count[c]
                spread[c] = square[c] / count[c] - center[c].outer(center[c])
        known = [c for c in range(CLASSES) if counts[c] > 0]
        normal = torch.from_numpy(t.server_draws("features").standard_normal((len(known), draws, HIDDEN)))
        drawn, labels = [], []
        for noise, c in zip(normal, known, strict=True):
            even = shrinkage * spread[c].trace() / HIDDEN + 1e-9 * (center[c] ** 2).mean()  # for classes of one sample
            wide = (1 - shrinkage) * spread[c] + even * torch.eye(HIDDEN, dtype=torch.float64)
            drawn.append(center[c] + noise @ torch.linalg.cholesky(wide).T)
            labels += [c] * draws
        z, y = torch.cat(drawn), torch.tensor(labels)
        middle, scale = z.mean(0), z.std(0, correction=0)
        h, velocity, standard = torch.zeros(12).double(), torch.zeros(12).double(), (z - middle) / scale
        for rows in t.server_batches(len(z), server_batch, "head", server_epochs):
            g = gradient(lambda v: cross_entropy(linear(v, standard[rows]), y[rows]), h)
            velocity = 0.9 * velocity + g
            h = h - server_lr * velocity
        weight = h[:9].reshape(CLASSES, HIDDEN) / scale
        deployed = torch.cat([body[BODY], weight.flatten(), h[9:] - weight @ middle])
    return Outcome(models=[deployed] * len(fed.clients), shared=deployed)


def linear(h: Tensor, z: Tensor) -> Tensor:
    """Return what a head by itself makes of features."""
    return z @ h[:9].reshape(CLASSES, HIDDEN).T + h[9:]
