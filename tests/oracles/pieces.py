"""Pieces and hybrids: what is added to a method, and a method inside clusters."""

import math

import torch
from oracles.clusters import draw_starts, merge
from oracles.tools import HEAD, Federation, Outcome, grad, logits, loss, oracle, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

from atoll.kernel.randomness import generator


def average(fed: Federation, train) -> tuple[Tensor, list]:
    """Federated averaging, whose clients train by `train(t, k, w)`; return the model and all rounds."""
    w, rounds = fed.w0, []
    for t in fed.rounds:
        rounds.append(t)
        for k in t.asked:
            t.send(k, delta=train(t, k, w) - w)
        if t.replies:
            w = w + t.mean("delta")
    return w, rounds


def same(fed: Federation, w: Tensor) -> Outcome:
    """All clients deploy the shared model."""
    return Outcome(models=[w] * len(fed.clients), shared=w)


@oracle("fedavg+prox", mu=0.4, epochs=2)
def prox(fed: Federation, mu: float, epochs: int) -> Outcome:
    """Li et al., MLSys 2020: (mu / 2) ||w - start||^2 in every training."""

    def train(t, k: int, w: Tensor) -> Tensor:
        v = w
        for x, y in t.batches(k, epochs):
            v = v - t.lr * (grad(v, x, y) + mu * (v - w))
        return v

    return same(fed, average(fed, train)[0])


def uphill(
    w: Tensor, x: Tensor, y: Tensor, rho: float, part: slice = slice(None), scale: Tensor | None = None
) -> Tensor:
    """Return the gradient at w + rho s^2 g / ||s g||, where s is 1 unless given, over a part of the model."""
    g = torch.zeros_like(w)
    g[part] = grad(w, x, y)[part]
    s = torch.ones_like(w) if scale is None else scale
    length = (s * g).norm() + 1e-7  # as FedSAM has it
    return grad(w + rho * s**2 * g / length, x, y)


@oracle("fedavg+sam", rho=0.3, epochs=2)
@oracle("fedavg+sam", rho=0.3, part="head")
def sam(fed: Federation, rho: float, epochs: int = 1, part: str = "all") -> Outcome:
    """Foret et al., ICLR 2021: g(w + rho g / ||g||)."""
    where = HEAD if part == "head" else slice(None)

    def train(t, k: int, w: Tensor) -> Tensor:
        return sgd(w, t.batches(k, epochs), t.lr, lambda v, x, y: uphill(v, x, y, rho, where))

    return same(fed, average(fed, train)[0])


@oracle("fedavg+asam", rho=0.4)
def asam(fed: Federation, rho: float) -> Outcome:
    """Kwon et al., ICML 2021: g(w + rho w^2 g / || |w| g ||)."""

    def train(t, k: int, w: Tensor) -> Tensor:
        return sgd(w, t.batches(k), t.lr, lambda v, x, y: uphill(v, x, y, rho, scale=v.abs()))

    return same(fed, average(fed, train)[0])


@oracle("fedavg+tune", tune="head", tune_epochs=3)
@oracle("fedavg+tune", tune="all", tune_epochs=2)
def tune(fed: Federation, tune: str, tune_epochs: int) -> Outcome:
    """Wang et al., 2019: every client tunes a part of the shared model before it deploys it."""
    w, _ = average(fed, lambda t, k, w: sgd(w, t.batches(k), t.lr))
    mask = torch.ones_like(w)
    if tune == "head":
        mask[: HEAD.start] = 0.0
    end = fed.end
    models = [
        sgd(w, end.batches(k, tune_epochs, stream="tune"), end.lr, lambda v, x, y: mask * grad(v, x, y))
        for k in fed.clients
    ]
    return Outcome(models=models, shared=w)


@oracle("fedavg+gate", epochs=2)
@oracle("fedavg+gate", epochs=1, margin=0.0, judge="score")
def gate(fed: Federation, epochs: int, margin: float = 1.0, judge: str = "loss") -> Outcome:
    """Every client also trains alone, and deploys that model where it is better by more than some standard errors."""
    own = dict.fromkeys(fed.clients, fed.w0)

    def train(t, k: int, w: Tensor) -> Tensor:
        own[k] = sgd(own[k], t.batches(k, epochs), t.lr)
        return sgd(w, t.batches(k, epochs), t.lr)

    w, _ = average(fed, train)

    def judged(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return what is better where it is larger, of each sample."""
        if judge == "loss":
            return -cross_entropy(logits(v, x), y, reduction="none")
        return (logits(v, x).argmax(1) == y).double()

    models = []
    for k in fed.clients:
        x, y = fed.data(k, "val")
        better = judged(own[k], x, y) - judged(w, x, y)
        error = math.sqrt(float((better**2).sum()))  # of a sum of differences that are 0 in truth
        models.append(own[k] if float(better.sum()) > margin * error else w)
    return Outcome(models=models, shared=w)


@oracle("fedavg+partial", slowest=0.3, epochs=3)
@oracle("fedavg+partial", slowest=0.5, stragglers=0.5, epochs=3)
def partial(fed: Federation, slowest: float, epochs: int, stragglers: float = 0.0) -> Outcome:
    """Li et al., MLSys 2020: clients take a share of their steps, one at least, and send what they have got to."""

    def share(k: int, number: int) -> float:
        speed = 1 - (1 - slowest) * generator(fed.settings.seed, "speed", k).random()
        stops, after = generator(fed.settings.seed, "straggler", number, k).random(2)
        return speed * (1 - after) if stops < stragglers else speed

    def train(t, k: int, w: Tensor) -> Tensor:
        batches = t.batches(k, epochs)
        steps = max(1, math.ceil(share(k, t.number) * len(batches)))
        return sgd(w, batches[:steps], t.lr)

    return same(fed, average(fed, train)[0])


# -- inside clusters ---------------------------------------------------------------------------------------------------
def fix_clusters(fed: Federation, of: dict[int, int]) -> dict[int, int]:
    """Return the cluster of every client: who is in none by now joins the largest."""
    sizes = [list(of.values()).count(c) for c in range(max(of.values()) + 1)]
    return {k: of.get(k, sizes.index(max(sizes))) for k in fed.clients}


@oracle("ditto@ifca", clusters=2, cluster_rounds=2, lam=0.5, rounds=5)
def ditto_in_ifca(fed: Federation, clusters: int, cluster_rounds: int, lam: float) -> Outcome:
    """IFCA for some rounds; then Ditto in each of its clusters, from the cluster's model."""
    models, of, done = draw_starts(fed.w0, clusters), dict[int, int](), 0
    v = dict[int, Tensor]()
    for t in fed.rounds:
        finding = done < cluster_rounds
        for k in t.asked:
            if finding:
                j = min(range(clusters), key=lambda c: float(loss(models[c], *fed.data(k))))
                t.send(k, finding=True, j=j, delta=sgd(models[j], t.batches(k), t.lr) - models[j])
            else:
                w, own = models[of[k]], v.get(k, models[of[k]])
                t.send(k, finding=False, j=of[k], delta=sgd(w, t.batches(k), t.lr) - w)
                for x, y in t.batches(k):
                    own = own - t.lr * (grad(own, x, y) + lam * (own - w))
                v[k] = own
        replies = [one for one in t.replies if one.finding == finding]
        if not t.replies:
            continue
        for c in range(clusters):
            members = [one for one in replies if one.j == c]
            if members:
                models[c] = models[c] + t.mean("delta", among=members)
        if finding:
            of |= {one.client: one.j for one in replies}
            done += 1
            if done == cluster_rounds:
                of = fix_clusters(fed, of)
    return Outcome(models=[v.get(k, models[of[k]]) for k in fed.clients])


@oracle("fedavg@flhc", clusters=2, rounds_before=1, cluster_rounds=3, rounds=5)
def fedavg_in_flhc(fed: Federation, clusters: int, rounds_before: int, cluster_rounds: int) -> Outcome:
    """FL+HC for some rounds; FedAvg in its clusters is what it does itself, but who came late is in the largest."""
    common, groups, models, done, fixed = fed.w0, list[list[int]](), list[Tensor](), 0, False
    for t in fed.rounds:
        of = {k: c for c, members in enumerate(groups) for k in members}
        for k in t.asked:
            w = models[of[k]] if k in of else common
            t.send(k, fixed=fixed, delta=sgd(w, t.batches(k), t.lr) - w)
        replies = [one for one in t.replies if one.fixed or not fixed]
        if not t.replies:
            continue
        if not fixed and done < rounds_before:
            common = common + t.mean("delta", among=replies)
        elif not fixed and done == rounds_before:
            delta = {one.client: one.delta for one in replies}
            groups = merge(lambda i, j: float((delta[i] - delta[j]).norm()), sorted(delta), clusters, "complete")
            centers = [sum(delta[k] for k in members) / len(members) for members in groups]
            models = [
                common + t.mean("delta", among=[one for one in replies if one.client in members]) for members in groups
            ]
        else:
            for c, members in enumerate(groups):
                own = [one for one in replies if one.client in members]
                if own:
                    models[c] = models[c] + t.mean("delta", among=own)
            for one in replies if not fixed else ():
                if one.client not in of:
                    near = min(range(len(groups)), key=lambda c: float((one.delta - centers[c]).norm()))
                    groups[near].append(one.client)
        done += 1
        if done == cluster_rounds:
            largest = max(range(len(groups)), key=lambda c: (len(groups[c]), -c))
            groups[largest] += [k for k in fed.clients if not any(k in members for members in groups)]
            fixed = True
    of = {k: c for c, members in enumerate(groups) for k in members}
    return Outcome(models=[models[of[k]] for k in fed.clients])
