"""FedGen: the server learns a generator of features from the clients' heads; with it, clients recall absent classes.

    server:  min_G  E_{y,e} sum_k s_k(y) CE(h_k(z), y)  +  eta exp(-mean_ij |e_i - e_j|^2 |z_i - z_j|),    z = G(y, e)
    client:  min_w  F_k(w) + alpha E_{y,e} CE(h(z), y) + beta E_{x,y,e} KL( softmax(h(G(y, e))) || softmax(f(x; w)) )

G makes what enters a head h (not samples), from a class y and noise e. s_k(y) is client k's share of the samples of
class y. alpha and beta fall by `decay` from round to round; in the first round there is no generator yet.

With ``alpha = beta = 0`` this is FedAvg, or with ``private = "body"`` LG-FedAvg.

Reference: Zhu, Hong, Zhou. "Data-Free Knowledge Distillation for Heterogeneous Federated Learning." ICML 2021,
Algorithm 1. https://arxiv.org/abs/2105.10056
"""

import functools
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Epochs,
    Limits,
    NonNegative,
    Positive,
    Predictor,
    Replies,
    Steps,
    Update,
    Weighting,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.hyperparameters import Range
from atoll.kernel.network import NO_NETWORK, Network
from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params, Part, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.models.generator import conditional_perceptron, generate
from atoll.toolbox.client import adam, no_past, sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.server.adam import Past
from atoll.toolbox.server.distillation import divergence


@record
class State:
    """The shared leaves and, once the server has seen heads, the generator."""

    w: Params
    generator: Params | None = None
    labels: Params | None = None  # 1 for classes that somebody has


@record
class Given:
    """What reminds a client of all classes."""

    generator: Params
    known: Tensor
    alpha: Tensor
    beta: Tensor


@record
class Heads:
    """What the generator learns from."""

    heads: Params  # of all clients, one row each
    shares: Tensor  # of each class's samples that a client has, [client, class]


@record
class Teaching:
    """The generator on its way."""

    generator: Each
    past: Past


@dataclass(frozen=True, kw_only=True)
class FedGen(Algorithm):
    """Federated averaging with a generator of features for every class."""

    alpha: NonNegative = 10.0  # weight of generated features of any class in a client's loss
    beta: NonNegative = 10.0  # weight of agreement with generated features of a sample's own class
    decay: Annotated[float, Range(0, 1, open_low=True)] = 0.98  # factor on alpha and beta per round
    epochs: Epochs = 1  # E: local epochs per round
    noise: Count = 32  # numbers in e
    hidden: Count = 256  # width of the generator
    server_steps: Steps = 50  # steps on the generator per round
    server_batch: Count = 32  # features in a step of the server
    server_lr: Positive = 3e-4  # step size of Adam on the generator
    weight_decay: NonNegative = 0.01  # weight decay of the generator
    diversity: NonNegative = 1.0  # eta: weight of the diversity of generated features
    private: Part = "none"  # the leaves that never leave the client; never the head
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"delta": "model", "labels": "labels"}
    limits: ClassVar[Limits] = {
        "fedavg": {"alpha": 0.0, "beta": 0.0},
        "lg-fedavg": {"alpha": 0.0, "beta": 0.0, "private": "body"},
    }
    cites: ClassVar[str] = "zhu2021data"

    def start(self, task: Facts) -> State:
        """Return the shared leaves; there is no generator before the server has seen heads."""
        feature_size(self, task)
        if task.network.layout.head & task.network.layout.part(self.private):
            raise HyperparameterError(
                f"`private` of FedGen must leave the head shared: the server learns from heads. Got {self.private!r}."
            )
        return State(task.network.initial.without_part(self.private))

    def local(self, server: State, cohort: Cohort) -> Update:
        """Train with what the generator knows of all classes, and count the own ones."""
        start = self.personalize(server, cohort)
        if server.generator is None or server.labels is None:
            w_k = sgd(cohort, start=start, epochs=self.epochs)
        else:
            left = cohort.lr.new_tensor(self.decay**cohort.round)
            given = Given(server.generator, server.labels.value, self.alpha * left, self.beta * left)
            w_k = sgd(cohort, start=start, epochs=self.epochs, gradient=reminded_gradient, given=given, draws=True)
        shared, private = w_k.without_part(self.private), w_k.part(self.private)
        send = {"delta": shared - server.w, "labels": label_counts(cohort)}
        return Update(send=send, weight=cohort.weights(self.weighting), keep=private)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average the models, and teach the generator what their heads know."""
        counts = replies.stack("labels").value
        heads = replies.models(lambda sent, _: sent.w.part("head"))
        return State(
            server.w + replies.mean("delta"),
            self.teach(server.generator, heads, counts, replies.workbench),
            Params.of(known=(counts.sum(0) > 0).to(counts.dtype)),
        )

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the shared leaves, with the client's own where some are private."""
        return cohort.recall(default=cohort.initial.part(self.private)) | cohort.stacked(server.w)

    def shared(self, server: State) -> Params | Predictor | None:
        """Return the averaged model, if nothing is private."""
        return super().shared(server.w)

    def teach(self, generator: Params | None, heads: Stack, counts: Tensor, bench: Workbench) -> Params:
        """Train the generator for a round's steps; `counts` holds the clients' samples, [client, class]."""
        classes, features = counts.shape[1], feature_size(self, bench.task)
        if generator is None:
            first = bench.generator("first generator")
            generator = conditional_perceptron(self.noise, classes, self.hidden, features, draw=first, like=counts)
        draw, size = bench.generator("features"), self.server_steps * self.server_batch
        known = np.flatnonzero(counts.sum(0).cpu().numpy())
        y = torch.from_numpy(draw.choice(known, size)).to(counts.device)
        noise = torch.from_numpy(draw.normal(size=(size, self.noise))).to(counts)
        server = bench.cohort(noise, y, network=NO_NETWORK, batch_size=self.server_batch)
        given = Heads(Params(heads, heads.layout), counts / counts.sum(0).clamp(min=1))
        step = functools.partial(teach, method=self, network=bench.network)
        end = server.scan(step, Teaching(generator, no_past(generator)), given=given, train=False)
        taught: Params = end.generator.client(0)
        return taught


def reminded_gradient(w: Params, batch: Batch, given: Given) -> Found:
    """Return the gradient of a client's loss, with as many generated features of any class as there are samples."""
    generator, known, size = given.generator, given.known, len(batch.x)
    y = any_of(known, batch.uniform("labels", size))
    noise = batch.normal("noise", 2, size, generator["hidden.weight"].shape[1] - len(known))
    z = generate(generator, noise[0], y)
    wanted = batch.head(w, generate(generator, noise[1], batch.y)).softmax(1)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        recalled = cross_entropy(batch.head(w | trained, z), y).mean()
        apart = batch.mean(divergence(outputs, wanted))
        return loss + given.alpha * recalled + given.beta * apart, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def any_of(known: Tensor, drawn: Tensor) -> Tensor:
    """Choose one of the classes marked by 1 in `known`, all equally likely, for every number drawn from [0, 1)."""
    place = torch.floor(drawn * known.sum())
    return (known.cumsum(0) <= place[:, None]).sum(1)


def teach(state: Teaching, batch: Batch, given: Heads, *, method: FedGen, network: Network) -> Teaching:
    """Take one step of the generator: each client's head should see the class in what is made, if it knows it."""
    heads, ask = given.heads, replace(batch, network=network)

    def objective(generator: Params) -> tuple[Tensor, None]:
        z = generate(generator, batch.x, batch.y)

        def errors(*leaves: Tensor) -> Tensor:
            head = Params(dict(zip(heads, leaves, strict=True)), heads.layout)
            return cross_entropy(ask.head(head, z), batch.y)

        each = given.shares[:, batch.y] * vmap(errors)(*heads.values())  # [client, sample]
        return each.sum(0).mean() + method.diversity * collapse(batch.x, z), None

    g, _ = batch.differentiate(objective, state.generator)
    return Teaching(*adam(state.generator, g, state.past, method.server_lr, method.weight_decay))


def collapse(noise: Tensor, z: Tensor) -> Tensor:
    """Return about 1 if different noise makes the same features, about 0 if it makes others."""
    apart = (noise[:, None] - noise).square().mean(2) * (z[:, None] - z).abs().mean(2)
    return torch.exp(-apart.mean())
