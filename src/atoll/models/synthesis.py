"""Networks that turn noise into samples, for a server that has none: data-free distillation.

Images are painted by convolutions between upsamplings, as in DENSE (Zhang et al., NeurIPS 2022). Their last layer is a
sigmoid, stretched to -1 .. 1: the range that Atoll gives to images (`atoll.data.datasets`), known without a look at
anybody's samples. Samples of another shape have no known range: for them, a perceptron ends in a linear layer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator

SPREAD = 0.02  # standard deviation of fresh weights
SLOPE = 0.2  # of LeakyReLU below 0


class ImageGenerator(nn.Module):
    """A network that maps noise to images in -1 .. 1, by two upsamplings from a quarter of each side."""

    def __init__(self, noise: int, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.small = (2 * width, -(-self.height // 4), -(-self.width // 4))
        self.start = nn.Linear(noise, math.prod(self.small))
        self.paint = nn.Sequential(
            _norm(nn.BatchNorm2d, 2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            _norm(nn.BatchNorm2d, 2 * width),
            nn.LeakyReLU(SLOPE),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            _norm(nn.BatchNorm2d, width),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return one image per row of noise; what upsampling adds beyond the size is cut off."""
        painted: Tensor = self.paint(self.start(z).unflatten(1, self.small))
        return 2 * painted[:, :, : self.height, : self.width] - 1


class VectorGenerator(nn.Sequential):
    """A network that maps noise to samples of any shape and range, by one hidden layer."""

    def __init__(self, noise: int, shape: tuple[int, ...], width: int) -> None:
        super().__init__(
            nn.Linear(noise, width),
            _norm(nn.BatchNorm1d, width),
            nn.LeakyReLU(SLOPE),
            nn.Linear(width, math.prod(shape)),
            nn.Unflatten(1, shape),
        )


def _norm(kind: type[nn.BatchNorm1d | nn.BatchNorm2d], features: int) -> nn.Module:
    """Return a BatchNorm by the statistics of the batch alone: a generator sees the noise it was trained with."""
    return kind(features, track_running_stats=False)


def generator_of(like: Tensor, noise: int, width: int) -> Network:
    """Return a generator of samples like `like`, of which only shape, type and device are read."""
    shape = tuple(like.shape)
    made = ImageGenerator if len(shape) == 3 else VectorGenerator
    with default_generator(0):  # which stays where it is: `draw_values` draws the values
        module = made(noise, shape, width).to(like.device, like.dtype)
    return Network(module, signature=("generator", shape, noise, width))


def draw_values(generator: Network, draw: np.random.Generator) -> Params:
    """Draw new values for a generator: normal weights, those of norm layers around 1, and biases of 0."""
    values = {}
    for name, leaf in generator.initial.items():
        centre = 1.0 if leaf.ndim == 1 else 0.0
        drawn = torch.from_numpy(draw.normal(centre, SPREAD, leaf.shape)).to(leaf)
        values[name] = torch.zeros_like(leaf) if name.endswith("bias") else drawn
    return Params(values)
