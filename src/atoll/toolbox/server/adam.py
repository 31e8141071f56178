"""Adam, for what a method trains beside the clients' models: students, generators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.kernel.params import Params, Scalar, Stack
from atoll.kernel.record import Each, record

DECAY, DECAY_OF_SQUARES, TINY = 0.9, 0.999, 1e-8  # beta_1, beta_2 and epsilon of the paper


@record
class Past:
    """What Adam remembers."""

    mean: Each
    square: Each
    steps: Each


def no_past(w: Params | Stack) -> Past:
    """Return what Adam remembers before its first step."""
    return Past(w.zeros(), w.zeros(), torch.zeros(()))


def adam(
    w: Params, g: Params, past: Past, lr: Scalar, weight_decay: float = 0.0, decay: float = DECAY
) -> tuple[Params, Past]:
    """Return the values and what Adam remembers after one step along g; weight decay is added to the gradient."""
    g = g.moved(w.only(g), weight_decay) if weight_decay else g
    steps = past.steps + 1
    done = steps.to(next((leaf.dtype for leaf in g.values()), steps.dtype))  # as exact as what is divided by it
    first, second = (-torch.expm1(done * math.log(part)) for part in (decay, DECAY_OF_SQUARES))  # 1 - part^steps
    root = second.sqrt()
    tiny = root * TINY
    mean, square, along = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for name, leaf in g.items():  # in few passes: with small batches these take as long as the gradient
        mean[name] = torch.lerp(past.mean[name], leaf, 1 - decay)
        square[name] = torch.addcmul(past.square[name] * DECAY_OF_SQUARES, leaf, leaf, value=1 - DECAY_OF_SQUARES)
        along[name] = mean[name] / (_root(square[name]) + tiny)
    found = Past(past.mean | Params(mean), past.square | Params(square), steps)
    return w.moved(Params(along, g.layout), -lr * root / first), found  # corrected in the step: fewer passes


def _root(x: Tensor) -> Tensor:
    """Return the square root; `sqrt` itself takes a CPU five times as long where x is 0, as of units that are off."""
    return x.rsqrt().reciprocal()


def annealed_share(steps: Tensor, total: int) -> Tensor:
    """Return the share of the step size that is left after so many steps of `total`: half a cosine, from 1 to 0."""
    return 0.5 * (1 + torch.cos(steps * (math.pi / total)))
