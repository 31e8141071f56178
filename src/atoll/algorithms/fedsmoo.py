"""FedSMOO: FedDyn along sharpness-aware gradients whose perturbations are drawn to a common one.

    eps <- rho d / ||d||,   d = g(theta) - mu_k - s;        mu_k <- mu_k + eps - s        (in every local step)

    steps along g(theta + eps) - q_k + alpha (theta - w);        s <- rho m / ||m||,   m = mean_k mu_k

q_k, w and h are those of FedDyn. mu_k is the dual variable of the constraint that every client's perturbation be s.
With ``rho = 0`` this is FedDyn.

Reference: Sun, Shen, Chen, Ding, Tao. "Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape." ICML 2023. https://arxiv.org/abs/2305.11584
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client import descend, linear, proximal, zero_velocity
from atoll.toolbox.client.descent import MeanLoss
from atoll.toolbox.client.penalties import Onto
from atoll.toolbox.client.sharpness import ascent, gradient_beside
from atoll.toolbox.server import dynamic
from atoll.toolbox.server.dynamic import Dynamic


@record
class State:
    """The state of FedDyn's server, and the common perturbation."""

    feddyn: Dynamic
    s: Params


@record
class Sent:
    """What clients receive."""

    w: Params
    s: Params


@record
class Kept:
    """The dual variables of a client."""

    q: Stack
    against: Stack  # -mu_k


@record
class Carry:
    """A model on its way, with its dual variable."""

    theta: Each
    against: Each
    velocity: Each
    loss: MeanLoss


@record
class Given:
    """What does not change on the way."""

    s: Params
    pull: Tree
    lr: Tensor


@dataclass(frozen=True, kw_only=True)
class FedSMOO(Algorithm):
    """One shared model; dynamic regularisation and a flat neighbourhood of it that all clients agree on."""

    alpha: Positive = 0.1  # α: pull towards the received model
    epochs: Epochs = 1  # local epochs per round
    rho: NonNegative = 0.1  # ρ: radius of the neighbourhood

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "dual": "state"}
    limits: ClassVar[Limits] = {"feddyn": {"rho": 0.0}}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "sun2023dynamic"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls the local model to w."""
        return {"lr * alpha": lr * self.alpha}

    def start(self, task: Facts) -> State:
        """Begin as FedDyn, without a common perturbation."""
        begun = dynamic.begin(task)
        return State(begun, begun.h)

    def broadcast(self, server: State) -> Sent:
        """Send the model and the common perturbation."""
        return Sent(server.feddyn.w, server.s)

    def local(self, received: Sent, cohort: Cohort) -> Update:
        """Train as FedDyn, along gradients that are taken uphill; both dual variables go on."""
        w, rule, zeros = received.w, cohort.training, cohort.stacked(received.w.zeros())
        mine = cohort.recall(default=Kept(zeros, zeros))
        pull = linear(-mine.q) + proximal(self.alpha, center=w)
        end = cohort.scan(
            partial(self._step, rule, pull.onto),
            Carry(w, mine.against, zero_velocity(rule, w), MeanLoss()),
            given=Given(received.s, pull.given, cohort.lr),
            epochs=self.epochs,
        )
        cohort.observe(**{"loss/main": end.loss.value})
        delta = end.theta - w
        keep = Kept(mine.q - delta.trained * self.alpha, end.against)
        return Update(send={"delta": delta, "dual": -end.against}, keep=keep)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Aggregate as FedDyn; the common perturbation is where the dual variables point on average."""
        dual = replies.mean("dual")
        s = ascent(server.feddyn.w, dual, self.rho)
        return State(dynamic.move(server.feddyn, replies, self.alpha), s)

    def personalize(self, server: State, cohort: Cohort) -> Params:
        """Return the shared model."""
        return server.feddyn.w

    def shared(self, server: State) -> Params:
        """Return the shared model."""
        return server.feddyn.w

    def _step(self, rule: Training, onto: Onto, carry: Carry, batch: Batch, given: Given) -> Carry:
        """Take one step of one client; `against` is what is added to its gradient before it climbs."""
        theta, against = carry.theta, carry.against
        g, after, loss = batch.gradient(theta)
        eps = ascent(theta, g + against - given.s, self.rho)
        uphill = onto(gradient_beside(theta, batch, eps), theta, given.pull)
        theta, velocity = descend(rule, after, uphill, carry.velocity, given.lr)
        return Carry(theta, against + given.s - eps, velocity, carry.loss.add(loss))
