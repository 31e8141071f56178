"""What a server makes of public samples before anybody trains, and sends once: a teacher, and a pool of its features.

    features    P0: unit features of the samples under another network, with their labels
    images      P1: the samples themselves, which every client encodes with its own network
    anchored    P2: the samples, and their unit features under the teacher that all clients begin with
    means       P3: the mean unit feature of every class under that teacher
    labelled    the samples themselves, as more samples to classify: what a pool of images is worth without contrast

For the first, the network is not the one that clients begin with, so directions in its feature space mean nothing
in theirs; it is what was run once and is here to be measured. Controls: an untrained network, random directions, and
images of noise.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params
from atoll.toolbox.client.sgd import sgd
from atoll.toolbox.objectives.contrastive import UNLABELLED
from atoll.toolbox.objectives.etf import random_directions

log = logging.getLogger("atoll.toolbox.client")

Pool = Literal["none", "features", "images", "anchored", "means", "labelled"]
Source = Literal["teacher", "untrained", "random", "noise"]
CONTROLS: dict[Pool, tuple[Source, ...]] = {"features": ("untrained", "random"), "images": ("noise",)}  # of no teacher


def teacher(bench: Workbench, start: Params, epochs: int, *, augmented: bool = True) -> Params:
    """Train a model on the public samples, by the clients' rule of steps."""
    return sgd(bench.cohort(*bench.public, augmented=augmented), start=start, epochs=epochs).client(0)


def redraw(bench: Workbench, w: Params) -> Params:
    """Make another initial model: the numbers of every weight in another order, as likely a draw as the first."""
    draw = bench.generator("another network")

    def shuffle(leaf: Tensor) -> Tensor:
        order = torch.from_numpy(draw.permutation(leaf.numel())).to(leaf.device)
        return leaf.flatten()[order].reshape(leaf.shape)

    return w | w.trained.map(shuffle)


def sample(bench: Workbench, size: int) -> tuple[Tensor, Tensor]:
    """Draw so many of the public samples, or all there are, without order."""
    x, y = bench.public
    chosen = torch.from_numpy(bench.generator("pool").permutation(len(x))[:size]).to(x.device)
    return x[chosen], y[chosen]


def directions(bench: Workbench, w: Params, x: Tensor) -> Tensor:
    """Return the unit features of samples."""
    return F.normalize(bench.answers(w, x, features=True), dim=1)


def class_means(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the direction of the mean of each class; a row of zeros for one without samples."""
    member = (y == torch.arange(classes, device=y.device)[:, None]).to(z.dtype)
    return F.normalize(member @ z, dim=1)


def pool(bench: Workbench, form: Pool, source: Source, *, size: int, start: Params, other: Params | None) -> Params:
    """Make the pool of a form: what is sent. `start` is what clients begin with, `other` another network."""
    x, y = sample(bench, size)
    if source == "noise":
        x = torch.from_numpy(bench.generator("noise pool").normal(size=tuple(x.shape))).to(x)
        y = torch.full_like(y, UNLABELLED)
    if form in ("images", "labelled"):
        return Params.of(x=x, y=y)
    if form == "anchored":
        return Params.of(x=x, y=y, features=directions(bench, start, x))
    if form == "means":
        classes = bench.task.classes
        assert classes is not None, "the task has no classes"
        return Params.of(features=class_means(directions(bench, start, x), y, classes))
    if source == "random":
        size = int(bench.answers(start, x[:1], features=True).shape[1])
        found = random_directions(len(x), size, bench.generator("random bank")).to(x)
        return Params.of(features=found, y=torch.full_like(y, UNLABELLED))
    assert other is not None, "there is no other network"
    log.warning(
        "the bank holds features of another network than the clients': directions in one mean nothing in the other. "
        "This is for reproduction; `pool=images` has the clients encode the samples themselves"
    )
    return Params.of(features=directions(bench, other, x), y=y)
