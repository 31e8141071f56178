"""Sharpness-aware gradients: taken uphill of a model, where its loss is about the worst within a radius.

    eps = radius g(w) / ||g(w)||,        g_s(w) = g(w + eps)        (both on the same batch)

What is perturbed is the data's loss alone, or what a method descends along in its place. A penalty is a known function
of w, and neither its gradient belongs to eps nor is it taken uphill; likewise weight decay. BatchNorm's statistics come
from the pass at w, and so does the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.kernel.batch import Batch
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.descent import Found

Radius = float | Params | Stack  # for the whole model, or one number for every leaf, perhaps each client's own
FLAT = 1e-7  # added to the norm of a gradient that may be zero


def sharp_gradient(
    w: Params,
    batch: Batch,
    radius: Radius,
    *,
    adaptive: bool = False,
    only: Iterable[str] | None = None,
    of: frozenset[str] | None = None,
) -> Found:
    """Return what `batch.gradient` does, with the gradient taken uphill; at radius 0 it is one plain pass.

    With `of`, only these leaves are perturbed, as far as if there were no others.
    """
    if _is_zero(radius):
        return batch.gradient(w, only)
    g, after, loss = batch.gradient(w, only)
    moved = _choose(g, of)
    if not moved:
        return g, after, loss
    eps = ascent(w, moved, radius, adaptive=adaptive)
    return gradient_beside(w, batch, eps, only=only), after, loss


def sharpen(
    gradient: Callable[[Params], Found],
    w: Params,
    radius: Radius,
    *,
    adaptive: bool = False,
    of: frozenset[str] | None = None,
) -> Found:
    """Take any gradient uphill of w along itself, or along some leaves; at radius 0 it is that gradient, one pass."""
    g, after, loss = gradient(w)
    moved = _choose(g, of)
    if _is_zero(radius) or not moved:
        return g, after, loss
    uphill, _, _ = gradient(w.moved(ascent(w, moved, radius, adaptive=adaptive), 1.0))
    return uphill, after, loss


def mixed_gradient(w: Params, batch: Batch, *, radius: float, share: float) -> Found:
    """Return (1 - share) g(w) + share g_s(w): between the plain gradient and the one taken uphill (FedSpeed)."""
    g, after, loss = batch.gradient(w)
    if not radius or not share:
        return g, after, loss
    return g.lerp(gradient_beside(w, batch, ascent(w, g, radius)), share), after, loss


def gradient_beside(w: Params, batch: Batch, eps: Params, *, only: Iterable[str] | None = None) -> Params:
    """Return the gradient of the loss at w + eps."""
    g, _, _ = batch.gradient(w, only, through=lambda v: v.moved(eps, 1.0))
    return g


def ascent(w: Params, g: Params, radius: Radius, *, adaptive: bool = False) -> Params:
    """Return SAM's perturbation radius g / ||g||; or ASAM's, whose neighbourhood scales with w: weights by |w|.

    The norm is that of all leaves of g together. With a radius per leaf, each leaf's share of g / ||g|| is scaled by
    its own, so the whole is as long as none of them.
    """
    if adaptive:
        size = w.only(g).map(lambda leaf: leaf.abs())
        g = _scale(g, size)
        return _scale(_stretch(g, radius), size)
    return _stretch(g, radius)


def _choose(g: Params, of: frozenset[str] | None) -> Params:
    """Return the leaves of g that are perturbed."""
    return g if of is None else g.only([name for name in g if name in of])


def _is_zero(radius: Radius) -> bool:
    return isinstance(radius, int | float) and radius == 0


def _stretch(g: Params, radius: Radius) -> Params:
    unit = g / (g.norm() + FLAT)
    return unit * radius if isinstance(radius, int | float) else _scale(unit, radius)


def _scale(g: Params, scale: Params | Stack) -> Params:
    """Multiply every leaf by the one of that name."""
    return Params({name: leaf * scale[name] for name, leaf in g.items()}, g.layout)
