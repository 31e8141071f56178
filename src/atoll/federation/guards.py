"""Checks while a method runs: states that are not finite, and hyperparameters that make no sense."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm, describe_values, hyperparameters
from atoll.kernel.errors import DivergedError, RunError
from atoll.kernel.params import Tree, named_leaves, widest
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


def hint_at_divergence(task: Task, method: Algorithm) -> str:
    """Say what to do about training that does not stay finite; where numbers are too large, that comes first."""
    own = [one.name for one in hyperparameters(method) if one.name.endswith("_lr")] if not method.trains_by_sgd else []
    steps = f"lower {' or '.join(f'`{name}`' for name in own)}" if own else "lower `lr` or set `clip`"
    usual = f"{steps}; the run can be resumed from its last checkpoint."
    scale = task.explain_scale()
    if not scale:
        return usual
    return (
        f"scale is the likely reason: {scale}. Bring numbers near 1 (own data: see `standardise`; `atoll data check`"
        f" finds spikes), or {usual}"
    )


def require_sound(server: Tree, round: int, task: Task, method: Algorithm) -> None:
    """Raise if a server's state is not finite, or if a variance in it is negative."""
    leaves = [(name, leaf) for name, leaf in named_leaves(server) if leaf.is_floating_point() and leaf.numel()]
    variances = [(name, leaf) for name, leaf in leaves if name.endswith("running_var")]
    numbers = _fetch([*(leaf.sum() for _, leaf in leaves), *(leaf.min() for _, leaf in variances)])
    if not all(map(math.isfinite, numbers)):
        raise DivergedError(
            f"Training must stay finite. The server's state after round {round} of {task.name} is not.",
            round=round,
            hint=hint_at_divergence(task, method),
        )
    lowest = [(value, name) for value, (name, _) in zip(numbers[len(leaves) :], variances, strict=True)]
    if lowest and min(lowest)[0] < 0:
        value, name = min(lowest)
        raise DivergedError(
            f"A variance must not be negative. In the server's state after round {round} of {task.name}, {name!r} is "
            f"{value:.3g}.",
            round=round,
            hint="noise and attackers do this, and so does a step that scales statistics: take a model without "
            "BatchNorm, or a method whose clients keep its statistics, such as fedbn.",
        )


def _fetch(numbers: list[Tensor]) -> list[float]:
    """Return the values of numbers; each device is waited for once."""
    found: dict[int, float] = {}
    for device in {one.device for one in numbers}:  # a server may hold a few tables on the CPU beside models on a GPU
        places = [place for place, one in enumerate(numbers) if one.device == device]
        table = torch.stack([numbers[place].to(widest(device)) for place in places]).tolist()
        found |= dict(zip(places, table, strict=True))
    return [found[place] for place in range(len(numbers))]


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
