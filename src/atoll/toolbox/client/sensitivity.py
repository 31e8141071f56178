"""How strongly each layer of a client's model reacts, and the radii that follow from it.

A layer is here a weight tensor: biases and norm layers are not counted. Sensitivities are Params or a Stack with one
number per layer, under the name of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params, Stack
from atoll.kernel.wrapper import title_of
from atoll.toolbox.client.full import full_gradient
from atoll.toolbox.client.sharpness import ascent

Sensitivity = Literal["minmax", "raw", "relative", "loss"]


def layers(w: Params | Stack) -> list[str]:
    """Return the weight tensors of a model, in its order."""
    norm = frozenset[str]() if w.layout is None else w.layout.norm
    return [name for name in w.trained if name not in norm and not name.endswith("bias")]


def require_layers(method: Algorithm, w: Params, count: int) -> None:
    """Raise unless the model has so many layers to choose from."""
    there = layers(w)
    if count > len(there):
        raise HyperparameterError(
            f"`top_c` of {title_of(method)} must be at most the number of the model's layers, {len(there)}. Got "
            f"{count}.",
            hint=f"they are: {', '.join(there)} (biases and norm layers do not count).",
        )


def sensitivities(kind: Sensitivity, cohort: Cohort, w: Params | Stack, w_k: Stack) -> Stack:
    """Return the sensitivities of all layers, after training led from w to w_k; log them, too.

    `minmax`, `raw` and `relative` take the training for a perturbation and compare the two ends, which costs nothing.
    `loss` is the change of a layer's loss under a perturbation of radius 1 at w_k, to first order: |<g_l, eps_l>|,
    with the gradient over all of a client's training data.
    """
    found: Stack
    if kind == "loss":
        g, _ = full_gradient(cohort, w_k, stream="sensitivity")
        found = cohort.map(_of_loss, w_k, g)
    else:
        found = cohort.map(partial(_of_change, CHANGES[kind]), w, w_k)
    cohort.observe(**{f"sensitivity/{name}": value for name, value in found.items()})
    return found


def most_sensitive(found: Stack, count: int) -> Stack:
    """Return 1 for each client's `count` most sensitive layers, of those above 0; 0 for all others."""
    table = torch.stack(list(found.values()), 1)
    ranks = table.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    chosen = ((ranks < count) & (table > 0)).to(table.dtype)
    return Stack(dict(zip(found, chosen.unbind(1), strict=True)), found.layout)


def radii(w: Params | Stack, chosen: Stack, radius: float, larger: float) -> Stack:
    """Return a radius for every trained leaf: `larger` where a layer is chosen, `radius` for all others."""
    base = {name: next(iter(chosen.values())).new_full((chosen.clients,), radius) for name in w.trained}
    flexible = {name: torch.where(one > 0, larger, base[name]) for name, one in chosen.items() if name in base}
    return Stack(base | flexible, w.layout)


def minmax(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean square change of the tensor brought to [0, 1]: blind to shift and factor. 0 if constant."""
    ends = [(tensor - tensor.amin()) / (tensor.amax() - tensor.amin()) for tensor in (before, after)]
    return (ends[1] - ends[0]).square().mean().nan_to_num(nan=0.0, posinf=0.0)


def raw(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean square change."""
    return (after - before).square().mean()


def relative(before: Tensor, after: Tensor) -> Tensor:
    """Return the square of the change over the square of the tensor; 0 where it was 0."""
    return ((after - before).square().sum() / before.square().sum()).nan_to_num(nan=0.0, posinf=0.0)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"minmax": minmax, "raw": raw, "relative": relative}


def _of_change(measure: Callable[[Tensor, Tensor], Tensor], w: Params, w_k: Params) -> Params:
    return Params({name: measure(w[name], w_k[name]) for name in layers(w)})


def _of_loss(w_k: Params, g: Params) -> Params:
    eps = ascent(w_k, g, 1.0)
    return Params({name: (g[name] * eps[name]).sum().abs() for name in layers(g)})
