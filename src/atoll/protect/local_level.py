"""Local differential privacy: `--dp local:epsilon=8`. Each message has noise before it leaves its client.

    x_k = everything client k sends at a time, as one vector, cut to norm C, plus N(0, z^2 C^2 I)

Nobody has to be trusted, not even the server, so it goes with every method, also those whose servers read single
replies or ask for more before the first round. Whatever a client has could be anything else: two messages lie up to
2 C apart, so u messages of a client are one Gaussian with mu = 2 sqrt(u) / z, whoever else is asked. The noise of all
clients adds up: of N messages it is sqrt(N) times as large as the noise that a server would add to their sum, for
half of mu. Most methods learn nothing at the epsilons that people expect.

Reference: Duchi, Jordan, Wainwright, FOCS 2013 (local privacy); Dong, Roth, Su, JRSS-B 2022 (mu).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import HyperparameterError, PrivacyError
from atoll.kernel.params import Stack
from atoll.protect.account import LARGEST_NOISE, find_mu, gaussian_epsilon
from atoll.protect.draws import draws_of
from atoll.protect.promise import Course, EqualWeights, Promise, Release
from atoll.protect.stages import Clip, Place, Sent, Stage


@dataclass(frozen=True)
class LocalNoise(Stage):
    """Cut what a client sends to norm C and add noise to every number of it; whole numbers are not told."""

    norm: float
    noise: float  # over the norm
    public: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "public", frozenset(self.public))  # as a job has it, it is a list

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Cut and add noise, client by client; see `Stage.apply`."""
        private = {name: value for name, value in sent.fields.items() if name not in self.public}
        if private and not any(len(value.floating) for value in private.values()):
            raise PrivacyError(
                f"Local privacy adds noise to numbers and tells no whole ones. {', '.join(sorted(private))} "
                "are nothing else, so the server would learn nothing.",
                hint="take a method that sends numbers: `atoll show NAME` says what leaves a client.",
            )
        cut = Clip(self.norm).apply(Sent(private, None), place).fields
        noisy = {name: self._disturb(name, value, place) for name, value in cut.items()}
        return sent._replace(fields={**sent.fields, **noisy})

    def _disturb(self, name: str, value: Stack, place: Place) -> Stack:
        return Stack(
            {leaf: self._add_noise(f"{name} {leaf}", rows, place) for leaf, rows in value.items()}, value.layout
        )

    def _add_noise(self, where: str, rows: Tensor, place: Place) -> Tensor:
        if not rows.is_floating_point():
            return torch.zeros_like(rows)
        drawn = np.stack([
            draws_of(place.source, "local privacy", place.round, client, where).standard_normal(tuple(rows.shape[1:]))
            for client in place.clients.tolist()
        ])  # fmt: skip
        return rows + self.norm * self.noise * torch.from_numpy(drawn).to(rows)


@dataclass(frozen=True)
class LocalPrivacy(Promise):
    """A promise about every message of a client, to everybody."""

    kind: ClassVar[str] = "local"

    def check(self, algorithm: Algorithm, course: Course) -> None:
        """Raise where a promise would be a lie."""
        self.require_small_delta(course.clients)
        if course.secure:
            raise PrivacyError(
                "Under local privacy messages have noise before they leave: nothing is left to hide from the server.",
                hint="leave out `secure`.",
            )
        self.require_unpacked(course)
        self.require_covered(algorithm)

    def resolve(self, share: float, rounds: int) -> LocalPrivacy:
        """Return the same with its noise, found for so many messages of a client."""
        if self.noise is not None or self.epsilon is None:
            return self
        noise = 2 * math.sqrt(rounds) / find_mu(self.epsilon, self.delta)
        if noise > LARGEST_NOISE:
            reached = gaussian_epsilon(2 * math.sqrt(rounds) / LARGEST_NOISE, self.delta)
            raise HyperparameterError(
                f"No noise up to {LARGEST_NOISE:g} keeps {rounds} messages within epsilon={self.epsilon:g}. With that "
                f"much they reach epsilon={reached:.3g} at delta={self.delta:g}.",
                hint="raise `epsilon`, or lower `rounds`.",
            )
        return replace(self, epsilon=None, noise=math.ceil(noise * 1000) / 1000)  # up: the promise must hold

    def spent(self, share: float, rounds: int) -> dict[str, float]:
        """Return epsilon of a client after so many messages; exact, so there is nothing to check it by."""
        noise = self.resolve(share, rounds).noise
        assert noise is not None
        exact = gaussian_epsilon(2 * math.sqrt(rounds) / noise, self.delta)
        return {"pld": exact, "rdp": exact}

    def spent_together(self, releases: Sequence[Release]) -> float:
        """Return epsilon after several runs on the same data; see `Promise.spent_together`."""
        return gaussian_epsilon(2 * math.sqrt(sum(rounds / noise**2 for noise, _, rounds in releases)), self.delta)

    def protect(self, share: float, clients: int, rounds: int, seed: int | bytes) -> tuple[tuple[Stage, ...], None]:
        """Return what clients do; the server does nothing."""
        noise = self.resolve(share, rounds).noise
        assert noise is not None
        return (LocalNoise(self.clip, noise, self.public_fields), EqualWeights()), None

    def describe(self, share: float, clients: int, rounds: int, *, sites: bool = False) -> str:
        """Say in a sentence what is promised; with `sites`, about real clients."""
        spent, found = self.spent(share, rounds), self.resolve(share, rounds)
        public = ", ".join(sorted(self.public_fields))
        but = f" of all fields but {public}" if public else ""
        still = f" Nothing is promised about {public}, named as public: it leaves as it is." if public else ""
        return (
            f"Local differential privacy{but}: epsilon {spent['pld']:.2f} at delta {self.delta:g} for replacing all "
            f"that a client has, after {rounds} messages, the most that one client sent; messages cut to norm "
            f"{self.clip:g}, noise {found.noise:g} times that on each before it leaves, {self.say_drawn(sites=sites)}. "
            "It holds against everybody, the server included. Personal parts never leave their client and cost nothing."
            f"{still} Scores and losses in this report are not covered."
        )
