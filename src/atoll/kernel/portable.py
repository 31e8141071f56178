"""Layers that mean the same in every execution strategy.

PyTorch's Dropout draws from a global generator, its BatchNorm would count the padding of a short batch and writes
its statistics in place, and its Conv2d turns into a slow grouped convolution when every client has weights of its
own. `portable` returns a copy of a network in which these layers are replaced by equivalents without those traits.
What they need beyond their input (a mask, a key) arrives as a buffer, so a forward pass stays a pure function.
"""

import functools
import itertools
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.kernel.randomness import Keys

KEY_LOW, KEY_HIGH, MASK = "_key_low", "_key_high", "_mask"
ALIGNED = 8  # the inner size of a matrix product on tensor cores is a multiple of this, else a slow kernel computes it


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (key, layer, element): the same alone, in a chunk or in a cohort."""

    _key_low: Tensor
    _key_high: Tensor

    def __init__(self, rate: float, layer: int, *, channels: bool) -> None:
        super().__init__()
        self.rate, self.layer, self.channels = rate, layer, channels
        self.calls = 0  # in this forward pass: one layer may be used in several places
        for name in (KEY_LOW, KEY_HIGH):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of the elements (or channels) and scale the rest up."""
        if not self.training or self.rate == 0:
            return x
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        counter = torch.arange(shape.numel(), device=x.device).reshape(shape)
        bits = Keys(self._key_low, self._key_high).fold(self.layer).fold(self.calls).bits(counter)
        self.calls += 1
        keep = bits >= int(self.rate * 2**32)
        return x * keep / (1 - self.rate if self.rate < 1 else 1)


class MaskedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics leave out padded samples; made from a `_BatchNorm` by changing its class."""

    _mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the batch in training, by the running statistics otherwise."""
        if not self.training and self.running_mean is not None:
            return self._normalise(x, self.running_mean, self.running_var)  # type: ignore[arg-type]
        if self._mask.ndim == 0:  # no sample is padding
            weight = torch.ones(len(x), device=x.device, dtype=self._precision(x))
        else:
            weight = self._mask.to(self._precision(x))
        weight = weight.reshape(-1, *[1] * (x.ndim - 1))
        axes = [0, *range(2, x.ndim)]
        count = weight.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        wide = x.to(weight.dtype)
        mean = (wide * weight).sum(axes) / count
        variance: Tensor = Variance.apply(wide, self._channelwise(mean, x), weight, count)  # type: ignore[no-untyped-call]
        if self.training and self.running_mean is not None:
            self._follow(mean.detach(), variance.detach(), count)
        return self._normalise(x, mean, variance)

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + 1
        rate = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        # One sample has no unbiased variance; its biased one, 0, is at least finite.
        unbiased = variance * count / (count - 1).clamp(min=1)
        # Assigned, not written in place: `functional_call` hands the new buffers back.
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
            old = getattr(self, name)
            setattr(self, name, old + rate * (value.to(old.dtype) - old))

    def _normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        # In one pass: in bf16 every product would be written and read again in fp32.
        return torch.addcmul(self._channelwise(shift, x), x, self._channelwise(scale, x)).to(x.dtype)

    def _channelwise(self, value: Tensor, x: Tensor) -> Tensor:
        return value.reshape(1, -1, *[1] * (x.ndim - 2))

    def _precision(self, x: Tensor) -> torch.dtype:
        """Return the type of the statistics: in bf16 they would be worthless."""
        return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the name nn.Module gives it
        """Accept any rank; the original layer checks nothing else."""


class Variance(torch.autograd.Function):
    """The variance of each channel about its mean.

    At the mean it does not change with the mean, sum_i (x_i - mean) being 0. So its gradient is 2 (x - mean) / count,
    and torch need not go over all activations again to find that nothing.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mean: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        """Return [channel], of samples [sample, channel, ...] with a weight of 0 or 1 each."""
        return ((x - mean) * weight).square().sum([0, *range(2, x.ndim)]) / count

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's names
        """Remember what the gradient is made of."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the samples."""
        x, mean, weight, count = ctx.saved_tensors
        scale = (2 / count * gradients[0]).reshape(mean.shape)
        return (x - mean) * (weight * scale), None, None, None


class ColumnConv2d(nn.Conv2d):
    """Conv2d as one matrix product; made from a `Conv2d` by changing its class.

    With one weight per client the product is a batched matrix product, which GPUs run several times faster than
    the grouped convolution it replaces.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Conv2d gives it
        """Compute the same values as Conv2d, to rounding."""
        assert not isinstance(self.padding, str)
        pad_rows, pad_columns = self.padding
        x = F.pad(input, (pad_columns, pad_columns, pad_rows, pad_rows))
        sizes = zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        high, wide = ((size - width) // step + 1 for size, width, step in sizes)
        table: Tensor = Columns.apply(x, self.kernel_size, self.stride)  # type: ignore[no-untyped-call]
        weight = self.weight.reshape(self.out_channels, len(table))
        if self.bias is not None:  # met by a row of ones, so the product of the gradients finds the bias's as well
            weight = torch.cat([weight, self.bias[:, None]], 1)
        weight = F.pad(weight, (0, -weight.shape[1] % ALIGNED))
        table = F.pad(table, (0, 0, 0, weight.shape[1] - len(table)), value=1.0)
        return (weight @ table).reshape(self.out_channels, len(x), high, wide).transpose(0, 1)


class Columns(torch.autograd.Function):
    """The patches of images that a convolution looks at, one per column.

    torch's own gradient of `unfold` adds up one number after another; this one adds slices.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        """Return [channel x row x column, sample x y x x], with rows as a convolution's weight is laid out."""
        x = F.avg_pool2d(x, 1)  # the same values; compilers write them down, rather than compute them for every patch
        table = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        return table.permute(1, 4, 5, 0, 2, 3).reshape(x.shape[1] * kernel[0] * kernel[1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's names
        """Remember the sizes."""
        x, ctx.kernel, ctx.stride = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients of all patches that a pixel is in."""
        (rows, columns), (down, right), (samples, channels, height, width) = ctx.kernel, ctx.stride, ctx.shape
        high, wide = (height - rows) // down + 1, (width - columns) // right + 1
        g = gradients[0].reshape(channels, rows, columns, samples, high, wide)
        places = itertools.product(range(rows), range(columns))
        parts = (_spread(_spread(g[:, i, j], 2, i, down, height), 3, j, right, width) for i, j in places)
        return functools.reduce(torch.add, parts).transpose(0, 1), None, None


def _spread(x: Tensor, axis: int, first: int, step: int, size: int) -> Tensor:
    """Return zeros of a size along an axis, with x at every `step`-th place from `first` on."""
    if step > 1:
        gaps = torch.zeros_like(x).unsqueeze(axis + 1)
        x = torch.cat([x.unsqueeze(axis + 1), *[gaps] * (step - 1)], axis + 1).flatten(axis, axis + 1)
        x = x.narrow(axis, 0, x.shape[axis] - step + 1)
    return F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (first, size - first - x.shape[axis]))


class TiledMaxPool2d(nn.MaxPool2d):
    """MaxPool2d whose windows are tiles, as comparisons of slices; made from a `MaxPool2d` by changing its class.

    A compiler joins comparisons with the layers around them, and what is left needs no table of positions.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.MaxPool2d gives it
        """Compute the same values and gradients as MaxPool2d: of equal values, the first has all of the gradient."""
        down, right = _pair(self.kernel_size)
        *front, height, width = input.shape
        high, wide = height // down, width // right
        tiles = input[..., : high * down, : wide * right].reshape(*front, high, down, wide, right)
        largest = tiles[..., 0, :, 0]
        for i, j in list(itertools.product(range(down), range(right)))[1:]:
            value = tiles[..., i, :, j]
            largest = torch.where((value > largest) | value.isnan(), value, largest)
        return largest


def portable(module: nn.Module, *, columns: bool = False) -> nn.Module:
    """Return a copy of `module` with portable layers; with `columns`, convolutions become matrix products."""
    copy = deepcopy(module)
    for layer, (name, part) in enumerate(list(copy.named_modules(remove_duplicate=False))):
        if isinstance(part, nn.modules.dropout._DropoutNd) and type(part).__module__ == nn.Dropout.__module__:
            if type(part) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                _replace(copy, name, KeyedDropout(part.p, layer, channels=type(part) is not nn.Dropout))
        elif type(part) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            part.__class__ = MaskedBatchNorm
            part.register_buffer(MASK, torch.zeros(()), persistent=False)
        elif columns and type(part) is nn.Conv2d and _is_plain(part):
            part.__class__ = ColumnConv2d
        elif columns and type(part) is nn.MaxPool2d and _is_tiled(part):
            part.__class__ = TiledMaxPool2d
    return copy


def _is_plain(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def _is_tiled(pool: nn.MaxPool2d) -> bool:
    plain = _pair(pool.padding) == (0, 0) and _pair(pool.dilation) == (1, 1)
    return plain and _pair(pool.stride) == _pair(pool.kernel_size) and not (pool.ceil_mode or pool.return_indices)


def _pair(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _replace(root: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(root.get_submodule(parent), attribute, part)
