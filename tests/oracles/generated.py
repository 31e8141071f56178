"""Models that the server makes: pFedHN's hypernetwork, FEDORA's propagation."""

import torch
from torch import Tensor

from atoll.compose import create
from oracles.tools import Federation, Outcome, grad, loss, oracle, sgd

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
            velocity[name] = (
                momentum * velocity[name] + g[name] * min(1.0, clip / length) + weight_decay * phi[name]
            )
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
