"""SCAFFOLD: local steps are corrected by how a client's gradient differs from everybody's.

    y   <- y - eta (grad F_k(y) - c_k + c),    from y = w, for K steps;        c_k <- c_k - c + (w - y) / (K eta)

    w   <- w + server_lr mean_k (y_k - w),                                     c   <- c + (1/N) sum_k (change of c_k)

The control variates c_k estimate each client's gradient and c their mean over all N clients. At the fixed point the
correction cancels what drives a client from the optimum of (1/N) sum_k F_k, for any number of local steps.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning." ICML 2020, Algorithm 1, option II. https://arxiv.org/abs/1910.06378
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Count, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import linear, sgd


@record
class State:
    """The model, the mean of all control variates, and how many clients there are."""

    w: Params
    c: Params
    clients: int


@record
class Sent:
    """What clients receive."""

    w: Params
    c: Params


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    """One shared model; control variates against client drift."""

    epochs: Count = 1  # local epochs per round; K is the number of batches in them
    server_lr: Positive = 1.0  # η_g: step of the server towards the mean of y_k

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "change": "model"}
    cites: ClassVar[str] = "karimireddy2020scaffold"

    def start(self, task: Facts) -> State:
        """Begin without a control variate for any client."""
        rule = task.training
        if rule.momentum or not rule.lr:
            raise TaskError(
                "SCAFFOLD reads gradients off plain steps, so `momentum` must be 0 and `lr` above 0. "
                f"Got momentum={rule.momentum:g}, lr={rule.lr:g}."
            )
        w = task.network.initial
        return State(w, w.zeros(), task.clients)

    def broadcast(self, server: State) -> Sent:
        """Send the model and the mean control variate."""
        return Sent(server.w, server.c)

    def local(self, received: Sent, cohort: Cohort) -> Update:
        """Train with the correction, and send by how much the model and c_k changed."""
        w, c = received.w, received.c
        c_k = cohort.recall(default=c.zeros())
        y = sgd(cohort, start=w, epochs=self.epochs, penalty=linear(c - c_k))
        change = cohort.stacked(-c) - (y - w).trained / (cohort.steps(self.epochs) * cohort.lr)
        return Update(send={"delta": y - w, "change": change}, keep=c_k + change)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average; a change of c_k counts whole, however late, so c stays the mean of all c_k."""
        c = server.c + replies.sum("change") / server.clients
        return replace(server, w=server.w.step(replies.mean("delta"), self.server_lr), c=c)

    def personalize(self, server: State, cohort: Cohort) -> Params:
        """Return the shared model."""
        return server.w

    def shared(self, server: State) -> Params:
        """Return the shared model."""
        return server.w
