"""A `Batch` is what a step sees: some samples of one client, and the model's functions of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from atoll.kernel.errors import CohortError, LabelsNeeded, ModelError, first_line
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack, Structure, flatten, unflatten
from atoll.kernel.randomness import Keys, moves_default_generator, number

A = TypeVar("A")
_taken = threading.local()
AUGMENTATION = 0x61756700  # keeps its draws apart from those of dropout layers


def gradients_taken() -> int:
    """Count the gradients that this thread's steps have taken so far; a traced step counts when it is traced."""
    return getattr(_taken, "count", 0)


@contextmanager
def _record_gradients() -> Iterator[bool]:
    """Record gradients; yield whether something around this was recording already."""
    inner = getattr(_taken, "recording", False)
    _taken.recording = True
    try:
        with torch.enable_grad():
            yield inner
    finally:
        _taken.recording = inner


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise LabelsNeeded(
        "Targets must not be read here. Whoever answers a sample has the sample alone.",
        hint="what an answer needs to know of classes stands beside the model: Predictor(model, beside, answer).",
    )


class HiddenTargets:
    """Stands for the targets of a batch where they must not be read; whatever is done with it raises."""

    __torch_function__ = classmethod(_refuse)

    def __getattr__(self, name: str) -> Any:
        """Refuse, except to Python itself, which asks for what a value may have."""
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()


for _name in [
    "abs", "add", "and", "bool", "contains", "eq", "float", "floordiv", "ge", "getitem", "gt", "index", "int", "invert",
    "iter", "le", "len", "lt", "matmul", "mod", "mul", "ne", "neg", "or", "pow", "radd", "rand", "rfloordiv", "rmatmul",
    "rmod", "rmul", "ror", "rpow", "rsub", "rtruediv", "rxor", "setitem", "sub", "truediv", "xor",
]:  # fmt: skip
    setattr(HiddenTargets, f"__{_name}__", _refuse)
HIDDEN = cast("Tensor", HiddenTargets())


class Augment(Protocol):
    """A rule that changes the samples of a batch; a frozen dataclass, so equal rules share programs."""

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        """Return the changed samples."""
        ...

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless samples of this shape can be changed so."""
        ...


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
    augment: Augment | None = None  # how the samples may be changed
    raw: Tensor | None = None  # the samples before they were changed, where `x` is a view of them
    shown: int | None = None  # the number of that view

    @property
    def unlabelled(self) -> Batch:
        """The same samples for whoever answers them: their targets cannot be read."""
        return replace(self, y=HIDDEN)

    def view(self, number: int = 0) -> Batch:
        """Return the samples as the rule changes them this time; views of other numbers are drawn independently.

        A step sees view 0. Every view starts from the samples as they are in the data, also a view of a view.
        """
        if self.augment is None or number == self.shown:
            return self
        assert self.keys is not None, "a batch that is augmented has keys"
        raw = self.x if self.raw is None else self.raw
        x = self.augment(raw, self.keys.fold(AUGMENTATION).fold(number))
        return replace(self, x=x, raw=raw, shown=number)

    def views(self, count: int) -> Batch:
        """Join the views 0 to count - 1 in one batch, one after the other; copies where the task changes no samples."""

        def repeat(values: Tensor) -> Tensor:
            return torch.cat([values] * count)

        return replace(
            self,
            x=torch.cat([self.view(number).x for number in range(count)]),
            y=self._targets(repeat),
            mask=None if self.mask is None else repeat(self.mask),
            augment=None,  # a view of these would be a view of views
            raw=None,
            shown=None,
        )

    def rows(self, chosen: Tensor) -> Batch:
        """Return the samples at these places, which may repeat; where samples are changed, every repeat differs."""
        x = self.x if self.raw is None else self.raw
        again = replace(self, x=x[chosen], y=self._targets(lambda y: y[chosen]), raw=None, shown=None)
        return again if self.shown is None else again.view(self.shown)

    @property
    def deployed(self) -> Batch:
        """The same samples for a model that does not train, such as a teacher: statistics stay, dropout is off."""
        return replace(self, variant=replace(self.variant, train=False))

    @property
    def count(self) -> Tensor:
        """How many samples are not padding."""
        if self.mask is None:
            return torch.full((), len(self.x), dtype=torch.get_default_dtype(), device=self.x.device)
        return self.mask.sum()

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Cut this into batches of equal size; each draws its own dropout masks, the first the same as this one."""
        keys = [self.keys if part == 0 else self.keys and self.keys.fold(part) for part in range(parts)]
        masks = [None] * parts if self.mask is None else self.mask.chunk(parts)
        raws = [None] * parts if self.raw is None else self.raw.chunk(parts)
        targets = [HIDDEN] * parts if self.y is HIDDEN else self.y.chunk(parts)
        pieces = zip(self.x.chunk(parts), targets, masks, keys, raws, strict=True)
        return tuple(replace(self, x=x, y=y, mask=mask, keys=key, raw=raw) for x, y, mask, key, raw in pieces)

    def _targets(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        return HIDDEN if self.y is HIDDEN else change(self.y)

    def total(self, per_sample: Tensor) -> Tensor:
        """Sum over the samples that are not padding."""
        return per_sample.sum() if self.mask is None else (per_sample * self.mask).sum()

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average over the samples that are not padding."""
        return per_sample.mean() if self.mask is None else self.total(per_sample) / self.count

    def outputs(self, w: Params) -> Tensor:
        """Return what the model answers, one row per sample."""
        return self.forward(w)[0]

    def features(self, w: Params) -> Tensor:
        """Return what enters the model's head, one row per sample."""
        return replace(self, variant=replace(self.variant, features=True)).outputs(w)

    def head(self, w: Params, features: Tensor) -> Tensor:
        """Return what the model's head answers to features of any number of samples; w may lack the other leaves."""
        variant = replace(self.variant, head=True)
        return replace(self, x=features, mask=None, variant=variant).outputs(w)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Draw from [0, 1): the same for this client, round and step however the scan is run."""
        if self.keys is None:
            raise CohortError("A step may draw only in a scan that says so.", hint="cohort.scan(..., draws=True).")
        counter = torch.arange(math.prod(shape), device=self.x.device).reshape(shape)
        return self.keys.fold(number(0, purpose) & 0xFFFFFFFF).uniform(counter, self.network.dtype)

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Draw from the standard normal distribution, as `uniform` does; two from every two, by Box and Muller."""
        count = math.prod(shape)
        drawn, angle = self.uniform(purpose, 2, -(-count // 2))
        length, angle = torch.sqrt(-2 * torch.log1p(-drawn)), 2 * math.pi * angle
        return torch.cat([length * torch.cos(angle), length * torch.sin(angle)])[:count].reshape(shape)

    def loss(self, w: Params) -> Tensor:
        """Return the mean loss."""
        return self.mean(self.network.loss(self.outputs(w), self.y))

    def gradient(
        self,
        w: Params,
        only: Iterable[str] | None = None,
        through: Callable[[Params], Params] | None = None,
    ) -> tuple[Params, Params, Tensor]:
        """Return the gradient g of the loss, w with the buffers of the pass, and the loss.

        With `only`, the gradient is taken for these leaves, and the buffers of all others stay as they are. With
        `through`, the loss is that of the model through(w), and g follows from it by the chain rule.
        """
        names = frozenset(w if only is None else only)

        def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            whole = w | trained
            outputs, after = self.forward(whole if through is None else through(whole))
            loss = self.mean(self.network.loss(outputs, self.y))
            return loss, (loss, after.buffers.only(names))

        g, (loss, buffers) = self.differentiate(objective, w.trained.only(names))
        return g, w | buffers, loss

    def sample_gradients(self, w: Params, only: Iterable[str] | None = None) -> tuple[Stack, Tensor]:
        """Return the gradient of every sample's own loss, a row per sample, and the mean loss; buffers stay.

        For a network whose answer to a sample does not depend on others: one without BatchNorm in training.
        """
        _taken.count = gradients_taken() + 1
        self.network.module(self.variant)  # this thread's copy cannot be made inside `vmap`
        at = w.trained.only(frozenset(w if only is None else only))
        names, layout = tuple(at), at.layout

        def of_one(x: Tensor, y: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
            one = replace(self, x=x[None], y=y[None], mask=None, raw=None, vectorised=True)
            loss = self.network.loss(one.outputs(w | Params(dict(zip(names, leaves, strict=True)), layout)), y[None])
            return loss.sum(), loss.sum()

        everything = tuple(range(2, 2 + len(names)))
        each = vmap(grad_and_value(of_one, argnums=everything, has_aux=True), in_dims=(0, 0, *[None] * len(names)))
        gradients, (_, losses) = each(self.x, self.y, *at.values())
        return Stack(dict(zip(names, gradients, strict=True)), layout), self.mean(losses)

    def differentiate(self, function: Callable[[Params], tuple[Tensor, A]], at: Params) -> tuple[Params, A]:
        """Return the gradient of the first value that `function` returns, and its second value.

        Inside another function that is differentiated, both can be differentiated again.
        """
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
            with _record_gradients() as inner:  # then the result needs a graph of its own
                leaves = [leaf if inner else leaf.detach() for leaf in at.values()]
                leaves = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves]
                value, extra = flat(*leaves)
                gradients = (
                    torch.autograd.grad(value, leaves, create_graph=inner, allow_unused=True, materialize_grads=True)
                    if names
                    else ()
                )
            extra = extra if inner else [tensor.detach() for tensor in extra]
        return Params(dict(zip(names, gradients, strict=True)), layout), unflatten(made[0], extra)

    def forward(self, w: Params) -> tuple[Tensor, Params]:
        """Return what the model answers, and w with the buffers of the pass."""
        return self.network.module(self.variant)(self.variant, w, self.x, self.mask, self.keys)


def check_outputs(network: Network, x: Tensor, classes: int | None) -> Tensor:
    """Return what a network answers; raise unless it takes such samples, with an output for each class.

    On the way it is found out whether the network draws.
    """

    @torch.no_grad()
    def answer(*, train: bool) -> Tensor:
        return Batch(x, HIDDEN, None, None, network, Variant(train=train)).outputs(network.initial)

    shape = tuple(x.shape[1:])
    try:
        outputs = answer(train=False)
        network.draws_globally |= moves_default_generator(lambda: answer(train=True))
    except Exception as error:  # a model may fail in any way
        raise ModelError(
            f"{network.name} must take samples of shape {shape}. It failed: {first_line(error)}",
            hint="check the model's first layer against the data.",
        ) from error
    if classes is not None and (outputs.ndim < 2 or outputs.shape[1] != classes):
        raise ModelError(
            f"{network.name} must give one output per class, {classes}. Got outputs of shape {tuple(outputs.shape)} "
            f"for {len(x)} samples.",
            hint="set the width of its last layer to the number of classes.",
        )
    return outputs


def check_targets(network: Network, outputs: Tensor, y: Tensor) -> None:
    """Raise unless the loss can compare such outputs with such targets."""
    try:
        network.loss(outputs, y)
    except Exception as error:
        raise ModelError(
            f"{network.name} must answer for targets of shape {tuple(y.shape[1:])}. Got outputs of shape "
            f"{tuple(outputs.shape)} for one sample: {first_line(error)}",
            hint="choose a network for such targets: `atoll list models` says what each is for.",
        ) from error
