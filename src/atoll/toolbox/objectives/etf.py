"""Fixed directions for classes, that everybody can make from one seed: nothing about data is in them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import ModelError


def simplex_etf(classes: int, size: int, rng: np.random.Generator) -> Tensor:
    """Return a simplex equiangular tight frame: unit rows [classes, size], all cosines -1 / (C - 1); float64.

    A = sqrt(C / (C - 1)) V Q^T, with V V^T = I - J / C and Q a random matrix of C - 1 orthonormal columns.
    """
    if classes < 2 or size < classes - 1:
        raise ModelError(
            "A simplex frame must have at least two classes, and at most one more than there are dimensions. "
            f"Got {classes} classes and {size} dimensions.",
            hint="use a model with more features, by a projection if need be.",
        )
    centred = np.eye(classes) - 1 / classes
    corners = _orthonormal(centred[:, :-1])  # V: the last column adds nothing to the space of the others
    columns = _orthonormal(rng.normal(size=(size, classes - 1)))
    return torch.from_numpy(np.sqrt(classes / (classes - 1)) * corners @ columns.T)


def random_directions(classes: int, size: int, rng: np.random.Generator) -> Tensor:
    """Return unit rows [classes, size], uniform on the sphere; float64."""
    rows = rng.normal(size=(classes, size))
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _orthonormal(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an orthonormal basis of the space of the columns, with signs that are the same on any machine."""
    basis, upper = np.linalg.qr(columns)
    return basis * np.sign(np.diag(upper))
