"""ResNet-18 for small images (He et al., CVPR 2016): a 3x3 stem and no first pooling."""

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import nn

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead, image_size

Norm = Literal["batch", "group"]

STAGES = (64, 128, 256, 512)


class ResNet18(BodyAndHead):
    """ResNet-18, with 11,173,962 parameters on 3x32x32 and 10 classes for either norm.

    Group norm keeps no running statistics, so there is nothing of the clients' data to average.
    """

    block_starts: ClassVar[tuple[int, ...]] = (0, 3, 5, 7, 9)  # the stem and four stages of two blocks each

    def __init__(self, shape: tuple[int, ...], classes: int, norm: Norm = "batch") -> None:
        if norm not in ("batch", "group"):
            raise ModelError(f"`norm` of ResNet18 must be 'batch' or 'group'. Got {norm!r} instead.")
        channels, _, _ = image_size("ResNet18", shape, smallest=1)
        layers: list[nn.Module] = [_conv(channels, STAGES[0], size=3), _norm(norm, STAGES[0]), nn.ReLU()]
        for before, after in pairwise((STAGES[0], *STAGES)):
            stride = 1 if before == after else 2
            layers += [BasicBlock(before, after, stride, norm), BasicBlock(after, after, 1, norm)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(nn.Sequential(*layers), nn.Linear(STAGES[-1], classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv(before, after, size=3, stride=stride),
            _norm(norm, after),
            nn.ReLU(),
            _conv(after, after, size=3),
            _norm(norm, after),
        )
        self.shortcut = (
            nn.Identity()
            if before == after
            else nn.Sequential(_conv(before, after, size=1, stride=stride), _norm(norm, after))
        )
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        y: torch.Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return y


def _conv(before: int, after: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    # The norm that follows has a bias of its own.
    return nn.Conv2d(before, after, kernel_size=size, stride=stride, padding=size // 2, bias=False)


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(32, channels), channels)
