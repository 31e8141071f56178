"""The replies of a round as rows of one matrix X, a row per client: all floating-point leaves of all fields.

X itself is never made: it would hold every model twice. Distances and inner products are sums over leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Arrival
from atoll.kernel.params import Params, Stack

Fields = Mapping[str, Stack]
COLUMNS = 4096  # whose inner products are taken at once


def stack_arrivals(arrivals: Sequence[Arrival]) -> dict[str, Stack]:
    """Return the fields that all replies have, a row per client; late ones may lack what clients send by now."""
    first = {name: field for name, field in arrivals[0].fields.items() if all(name in one.fields for one in arrivals)}
    if len(arrivals) == 1:
        return first
    return {
        name: Stack(
            {leaf: torch.cat([one.fields[name][leaf] for one in arrivals]) for leaf in first[name]}, first[name].layout
        )
        for name in first
    }


def floating_leaves(fields: Fields) -> Iterator[Tensor]:
    """Yield the floating-point leaves of all fields as matrices, [client, number]."""
    for value in fields.values():
        for leaf in value.values():
            if leaf.is_floating_point():
                yield leaf.flatten(1) if leaf.ndim > 1 else leaf[:, None]


def gram(leaves: Iterable[Tensor], *, centred: bool = False) -> Tensor:
    """Return X X' in float64; `centred` moves the origin to the reply of median norm, which outliers cannot enlarge.

    With an origin of the size of honest replies, a reply of any size leaves the distances between others exact.
    """
    leaves = list(leaves)
    assert leaves, "replies without numbers have no distances"
    origin = None
    if centred:
        squares = torch.stack([rows.double().square().sum(1) for rows in leaves]).sum(0)
        origin = int(squares.argsort(stable=True)[(len(squares) - 1) // 2])
    total = leaves[0].new_zeros(len(leaves[0]), len(leaves[0]), dtype=torch.float64)
    for rows in leaves:
        for part in torch.split(rows, COLUMNS, dim=1):  # float64 copies stay in the cache
            wide = part.double()
            if origin is not None:
                wide = wide - wide[origin]
            total += wide @ wide.T
    return total


def squared_distances(products: Tensor) -> Tensor:
    """Return the squared distances between rows from their inner products."""
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2 * products).clamp(min=0)


def sort_columns(rows: Tensor) -> Tensor:
    """Return each column in ascending order. NumPy sorts many short columns twenty times as fast as torch on a CPU."""
    if rows.device.type != "cpu":
        return rows.sort(dim=0).values
    plain = rows.detach()
    if rows.dtype not in (torch.float32, torch.float64):
        plain = plain.float()
    return torch.from_numpy(np.sort(plain.numpy(), axis=0)).to(rows.dtype)


def take_median(rows: Tensor) -> Tensor:
    """Return the median of each column: of an even number of rows, the mean of the middle two."""
    ordered, count = sort_columns(rows), len(rows)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def reduce_leaves(fields: Fields, reduce: Callable[[Tensor], Tensor]) -> dict[str, Params]:
    """Return `reduce` of the rows of every floating-point leaf; of whole numbers, the lower median."""

    def reduce_leaf(leaf: Tensor) -> Tensor:
        if leaf.dtype == torch.bool:
            return leaf.to(torch.uint8).median(dim=0).values.bool()
        if not leaf.is_floating_point():
            return leaf.median(dim=0).values
        made: Tensor = reduce(leaf.reshape(len(leaf), -1)).reshape(leaf.shape[1:])
        return made

    return {
        name: Params({leaf: reduce_leaf(rows) for leaf, rows in value.items()}, value.layout)
        for name, value in fields.items()
    }


def mix_rows(fields: Fields, shares: Tensor) -> dict[str, Stack]:
    """Return M X for a matrix M of shares, [row, client]; whole numbers stay those of the first rows."""

    def mix(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf[: len(shares)]
        mixed: Tensor = torch.tensordot(shares.to(leaf), leaf, dims=1)
        return mixed

    return {name: value.map(mix) for name, value in fields.items()}


def weigh(fields: Fields, shares: Tensor) -> dict[str, Params]:
    """Return sum_i a_i x_i for shares a of the clients; of statistics a mean at most, so variances stay above 0."""

    def add_up(some: Fields, a: Tensor) -> dict[str, Params]:
        return reduce_leaves(some, lambda rows: torch.matmul(a.to(rows), rows))

    statistics = {name: value.buffers for name, value in fields.items()}
    means = add_up(statistics, shares / shares.sum().clamp(min=1))
    return {name: value | means[name] for name, value in add_up(fields, shares).items()}
