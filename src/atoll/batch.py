"""A `Batch` is what a step sees: some samples of one client, and the model's functions of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from atoll.models.network import Network, Variant
from atoll.params import Params, Structure, flatten, unflatten
from atoll.randomness import Keys

A = TypeVar("A")
Objective = Callable[[Params], Tensor]
_taken = threading.local()


def gradients_taken() -> int:
    """How many gradients this thread's steps have taken so far; a traced step counts when it is traced."""
    return getattr(_taken, "count", 0)


@dataclass(frozen=True)
class Batch:
    """Samples `x` with targets `y`; `mask` is None or says which of them are not padding."""

    x: Tensor
    y: Tensor
    mask: Tensor | None
    keys: Keys | None
    network: Network
    variant: Variant
    vectorised: bool = False  # whether the step runs inside `vmap`, where gradients must be functional

    @property
    def count(self) -> Tensor:
        """How many samples are not padding."""
        if self.mask is None:
            return torch.full((), len(self.x), dtype=torch.get_default_dtype(), device=self.x.device)
        return self.mask.sum()

    def total(self, per_sample: Tensor) -> Tensor:
        """The sum over the samples that are not padding."""
        return per_sample.sum() if self.mask is None else (per_sample * self.mask).sum()

    def mean(self, per_sample: Tensor) -> Tensor:
        """The mean over the samples that are not padding."""
        return per_sample.mean() if self.mask is None else self.total(per_sample) / self.count

    def outputs(self, w: Params) -> Tensor:
        """What the model answers, one row per sample."""
        return self._forward(w)[0]

    def features(self, w: Params) -> Tensor:
        """What enters the model's head, one row per sample."""
        return replace(self, variant=replace(self.variant, features=True)).outputs(w)

    def loss(self, w: Params) -> Tensor:
        """The mean loss."""
        return self.mean(self.network.loss(self.outputs(w), self.y))

    def gradient(
        self, w: Params, penalty: Objective | None = None, only: Iterable[str] | None = None
    ) -> tuple[Params, Params, Tensor]:
        """The gradient g of loss + penalty; w with the buffers of the pass; the loss without the penalty.

        With `only`, the gradient is taken for these leaves, and the buffers of all others stay as they are.
        """
        names = frozenset(w if only is None else only)

        def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            outputs, after = self._forward(w | trained)
            loss = self.mean(self.network.loss(outputs, self.y))
            return loss if penalty is None else loss + penalty(trained), (loss, after.buffers.only(names))

        g, (loss, buffers) = self.differentiate(objective, w.trained.only(names))
        return g, w | buffers, loss

    def differentiate(self, function: Callable[[Params], tuple[Tensor, A]], at: Params) -> tuple[Params, A]:
        """The gradient of the first value that `function` returns, and its second value."""
        _taken.count = gradients_taken() + 1
        names, layout = tuple(at), at.layout
        made: list[Structure] = []

        def flat(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            value, extra = function(Params(dict(zip(names, leaves, strict=True)), layout))
            tensors, structure = flatten(extra)
            made.append(structure)
            return value, tensors

        if self.vectorised and names:
            everything = tuple(range(len(names)))
            gradients, (_, extra) = grad_and_value(flat, argnums=everything, has_aux=True)(*at.values())
        else:  # plain autograd has less overhead
            with torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in at.values()]
                value, extra = flat(*leaves)
                gradients = (
                    torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True) if names else ()
                )
            extra = [tensor.detach() for tensor in extra]
        return Params(dict(zip(names, gradients, strict=True)), layout), unflatten(made[0], extra)

    def _forward(self, w: Params) -> tuple[Tensor, Params]:
        return self.network.module(self.variant)(self.variant, w, self.x, self.mask, self.keys)
