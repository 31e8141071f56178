"""The account of differential privacy: what Gaussian releases give away together, as (epsilon, delta).

A round of client-level privacy is a Gaussian on the sum of clipped messages, of a cohort that every client joins with
probability q: `rounds` such releases are composed by privacy loss distributions (PLD), with Renyi divergences (RDP) as
a check that is never below. All of it is for adding or removing one client. Training with noise on clipped gradients of
shuffled samples has a closed form: every pass is one Gaussian per sample, without amplification. That is for blanking a
sample, whose place in the batches stays; exchanging it for any other moves a sum twice as far.

References: Mironov et al., 2019 (sampled Gaussian, RDP); Sommer et al., PoPETs 2019, and Koskela et al., AISTATS 2020
(PLD); Dong, Roth, Su, JRSS-B 2022 (Gaussian privacy). Composition is computed by dp-accounting.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from atoll.kernel.errors import HyperparameterError, PrivacyError

LARGEST_NOISE = 1e4


def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise PrivacyError(
            "Accounting for differential privacy needs dp-accounting, which is not installed.",
            hint="pip install 'atoll[privacy]'",
        ) from error
    return dp_accounting, pld, rdp


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta of a Gaussian release whose means are mu standard deviations apart."""
    if mu <= 0:
        return 0.0
    tail = -mu / 2 - epsilon / mu
    # e^epsilon times a tiny probability: in logarithms where it would overflow
    return float(ndtr(mu / 2 - epsilon / mu)) - math.exp(epsilon + float(log_ndtr(tail)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian release whose means are mu standard deviations apart; see `gaussian_delta`."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, high, xtol=1e-12))


@functools.lru_cache(maxsize=64)
def find_mu(epsilon: float, delta: float) -> float:
    """Return how many standard deviations apart the means of a Gaussian release may be at (epsilon, delta)."""
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
    low = min(1e-9, delta)  # delta is at least about 0.4 mu where epsilon is 0, and less elsewhere
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, low, high, xtol=1e-15))


@functools.lru_cache(maxsize=256)
def composed_epsilon(noise: float, share: float, rounds: int, delta: float, how: str = "pld") -> float:
    """Return epsilon after so many rounds, each a Gaussian on the sum of a cohort that all join with probability q.

    `noise` is the noise's standard deviation over the norm to which messages are clipped.
    """
    if noise <= 0:
        return math.inf
    if share >= 1 and how == "pld":  # no sampling: the closed form
        return gaussian_epsilon(math.sqrt(rounds) / noise, delta)
    library, pld, rdp = _library()
    event = library.GaussianDpEvent(noise)
    if share < 1:
        event = library.PoissonSampledDpEvent(share, event)
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # it warns of orders that it leaves out, which only costs a little
    account = rdp.RdpAccountant() if how == "rdp" else pld.PLDAccountant()
    account.compose(event, rounds)
    return float(account.get_epsilon(delta))


def total_epsilon(releases: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Return epsilon of several runs together: the noise of each, the share of clients in a round, and its rounds."""
    if all(share >= 1 for _, share, _ in releases):  # no sampling: the closed form
        return gaussian_epsilon(math.sqrt(sum(rounds / noise**2 for noise, _, rounds in releases)), delta)
    library, pld, _ = _library()
    account = pld.PLDAccountant()
    for (noise, share), count in _add_rounds(releases).items():
        event = library.GaussianDpEvent(noise)
        account.compose(event if share >= 1 else library.PoissonSampledDpEvent(share, event), count)
    return float(account.get_epsilon(delta))


def _add_rounds(releases: Sequence[tuple[float, float, int]]) -> Counter[tuple[float, float]]:
    counts: Counter[tuple[float, float]] = Counter()
    for noise, share, rounds in releases:
        counts[noise, share] += rounds
    return counts


@functools.lru_cache(maxsize=64)
def find_noise(epsilon: float, share: float, rounds: int, delta: float) -> float:
    """Return the least noise, rounded up, with which so many rounds stay within epsilon."""
    high = 1.0
    while composed_epsilon(high, share, rounds, delta) > epsilon:
        high *= 2
        if high > LARGEST_NOISE:
            raise HyperparameterError(
                f"No noise up to {LARGEST_NOISE:g} keeps {rounds} rounds within epsilon={epsilon:g}. With that much "
                f"they reach epsilon={composed_epsilon(LARGEST_NOISE, share, rounds, delta):.3g} at delta={delta:g}.",
                hint="raise `epsilon`, lower `rounds`, or ask a smaller share of the clients per round.",
            )
    low = high / 2 if high > 1 else 0.01
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if composed_epsilon(middle, share, rounds, delta) <= epsilon else (middle, high)
        if high / low < 1.0002:
            break
    return math.ceil(high * 1000) / 1000 if high < 10 else math.ceil(high * 10) / 10  # up: the promise must hold


def passes_epsilon(noise: float, passes: float, delta: float) -> float:
    """Return epsilon of a sample whose clipped gradient was in so many passes with noise on every sum."""
    return math.inf if noise <= 0 and passes else gaussian_epsilon(math.sqrt(passes) / noise if passes else 0.0, delta)
