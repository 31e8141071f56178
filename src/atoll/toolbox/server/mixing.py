"""Who learns from whom: a server that holds every client's model, and matrices over pairs of clients.

Row k of a mixing matrix says how much of every client's model client k gets; `Algorithm.mixing` shows it in reports.
The server's memory grows with the number of clients here, so these methods are for tens or hundreds of them.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import EngineError
from atoll.kernel.params import Stack, spread
from atoll.kernel.task import Facts


def initial_models(task: Facts, copies: int) -> Stack:
    """Return the initial trained leaves for every client; raise if `copies` of them do not fit in memory."""
    require_memory(task, copies)
    return spread(task.network.initial.trained, task.clients)


def require_memory(task: Facts, copies: int) -> None:
    """Raise unless `copies` of all clients' models at a time would fit in memory."""
    require_bytes(
        copies * task.clients * sum(leaf.nbytes for leaf in task.network.initial.trained.values()),
        task.sample.device,
        f"The server must hold the models of all {task.clients} clients, {copies} of each at a time",
        hint="take fewer clients or a smaller model, or a method whose server needs sums only.",
    )


def require_bytes(needed: int, device: torch.device, what: str, *, hint: str) -> None:
    """Raise unless so many bytes would fit in a device's memory; `what` says what for."""
    there = _memory(device)
    if there is not None and needed > there:
        raise EngineError(f"{what}: {needed:,} bytes. There are {there:,} on {device}.", hint=hint)


def _memory(device: torch.device) -> int | None:
    """Return all bytes of a device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def identity_mixing(models: Stack) -> Tensor:
    """Return the matrix in which every client has its own model and nothing else; raise if it needs too much memory."""
    leaf = next(iter(models.values()))
    require_pairs(len(leaf), leaf.dtype, leaf.device)
    return torch.eye(len(leaf), dtype=leaf.dtype, device=leaf.device)


def require_pairs(clients: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless a number for every pair of clients would fit in memory."""
    require_bytes(
        clients**2 * dtype.itemsize,
        device,
        f"The server must hold a number for every pair of {clients} clients",
        hint="take fewer clients, or a method whose server needs sums only.",
    )


def none_seen(models: Stack) -> Tensor:
    """Return a flag per client: none has sent anything yet."""
    leaf = next(iter(models.values()))
    return torch.zeros(len(leaf), dtype=torch.bool, device=leaf.device)


def mark_seen(seen: Tensor, clients: NDArray[np.int64]) -> Tensor:
    """Return the flags with these clients among those who have sent something."""
    return seen.index_fill(0, torch.from_numpy(clients).to(seen.device), True)


def mean_for_unseen(matrix: Tensor, seen: Tensor, clients: Tensor | None = None) -> Tensor:
    """Return the matrix in which a client that has sent nothing yet has the mean of those who have.

    It has no model to compare with theirs, so all count alike. The rows are those of `clients`, by default of all.
    """
    here = seen if clients is None else seen[clients]
    return torch.where(here[:, None], matrix, seen.to(matrix.dtype) / seen.sum().clamp(min=1))


def with_replies(models: Stack, clients: NDArray[np.int64], delta: Stack) -> Stack:
    """Return the models of all clients, those of `clients` moved by `delta`."""
    rows = torch.from_numpy(clients)
    return Stack(
        {name: leaf.index_add(0, rows.to(leaf.device), delta[name]) for name, leaf in models.items()}, models.layout
    )


def write_rows(table: Stack | None, rows: Stack, clients: NDArray[np.int64], size: int) -> Stack:
    """Write the rows of some into the table of all `size` clients; zeros stand for those who sent nothing."""
    before = rows.map(lambda leaf: leaf.new_zeros(size, *leaf.shape[1:])) if table is None else table
    places = torch.from_numpy(clients)
    return Stack(
        {name: leaf.index_copy(0, places.to(leaf.device), rows[name]) for name, leaf in before.items()}, before.layout
    )


def rows_for(models: Stack, ids: NDArray[np.int64], own: Stack) -> Stack:
    """Return rows for all clients: their `own` for these, and zeros for all others."""
    rows = torch.from_numpy(ids)
    return Stack(
        {name: torch.zeros_like(leaf).index_copy(0, rows.to(leaf.device), own[name]) for name, leaf in models.items()},
        models.layout,
    )


def products(models: Stack) -> Tensor:
    """Return <w_i, w_j> for every pair of clients."""
    flat = [leaf.reshape(len(leaf), -1) for leaf in models.trained.values()]
    return torch.stack([leaf @ leaf.T for leaf in flat]).sum(0)


def squared_distances(models: Stack) -> Tensor:
    """Return ||w_i - w_j||^2 for every pair of clients."""
    inner = products(models.map(lambda leaf: leaf - leaf.mean(0)))  # near the origin little is lost to rounding
    lengths = inner.diagonal()
    apart = (lengths[:, None] + lengths - 2 * inner).clamp(min=0)
    return apart.fill_diagonal_(0)


def cosines(models: Stack) -> Tensor:
    """Return the cosine of the angle between the models of every pair of clients."""
    inner = products(models)
    lengths = inner.diagonal().sqrt()
    return inner / (lengths[:, None] * lengths).clamp(min=torch.finfo(inner.dtype).tiny)


def mix_models(matrix: Tensor, models: Stack) -> Stack:
    """Mix the models: row k of the result is the sum of all models with the weights in row k of the matrix."""

    def mix(leaf: Tensor) -> Tensor:
        flat = leaf.reshape(len(leaf), -1)
        if leaf.dtype == torch.float64:  # row by row: the same bits however the cohort is cut into chunks
            rows = torch.stack([row @ flat for row in matrix]) if len(matrix) else flat[:0]
        else:
            rows = matrix @ flat
        return rows.reshape(-1, *leaf.shape[1:])

    return models.map(mix)
