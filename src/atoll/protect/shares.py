"""Client-level privacy under masks: `--secure masks --dp client:epsilon=4`. Clients add the noise, each a share of it.

    e_k = round(S x_k),   ||x_k|| cut so ||e_k|| <= S C;      clients send  e_k + Sk(m / t)  under masks mod 2^32

Nobody could add noise to a sum that only clients see, so every client adds integer noise of its own: the difference of
two Poisson numbers (Skellam), whose sums are Skellam again. Of n clients that are asked, a sum needs t, else it cannot
be unmasked; so each adds the variance m / t, and every sum has at least m = (z S C)^2. The server reads sums that are
private already. It knows who takes part, so nothing is gained by chance: T messages cost T times one.

    RDP of one sum:  a D^2 / (2 m) + min( ((2a - 1) D^2 + 6 D1) / (4 m^2), 3 D1 / (2 m) ),     D = S C,  D1 <= D^2

Integers have |e| <= e^2, so D1 is bounded without the number of weights. With the least S C that is allowed, 2^12, this
is within 1e-5 of the divergence of a Gaussian with noise z, and the account counts with that one.

Reference: Agarwal, Kairouz, Liu. "The Skellam Mechanism for Differentially Private Federated Learning." NeurIPS 2021.
https://arxiv.org/abs/2110.04995
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import HyperparameterError, PrivacyError
from atoll.kernel.params import Stack
from atoll.protect.account import LARGEST_NOISE
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.draws import Draws, draws_of
from atoll.protect.masks import default_threshold
from atoll.protect.promise import Course, EqualWeights, Promise, Release
from atoll.protect.secure import MODULUS, WEIGHT, Encode, SecureSum
from atoll.protect.stages import Clip, Place, Sent, Stage

STEPS = 2**16  # S C: how many steps of the fixed point there are to the largest norm
LEAST_STEPS = 2**12  # the account counts with these
SIGMAS = 10  # standard deviations of noise that must fit beside the sum
ORDERS = np.unique(np.round(np.geomspace(2, 16_384, 600))).astype(np.float64)


def skellam_divergence(order: np.ndarray, variance: float, l1: float, l2: float) -> np.ndarray:
    """Return the Renyi divergence of whole orders between sums that differ by integers of norms `l1` and `l2`."""
    near = ((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2)
    far = 3 * l1 / (2 * variance)
    found: np.ndarray = order * l2**2 / (2 * variance) + np.minimum(near, far)
    return found


def divergence_epsilon(order: np.ndarray, divergence: np.ndarray, delta: float) -> float:
    """Return epsilon that follows from Renyi divergences, the least over their orders."""
    found = divergence + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    return max(0.0, float(found.min()))


def shares_epsilon(noise: float, messages: int, delta: float, steps: float = LEAST_STEPS) -> float:
    """Return epsilon after so many messages of a client, in sums whose noise is `noise` times the largest norm."""
    variance = (noise * steps) ** 2
    return divergence_epsilon(ORDERS, messages * skellam_divergence(ORDERS, variance, steps**2, steps), delta)


@functools.lru_cache(maxsize=64)
def find_shares_noise(epsilon: float, messages: int, delta: float) -> float:
    """Return the least noise, rounded up, with which so many messages stay within epsilon."""
    high = 1.0
    while shares_epsilon(high, messages, delta) > epsilon:
        high *= 2
        if high > LARGEST_NOISE:
            raise HyperparameterError(
                f"No noise up to {LARGEST_NOISE:g} keeps {messages} messages within epsilon={epsilon:g}. With that "
                f"much they reach epsilon={shares_epsilon(LARGEST_NOISE, messages, delta):.3g} at delta={delta:g}.",
                hint="raise `epsilon`, or lower `rounds`.",
            )
    low = 0.01 if high == 1.0 else high / 2
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if shares_epsilon(middle, messages, delta) <= epsilon else (middle, high)
    return math.ceil(high * 1000) / 1000  # up: the promise must hold


@dataclass(frozen=True)
class RoundedClip(Stage):
    """Cut messages so their norm is at most C after every number was rounded to the fixed point."""

    norm: float
    scale: float  # S

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Leave room for rounding, half a step for each number; see `Stage.apply`."""
        numbers = sum(leaf[0].numel() for value in sent.fields.values() for leaf in value.floating.values())
        room = math.sqrt(numbers) / (2 * self.scale)
        if room >= self.norm:
            raise PrivacyError(f"Rounding {numbers:,} numbers takes all of the norm {self.norm:g}: there are too many.")
        return Clip(self.norm - room).apply(sent, place)


@dataclass(frozen=True)
class NoiseInShares(Stage):
    """Add integer noise to what was encoded: the share of one client."""

    variance: float

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Add noise, client by client; how many there are is known. See `Stage.apply`."""
        noisy = {
            name: value if name == WEIGHT else self._disturb(name, value, place) for name, value in sent.fields.items()
        }
        return sent._replace(fields=noisy)

    def _disturb(self, name: str, value: Stack, place: Place) -> Stack:
        words = value["masked"]
        size = tuple(words.shape[1:])
        drawn = np.stack([
            draw_skellam(draws_of(place.source, "shares of noise", place.round, client, name), self.variance, size)
            for client in place.clients.tolist()
        ])  # fmt: skip
        total = torch.remainder(words.to(torch.int64) + torch.from_numpy(drawn).to(words.device), MODULUS)
        return Stack.of(masked=total.to(torch.uint32))


def draw_skellam(rng: Draws, variance: float, size: tuple[int, ...]) -> np.ndarray:
    """Draw whole numbers with mean 0 and this variance: differences of two Poisson numbers."""
    drawn: np.ndarray = rng.poisson(variance / 2, size) - rng.poisson(variance / 2, size)
    return drawn


@dataclass(frozen=True)
class PrivacyInShares(Promise):
    """A promise about clients whose noise is added in shares, under masks."""

    kind: ClassVar[str] = "client-level"

    @classmethod
    def of(cls, promise: ClientPrivacy) -> PrivacyInShares:
        """Return the same promise, with noise in shares."""
        if promise.quantile is not None:
            raise PrivacyError(
                "A clip that adapts is not offered under masks, where every client must round alike.",
                hint="give a number: clip=1.",
            )
        return cls(promise.epsilon, promise.delta, promise.clip, promise.noise, promise.public)

    def check(self, algorithm: Algorithm, course: Course) -> None:
        """Raise where a promise would be a lie; masks themselves refuse what needs single replies."""
        self.require_small_delta(course.clients)
        if course.sampled and course.by_chance:
            raise PrivacyError(
                "Under masks every client must know how many others add noise, so a cohort must have a fixed size.",
                hint="give a number of clients as `cohort`, or ask all of them.",
            )
        if course.schedule != "constant":
            raise PrivacyError(
                "Noise in shares counts with as many clients as are asked. With a schedule of participation there may "
                f"be fewer. Got participation={course.schedule!r}."
            )
        self.require_covered(algorithm)

    def resolve(self, share: float, rounds: int) -> PrivacyInShares:
        """Return the same with its noise, found for so many messages of a client."""
        if self.noise is not None or self.epsilon is None:
            return self
        return replace(self, epsilon=None, noise=find_shares_noise(self.epsilon, rounds, self.delta))

    def spent(self, share: float, rounds: int) -> dict[str, float]:
        """Return epsilon of a client after so many messages, by Renyi divergences; others do not know this noise."""
        noise = self.resolve(share, rounds).noise
        assert noise is not None
        found = shares_epsilon(noise, rounds, self.delta)
        return {"pld": found, "rdp": found}

    def spent_together(self, releases: Sequence[Release]) -> float:
        """Return epsilon after several runs on the same data; see `Promise.spent_together`."""
        least = min(noise for noise, _, _ in releases)  # more noise costs less
        return shares_epsilon(least, sum(rounds for _, _, rounds in releases), self.delta)

    def encoding(self, asked: int, noise: float) -> Encode:
        """Return the fixed point of a cohort: sums and their noise must fit in 32 bits."""
        spread = noise * math.sqrt(asked / default_threshold(asked))
        steps = STEPS
        while asked * (steps + 0.5) + SIGMAS * spread * steps >= MODULUS / 2:
            steps //= 2
        if steps < LEAST_STEPS:
            raise PrivacyError(
                f"With {asked} clients and noise {noise:g}, 32 bits leave less than {LEAST_STEPS} steps."
            )
        return Encode(steps / self.clip, 1.0, 2.0 ** math.floor(math.log2(MODULUS / 2 / asked - 0.5)))

    def protect(
        self, share: float, clients: int, rounds: int, seed: int | bytes
    ) -> tuple[tuple[Stage, ...], SecureSum]:
        """Return what clients do to their messages, and how the server reads their sum."""
        noise, asked = self.resolve(share, rounds).noise, max(1, round(share * clients))
        assert noise is not None
        encoding = self.encoding(asked, noise)
        each = (noise * encoding.scale * self.clip) ** 2 / default_threshold(asked)
        cut = RoundedClip(self.clip, encoding.scale)
        return (cut, EqualWeights(), encoding, NoiseInShares(each)), SecureSum(encoding, torch.float32)

    def describe(self, share: float, clients: int, rounds: int, *, sites: bool = False) -> str:
        """Say in a sentence what is promised; with `sites`, about real clients."""
        spent, found, asked = self.spent(share, rounds), self.resolve(share, rounds), max(1, round(share * clients))
        return (
            f"Client-level differential privacy with noise in shares: epsilon {spent['pld']:.2f} (RDP) at delta "
            f"{self.delta:g} for leaving out the messages of one of {clients} clients, after {rounds} of them, the "
            f"most that one client sent; messages cut to norm {self.clip:g}; of {asked} clients that are asked, the "
            f"{default_threshold(asked)} without whom there is no sum add integer noise of {found.noise:g} times that "
            f"together, {self.say_drawn(sites=sites)}. The server reads sums that have the noise already, so it "
            "holds against a server that follows the protocol; who takes part is known, and clients who tell the "
            "server their noise take it away. Personal parts never leave their client and cost nothing. Scores and "
            "losses in this report are not covered."
        )
