"""Perceptrons on Params that map a class and some numbers, such as noise, to features or samples."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.params import Params


def conditional_perceptron(
    inputs: int, classes: int, hidden: int, outputs: int, *, draw: np.random.Generator, like: Tensor
) -> Params:
    """Draw a perceptron with one hidden layer as torch draws its layers; it has the type of `like`.

    Torch itself would draw from its global generator, which clients that run in threads share.
    """
    values = {}
    for name, (rows, columns) in {"hidden": (hidden, inputs + classes), "out": (outputs, hidden)}.items():
        for part, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            drawn = draw.uniform(-1, 1, shape) / math.sqrt(columns)
            values[f"{name}.{part}"] = torch.from_numpy(drawn).to(like)
    return Params(values)


def generate(perceptron: Params, numbers: Tensor, y: Tensor) -> Tensor:
    """Map numbers and classes through a conditional perceptron, one row per sample."""
    count = perceptron["hidden.weight"].shape[1] - numbers.shape[1]
    classes = (y[:, None] == torch.arange(count, device=y.device)).to(numbers.dtype)
    hidden = F.linear(torch.cat([numbers, classes], 1), perceptron["hidden.weight"], perceptron["hidden.bias"])
    return F.linear(F.relu(hidden), perceptron["out.weight"], perceptron["out.bias"])
