"""FML: every client has a model of its own, and the two models that it trains teach each other.

    v_k <- v_k - eta grad_v [ alpha F_k(v_k) + (1 - alpha) E_x KL( softmax(z(x; w_k)) || softmax(z(x; v_k)) ) ]
    w_k <- w_k - eta grad_w [ beta  F_k(w_k) + (1 - beta)  E_x KL( softmax(z(x; v_k)) || softmax(z(x; w_k)) ) ]

w_k begins at the shared w and is averaged; v_k never leaves. Both learn on the same batches, from what the other one
answered before the step. With ``alpha = 1`` each v_k is trained alone, as `local`; with ``beta = 1`` w is FedAvg's.
With ``meme = "mlp:16"``, w is a network of that kind, small enough to travel, and each v_k is of the client's own.

Reference: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. "Federated Mutual Learning." 2020.
https://arxiv.org/abs/2006.16765
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Replies, Search, Share, Update, Weighting, WithEverybody
from atoll.kernel.batch import Batch, check_outputs, check_targets
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError, TaskError
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import default_generator, number
from atoll.kernel.task import Facts, Training
from atoll.models import build
from atoll.toolbox.client import descend, zero_velocity
from atoll.toolbox.client.descent import Found, TwoModels
from atoll.toolbox.server.distillation import divergence


@dataclass(frozen=True, kw_only=True)
class FML(Algorithm):
    """A personal and a shared model that teach each other."""

    alpha: Annotated[Share, Search(0.1, 0.9)] = 0.5  # α: weight of the data in the loss of v_k; the rest is w_k's
    beta: Annotated[Share, Search(0.1, 0.9)] = 0.5  # β: weight of the data in the loss of w_k; the rest is v_k's
    epochs: Epochs = 1  # E: local epochs per round, on both models together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all
    meme: str | None = None  # the network of w, such as mlp:16; None: the clients' own

    mixes_architectures: ClassVar[bool] = True
    limits: ClassVar[Limits] = {"local": WithEverybody(alpha=1.0)}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "shen2020federated"

    def start(self, task: Facts) -> Params:
        """Return the initial model, of a task with classes."""
        require_classes(task)
        if self.meme is None:
            return task.network.initial
        meme = self.network(task)
        try:
            check_targets(meme, check_outputs(meme, task.sample[None], task.classes), task.target[None])
        except ModelError as error:
            raise ModelError(f"meme={self.meme} does not fit this task. {error}") from error
        return Params(meme.initial)  # without its layout: messages and checkpoints know the clients' networks alone

    def networks(self, task: Facts) -> tuple[Network, ...]:
        """Return the network of w, of which all messages are."""
        return (self.network(task),)

    def network(self, task: Facts) -> Network:
        """Return the network of w."""
        if self.meme is None:
            return task.network
        sample, classes = task.sample, require_classes(task)
        own, made = task.network, (self.meme, tuple(sample.shape), classes, task.seed)
        return build_meme(*made, loss=own.loss, score=own.score, device=sample.device, dtype=own.dtype)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models together, step by step on the same batches."""
        end = self.train(w, self.recall(w, cohort), cohort)
        cohort.observe(**end.losses)
        delta = Stack(end.w - w, w.layout)
        return Update(send={"delta": delta}, weight=cohort.weights(self.weighting), keep=end.v)

    def fuse(self, servers: Sequence[Params], replies: Replies) -> list[Params]:
        """Average w over the clients of all architectures, if it is of none of these; otherwise over those of each."""
        if self.meme is None:
            return super().fuse(servers, replies)
        return [servers[0] + replies.mean("delta")] * len(servers)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's own model; a client that never took part uses w, or its own network as it begins."""
        return self.recall(w, cohort)

    def shared(self, w: Params) -> Params | None:
        """Return w, if clients could deploy it."""
        return w if self.meme is None else None

    def welcome(self, w: Params, cohort: Cohort) -> Params | Stack:
        """Return w; if it is of another network, train a new client's model with it."""
        return w if self.meme is None else self.train(w, self.recall(w, cohort), cohort).v

    def recall(self, w: Params, cohort: Cohort) -> Stack:
        """Return the clients' own models."""
        return cohort.recall(default=w if self.meme is None else cohort.initial)

    def train(self, w: Params, v: Stack, cohort: Cohort) -> TwoModels:
        """Return both models after the round's steps."""
        network, rule = self.network(cohort.task), cohort.training
        w = Params({name: w[name] for name in network.initial}, network.layout)
        carry = TwoModels(w, v, zero_velocity(rule, w), zero_velocity(rule, v))
        step = partial(self._step, rule, network)
        both: TwoModels = cohort.scan(step, carry, given=cohort.lr, epochs=self.epochs, draws=network.draws)
        return both

    def _step(self, rule: Training, network: Network, carry: TwoModels, batch: Batch, lr: Tensor) -> TwoModels:
        """Take one step of one client; both gradients are taken before anything moves."""
        meme = replace(batch, network=network)
        g_w, w, main = taught_gradient(carry.w, meme, self.beta, lambda: batch.forward(carry.v)[0])
        g_v, v, personal = taught_gradient(carry.v, batch, self.alpha, lambda: meme.forward(carry.w)[0])
        w, velocity_w = descend(rule, w, g_w, carry.velocity_w, lr)
        v, velocity_v = descend(rule, v, g_v, carry.velocity_v, lr)
        return TwoModels(w, v, velocity_w, velocity_v, carry.main.add(main), carry.personal.add(personal))


def taught_gradient(w: Params, batch: Batch, share: float, answer: Callable[[], Tensor]) -> Found:
    """Return the gradient of a share of the data's loss, and of the distance to what another model answers."""
    if share == 1:
        return batch.gradient(w)
    wanted = answer().softmax(1)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        apart = batch.mean(divergence(outputs, wanted))
        return share * loss + (1 - share) * apart, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def require_classes(task: Facts) -> int:
    """Return how many classes there are; raise if targets are something else."""
    if task.classes is None:
        raise TaskError(f"The models of FML teach each other probabilities of classes. {task.name} has no classes.")
    return task.classes


@lru_cache(maxsize=8)
def build_meme(
    name: str, shape: tuple[int, ...], classes: int, seed: int, *, loss: Any, score: Any,
    device: torch.device, dtype: torch.dtype,
) -> Network:  # fmt: skip
    """Make the network of this name for such samples; its values follow from the seed.

    The same one in every round, so its step is traced once.
    """
    with default_generator(number(seed, "meme")):
        module = build(name, shape, classes)
    return Network(module, loss=loss, score=score, signature=(name, shape, classes)).to(device, dtype)
