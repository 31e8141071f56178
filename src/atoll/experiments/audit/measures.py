"""Measures of attacks: how well members are found, which epsilon right guesses rule out, how alike pictures are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import rankdata

from atoll.kernel.errors import HyperparameterError
from atoll.kernel.randomness import generator

Values = NDArray[np.float64]
DRAWS = 200  # of a bootstrap
LEVEL = 0.05  # error of a lower bound


def auc(members: Values, others: Values) -> float:
    """Return the probability that a member has a higher score than another sample; ties count half."""
    ranks = rankdata(np.concatenate([members, others]))
    below = ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2
    return float(below / (len(members) * len(others)))


def tpr(members: Values, others: Values, fpr: float = 0.01) -> float:
    """Return the share of members above the threshold that at most a share `fpr` of the others is above."""
    allowed = math.floor(fpr * len(others) + 1e-9)
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(members: Values, others: Values, seed: int, draws: int = DRAWS) -> tuple[Interval, Interval]:
    """Return the AUC and the TPR at 1 % FPR, with intervals over draws of both sides with replacement."""
    rng = generator(seed, "bootstrap of an audit")
    pairs = [
        (rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(draws)
    ]  # sides keep their sizes
    found = []
    for measure in (auc, tpr):
        low, high = np.quantile([measure(*pair) for pair in pairs], (0.025, 0.975))
        found.append(Interval(measure(members, others), float(low), float(high)))
    return found[0], found[1]


def lower_bound(canaries: int, guesses: int, right: int, delta: float, level: float = LEVEL) -> float:
    """Return the largest epsilon that so many right guesses rule out, with an error of at most `level`.

    Canaries are in with probability 1/2 each; an (epsilon, delta) mechanism lets at most so many of the guesses be
    right. Reference: Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
    """
    if not 0 <= right <= guesses <= canaries:
        raise HyperparameterError(
            f"Right guesses must be at most all guesses, and these at most all canaries. Got {right} of {guesses} of "
            f"{canaries}."
        )
    if guesses == 0 or _chance(0.0, canaries, guesses, right, delta) > level:
        return 0.0
    high = 1.0
    while _chance(high, canaries, guesses, right, delta) <= level:
        high *= 2
        if high > 1000:
            return math.inf
    return float(brentq(lambda e: _chance(e, canaries, guesses, right, delta) - level, 0.0, high, xtol=1e-10))


def _chance(epsilon: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    """Bound the probability that so many guesses are right though (epsilon, delta) holds."""
    counts = np.arange(guesses + 1)
    log_right, log_wrong = -np.logaddexp(0, -epsilon), -np.logaddexp(0, epsilon)
    ways = gammaln(guesses + 1) - gammaln(counts + 1) - gammaln(guesses - counts + 1)
    logs = ways + counts * log_right + (guesses - counts) * log_wrong
    beyond = math.exp(logsumexp(logs[right:]))
    if delta == 0 or right == 0:
        return min(1.0, beyond)
    just_below = np.cumsum(np.exp(logs[:right])[::-1])  # P[right - i <= Bin < right], i = 1 ... right
    return float(min(1.0, beyond + 2 * canaries * delta * (just_below / np.arange(1, right + 1)).max()))


def ssim(found: Values, true: Values, span: float) -> float:
    """Return the structural similarity of two pictures [channel, row, column], the mean over windows; 1: the same.

    Windows are squares of 7 pixels, or as large as the picture where it is smaller; constants are (0.01 span)^2 and
    (0.03 span)^2. Reference: Wang, Bovik, Sheikh, Simoncelli, IEEE TIP 2004.
    """
    side = min(7, *true.shape[1:])
    side -= 1 - side % 2  # odd
    window, margin, counted = (1, side, side), side // 2, side * side
    unbiased = counted / max(counted - 1, 1)
    small, medium = (0.01 * span) ** 2, (0.03 * span) ** 2

    def mean(values: Values) -> Values:
        return np.asarray(uniform_filter(values.astype(np.float64), size=window))

    a, b = mean(found), mean(true)
    vary_a, vary_b, together = (
        unbiased * (mean(one * other) - m * n)
        for one, other, m, n in ((found, found, a, a), (true, true, b, b), (found, true, a, b))
    )
    alike = (2 * a * b + small) * (2 * together + medium)
    alike = alike / ((a * a + b * b + small) * (vary_a + vary_b + medium))
    inside = slice(margin, -margin or None)
    return float(alike[:, inside, inside].mean())  # windows that lie within the picture


def psnr(found: Values, true: Values, span: float) -> float:
    """Return the peak signal-to-noise ratio in dB, of values that span so much; infinite if both are the same."""
    error = float(np.square(found - true).mean())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)
