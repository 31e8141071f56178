"""Functions of a class and some numbers, such as noise, with Params of their own: they make features, or samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.params import Params
from atoll.randomness import default_generator


def conditional(inputs: int, classes: int, hidden: int, outputs: int, *, key: int, like: Tensor) -> Params:
    """A perceptron with one hidden layer, drawn from a key as torch draws its layers; of the type of `like`."""
    with default_generator(key):
        layers = {"hidden": nn.Linear(inputs + classes, hidden), "out": nn.Linear(hidden, outputs)}
    named = nn.ModuleDict(layers).named_parameters()
    return Params({name: leaf.detach().to(like) for name, leaf in named})


def generate(perceptron: Params, numbers: Tensor, y: Tensor) -> Tensor:
    """What a conditional perceptron makes of numbers and classes, one row per sample."""
    count = perceptron["hidden.weight"].shape[1] - numbers.shape[1]
    classes = (y[:, None] == torch.arange(count, device=y.device)).to(numbers.dtype)
    hidden = F.linear(torch.cat([numbers, classes], 1), perceptron["hidden.weight"], perceptron["hidden.bias"])
    return F.linear(F.relu(hidden), perceptron["out.weight"], perceptron["out.bias"])
