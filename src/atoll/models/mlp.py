"""The multilayer perceptron."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from atoll.models.split import BodyAndHead


class MLP(BodyAndHead):
    """Linear layers with ReLU between them, on inputs of any shape."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (128, 128)) -> None:
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(nn.Sequential(*layers), nn.Linear(widths[-1], classes))
