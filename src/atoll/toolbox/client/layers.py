"""The linear maps inside a network, M (a, 1): their matrices, what enters them, and the gradients at their outputs.

A convolution is one as well, from patches to pixels; it has many places per sample, a linear layer has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.kernel.batch import Batch
from atoll.kernel.errors import ModelError, name_in_messages
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import one_sample

Rows = dict[str, Tensor]  # by layer: [sample, place, number]
Look = Callable[[str, nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]  # name, layer, inputs, output


def linear_maps(method: object, task: Facts, *, convolutions: bool = False) -> dict[str, tuple[int, int]]:
    """Return the layers that are linear maps and enter a forward pass, with the shape of their matrix.

    Raises where there is none, so the method would merge nothing.
    """
    kinds = (nn.Linear, nn.Conv2d) if convolutions else (nn.Linear,)
    network = task.network
    names = [
        name
        for name, part in _parts(network).items()
        if type(part) in kinds and f"{name}.weight" in network.initial and _is_plain(part)
    ]
    if not names:
        raise ModelError(
            f"{name_in_messages(method)} needs a network with linear layers{' or convolutions' * convolutions}. That "
            f"of {task.name} has none.",
            hint="take the answer `average`, which averages all layers.",
        )
    with torch.no_grad():
        entered = inputs_of(one_sample(task), network.initial, names)
    return {name: (len(network.initial[f"{name}.weight"]), rows.shape[2]) for name, rows in entered.items()}


def matrix(w: Params | Stack, layer: str) -> Tensor:
    """Return the matrix of a layer, [..., outputs, inputs], its bias as the last column; one per client for a Stack."""
    weight = w[f"{layer}.weight"].flatten(2 if isinstance(w, Stack) else 1)
    bias = w.get(f"{layer}.bias")
    return weight if bias is None else torch.cat([weight, bias[..., None]], -1)


def with_matrix(w: Params, layer: str, found: Tensor) -> Params:
    """Return the same model with another matrix in a layer."""
    weight, bias = f"{layer}.weight", f"{layer}.bias"
    new = {weight: found[:, : w[weight][0].numel()].reshape(w[weight].shape).to(w[weight])}
    if bias in w:
        new[bias] = found[:, -1].to(w[bias])
    return w | Params(new)


def inputs_of(batch: Batch, w: Params, layers: Iterable[str]) -> Rows:
    """Return what enters each layer, with a 1 where there is a bias."""
    entered: Rows = {}

    def look(name: str, part: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
        entered[name] = _rows(part, arguments[0])

    with _watch(batch, layers, look):
        batch.outputs(w)
    return entered


def output_gradients(batch: Batch, w: Params, layers: Iterable[str]) -> Rows:
    """Return the gradient of each sample's loss at the output of each layer; 0 for padding."""
    places: dict[str, Tensor] = {}

    def look(name: str, part: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
        places[name] = torch.zeros_like(output)

    with _watch(batch, layers, look):
        batch.outputs(w)

    def loss(probes: Params) -> tuple[Tensor, None]:
        def add(name: str, part: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:  # noqa: ARG001
            return output + probes[name]

        with _watch(batch, layers, add):
            outputs = batch.outputs(w)
        return batch.total(batch.network.loss(outputs, batch.y)), None

    found, _ = batch.differentiate(loss, Params(places))
    parts = _parts(batch.network)
    return {name: _by_place(parts[name], g) for name, g in found.items()}


def squares(batch: Batch, rows: Tensor) -> Tensor:
    """Return the sum of row row^T over all places of the samples that are not padding."""
    rows = rows.to(batch.network.dtype)  # also those of a pass in lower precision
    real = rows if batch.mask is None else rows * batch.mask[:, None, None]
    return real.flatten(0, 1).T @ rows.flatten(0, 1)


@contextmanager
def _watch(batch: Batch, layers: Iterable[str], look: Look) -> Iterator[None]:
    """Look at layers when they have run; what `look` returns is their output from there on."""
    module = batch.network.module(batch.variant).module  # this thread's own
    hooks = [module.get_submodule(name).register_forward_hook(partial(look, name)) for name in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parts(network: Network) -> Mapping[str, nn.Module]:
    return dict(next(iter(network.submodules())).named_modules())


def _is_plain(part: nn.Module) -> bool:
    """Return whether a convolution sees patches of all channels, with zeros around the image."""
    return not isinstance(part, nn.Conv2d) or (
        part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    )


def _rows(part: nn.Module, x: Tensor) -> Tensor:
    if isinstance(part, nn.Conv2d):
        assert not isinstance(part.padding, str)
        rows = F.unfold(x, part.kernel_size, part.dilation, part.padding, part.stride).mT
    else:
        rows = _by_place(part, x)
    return rows if part.bias is None else F.pad(rows, (0, 1), value=1.0)


def _by_place(part: nn.Module, values: Tensor) -> Tensor:
    """Return inputs or outputs of a layer as [sample, place, number]."""
    if isinstance(part, nn.Conv2d):
        return values.flatten(2).mT
    return values.reshape(len(values), -1, values.shape[-1])
