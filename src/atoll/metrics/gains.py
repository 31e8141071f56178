"""How much is gained by clients like these, and how sure that is.

    g_ks = a_ks - r_ks        client k, seed s, the same samples; turned where a lower score is better

The mean gain G has an interval of two parts: clients differ, se_c = sd_k(g_k) / sqrt(N), and so do seeds,
se_s = sd_s(G_s) / sqrt(S), each of which has a cut of the samples and a training of its own:

    G ± t sqrt(se_c^2 + se_s^2)

with Satterthwaite's degrees of freedom. The first part makes it a statement about clients like these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Gains = NDArray[np.float64]  # [seed, client]
FEWEST_CLIENTS = 6  # with fewer, gains have no interval: they are told client by client
SURE_SEEDS = 3
BY_CHANCE = 0.16  # of clients are worse off by more than one standard error where there is no difference at all


@dataclass(frozen=True)
class Gain:
    """A mean gain, half its 95 % interval, and the two parts of its standard error; None where there is none."""

    mean: float
    half: float | None
    of_clients: float | None
    of_seeds: float | None
    seeds: int
    agree: bool  # whether all seeds have the sign of the mean
    p: float | None = None  # that a mean is so far from 0 by chance, to either side

    @property
    def words(self) -> str:
        """How sure it is: sure, likely, or no evidence."""
        if self.half is None:
            return "too few clients to say how sure"
        apart = abs(self.mean) > self.half
        if apart and self.agree and self.seeds >= SURE_SEEDS:
            return "sure"
        return "likely" if apart or (self.agree and self.seeds > 1) else "no evidence"


def estimate_gain(gains: Gains, pooled: tuple[float, int] | None = None) -> Gain:
    """Estimate the mean gain of clients like these.

    `pooled` is the standard deviation over seeds and its degrees of freedom, from other methods too: two seeds alone
    say little of it.
    """
    gains = gains[:, ~np.isnan(gains).all(axis=0)]  # of clients that have a score
    of_client, of_seed = np.nanmean(gains, axis=0), np.nanmean(gains, axis=1)
    mean, seeds, clients = float(np.mean(of_client)), len(of_seed), len(of_client)
    agree = bool((np.sign(of_seed) == np.sign(mean)).all() and mean != 0)
    if clients < FEWEST_CLIENTS:
        return Gain(mean, None, None, None, seeds, agree)
    from scipy import stats

    se_clients = float(of_client.std(ddof=1)) / math.sqrt(clients)
    spread, freedom = pooled or (float(of_seed.std(ddof=1)) if seeds > 1 else 0.0, max(seeds - 1, 1))
    se_seeds = spread / math.sqrt(seeds)
    both = se_clients**2 + se_seeds**2
    whole = se_clients**4 / (clients - 1) + se_seeds**4 / freedom
    if both == 0:
        return Gain(mean, 0.0, se_clients, se_seeds, seeds, agree, p=1.0 if mean == 0 else 0.0)
    degrees, error = both**2 / whole, math.sqrt(both)
    p = 2 * float(stats.t.sf(abs(mean) / error, degrees))
    return Gain(mean, float(stats.t.ppf(0.975, degrees)) * error, se_clients, se_seeds, seeds, agree, p)


def pool_seeds(several: list[Gains]) -> tuple[float, int]:
    """Return the standard deviation over seeds of the mean gains of several methods, and its degrees of freedom."""
    means = [np.nanmean(gains, axis=1) for gains in several]
    freedom = sum(len(one) - 1 for one in means)
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in means)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 1)
