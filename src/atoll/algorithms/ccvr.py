"""CCVR: the head of a federated average, calibrated on features that are drawn from a Gaussian per class.

    client:  trains w as in `fedavg`; sends for each class c the count, sum and products of its features z(x; w)
    server:  mu_c, S_c = mean and covariance of class c over the samples of all clients
             h = argmin_h  sum_c E_{z ~ N(mu_c, S_c)} loss(h(z), c),        deployed: the body of w under h

Heads suffer most from classes that clients do not have in common; on drawn features all classes are in one place, as
many of each. Sums suffice, so the Gaussians are the same however samples are dealt to clients. The features are those
of the received w: what is deployed after T rounds is the average of T - 1 rounds, calibrated. The first
`rounds_before` rounds are plain averaging; with T - 1 of them the head is calibrated once, as in the paper. With
``draws = 0`` nothing is calibrated, and this is `fedavg`.

Reference: Luo, Chen, Hu, Zhang, Liang, Feng. "No Fear of Heterogeneity: Classifier Calibration for Federated Learning
with Non-IID Data." NeurIPS 2021, Algorithm 1. https://arxiv.org/abs/2106.05001
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Epochs,
    Limits,
    Natural,
    Positive,
    Predictor,
    Range,
    Replies,
    Rounds,
    Update,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client import sgd
from atoll.toolbox.client.features import feature_size, membership
from atoll.toolbox.client.passes import many_at_once
from atoll.toolbox.server.frozen import head_leaves
from atoll.toolbox.server.heads import train_head
from atoll.toolbox.server.triangles import shrink, symmetric, triangle, without_negative_variances

MOMENTUM = 0.9  # of the server's steps
LEAST = 1e-9  # variance in squares of means: a class of one sample has no other


@record
class State:
    """The average, what is deployed of it, and what is known of each class."""

    w: Params
    deployed: Params
    gaussians: Params  # `share` of all samples [class], `mean` [class, feature], `covariance` [class, feature, feature]


@dataclass(frozen=True, kw_only=True)
class CCVR(Algorithm):
    """One shared model for all clients, whose head is trained anew on drawn features."""

    epochs: Epochs = 1  # E: local epochs per round
    rounds_before: Rounds = 0  # rounds of plain averaging before the first that calibrates
    draws: Natural = 500  # features of each class; 0: the head of the average stays as it is
    shrinkage: Annotated[float, Range(0, 1, open_low=True)] = 0.01  # share of S_c that is its mean variance times I
    server_epochs: Epochs = 10  # passes over the drawn features
    server_batch: Count = 128  # features in a step of the server
    server_lr: Positive = 0.01  # its step size, on standardised features

    sends: ClassVar[dict[str, str]] = {"delta": "model", "moments": "statistic"}
    limits: ClassVar[Limits] = {"fedavg": {"draws": 0}}
    cites: ClassVar[str] = "luo2021no"

    @property
    def least_rounds(self) -> int:
        """One that calibrates, after those that do not."""
        return self.rounds_before + 1 if self.draws else 1

    def start(self, task: Facts) -> State:
        """Begin with nothing known of any class; raise unless the head is a linear layer."""
        w, size = task.network.initial, feature_size(self, task)
        assert task.classes is not None
        head_leaves(self, w, (task.classes, size))
        zeros = torch.zeros(task.classes, size, size, dtype=torch.float64, device=task.sample.device)
        return State(w, w, Params.of(share=zeros[:, 0, 0], mean=zeros[:, 0], covariance=zeros))

    def broadcast(self, server: State) -> Params:
        """Send the average."""
        return server.w

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the average; describe the features of what was received, class by class, if it is time."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        send = {"delta": w_k - w}
        if self.draws and cohort.round >= self.rounds_before:
            send["moments"] = mean_products(cohort, w, feature_size(self, cohort.task))
        return Update(send=send, weight=cohort.weights("samples"))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average; calibrate the head of what the clients had received."""
        w = server.w + replies.mean("delta")
        if not replies.has("moments"):
            return State(w, w, server.gaussians)
        # Late replies without moments make all sums smaller alike, and no mean or covariance.
        gaussians = renew(server.gaussians, replies.mean("moments"))
        head = self.calibrate(server.w, gaussians, replies.workbench)
        return State(w, server.w | head, gaussians)

    def calibrate(self, w: Params, gaussians: Params, bench: Workbench) -> Params:
        """Return a head for w, trained on features of the classes that are known; its own where none is."""
        if not bool((gaussians["share"] > 0).any()):
            return w.only(())
        features, classes = draw_features(gaussians, self.draws, self.shrinkage, bench)
        rule = Training(lr=self.server_lr, batch_size=self.server_batch, momentum=MOMENTUM)
        weight, bias = train_head(features, classes, bench, rule, epochs=self.server_epochs)
        names = head_leaves(self, w, tuple(weight.shape))
        return Params({name: leaf.to(w[name]) for name, leaf in zip(names, (weight, bias), strict=True)})

    def shared(self, server: State) -> Params | Predictor | None:
        """Return the calibrated model."""
        return super().shared(server.deployed)


def mean_products(cohort: Cohort, w: Params, size: int) -> Stack:
    """Return each client's means over its samples of 1, z and z z^T, by class; of the latter the upper triangle."""
    classes = cohort.task.classes
    assert classes is not None

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(len(cohort), classes, *shape, dtype=cohort.initial_dtype, device=cohort.device)

    start = Stack.of(share=zeros(), sum=zeros(size), square=zeros(size, size))
    sums: Stack = cohort.scan(
        _add, start, given=w, batch_size=many_at_once(cohort), shuffle=False, train=False, exact=True
    )
    means: Stack = cohort.map(_divide, sums)
    return means


def _add(seen: Params, batch: Batch, w: Params) -> Params:
    z = batch.features(w).to(seen["sum"])
    same = membership(batch, len(seen["share"])).to(z)
    squares = (same[:, :, None] * z[:, None]).flatten(1).T @ z  # of all classes in one product
    return Params.of(
        share=seen["share"] + same.sum(0),
        sum=seen["sum"] + same.T @ z,
        square=seen["square"] + squares.reshape(same.shape[1], *z.shape[1:], -1),
    )


def _divide(sums: Params) -> Params:
    samples = sums["share"].sum().clamp(min=1)
    return Params.of(share=sums["share"], sum=sums["sum"], square=triangle(sums["square"])) * (1 / samples)


def renew(gaussians: Params, moments: Params) -> Params:
    """Return the Gaussians of classes that somebody sent; a class that nobody sent stays as it was."""
    share = moments["share"].double()
    there = share > 0
    mean = moments["sum"] / torch.where(there, share, 1)[:, None]
    square = symmetric(moments["square"] / torch.where(there, share, 1)[:, None])
    covariance = torch.baddbmm(square, mean[:, :, None], mean[:, None, :], alpha=-1)
    new = Params.of(share=share, mean=mean, covariance=covariance)
    rows = torch.nonzero(there)[:, 0]
    return Params({name: leaf.index_copy(0, rows, new[name][rows]) for name, leaf in gaussians.items()})


def draw_features(gaussians: Params, draws: int, shrinkage: float, bench: Workbench) -> tuple[Tensor, Tensor]:
    """Draw as many features of each known class; return them, and their classes."""
    known = torch.nonzero(gaussians["share"] > 0)[:, 0]
    mean, covariance = gaussians["mean"][known], shrink(gaussians["covariance"][known], shrinkage)
    size = mean.shape[1]
    least = max(LEAST, size * torch.finfo(bench.network.dtype).eps)  # products come in that type, and are rounded
    covariance.diagonal(dim1=1, dim2=2).add_(least * mean.square().mean(1, keepdim=True))
    normal = bench.generator("features").standard_normal((len(known), draws, size))
    root = torch.linalg.cholesky(without_negative_variances(covariance))  # eigenvectors would jump with the rounding
    mean, root = mean.to(bench.network.dtype), root.to(bench.network.dtype)
    drawn = torch.baddbmm(mean[:, None], torch.from_numpy(normal).to(mean), root.transpose(1, 2))
    return drawn.flatten(0, 1), known.repeat_interleave(draws)
