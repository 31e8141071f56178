"""A network with a declared boundary: the body computes features, the head classifies them."""

from typing import ClassVar

import torch
from torch import nn

from atoll.kernel.errors import ModelError


class BodyAndHead(nn.Module):
    """`forward(x) = head(features(x))`; methods that share only one of the two read `head_modules`."""

    head_modules: ClassVar[tuple[str, ...]] = ("head",)
    block_starts: ClassVar[tuple[int, ...] | None] = None  # the body's parts at which blocks begin; None: every layer

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head: one row per sample."""
        features: torch.Tensor = self.body(x)
        return features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one row of logits per sample."""
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def image_size(model: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return `shape` as (channels, height, width); raise unless it is an image with no side below `smallest`."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ModelError(
            f"{model} must be given images of shape (channels, height, width), "
            f"at least {smallest}x{smallest}. Got shape {shape}.",
            hint="use the model `mlp`, which takes any shape.",
        )
    channels, height, width = shape
    return channels, height, width
