"""MTFL with FedAvg-Adam: clients train by Adam, and its moments are averaged as the model is.

    m_k <- b1 m_k + (1 - b1) g,   s_k <- b2 s_k + (1 - b2) g^2,   t <- t + 1
    w_k <- w_k - eta (m_k / (1 - b1^t)) / ( sqrt(s_k / (1 - b2^t)) + 1e-8 ),        g = grad F_k(w_k, patch_k)
    w, m, s, t <- their means over clients, weighted by p_k

Every client has a batch-norm patch of its own, as in `mtfl`, and Adam's moments of the patch stay with it. With
``private = "none"`` everything is shared: FedAvg-Adam alone. A single client trains by Adam, whatever the rounds.

Reference: Mills, Hu, Min. "Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing."
IEEE TPDS 33(3), 2022. https://arxiv.org/abs/2007.09236. FedAvg-Adam: Mills, Hu, Min. "Communication-Efficient Federated
Learning for Wireless Edge Intelligence in IoT." IEEE Internet of Things Journal 7(7), 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Epochs, Positive, Predictor, Replies, Search, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.adaptive import train_by_adam
from atoll.toolbox.client.sharing import batchnorm_patch, fit_patch, say_what_is_shared
from atoll.toolbox.server.adam import Past


@record
class State:
    """The shared leaves, and what Adam remembers of them."""

    w: Params
    mean: Params
    square: Params
    steps: Params


@record
class Kept:
    """A client's patch, and what Adam remembers of it."""

    patch: Stack
    mean: Stack
    square: Stack


@dataclass(frozen=True, kw_only=True)
class MTFLAdam(Algorithm):
    """Shared layers with a private patch between them, trained by Adam with averaged moments."""

    private: Literal["none", "yb", "us", "usyb"] = "yb"  # the patch: γ and β, running μ and σ, all of them, or nothing
    epochs: Epochs = 1  # E: local epochs per round, on everything together
    adam_lr: Annotated[Positive, Search(1e-4, 1e-2, log=True)] = 3e-3  # η: step size of Adam, as in the paper
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "mean": "state", "square": "state", "steps": "statistic"}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "mills2022multi"

    def start(self, task: Facts) -> State:
        """Return everything but patches, which is all that the server knows."""
        initial = task.network.initial
        if self.private != "none":
            say_what_is_shared(self, initial, "batchnorm", otherwise="FedAvg-Adam")
        w = initial.without(self._patch(initial))
        return State(w, w.zeros(), w.zeros(), Params.of(steps=0.0))

    def local(self, server: State, cohort: Cohort) -> Update:
        """Train everything by Adam from the averaged moments; send what is shared, keep the patch and its moments."""
        kept = self._recall(server, cohort)
        start = kept.patch | cohort.stacked(server.w)
        mean, square = (cohort.stacked(one) for one in (server.mean, server.square))
        past = Past(kept.mean | mean, kept.square | square, cohort.each(server.steps.value))
        w_k, after = train_by_adam(cohort, start, past, epochs=self.epochs, lr=self.adam_lr)
        send = {
            "delta": w_k.only(server.w) - server.w,
            "mean": after.mean.only(server.mean) - server.mean,
            "square": after.square.only(server.square) - server.square,
            "steps": Stack.of(steps=after.steps - past.steps),
        }
        keep = Kept(w_k.without(server.w), after.mean.without(server.mean), after.square.without(server.square))
        return Update(send=send, weight=cohort.weights(self.weighting), keep=keep)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average the shared leaves and their moments; a mean of squares stays one, whatever came late."""
        square = server.square + replies.mean("square")
        return State(
            server.w + replies.mean("delta"),
            server.mean + replies.mean("mean"),
            square.map(lambda leaf: leaf.clamp(min=0)),
            server.steps + replies.mean("steps"),
        )

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the shared leaves with the client's patch; a client that never took part has the initial one."""
        return self._recall(server, cohort).patch | cohort.stacked(server.w)

    def shared(self, server: State) -> Params | Predictor | None:
        """Return the averaged model, if nothing is private."""
        return super().shared(server.w)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Fit a new client's patch, from the initial one, and nothing else; statistics need no labels."""
        return fit_patch(cohort, server.w, self._patch(cohort.initial))

    def _recall(self, server: State, cohort: Cohort) -> Kept:
        patch = cohort.stacked(cohort.initial.without(server.w))
        return cohort.recall(default=Kept(patch, patch.zeros(), patch.zeros()))

    def _patch(self, model: Params) -> Params:
        return model.only(()) if self.private == "none" else batchnorm_patch(model, self.private)
