"""How alike clients are, from what they say about their samples, and how models travel between those that are alike.

    bases         what a client says: the leading directions of its samples, with their labels and without
    alignment     how alike two clients are: the cosines between their directions
    links         whom a client listens to: the few that are most like it
    propagation   what reaches it along all paths of links: P = (1 - alpha) (I - alpha S)^-1, personalised PageRank

Pure functions of tensors, in float64. `links` and `propagation` give matrices whose rows are distributions.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from atoll.kernel.errors import CohortError, HyperparameterError

ROUNDING = 1e-9
SMALLEST = 1e-37  # what reaches a client over the longest way: no less, or it would be 0 in single precision


def directions(rows: Tensor, q: int) -> Tensor:
    """Return the q leading right singular vectors of rows [n, d], as [q, d]; those beyond the rank of the rows are 0.

    The largest entry of each is positive, so the same rows give the same directions on any machine.
    """
    _, sizes, vectors = torch.linalg.svd(rows.double(), full_matrices=False)
    return _first(sizes, vectors, q)


def private_moment(rows: Tensor, noise: float, rng: np.random.Generator) -> Tensor:
    """Return rows^T rows of rows cut to length 1, plus symmetric Gaussian noise: one row moves it by at most 1.

    Dwork, Talwar, Thakurta, Zhang. "Analyze Gauss." STOC 2014, Algorithm 1.
    """
    rows = rows.double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
    upper = torch.from_numpy(np.triu(rng.normal(scale=noise, size=(rows.shape[1], rows.shape[1])))).to(rows.device)
    return rows.T @ rows + upper + upper.T - torch.diag(upper.diagonal())


def leading(moment: Tensor, q: int) -> Tensor:
    """Return the q leading eigenvectors of a symmetric matrix, as [q, d]; 0 where eigenvalues are not positive."""
    values, vectors = torch.linalg.eigh(moment)
    return _first(values.flip(0).clamp(min=0), vectors.T.flip(0), q)


def _first(sizes: Tensor, vectors: Tensor, q: int) -> Tensor:
    """Return the first q rows, with a definite sign, and zeros where there is none or its size is a rounding error."""
    found = vectors.new_zeros(q, vectors.shape[1])
    there = min(q, len(sizes))
    if there:
        first, size = vectors[:there], sizes[:there]
        sign = first.gather(1, first.abs().argmax(1, keepdim=True)).sign()
        real = size > sizes[0] * max(vectors.shape) * torch.finfo(sizes.dtype).eps
        found[:there] = sign * first * real[:, None]
    return found


def bases(
    x: Tensor,
    y: Tensor,
    q: int,
    *,
    by_class: bool = False,
    center: bool = False,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Describe one client's samples x [n, p] with targets y [n, t]: [parts, q, d]; without targets, [1, q, p].

    One part: the directions of [x, y]. `by_class`: a part for every column of y, a class: the directions of its samples
    times the root of its share. With `noise`, all of it comes from `private_moment` and counts with the same noise.
    """
    chosen = [y[:, label] > 0 for label in range(y.shape[1])] if by_class else []
    if center:
        x, y = x - x.mean(0), y - y.mean(0)
    parts = [x[those] for those in chosen] if by_class else [torch.cat([x, y], 1)]
    counts = x.new_tensor([len(part) for part in parts], dtype=torch.float64)
    if noise:
        assert rng is not None, "noise is drawn from a generator"
        moments = [private_moment(part, noise, rng) for part in parts]
        width = x.shape[1]
        plain = leading(torch.stack([moment[:width, :width] for moment in moments]).sum(0), q)
        found = [leading(moment, q) for moment in moments]
        counts = (counts + torch.from_numpy(rng.normal(scale=noise, size=len(parts))).to(counts)).clamp(min=0)
    else:
        plain, found = directions(x, q), [directions(part, q) for part in parts]
    shares = counts / counts.sum().clamp(min=1) if by_class else torch.ones_like(counts)
    return torch.stack(found) * shares.sqrt()[:, None, None], plain[None]


def alignment(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean cosine of principal angles between bases [n, parts, q, d] and [m, parts, q, d], summed by part.

    It is 1 for two equal clients with q directions each, and 0 for two whose samples have no direction in common.
    """
    if ours.shape[1:] != theirs.shape[1:]:
        raise CohortError(
            f"Clients must be compared by bases of one shape, (parts, q, features). Got {tuple(ours.shape[1:])} and "
            f"{tuple(theirs.shape[1:])}.",
            hint="give all clients samples of the same shape, and the same classes.",
        )
    # One client after another: the same bits however many are asked at once.
    products = torch.stack([torch.einsum("aqd,jard->jaqr", one, theirs.double()) for one in ours.double()])
    cosines: Tensor = torch.linalg.svdvals(products)
    return cosines.sum((2, 3)) / ours.shape[2]


def links(scores: Tensor, topk: int, temperature: float, *, among: Tensor) -> Tensor:
    """Return rows softmax(temperature * scores) over the `topk` highest scores that `among` allows; else all zero.

    Where fewer are allowed, all of them; of equal scores, the first.
    """
    allowed = scores.masked_fill(~among, -torch.inf)
    best = allowed.argsort(dim=1, descending=True, stable=True)[:, :topk]
    chosen = torch.zeros_like(among).scatter(1, best, True) & among
    weights = torch.softmax((temperature * scores).masked_fill(~chosen, -torch.inf), 1)
    return torch.where(among.any(1, keepdim=True), weights, 0)


def propagation(stochastic: Tensor, alpha: float) -> Tensor:
    """Return P = (1 - alpha) (I - alpha S)^-1: its rows are distributions where those of S are.

    P_kj is positive exactly where links of S lead from k to j, in single precision as well.
    """
    if not 0 <= alpha < 1:
        raise HyperparameterError(f"`alpha` must be a float in [0, 1). Got {alpha!r}: at 1 nothing can be inverted.")
    off = (stochastic.sum(1) - 1).abs().max()
    if stochastic.min() < 0 or off > ROUNDING:
        raise CohortError(
            f"Rows of links must be distributions. Got a sum that is off by {off:.2g}, and {stochastic.min():.2g} as "
            "the smallest entry."
        )
    eye = torch.eye(len(stochastic), dtype=stochastic.dtype, device=stochastic.device)
    # Of the transposed matrix no column needs another pivot than its diagonal, so all terms have one sign, and small
    # entries are as exact as large ones. Solvers return columns, which are rows of P: it is saved and loaded as it is.
    inverse: Tensor = torch.linalg.solve(eye - alpha * stochastic.T, eye).T.contiguous()
    return torch.where(reachable(alpha * stochastic), ((1 - alpha) * inverse).clamp(min=SMALLEST), 0)


def reachable(links: Tensor) -> Tensor:
    """Return to whom links lead from each client, over any number of others; everybody reaches itself."""
    steps = shortest_path(csr_array(links.cpu().numpy()), unweighted=True)
    return torch.from_numpy(np.isfinite(steps)).to(links.device)


def among_known(mixing: Tensor, known: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the same matrix over `known` clients only, its rows distributions again; who gets nothing has itself.

    With `rows`, only these rows of it.
    """
    rows = torch.arange(len(mixing), device=mixing.device) if rows is None else rows
    there = mixing[rows] * known
    mass = there.sum(1, keepdim=True)
    itself = torch.zeros_like(there).scatter_(1, rows[:, None], 1.0)
    return torch.where(mass > 0, there / mass.clamp(min=torch.finfo(mass.dtype).tiny), itself)
