"""Checks while a method runs: states that are not finite, and hyperparameters that make no sense."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, describe_values
from atoll.kernel.errors import DivergedError, RunError
from atoll.kernel.params import Tree, flatten, named_leaves
from atoll.kernel.record import is_record
from atoll.kernel.wrapper import title_of

log = logging.getLogger("atoll.federation")


def require_same_kind(found: Tree, begun: Tree) -> None:
    """Raise for a server's state from a checkpoint that is not of the record with which the method begins."""
    if is_record(begun) and type(found) is not type(begun):
        raise RunError(
            f"The server's state in the checkpoint must be a {type(begun).__name__} record of the method. It is a "
            f"{type(found).__name__}.",
            hint="an older version wrote it: begin a new run in another folder, or go on with that version.",
        )


def require_sound(server: Tree, round: int, task: str) -> None:
    """Raise if a server's state is not finite, or if a variance in it is negative."""
    sums: dict[torch.device, list[Tensor]] = {}  # a server may hold a few tables on the CPU beside models on a GPU
    for leaf in flatten(server)[0]:
        if leaf.is_floating_point():
            sums.setdefault(leaf.device, []).append(leaf.sum())
    if not all(bool(torch.isfinite(torch.stack(some).sum())) for some in sums.values()):
        raise DivergedError(
            f"Training must stay finite. The server's state after round {round} of {task} is not.",
            round=round,
            hint="lower `lr` or set `clip`; the run can be resumed from its last checkpoint.",
        )
    variances = [(name, leaf) for name, leaf in named_leaves(server) if name.endswith("running_var") and leaf.numel()]
    lowest = [(name, leaf.min()) for name, leaf in variances]
    if lowest and bool((torch.stack([value for _, value in lowest]) < 0).any()):
        name, value = min(lowest, key=lambda one: float(one[1]))
        raise DivergedError(
            f"A variance must not be negative. In the server's state after round {round} of {task}, {name!r} is "
            f"{float(value):.3g}.",
            round=round,
            hint="scale only what is trained, `w.step(delta, size)`, or take a model without BatchNorm.",
        )


def warn_of_limits(algorithm: Algorithm) -> None:
    """Warn when hyperparameters make a method equal to a simpler one."""
    for other, values in algorithm.limits.items():
        if all(getattr(algorithm, name) == value for name, value in values.items()):
            log.warning("%s with %s does the same as %s", title_of(algorithm), describe_values(values), other)


def warn_of_overshooting(algorithm: Algorithm, lr: float) -> None:
    """Warn when a penalty is so strong that steps lead away from what it pulls to."""
    for name, value in algorithm.pulls(lr).items():
        if value > 2:
            log.warning(
                "%s: %s must be at most 2, or steps lead away from where they are pulled. It is %g (lr %g)",
                title_of(algorithm), name, value, lr,
            )  # fmt: skip
