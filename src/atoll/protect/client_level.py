"""Client-level differential privacy: `--dp client:epsilon=4,delta=1e-5`.

    x_k = everything client k sends, as one vector,  cut to norm C
    s   = sum of x_k over the cohort + N(0, z^2 C^2 I),     a mean is s / (q N)

Every client joins a round with probability q (`--cohort poisson:q`; all clients: q = 1), counts the same, and moves
the sum by at most C. So a mean divides by q N, which is public, and never by how many replied. What clients keep costs
nothing, because it never leaves them: what others see, all rounds together, is within (epsilon, delta) with respect to
a client, and its personal model is its own affair.

Not covered are scores and losses in reports, and hyperparameters or rounds that are chosen by them. Noise comes from
the run's seed: good to measure what privacy costs, no protection of real clients.

Reference: McMahan, Ramage, Talwar, Zhang. "Learning Differentially Private Recurrent Language Models." ICLR 2018.
https://arxiv.org/abs/1710.06963
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, PrivacyError
from atoll.kernel.params import Params, Tree
from atoll.kernel.replies import Rule
from atoll.kernel.wrapper import title_of
from atoll.protect.account import composed_epsilon, find_noise, total_epsilon
from atoll.protect.adaptive import COUNTED, AdaptiveClip, Quantile, count_noise, message_noise, share_uncut
from atoll.protect.draws import draws_of
from atoll.protect.ledger import Direction
from atoll.protect.promise import Course, EqualWeights, Promise, Release
from atoll.protect.stages import Clip, Stage
from atoll.toolbox.client.private import suggest_promise

log = logging.getLogger("atoll.protect")


@dataclass(frozen=True)
class NoisySum(Rule):
    """The rule by which the server sees sums with noise, and divides by a number that is public."""

    std: float | None  # None: `noise` times the quantile's norm, as it is in a round
    expected: float  # clients in a round: q N
    seed: int | bytes = field(repr=False)  # or a secret, where noise protects real clients
    noise: float = 0.0  # z on the messages, where their norm follows a quantile
    quantile: Quantile | None = None
    count_std: float = 0.0  # noise on the count of messages that stayed whole
    round: int = -1
    closed: list[int] = field(default_factory=list, compare=False)  # what this rule has released

    needs_replies: ClassVar[bool] = False
    always: ClassVar[bool] = True  # there is a release in every round: silence would tell that nobody was asked

    def in_round(self, round: int, asked: object = None) -> NoisySum:
        """Return the rule of a round, which has noise of its own."""
        return replace(self, round=round, closed=[])

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes by which clients are told the norm that they cut to, where it changes."""
        return {} if self.quantile is None else {"down": 8}

    def save(self) -> Tree:
        """Return the norm, where it changes."""
        return None if self.quantile is None else self.quantile.save()

    def load(self, state: Tree) -> None:
        """Go on with a norm that was saved."""
        if self.quantile is not None:
            self.quantile.load(state)

    def close(self, sums: Mapping[str, Params], total: Tensor) -> tuple[dict[str, Params], Tensor]:
        """Return the sums with noise; whole numbers are not told. See `Rule.close`."""
        if self.closed:
            raise PrivacyError(
                f"A round must release its sums once, which is what the account counts. In round {self.round} they "
                "were asked for twice."
            )
        self.closed.append(self.round)
        noisy = {
            name: Params(
                {leaf: self._add_noise(f"{name} {leaf}", value) for leaf, value in field.items()}, field.layout
            )
            for name, field in sums.items()
            if name != COUNTED
        }
        if self.quantile is not None:
            whole = float(sums[COUNTED]["whole"]) if COUNTED in sums else 0.0  # nobody was asked
            drawn = self.count_std * float(draws_of(self.seed, "privacy", self.round, COUNTED).standard_normal(()))
            self.quantile.follow(share_uncut(whole, drawn, self.expected))
            log.info("round %d: messages are cut to norm %.4g from now on", self.round, self.quantile.norm)
        return noisy, total.new_full((), self.expected)

    @property
    def size(self) -> float:
        """The standard deviation of the noise, as it is in this round."""
        size = self.std if self.quantile is None else self.noise * self.quantile.norm
        assert size is not None
        return size

    def _add_noise(self, where: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return torch.zeros_like(value)
        draw = draws_of(self.seed, "privacy", self.round, where).standard_normal(tuple(value.shape))
        return value + self.size * torch.as_tensor(draw).to(value)

    def combine(self, arrivals: object, workbench: Workbench | None) -> dict[str, Params]:
        """Raise: this rule never sees single replies."""
        raise PrivacyError("Under client-level privacy the server never sees single replies.")


@dataclass(frozen=True)
class ClientPrivacy(Promise):
    """A promise about clients; with a `quantile`, C follows that of the messages' norms, and begins with `clip`."""

    quantile: float | None = None  # g: the share of messages that is to stay whole

    kind: ClassVar[str] = "client-level"
    drawn_at_sites: ClassVar[str] = "drawn by the server, which is trusted with it, from a secret of its own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise HyperparameterError(
                f"`clip=adaptive:QUANTILE` must have a quantile in (0, 1). Got {self.quantile!r}."
            )

    def check(self, algorithm: Algorithm, course: Course) -> None:
        """Raise where a promise would be a lie."""
        title = title_of(algorithm)
        self.require_small_delta(course.clients)
        if not algorithm.sums_suffice:
            raise PrivacyError(
                f"Under client-level privacy the server sees sums only, and that of {title} reads single replies.",
                hint=f"take a method whose server needs sums only: `atoll show NAME` says which; or "
                f"{suggest_promise(algorithm)}",
            )
        if algorithm.defines("prepare"):
            raise PrivacyError(
                f"{title} asks clients for more before their first round, and no mechanism covers that exchange.",
                hint=f"take a method without such an exchange; or {suggest_promise(algorithm)}",
            )
        if not course.sampled:
            raise PrivacyError(
                "A cohort of fixed size is not what the account is made for: it would promise too much.",
                hint="let clients join by chance (`cohort='poisson:0.1'`), or ask all of them in every round.",
            )
        if course.late or course.schedule != "constant":
            raise PrivacyError(
                "Late replies and schedules of participation break the sampling that the account counts with. Got "
                f"late={course.late:g}, participation={course.schedule!r}."
            )
        if course.mixed:
            raise PrivacyError(
                "Clients of different architectures are added up apart, and the account counts one sum a round.",
                hint="use one architecture, or dp='local:...'.",
            )
        if course.aggregate != "mean":
            raise PrivacyError(
                "Under client-level privacy replies are added up, so `aggregate` must be mean. Got "
                f"{course.aggregate!r}."
            )
        if self.quantile is not None and course.one_shot:
            raise PrivacyError(
                f"A clip that adapts needs rounds to do so, and {title} uploads once.", hint="give a number: clip=1."
            )
        self.require_unpacked(course)
        self.require_covered(algorithm)

    def resolve(self, share: float, rounds: int) -> ClientPrivacy:
        """Return the same with its noise, found for so many rounds of a share of the clients."""
        if self.noise is not None or self.epsilon is None:
            return self
        return replace(self, epsilon=None, noise=find_noise(self.epsilon, share, rounds, self.delta))

    def spent(self, share: float, rounds: int) -> dict[str, float]:
        """Return epsilon after so many rounds: `pld` is promised, `rdp` checks it and is never below."""
        noise = self.resolve(share, rounds).noise
        assert noise is not None
        return {how: composed_epsilon(noise, share, rounds, self.delta, how) for how in ("pld", "rdp")}

    def spent_together(self, releases: Sequence[Release]) -> float:
        """Return epsilon after several runs on the same data; see `Promise.spent_together`."""
        return total_epsilon(releases, self.delta)

    def protect(self, share: float, clients: int, rounds: int, seed: int | bytes) -> tuple[tuple[Stage, ...], NoisySum]:
        """Return what clients do, cut their message and count the same, and what the server may see."""
        noise, expected = self.resolve(share, rounds).noise, share * clients
        assert noise is not None
        if self.quantile is None:
            return (Clip(self.clip), EqualWeights()), NoisySum(noise * self.clip, expected, seed)
        quantile, count = Quantile(self.clip, self.quantile), count_noise(noise, expected)
        rule = NoisySum(None, expected, seed, message_noise(noise, count), quantile, count)
        return (AdaptiveClip(quantile), EqualWeights()), rule

    def describe(self, share: float, clients: int, rounds: int, *, sites: bool = False) -> str:
        """Say in a sentence what is promised; with `sites`, about real clients."""
        spent, found = self.spent(share, rounds), self.resolve(share, rounds)
        cut = (
            f"messages cut to norm {self.clip:g}, noise {found.noise:g} times that on their sum,"
            if self.quantile is None
            else f"messages cut to a norm that begins at {self.clip:g} and follows the {self.quantile:g} quantile of "
            f"theirs, with noise on their sum and on the count of those left whole that together cost as much as "
            f"{found.noise:g} times the norm,"
        )
        return (
            f"Client-level differential privacy: epsilon {spent['pld']:.2f} (RDP {spent['rdp']:.2f}) at delta "
            f"{self.delta:g} for adding or removing one of {clients} clients, after {rounds} rounds that each joins "
            f"with probability {share:g}; {cut} {self.say_drawn(sites=sites)}. Personal parts never leave "
            "their client and cost nothing. Scores and losses in this report are not covered."
        )
