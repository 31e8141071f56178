"""Where noise comes from: the run's seed in a simulation; at sites, a secret of whoever adds it.

A seed makes runs repeatable, and whoever knows it can subtract the noise. A secret of 32 bytes, drawn by the operating
system, is stretched by ChaCha20, so nobody who sees some of the noise can tell the rest.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from scipy.special import gammaln, ndtri

from atoll.kernel.randomness import generator
from atoll.protect.masks import derive_key, mask_words

Shape = int | tuple[int, ...]
FEW = 10  # below this mean, Poisson numbers are read from a table


class Draws(Protocol):
    """What noise is drawn from; NumPy's generators are such."""

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Draw from the standard normal distribution."""
        ...

    def poisson(self, lam: float, size: tuple[int, ...]) -> np.ndarray:
        """Draw Poisson numbers of this mean."""
        ...


def draws_of(source: int | bytes, purpose: str, *counters: int | str) -> Draws:
    """Return the draws for a purpose: from a seed, which is public, or from a secret."""
    if isinstance(source, int):
        return generator(source, purpose, *counters)
    return SecretDraws(derive_key(source, "\x1f".join(map(str, (purpose, *counters)))))


class SecretDraws:
    """Draws that only who has the key can repeat; each call goes on where the last one ended."""

    def __init__(self, key: bytes) -> None:
        self._key, self._calls = key, 0

    def uniform(self, count: int) -> np.ndarray:
        """Draw from (0, 1), in steps of 2^-53."""
        words = mask_words(derive_key(self._key, f"call {self._calls}"), 2 * count).view("<u8")
        self._calls += 1
        drawn: np.ndarray = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return drawn

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Draw from the standard normal distribution: its quantile function at uniform numbers."""
        drawn: np.ndarray = ndtri(self.uniform(math.prod(size))).reshape(size)
        return drawn

    def poisson(self, lam: float, size: tuple[int, ...]) -> np.ndarray:
        """Draw Poisson numbers: from a table where they are small, else by rejection (Hormann 1993, PTRS)."""
        count = math.prod(size)
        if lam < FEW:
            at = np.arange(20 * FEW)
            shares = np.cumsum(np.exp(at * math.log(lam) - lam - gammaln(at + 1))) if lam else np.ones(1)
            return np.searchsorted(shares, self.uniform(count)).reshape(size)
        drawn = np.full(count, -1, dtype=np.int64)
        while len(open_places := np.flatnonzero(drawn < 0)):
            drawn[open_places] = self._propose_poisson(lam, len(open_places))
        return drawn.reshape(size)

    def _propose_poisson(self, lam: float, count: int) -> np.ndarray:
        """Return so many Poisson numbers, and -1 where one was rejected."""
        b = 0.931 + 2.53 * math.sqrt(lam)
        a = -0.059 + 0.02483 * b
        u, v = self.uniform(count) - 0.5, self.uniform(count)
        us = 0.5 - np.abs(u)
        k = np.floor((2 * a / us + b) * u + lam + 0.43)
        quick = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
        bad = (k < 0) | ((us < 0.013) & (v > us))
        level = np.log(v) + math.log(1.1239 + 1.1328 / (b - 3.4)) - np.log(a / us**2 + b)
        likely = level <= k * math.log(lam) - lam - gammaln(np.maximum(k, 0) + 1)
        return np.where(quick | (~bad & likely), k, -1).astype(np.int64)
