"""A `Network` turns any `nn.Module` into pure functions of Params: outputs, loss and score."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.kernel.errors import ModelError
from atoll.kernel.fingerprints import Unstable, content, function_of
from atoll.kernel.objective import PerSample, accuracy, cross_entropy, metric_of
from atoll.kernel.params import Kind, Layout, Params
from atoll.kernel.portable import KEY_HIGH, KEY_LOW, MASK, KeyedDropout, MaskedBatchNorm, portable
from atoll.kernel.randomness import Keys

Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class Variant:
    """How a forward pass is computed; every variant computes the same function, to rounding."""

    train: bool = True
    features: bool = False  # stop where the head begins
    head: bool = False  # begin there: samples are features
    columns: bool = False  # convolutions as matrix products
    channels_last: bool = False
    precision: Precision = "fp32"


class Network:
    """An architecture with its initial parameters, loss and score; it holds nothing that training changes."""

    def __init__(
        self,
        module: nn.Module,
        *,
        loss: PerSample = cross_entropy,
        score: PerSample = accuracy,
        signature: Hashable = None,
    ) -> None:
        self.loss, self.score = loss, metric_of(score)
        self._known_as = signature or object()
        self.draws_globally = False  # whether a forward pass draws from torch's own generator; a task finds out
        self.fits: Hashable = None  # the samples and classes that it was tried on
        self._original = module
        self.layout = layout_of(module)
        leaves = [*module.named_parameters(), *module.named_buffers()]
        self.initial = Params({name: leaf.detach().clone() for name, leaf in leaves}, self.layout)
        # `functional_call` swaps tensors inside the module while it runs, so threads must not share one.
        self._copies = threading.local()

    def __getstate__(self) -> dict[str, object]:
        """Return what travels to another process: all but this one's copies of the module."""
        return {name: value for name, value in self.__dict__.items() if name != "_copies"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._copies = threading.local()

    def __repr__(self) -> str:
        return f"<Network {self.name}: {self.parameters:,} parameters>"

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return type(self._original).__name__

    def to(self, device: torch.device, dtype: torch.dtype) -> Network:
        """Return the same network with its values on `device`, floating point ones in `dtype`."""
        module = deepcopy(self._original).to(device=device, dtype=dtype)
        moved = Network(module, loss=self.loss, score=self.score, signature=self._known_as)
        moved.draws_globally, moved.fits = self.draws_globally, self.fits
        return moved

    def beginning_at(self, initial: Params) -> Network:
        """Return the same network with other initial values."""
        other = copy(self)
        other.initial = initial
        return other

    def with_loss(self, loss: PerSample) -> Network:
        """Return the same network with another loss."""
        other = Network(self._original, loss=loss, score=self.score, signature=(self._known_as, loss))
        other.draws_globally = self.draws_globally
        return other

    def through(self, made: Callable[..., nn.Module], *arguments: Hashable) -> Network:
        """Return a network of the same leaves that computes something else: the module made(module, *arguments)."""
        other = Network(
            made(self._original, *arguments),
            loss=self.loss, score=self.score, signature=(self._known_as, made, *arguments),
        )  # fmt: skip
        other.draws_globally = self.draws_globally
        return other.beginning_at(self.initial)

    @cached_property
    def signature(self) -> Hashable:
        """What programs are shared by: networks with the same signature compute the same function.

        Whatever a network is known as, one whose module was changed since is another one.
        """
        try:
            return self._known_as, self.function
        except Unstable as reason:
            return self._known_as, str(reason)

    def __fingerprint__(self) -> Hashable:
        """Return the signature: a step that captures a network does the same for networks that compute the same."""
        return self.signature

    @cached_property
    def function(self) -> Hashable:
        """What it computes of its leaves, and which of these are what; raises Unstable if nobody can tell."""
        layout = self.layout
        leaves = (tuple(layout.kinds.items()), layout.head, layout.norm, layout.batchnorm, layout.layers)
        given = [*self._original.parameters(), *self._original.buffers()]
        return function_of(self._original, given), leaves, function_of(self.loss), function_of(self.score)

    @property
    def values(self) -> str:
        """A digest of all numbers that it begins with, and of those that the module itself holds."""
        held = [*self._original.named_parameters(), *self._original.named_buffers()]
        every = [(name, content(leaf)) for name, leaf in [*self.initial.items(), *held]]
        return hashlib.sha256(repr(every).encode()).hexdigest()

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(leaf.numel() for leaf in self.initial.trained.values())

    @cached_property
    def transductive(self) -> bool:
        """Whether its answer to a sample depends on the others of the batch: a BatchNorm follows no statistics."""
        kind = nn.modules.batchnorm._BatchNorm
        return any(isinstance(part, kind) and part.running_mean is None for part in self._original.modules())

    def normalises_alone(self, x: Tensor) -> bool:
        """Return whether one sample by itself has a variance in every BatchNorm: several numbers per channel."""
        module, kind, found = deepcopy(self._original).eval(), nn.modules.batchnorm._BatchNorm, list[int]()
        for part in module.modules():
            if isinstance(part, kind):
                part.register_forward_pre_hook(lambda _, given: found.append(given[0][0, 0].numel()))
        with torch.no_grad():
            module(x[:1])
        return all(numbers > 1 for numbers in found)

    def submodules(self) -> Iterable[nn.Module]:
        """Return the parts of the module."""
        return self._original.modules()

    @cached_property
    def draws(self) -> bool:
        """Whether a forward pass needs keys, because there is dropout in it."""
        return bool(self.module(Variant()).low_buffers)

    @property
    def has_features(self) -> bool:
        """Whether the module declares what enters its head."""
        return callable(getattr(self._original, "features", None))

    @property
    def has_head(self) -> bool:
        """Whether the module has a head that can be given features."""
        return callable(getattr(self._original, "head", None))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating point type of its parameters."""
        return next((leaf.dtype for leaf in self.initial.floating.values()), torch.get_default_dtype())

    def module(self, variant: Variant) -> PortableModule:
        """Return this thread's own copy of the module, made portable."""
        copies: dict[str, PortableModule] = self._copies.__dict__
        key = f"{variant.train}-{variant.features}-{variant.head}-{variant.columns}"
        if key not in copies:
            if variant.features and not self.has_features:
                raise ModelError(
                    f"{type(self._original).__name__} must have a method `features(x)` for this algorithm.",
                    hint="let it return what enters the head, with forward(x) = head(features(x)).",
                )
            if variant.head and not self.has_head:
                raise ModelError(
                    f"{type(self._original).__name__} must have a submodule or a method `head` for this algorithm.",
                    hint="let it turn features into outputs, with forward(x) = head(features(x)).",
                )
            copies[key] = PortableModule(self._original, variant)
        return copies[key]

    def prepare(self, variant: Variant) -> None:
        """Make this thread's copies for a step, which may ask for either mode, for features and for the head.

        Inside `vmap` they cannot be made.
        """
        for mode in (replace(variant, train=train) for train in (True, False)):
            self.module(mode)
            if self.has_features:
                self.module(replace(mode, features=True))
            if self.has_head:
                self.module(replace(mode, head=True))


class PortableModule:
    """A portable copy of a module and the names of the buffers through which masks and keys reach its layers."""

    def __init__(self, original: nn.Module, variant: Variant) -> None:
        module = portable(original, columns=variant.columns).train(variant.train).requires_grad_(False)
        if variant.features:
            module.forward = module.features  # type: ignore[assignment]
        if variant.head:
            module.forward = module.head.__call__  # type: ignore[operator]  # a module itself would become a part
        self.module = module
        self._dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        # Layers that are not ours may write their buffers in place, so they get copies.
        self._foreign = [
            f"{path}.{name}" if path else name
            for path, part in module.named_modules()
            if not isinstance(part, KeyedDropout | MaskedBatchNorm)
            for name, _ in part.named_buffers(recurse=False)
        ]
        names = [name for name, _ in module.named_buffers()]
        self.low_buffers, self.high_buffers, self.mask_buffers = (
            [name for name in names if name.endswith(end)] for end in (KEY_LOW, KEY_HIGH, MASK)
        )

    def __call__(
        self, variant: Variant, params: Params, x: Tensor, mask: Tensor | None, keys: Keys | None
    ) -> tuple[Tensor, Params]:
        """Return the outputs, and `params` with the buffers as the pass left them."""
        buffers = params.buffers
        state = dict(params) | {name: params[name].clone() for name in self._foreign if name in params}
        for dropout in self._dropouts:
            dropout.calls = 0
        if variant.precision == "bf16":  # master weights and statistics stay in fp32
            state = {name: leaf if name in buffers else _bf16(leaf) for name, leaf in state.items()}
            x = _bf16(x)
        if variant.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if keys is not None:
            state |= dict.fromkeys(self.low_buffers, keys.low) | dict.fromkeys(self.high_buffers, keys.high)
        if mask is not None:
            state |= dict.fromkeys(self.mask_buffers, mask)
        outputs = functional_call(self.module, state, (x,))
        if outputs.dtype == torch.bfloat16:
            outputs = outputs.float()
        # `functional_call` has written the buffers that the layers assigned back into `state`.
        return outputs, Params({**params, **{name: state[name] for name in buffers}}, params.layout)


def _bf16(leaf: Tensor) -> Tensor:
    return leaf.to(torch.bfloat16) if leaf.is_floating_point() else leaf


def layout_of(module: nn.Module) -> Layout:
    """Find which leaves are trained, frozen or buffers, their layers, and which form the head and the norm layers."""
    kinds: dict[str, Kind] = {
        name: "trained" if leaf.requires_grad else "frozen" for name, leaf in module.named_parameters()
    }
    kinds |= dict.fromkeys((name for name, _ in module.named_buffers()), "buffer")
    norm_types = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm
    norms = tuple(name for name, part in module.named_modules() if isinstance(part, norm_types))
    of_batches = nn.modules.batchnorm._BatchNorm
    batchnorms = tuple(name for name in norms if isinstance(module.get_submodule(name), of_batches))
    holders = {name.rpartition(".")[0] for name in kinds}
    layers = tuple(name for name, _ in module.named_modules() if name in holders)
    head, norm, batchnorm = (_inside(kinds, names) for names in (head_modules(module), norms, batchnorms))
    return Layout(kinds, head, norm, batchnorm, layers)


def head_modules(module: nn.Module) -> tuple[str, ...]:
    """Return the submodules that form the head: as declared in `head_modules`, else the last linear layer."""
    declared: tuple[str, ...] | None = getattr(module, "head_modules", None)
    if declared is None:
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        return tuple(linear[-1:])
    known = dict(module.named_modules())
    for name in declared:
        if name not in known:
            raise ModelError(
                f"`head_modules` of {type(module).__name__} must name its submodules. Got {name!r}.",
                hint=f"there are: {', '.join(filter(None, known))}.",
            )
    return declared


def _inside(names: dict[str, Kind], modules: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if any(name.startswith(f"{part}.") for part in modules if part))


NO_NETWORK = Network(nn.Identity(), signature="no network")  # for samples that a method's own functions read
