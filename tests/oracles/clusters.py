"""One model for each group of clients: IFCA, CFL, FL+HC."""

from collections.abc import Callable

import numpy as np
import torch
from oracles.tools import BODY, Federation, Outcome, Reply, Round, grad, loss, oracle, sgd
from torch import Tensor, cosine_similarity

from atoll.kernel.randomness import generator


def draw_starts(w: Tensor, clusters: int) -> list[Tensor]:
    """Return independent starts: the initial model, and its leaves with their values in another order."""
    leaves, starts = (slice(0, 12), slice(12, 15), slice(15, 24), slice(24, 27)), [w]
    for number in range(1, clusters):
        draw, start = generator(0, "start", number), w.clone()
        for leaf in leaves:
            start[leaf] = w[leaf][torch.from_numpy(draw.permutation(leaf.stop - leaf.start))]
        starts.append(start)
    return starts


@oracle("ifca", clusters=4, epochs=2)
@oracle("ifca", clusters=3, weighting="uniform")
@oracle("ifca", clusters=3, common="body")
@oracle("ifca", clusters=4, averaging="gradients")
def ifca(
    fed: Federation,
    clusters: int,
    epochs: int = 1,
    weighting: str = "samples",
    common: str = "",
    averaging: str = "models",
) -> Outcome:
    """Ghosh et al., NeurIPS 2020, Algorithm 1, both options."""
    models = draw_starts(fed.w0, clusters)
    shared = BODY if common == "body" else slice(0, 0)
    for w in models:
        w[shared] = fed.w0[shared]

    def choose(k: int) -> int:
        """Return the model with the smallest loss on all training samples."""
        return int(np.argmin([float(loss(w, *fed.data(k))) for w in models]))

    for t in fed.rounds:
        for k in t.asked:
            j = choose(k)
            if averaging == "gradients":
                w_k = models[j] - t.lr * grad(models[j], *fed.data(k))
            else:
                w_k = sgd(models[j], t.batches(k, epochs), t.lr)
            t.send(k, j=j, delta=w_k - models[j])
        if not t.replies:
            continue
        everybody = t.mean("delta", weighting)[shared]
        for j, w in enumerate(models):
            members = [one for one in t.replies if one.j == j]
            models[j] = w.clone()
            if members:
                part = share_of(t, members, weighting) if averaging == "gradients" else 1.0
                models[j] += part * t.mean("delta", weighting, among=members)
            models[j][shared] = w[shared] + everybody
    return Outcome(models=[models[choose(k)] for k in fed.clients])


def share_of(t: Round, members: list[Reply], weighting: str) -> float:
    """Return the share of all weights that some replies have."""
    weight = {one.client: (t.fed.n[one.client] if weighting == "samples" else 1) * one.discount for one in t.replies}
    return sum(weight[one.client] for one in members) / sum(weight.values())


def merge(distance: Callable[[int, int], float], members: list[int], until: int, linkage: str) -> list[list[int]]:
    """Merge the nearest two groups until so many are left; groups are as far apart as their farthest (nearest) two."""
    groups, apart = [[one] for one in members], {"complete": max, "single": min}[linkage]
    while len(groups) > until:
        pairs = [
            (apart(distance(i, j) for i in a for j in b), n, m)
            for n, a in enumerate(groups)
            for m, b in enumerate(groups)
            if n < m
        ]
        _, n, m = min(pairs)
        groups[n] += groups.pop(m)
    return groups


@oracle("cfl", eps1=2.0, eps2=0.1, rounds_before=0, rounds=5)
@oracle("cfl", eps1=2.0, eps2=0.1, rounds_before=0, linkage="single", rounds=5)
def cfl(fed: Federation, eps1: float, eps2: float, rounds_before: int, linkage: str = "complete") -> Outcome:
    """Sattler et al., TNNLS 2021."""
    clusters = [([*fed.clients], fed.w0)]  # members and model
    for t in fed.rounds:
        for members, w in clusters:
            for k in members:
                if k in t.asked:
                    t.send(k, delta=sgd(w, t.batches(k), t.lr) - w)
        delta, after = {one.client: one.delta for one in t.replies}, []
        for members, w in clusters:
            parts, replied = [members], [one for one in t.replies if one.client in members]
            if t.number >= rounds_before and len(replied) == len(members) > 2:
                stationary = float(t.mean("delta", among=replied).norm()) < eps1
                if stationary and max(float(one.delta.norm()) for one in replied) > eps2:
                    parts = merge(lambda i, j: 1 - float(cosine_similarity(delta[i], delta[j], 0)), members, 2, linkage)
            for part in parts:  # as in the authors' code, halves part in the round of the split
                moving = [one for one in replied if one.client in part]
                after.append((part, w + t.mean("delta", among=moving) if moving else w))
        clusters = after
    return Outcome(models=[w for k in fed.clients for members, w in clusters if k in members])


@oracle("flhc", rounds_before=2, clusters=2, rounds=5)
@oracle("flhc", rounds_before=1, clusters=3, rounds=5)
def flhc(fed: Federation, rounds_before: int, clusters: int) -> Outcome:
    """Briggs et al., IJCNN 2020, Algorithm 1: FedAvg, one clustering of updates, FedAvg in each cluster."""
    common, groups, models, centers = fed.w0, list[list[int]](), list[Tensor](), list[Tensor]()

    def nearest(delta: Tensor) -> int:
        return int(np.argmin([float((delta - center).norm()) for center in centers]))

    for t in fed.rounds:
        of = {k: c for c, members in enumerate(groups) for k in members}
        for k in t.asked:
            w = models[of[k]] if k in of else common
            t.send(k, delta=sgd(w, t.batches(k), t.lr) - w)
        if not t.replies:
            continue
        if t.number < rounds_before:
            common = common + t.mean("delta")
        elif t.number == rounds_before:
            delta = {one.client: one.delta for one in t.replies}
            groups = merge(lambda i, j: float((delta[i] - delta[j]).norm()), sorted(delta), clusters, "complete")
            centers = [sum(delta[k] for k in members) / len(members) for members in groups]
            for members in groups:
                models.append(common + t.mean("delta", among=[one for one in t.replies if one.client in members]))
        else:
            for c, members in enumerate(groups):
                replied = [one for one in t.replies if one.client in members]
                if replied:
                    models[c] = models[c] + t.mean("delta", among=replied)
            for one in t.replies:
                if one.client not in of:
                    groups[nearest(one.delta)].append(one.client)
    t, of = fed.end, {k: c for c, members in enumerate(groups) for k in members}
    joined = {k: nearest(sgd(common, t.batches(k), t.lr) - common) for k in fed.clients if k not in of}
    return Outcome(models=[models[(of | joined)[k]] for k in fed.clients])
