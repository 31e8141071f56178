"""Adam, for what a method trains beside the clients' models: students, generators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atoll.kernel.params import Params, Scalar, Stack

DECAY, DECAY_OF_SQUARES, TINY = 0.9, 0.999, 1e-8  # beta_1, beta_2 and epsilon of the paper


def unmoved(w: Params | Stack) -> dict[str, Any]:
    """What Adam remembers, before its first step."""
    return {"mean": w.zeros(), "square": w.zeros(), "steps": Params.of(steps=0.0)}


def adam(
    w: Params, g: Params, past: dict[str, Params], lr: Scalar, weight_decay: float = 0.0, decay: float = DECAY
) -> tuple[Params, dict[str, Params]]:
    """The values and what Adam remembers after one step along g; weight decay is added to the gradient."""
    g = g.moved(w.only(g), weight_decay) if weight_decay else g
    mean = past["mean"] * decay + g * (1 - decay)
    square = past["square"] * DECAY_OF_SQUARES + g.map(torch.square) * (1 - DECAY_OF_SQUARES)
    steps = past["steps"]["steps"] + 1
    first, second = (-torch.expm1(steps * math.log(part)) for part in (decay, DECAY_OF_SQUARES))  # 1 - part^steps
    along = {name: leaf / first / ((square[name] / second).sqrt() + TINY) for name, leaf in mean.items()}
    return w.moved(Params(along, g.layout), -lr), {"mean": mean, "square": square, "steps": Params.of(steps=steps)}


def annealed(steps: Tensor, total: int) -> Tensor:
    """The share of the step size that is left after so many steps of `total`: half a cosine, from 1 to 0."""
    return 0.5 * (1 + torch.cos(steps * (math.pi / total)))
