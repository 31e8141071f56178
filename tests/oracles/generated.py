"""Models that the server makes: pFedHN's hypernetwork, FEDORA's propagation."""

import math

import torch
from oracles.tools import CLASSES, Federation, Outcome, grad, loss, oracle, sgd
from torch import Tensor

from atoll.compose import create

Numbers = dict[str, Tensor]


def generate(phi: Numbers, e: Tensor) -> Tensor:
    """Return h(e; phi): f_0 = A_0 e + a_0, f_i = A_i relu(f_(i-1)) + a_i, and a linear head for every leaf."""
    f = phi["hidden.0.weight"] @ e + phi["hidden.0.bias"]
    layers = sum(name.startswith("hidden") for name in phi) // 2
    for i in range(1, layers):
        f = phi[f"hidden.{i}.weight"] @ f.relu() + phi[f"hidden.{i}.bias"]
    leaves = [name[: -len(".weight")] for name in phi if name.startswith("head.") and name.endswith(".weight")]
    leaves = [leaf for leaf in leaves if f"{leaf}.bias" in phi]
    return torch.cat([phi[f"{leaf}.weight"] @ f + phi[f"{leaf}.bias"].flatten() for leaf in leaves])


@oracle("pfedhn", hidden=4, layers=1, embedding=2, server_lr=0.1, clip=0.05, epochs=2)
@oracle("pfedhn", hidden=5, layers=2, server_lr=0.05, weight_decay=0.1, momentum=0.5)
@oracle("pfedhn", hidden=4, layers=1, embedding=2, server_lr=0.02, server_batch="sequential", clip=0.05)
def pfedhn(
    fed: Federation, hidden: int, layers: int, server_lr: float, embedding: int | None = None, clip: float = 50.0,
    weight_decay: float = 0.001, momentum: float = 0.9, server_batch: str = "all", epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Shamsian et al., ICML 2021, Algorithm 1; where it begins is a draw."""
    words = f"pfedhn:hidden={hidden},layers={layers}" + (f",embedding={embedding}" if embedding else "")
    phi = dict(create(words).start(fed.task.public_facts()).phi)
    velocity = {name: torch.zeros_like(value) for name, value in phi.items()}

    def step(replies: list) -> None:
        """Take a step of SGD along the mean of J_k' Delta_k."""
        point = {name: value.clone().requires_grad_() for name, value in phi.items()}
        along = sum(-one.discount * (generate(point, point["embeddings"][one.client]) @ one.delta) for one in replies)
        along = along / len(replies)  # a late reply makes a smaller step
        g = dict(zip(point, torch.autograd.grad(along, [*point.values()]), strict=True))
        length = float(torch.cat([value.flatten() for value in g.values()]).norm())
        for name in phi:
            velocity[name] = momentum * velocity[name] + g[name] * min(1.0, clip / length) + weight_decay * phi[name]
            phi[name] = phi[name] - server_lr * velocity[name]

    for t in fed.rounds:
        for k in t.asked:
            theta = generate(phi, phi["embeddings"][k])
            t.send(k, delta=sgd(theta, t.batches(k, epochs), t.lr) - theta)
        if t.replies and server_batch == "all":
            step(t.replies)
        elif server_batch == "sequential":
            for one in sorted(t.replies, key=lambda reply: reply.client):
                step([one])
    return Outcome(models=[generate(phi, phi["embeddings"][k]) for k in fed.clients])


def directions(rows: Tensor, q: int) -> Tensor:
    """Return the q leading directions of some rows, [p, q]; 0 beyond their rank."""
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    found = torch.zeros(rows.shape[1], q, dtype=rows.dtype)
    rank = int((values[:q] > 1e-12).sum())
    found[:, :rank] = right[:rank].T
    return found


@oracle("fedora", topk=1, temperature=3.0, alpha=0.6, epochs=2)
@oracle("fedora", topk=2, q=2, gate="official", lam_max=1.5)
@oracle("fedora", topk=3, similarity="labels", alpha=0.7)
def fedora(
    fed: Federation, topk: int, temperature: float = 10.0, alpha: float = 0.8, q: int = 1, similarity: str = "subspace",
    gate: str = "strict", lam_max: float | None = None, epochs: int = 1,
) -> Outcome:  # fmt: skip
    """Wu et al., KDD 2023, as released: models travel along links between clients with similar data."""
    own, last, told = dict[int, Tensor](), dict[int, Tensor](), dict[int, tuple[list[Tensor], Tensor]]()

    def describe(k: int) -> tuple[list[Tensor], Tensor]:
        """Return the directions of a client's samples, of all or of each class, and how much each part counts."""
        x, y = fed.data(k)
        one_hot = torch.eye(CLASSES, dtype=torch.float64)[y]
        if similarity == "subspace":
            return [directions(torch.cat([x, one_hot], 1), q)], torch.ones(1)
        return [directions(x[y == c], q) for c in range(CLASSES)], one_hot.mean(0)

    def links(k: int, others: list[int]) -> Tensor:
        """Return a softmax over the likeness to the nearest others: the mean cosine of principal angles."""
        mine, weight = describe(k)
        likeness = {}
        for j in others:
            theirs, their_weight = told[j]
            cosines = [float(torch.linalg.svdvals(a.T @ b).sum()) / q for a, b in zip(mine, theirs, strict=True)]
            likeness[j] = sum(float(p) * cos for p, cos in zip((weight * their_weight).sqrt(), cosines, strict=True))
        nearest = sorted(likeness, key=lambda j: -likeness[j])[:topk]
        weights = torch.tensor([temperature * likeness[j] for j in nearest], dtype=torch.float64).softmax(0)
        return torch.zeros(len(fed.clients), dtype=torch.float64).index_put((torch.tensor(nearest),), weights)

    def propagated(k: int) -> Tensor:
        """Return G_k: row k of P = (1 - alpha) (I - alpha S)^-1 over those who have replied, times their models."""
        everybody = len(fed.clients)
        S = torch.zeros(everybody, everybody, dtype=torch.float64)
        for i in told:
            if len(told) > 1:
                S[i] = links(i, [j for j in told if j != i])
        # One that never told anything is a new client: it has what those have that it would link to.
        step = torch.eye(everybody, dtype=torch.float64)[k] if k in told else links(k, [*told])
        row = torch.zeros_like(step)
        for _ in range(300):  # I + alpha S + (alpha S)^2 + ...: nobody is reached by rounding
            row, step = row + (1 - alpha) * step, alpha * step @ S
        row = row * torch.tensor([float(j in last) for j in fed.clients])
        if not row.sum() > 0:
            return own.get(k, fed.w0)
        return sum(row[j] / row.sum() * w for j, w in last.items())

    for t in fed.rounds:
        for k in t.new:
            told[k] = describe(k)
        received = {k: propagated(k) for k in t.asked}
        for k in t.asked:
            G = received[k]
            v = own.get(k, G)
            of_G, of_v = (float(loss(w, *fed.data(k, "val"))) for w in (G, v))
            opens = of_G <= of_v if gate == "official" else of_G < of_v
            lam = min(math.exp((of_v - of_G) / 2), 1 / t.lr if lam_max is None else lam_max) if opens else 0.0
            for x, y in t.batches(k, epochs):
                v = v - t.lr * grad(v, x, y) - t.lr * lam * (v - G)
            own[k] = v
            t.send(k, model=v)
        for one in t.replies:
            last[one.client] = one.model
    return Outcome(models=[own[k] if k in own else propagated(k) for k in fed.clients])
