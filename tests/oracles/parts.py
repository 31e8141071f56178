"""Models of which clients keep a part: FedPer, LG-FedAvg, FedRep, FedBABU, FedRoD, FedBN, MTFL."""

import torch
from oracles.tools import BODY, CLASSES, HEAD, Federation, Outcome, features, grad, gradient, head, logits, oracle, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy


def only(part: slice, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a part of a model, and 0 elsewhere."""
    g = torch.zeros_like(w)
    g[part] = grad(w, x, y)[part]
    return g


def train_body(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the body."""
    return only(BODY, w, x, y)


def train_head(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the head."""
    return only(HEAD, w, x, y)


@oracle("fedper", epochs=2)
def fedper(fed: Federation, epochs: int) -> Outcome:
    """Arivazhagan et al., 2019: body and head train together, and the head stays."""
    body, heads = fed.w0[BODY], dict.fromkeys(fed.clients, fed.w0[HEAD])
    for t in fed.rounds:
        for k in t.asked:
            w_k = sgd(torch.cat([body, heads[k]]), t.batches(k, epochs), t.lr)
            heads[k] = w_k[HEAD]
            t.send(k, delta=w_k[BODY] - body)
        if t.replies:
            body = body + t.mean("delta")
    return Outcome(models=[torch.cat([body, heads[k]]) for k in fed.clients])


@oracle("lg-fedavg", epochs=2, weighting="uniform")
def lg_fedavg(fed: Federation, epochs: int, weighting: str) -> Outcome:
    """Liang et al., 2020: the body stays, and the head is averaged."""
    bodies, shared = dict.fromkeys(fed.clients, fed.w0[BODY]), fed.w0[HEAD]
    for t in fed.rounds:
        for k in t.asked:
            w_k = sgd(torch.cat([bodies[k], shared]), t.batches(k, epochs), t.lr)
            bodies[k] = w_k[BODY]
            t.send(k, delta=w_k[HEAD] - shared)
        if t.replies:
            shared = shared + t.mean("delta", weighting)
    return Outcome(models=[torch.cat([bodies[k], shared]) for k in fed.clients])


@oracle("fedrep", head_epochs=3, epochs=2, final_epochs=3)
def fedrep(fed: Federation, head_epochs: int, epochs: int, final_epochs: int) -> Outcome:
    """Collins et al., ICML 2021, Algorithm 1; after the last round all clients fit their heads."""
    body, heads = fed.w0[BODY], dict.fromkeys(fed.clients, fed.w0[HEAD])
    for t in fed.rounds:
        for k in t.asked:
            w_k = sgd(torch.cat([body, heads[k]]), t.batches(k, head_epochs), t.lr, train_head)
            w_k = sgd(w_k, t.batches(k, epochs), t.lr, train_body)
            heads[k] = w_k[HEAD]
            t.send(k, delta=w_k[BODY] - body)
        if t.replies:
            body = body + t.mean("delta")
    t, last = fed.end, [torch.cat([body, heads[k]]) for k in fed.clients]
    return Outcome(
        models=[sgd(last[k], t.batches(k, final_epochs, stream="final"), t.lr, train_head) for k in fed.clients]
    )


@oracle("fedbabu", epochs=2, tune_epochs=2)
@oracle("fedbabu", tune="head", tune_epochs=3)
def fedbabu(fed: Federation, tune_epochs: int, epochs: int = 1, tune: str = "all") -> Outcome:
    """Oh et al., ICLR 2022, Algorithm 1: the head stays as it was drawn until clients tune."""
    w = fed.w0
    for t in fed.rounds:
        for k in t.asked:
            t.send(k, delta=sgd(w, t.batches(k, epochs), t.lr, train_body) - w)
        if t.replies:
            w = w + t.mean("delta")
    t, tuning = fed.end, grad if tune == "all" else train_head
    models = [sgd(w, t.batches(k, tune_epochs, stream="tune"), t.lr, tuning) for k in fed.clients]
    return Outcome(models=models, shared=w)


@oracle("fedrod", gamma=0.8, epochs=2)
def fedrod(fed: Federation, gamma: float, epochs: int) -> Outcome:
    """Chen, Chao, ICLR 2022, Algorithm 1, with a balanced softmax and a linear personal head."""
    w, personal = fed.w0, dict[int, Tensor]()
    for t in fed.rounds:
        for k in t.asked:
            counts = torch.bincount(fed.data(k)[1], minlength=CLASSES).double().clamp(min=1e-8)
            prior = gamma * counts.log()
            w_k, h_k = w, personal.get(k, fed.w0[HEAD])
            for x, y in t.batches(k, epochs):
                z = features(w_k, x)
                generic = head(w_k, z)

                def personal_loss(h: Tensor, z: Tensor = z, generic: Tensor = generic, y: Tensor = y) -> Tensor:
                    return cross_entropy(generic + head(torch.cat([fed.w0[BODY], h]), z), y)

                g_h = gradient(personal_loss, h_k)
                g = gradient(lambda v, x=x, y=y, prior=prior: cross_entropy(logits(v, x) + prior, y), w_k)
                w_k, h_k = w_k - t.lr * g, h_k - t.lr * g_h
            personal[k] = h_k
            t.send(k, delta=w_k - w)
        if t.replies:
            w = w + t.mean("delta")
    answers = []
    for k in fed.clients:
        z = features(w, fed.probes)
        own = head(torch.cat([fed.w0[BODY], personal[k]]), z) if k in personal else 0
        answers.append(head(w, z) + own)
    return Outcome(answers=answers, shared=w)
