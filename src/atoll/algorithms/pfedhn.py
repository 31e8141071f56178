"""pFedHN: the server learns a hypernetwork that makes every client's model, from an embedding of the client.

    min_{phi, e_1..e_N}  sum_k F_k(h(e_k; phi))

    client:  delta_k = theta^S - theta,        theta^S by S local steps from theta = h(e_k; phi)
    server:  (phi, e_k) <- (phi, e_k) + server_lr J_k^T delta_k,        J_k = d h(e_k; phi) / d (phi, e_k)

h is a perceptron with one linear head per leaf of the model. No client's embedding or model reaches another client.
With ``private = "head"`` clients keep a head of their own, which is not generated (pFedHN-PC); with
``private = "all"`` nothing is, and every client trains alone.

Reference: Shamsian, Navon, Fetaya, Chechik. "Personalized Federated Learning using Hypernetworks." ICML 2021,
Algorithm 1. https://arxiv.org/abs/2103.04628
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Epochs,
    Limits,
    Natural,
    NonNegative,
    Positive,
    Range,
    Replies,
    Update,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.models.hypernetwork import Spectral, generate_leaves, hypernetwork, normalise_spectrum, size_of
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.sharing import say_what_is_shared
from atoll.toolbox.client.statistics import refresh_statistics
from atoll.toolbox.server.mixing import require_bytes

ALL, ONE = "embeddings", "embedding"  # e of all clients, a leaf of phi; e of a new one, a leaf beside its own


@record
class State:
    """The hypernetwork with all embeddings, and how fast they go."""

    phi: Params
    velocity: Params


@dataclass(frozen=True, kw_only=True)
class PFedHN(Algorithm):
    """Every client's model is made by one hypernetwork on the server."""

    embedding: Count | None = None  # numbers in e_k; None: 1 + N / 4, rounded down
    hidden: Count = 100  # width of the hypernetwork
    layers: Natural = 3  # hidden layers of the hypernetwork after the first
    spectral: Spectral = "none"  # weights that are divided by their spectral norm: of hidden layers, or also of heads
    server_batch: Literal["all", "sequential"] = "all"  # one step along the mean of all replies, or one for each
    server_lr: NonNegative = 0.01  # η_s: step size on φ and e
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # momentum of these steps
    weight_decay: NonNegative = 1e-3  # weight decay of φ and e
    clip: Positive | None = 50.0  # the largest norm of a gradient
    private: Part = "none"  # the leaves that are not generated and never leave the client
    epochs: Epochs = 1  # S: local epochs per round
    fit_epochs: Epochs = 20  # epochs in which a new client fits its embedding

    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"local": {"private": "all"}}
    cites: ClassVar[str] = "shamsian2021personalized"

    def start(self, task: Facts) -> State:
        """Draw a hypernetwork, with an embedding for each client."""
        say_what_is_shared(self, task.network.initial, self.private)
        target, inputs = self._target(task.network.initial), self.embedding or 1 + task.clients // 4
        numbers = size_of(target, inputs, self.hidden, self.layers) + task.clients * inputs
        require_bytes(
            5 * numbers * task.network.dtype.itemsize,  # phi and its velocity before and after a step, and a gradient
            task.sample.device,
            f"The server must hold a hypernetwork of {numbers:,} numbers, 5 of each at a time",
            hint="take a smaller model, or fewer `hidden` units: there are so many weights for every number of it.",
        )
        draw = generator(0, "hypernetwork")
        phi = hypernetwork(target, inputs, self.hidden, self.layers, draw=draw)
        like = next(iter(phi.values()))
        phi = phi | Params({ALL: torch.from_numpy(draw.normal(size=(task.clients, inputs))).to(like)})
        return State(phi, phi.zeros())

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send what the hypernetwork makes for each client."""
        phi = self._normalise(server)
        return make_models(phi, phi[ALL][torch.from_numpy(ids)])

    def local(self, _: None, cohort: Cohort) -> Update:
        """Train what was generated, with the leaves of one's own."""
        theta: Stack = cohort.received
        end = sgd(cohort, start=self._assemble(theta, cohort), epochs=self.epochs)
        return Update(send={"delta": end.only(theta) - theta}, keep=end.without(theta))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Take a step for each reply, in the order of the clients' numbers; or one step for all."""
        delta, order = replies.stack("delta"), torch.from_numpy(replies.clients.argsort())
        if not delta:
            return server
        weights = replies.weights.to(next(iter(delta.values())))  # 1, or less for a reply that was late
        for some in torch.split(order, 1 if self.server_batch == "sequential" else len(order)):
            shares = weights[some] / len(some)
            server = self.step(server, torch.from_numpy(replies.clients)[some], delta.rows(some) * shares)
        return server

    def step(self, server: State, clients: Tensor, delta: Stack) -> State:
        """Take one step that moves the models of some clients this way; return the hypernetwork and all e."""
        g = gradient(server.phi, clients, delta, self.spectral)
        if self.clip is not None:
            g = g * (self.clip / g.norm().clamp(min=self.clip))
        velocity = server.velocity * self.momentum + g.moved(server.phi, self.weight_decay)
        return State(server.phi.moved(velocity, -self.server_lr), velocity)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return the hypernetwork with no embedding but those of these clients."""
        rows, all_of_them = torch.from_numpy(ids).to(server.phi[ALL].device), server.phi[ALL]
        e = torch.zeros_like(all_of_them).index_copy(0, rows, all_of_them[rows])
        return State(server.phi | Params({ALL: e}), server.velocity.zeros())

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return what is generated for the client, with what it keeps."""
        return self._assemble(self.unicast(server, cohort.clients), cohort)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Fit a new client's embedding, from the mean of all, to the hypernetwork as it is.

        Without labels it has the mean: a heuristic. That does not help where it would need a head of its own.
        """
        phi = self._normalise(server)
        own, e = cohort.initial.without(self._target(cohort.initial)), phi[ALL].mean(0)
        if not cohort.labelled and not own.trained:
            return refresh_statistics(cohort, self._assemble(cohort.stacked(Params(generate_leaves(phi, e))), cohort))
        layout = cohort.task.network.layout
        layout = replace(layout, kinds={**layout.kinds, ONE: "trained"})
        start = Params({**own, ONE: e}, layout)
        given = cohort.stacked(phi) if e.dtype == torch.float64 else phi  # as in `make_models`
        fit = sgd(
            cohort,
            start,
            epochs=self.fit_epochs,
            only=start,
            gradient=embedding_gradient,
            given=given,
            stream="welcome",
        )
        return cohort.stacked(cohort.initial) | fit.without([ONE]) | make_models(phi, fit[ONE])

    # -- parts -------------------------------------------------------------------------------------------------------
    def _target(self, model: Params) -> Params:
        """Return the leaves that are generated."""
        return model.trained.without_part(self.private)

    def _normalise(self, server: State) -> Params:
        return normalise_spectrum(server.phi, self.spectral)

    def _assemble(self, theta: Stack, cohort: Cohort) -> Stack:
        """Return whole models: those who never took part have the initial values of what is not generated."""
        own = cohort.recall(default=cohort.initial.without(theta))
        return cohort.stacked(cohort.initial) | own | theta


def make_models(phi: Params, e: Tensor) -> Stack:
    """Generate the models of several clients."""
    if e.dtype == torch.float64:  # one by one: the same bits however the cohort is cut into chunks
        each = [generate_leaves(phi, one) for one in e]
        return Stack({name: torch.stack([one[name] for one in each]) for name in (each[0] if each else ())})
    return Stack(generate_leaves(phi, e))


def gradient(phi: Params, clients: Tensor, delta: Stack, spectral: Spectral) -> Params:
    """Return - sum_k J_k^T delta_k: what moves the models of these clients, against their own steps."""

    def models(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        now = Params(leaves)
        return generate_leaves(normalise_spectrum(now, spectral), now[ALL][clients])

    pulled = vjp(models, dict(phi))[1]
    return Params(*pulled(dict(-delta)))


def embedding_gradient(w: Params, batch: Batch, phi: Params) -> Found:
    """Return the gradient of a new client's loss for its embedding, and for the leaves of its own."""
    return batch.gradient(w, through=lambda own: own.without([ONE]) | Params(generate_leaves(phi, own[ONE])))
