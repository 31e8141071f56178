"""A hypernetwork on Params: a perceptron of a few numbers e, with a linear head for every leaf of another network.

f_0 = A_0 e + a_0,        f_i = A_i relu(f_{i-1}) + a_i,        leaf l = H_l f_n + c_l
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.params import Params

Spectral = Literal["none", "hidden", "all"]
HIDDEN, HEAD, WEIGHT, BIAS = "hidden.", "head.", ".weight", ".bias"


def size_of(target: Params, inputs: int, hidden: int, layers: int) -> int:
    """Return how many numbers a hypernetwork for these leaves has."""
    body = hidden * (inputs + 1) + layers * hidden * (hidden + 1)
    return body + (hidden + 1) * sum(leaf.numel() for leaf in target.values())


def hypernetwork(target: Params, inputs: int, hidden: int, layers: int, *, draw: np.random.Generator) -> Params:
    """Draw a hypernetwork as torch draws its layers; c_l begins at leaf l, so it has the scale it needs."""
    like = next(iter(target.values()), torch.zeros(()))

    def draw_layer(columns: int, *shape: int) -> Tensor:
        return torch.from_numpy(draw.uniform(-1, 1, shape) / math.sqrt(columns)).to(like)

    values = {}
    for layer, columns in enumerate([inputs, *[hidden] * layers]):
        values[f"{HIDDEN}{layer}{WEIGHT}"] = draw_layer(columns, hidden, columns)
        values[f"{HIDDEN}{layer}{BIAS}"] = draw_layer(columns, hidden)
    for name, leaf in target.items():
        values[f"{HEAD}{name}{WEIGHT}"] = draw_layer(hidden, leaf.numel(), hidden)
        values[f"{HEAD}{name}{BIAS}"] = leaf
    return Params(values)


def generate_leaves(phi: Params, e: Tensor) -> dict[str, Tensor]:
    """Generate all leaves for one e, or for each row of several."""
    f = e
    for layer, name in enumerate(_stems(phi, HIDDEN)):
        f = F.linear(F.relu(f) if layer else f, phi[name + WEIGHT], phi[name + BIAS])
    made = {}
    for name in _stems(phi, HEAD):
        bias = phi[name + BIAS]
        made[name.removeprefix(HEAD)] = F.linear(f, phi[name + WEIGHT]).reshape(*e.shape[:-1], *bias.shape) + bias
    return made


def normalise_spectrum(phi: Params, which: Spectral) -> Params:
    """Divide weight matrices by their largest singular value: those of the hidden layers, or all."""
    prefixes = {"none": (), "hidden": (HIDDEN,), "all": (HIDDEN, HEAD)}[which]
    stems = [name for prefix in prefixes for name in _stems(phi, prefix)]
    return phi | Params(
        {name + WEIGHT: phi[name + WEIGHT] / largest_singular_value(phi[name + WEIGHT]) for name in stems}
    )


def largest_singular_value(matrix: Tensor) -> Tensor:
    """Return the largest singular value, from the eigenvalues of the smaller of M^T M and M M^T."""
    rows, columns = matrix.shape
    gram = matrix.T @ matrix if rows > columns else matrix @ matrix.T
    largest: Tensor = torch.linalg.eigvalsh(gram)[-1].sqrt()
    return largest


def _stems(phi: Params, prefix: str) -> list[str]:
    return [name.removesuffix(BIAS) for name in phi if name.startswith(prefix) and name.endswith(BIAS)]
