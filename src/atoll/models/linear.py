"""The linear model: regression or logistic regression, convex in its parameters."""

import math

from torch import nn

from atoll.models.split import BodyAndHead


class Linear(BodyAndHead):
    """One linear layer on inputs of any shape; the body only flattens, so everything is head."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))
