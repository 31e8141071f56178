"""FedCR: features are distributions, drawn to what all clients together know of their class; heads are private.

    min_{w, h_k}  E_k [ mean_m CE(h_k(mu + sigma e_m), y) + beta KL( N(m_y, s_y^2) || N(mu, sigma^2) ) ]

    1 / s_y^2 = 1 + sum_k sum_i 1 / sigma_i^2,        m_y = s_y^2 sum_k sum_i mu_i / sigma_i^2

mu(x; w) is what enters the head, sigma(x; w) comes from one more linear layer on it, e_m is standard normal noise. The
last line is a product of experts: those of all samples i of class y, and a standard normal one. Encoders are averaged.
Without ``beta`` and noise this is FedPer.

Reference: Zhang, Li, Dai, Zou, Xiong. "FedCR: Personalized Federated Learning Based on Across-Client Common
Representation with Conditional Mutual Information Regularization." ICML 2023, Algorithm 1.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, NonNegative, Replies, Share, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Layout, Params, Part, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import feature_size, membership
from atoll.toolbox.client.sharing import say_what_is_shared

WEIGHT, BIAS = "fedcr.spread.weight", "fedcr.spread.bias"  # the layer that sigma comes from
SMALLEST = 1e-3  # sigma, where something is divided by it: a product of many experts shrinks it without end


@record
class State:
    """The encoder, and the distribution of each class's features."""

    w: Params
    prior: Params  # mean m_y and sigma s_y


@dataclass(frozen=True, kw_only=True)
class FedCR(Algorithm):
    """An encoder of distributions that agree with the product of all clients' experts, under personal heads."""

    beta: NonNegative = 1e-4  # β: weight of the divergence from the common distribution of a class
    draws: Count = 18  # M: features drawn for a sample in a step
    offset: NonNegative = 0.0  # α: sigma is softplus(s - α); from about 1000 there is no noise
    rate: Share = 1.0  # the share of a class's distribution that is renewed in a round
    epochs: Epochs = 1  # E: local epochs per round, on encoder and head together
    final_epochs: Epochs = 10  # epochs on the heads of all clients after the last round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sends: ClassVar[dict[str, str]] = {"delta": "model", "experts": "statistic"}
    limits: ClassVar[Limits] = {"fedper": {"beta": 0.0, "offset": 1000.0, "draws": 1, "final_epochs": 0}}
    reads_total: ClassVar[bool] = True  # experts multiply, so as many as there are count
    cites: ClassVar[str] = "zhang2023fedcr"

    def start(self, task: Facts) -> State:
        """Return the encoder, and a standard normal distribution for every class."""
        size, initial = feature_size(self, task), task.network.initial
        say_what_is_shared(self, initial, "head")
        assert task.classes is not None
        zeros = next(iter(initial.floating.values())).new_zeros(task.classes, size)
        spread = {WEIGHT: zeros.new_zeros(size, size), BIAS: zeros.new_zeros(size)}
        w = initial.without_part("head") | Params(spread)
        return State(w, Params.of(mean=zeros, sigma=torch.ones_like(zeros)))

    def local(self, server: State, cohort: Cohort) -> Update:
        """Train encoder and head, then make the own experts of every class."""
        w, weight = server.w, cohort.weights(self.weighting)
        w_k = self._train(server, cohort, epochs=self.epochs)
        nothing = torch.zeros_like(server.prior["mean"])
        start = Params.of(precision=nothing, moment=nothing)
        experts = cohort.scan(partial(multiply, self), start, given=w_k, shuffle=False, train=False, exact=True)
        # The server has weighted means: times the sum of all weights, that of these is the sum of the experts.
        send = {"delta": w_k.without_part("head") - w, "experts": experts / weight.clamp(min=1)}
        return Update(send=send, weight=weight, keep=_network(w_k, cohort).part("head"))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average the encoders and multiply the experts; what is known of a class stays if nobody had it."""
        experts, prior = replies.mean("experts"), server.prior
        precision, moment = (experts[name] * replies.total.to(experts[name]) for name in ("precision", "moment"))
        found = Params.of(mean=moment / (1 + precision), sigma=(1 + precision).rsqrt())
        new = prior.lerp(found, self.rate)
        prior = Params({name: torch.where(precision > 0, new[name], prior[name]) for name in prior})
        return State(server.w + replies.mean("delta"), prior)

    def finish(self, server: State, cohort: Cohort) -> Stack:
        """Fit every client's head to the final encoder, also of one that never took part."""
        return self.welcome(server, cohort).part("head")

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the network at the mean features; a client that never took part has the initial head."""
        return _network(self._assemble(server, cohort), cohort)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Fit the head of a new client, from the initial one, to the newest encoder."""
        return _network(self._train(server, cohort, epochs=self.final_epochs, part="head", stream="final"), cohort)

    def _assemble(self, server: State, cohort: Cohort) -> Stack:
        """Join the encoder, with the layer of sigma, and the client's head."""
        whole = cohort.stacked(server.w) | cohort.recall(default=cohort.initial.part("head"))
        return Stack(whole, with_spread(cohort.task.network.layout))

    def _train(self, server: State, cohort: Cohort, *, epochs: int, part: Part = "all", stream: str = "main") -> Stack:
        start = self._assemble(server, cohort)
        return sgd(
            cohort,
            start,
            epochs=epochs,
            only=start.part(part),
            stream=stream,
            gradient=partial(informed_gradient, self, part),
            given=server.prior,
            draws=True,
        )


def with_spread(layout: Layout) -> Layout:
    """Return the layout of a network that has the layer of sigma in its body."""
    return replace(layout, kinds={**layout.kinds, WEIGHT: "trained", BIAS: "trained"})


def _network(w: Stack, cohort: Cohort) -> Stack:
    """Return the network's own leaves, without the layer of sigma."""
    return cohort.stacked(cohort.initial) | w.only(cohort.initial)


def encode(method: FedCR, batch: Batch, w: Params) -> tuple[Tensor, Tensor, Params]:
    """Return the mean and sigma of every sample, and the network with the buffers of the pass."""
    body = replace(batch, variant=replace(batch.variant, features=True))
    mean, after = body.forward(w.only(batch.network.initial))
    sigma = F.softplus(F.linear(mean, w[WEIGHT], w[BIAS]) - method.offset)
    return mean, sigma, after


def informed_gradient(method: FedCR, part: Part, w: Params, batch: Batch, prior: Params) -> Found:
    """Return the gradient of the loss at noisy features plus their divergence from what is known of the class."""
    names, known = frozenset(w.part(part)), {name: leaf[batch.y] for name, leaf in prior.items()}

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        mean, sigma, after = encode(method, batch, w | trained)
        z = mean + sigma * batch.normal("features", method.draws, *mean.shape)
        outputs = batch.head(after, z.flatten(0, 1))
        each = batch.network.loss(outputs, batch.y.repeat(method.draws)).reshape(method.draws, -1)
        loss = batch.mean(each.mean(0))
        apart = batch.mean(divergence(known["mean"], known["sigma"], mean, sigma))
        return loss + method.beta * apart, (loss, after.buffers.only(names))

    g, (loss, buffers) = batch.differentiate(objective, w.trained.only(names))
    return g, w | buffers, loss


def divergence(mean: Tensor, sigma: Tensor, other_mean: Tensor, other_sigma: Tensor) -> Tensor:
    """Return every row's KL(N(mean, sigma^2) || N(other_mean, other_sigma^2)); no sigma counts below SMALLEST."""
    sigma, other = sigma.clamp(min=SMALLEST), other_sigma.clamp(min=SMALLEST)
    ratio, apart = sigma / other, (mean - other_mean) / other
    return (0.5 * (ratio.square() + apart.square() - 1) - ratio.log()).sum(1)


def multiply(method: FedCR, experts: Params, batch: Batch, w: Params) -> Params:
    """Multiply the experts of a client's classes by those of the samples of a batch: precisions add."""
    mean, sigma, _ = encode(method, batch, w)
    precision, same = sigma.clamp(min=SMALLEST) ** -2, membership(batch, len(experts["precision"]))
    return Params.of(
        precision=experts["precision"] + same.T @ precision, moment=experts["moment"] + same.T @ (precision * mean)
    )
