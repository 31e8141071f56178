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

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, PrivacyError, unknown
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import title_of
from atoll.privacy.account import composed_epsilon, find_noise
from atoll.runtime.channel import Clip, Place, Sent, Stage


@dataclass(frozen=True)
class EqualWeights(Stage):
    """Every client counts the same, and nobody says how many samples it has."""

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Leave the weight out; see `Stage.apply`."""
        return sent._replace(weight=None)


@dataclass(frozen=True)
class NoisySum:
    """The rule by which the server sees sums with noise, and divides by a number that is public."""

    std: float
    expected: float  # clients in a round: q N
    seed: int
    round: int = -1

    needs_replies: ClassVar[bool] = False
    always: ClassVar[bool] = True  # there is a release in every round: silence would tell that nobody was asked

    def in_round(self, round: int, asked: object = None) -> NoisySum:
        """Return the rule of a round, which has noise of its own."""
        return replace(self, round=round)

    def close(self, sums: Mapping[str, Params], total: Tensor) -> tuple[dict[str, Params], Tensor]:
        """Return the sums with noise; whole numbers are not told. See `Rule.close`."""
        noisy = {
            name: Params(
                {leaf: self._add_noise(f"{name} {leaf}", value) for leaf, value in field.items()}, field.layout
            )
            for name, field in sums.items()
        }
        return noisy, total.new_full((), self.expected)

    def _add_noise(self, where: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return torch.zeros_like(value)
        draw = generator(self.seed, "privacy", self.round, where).standard_normal(tuple(value.shape))
        return value + self.std * torch.as_tensor(draw).to(value)

    def combine(self, arrivals: object, workbench: Workbench | None) -> dict[str, Params]:
        """Raise: this rule never sees single replies."""
        raise PrivacyError("Under client-level privacy the server never sees single replies.")


@dataclass(frozen=True)
class ClientPrivacy:
    """What is promised, and how: either `epsilon`, or the `noise` itself."""

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0  # C: the largest norm of a message
    noise: float | None = None  # z: standard deviation of the noise on the sum, over C
    public: str = ""  # fields that need no protection, joined by "/"

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise is None):
            raise HyperparameterError("Privacy must be given by either `epsilon` or `noise`, not by both or neither.")
        for name in ("epsilon", "noise", "clip"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise HyperparameterError(f"`{name}` of privacy must be a float in (0, inf). Got {value!r}.")
        if not 0 < self.delta < 1:
            raise HyperparameterError(f"`delta` of privacy must be a float in (0, 1). Got {self.delta!r}.")

    def check(self, algorithm: Algorithm, clients: int, *, sampled: bool, late: float, schedule: str) -> None:
        """Raise where a promise would be a lie."""
        title = title_of(algorithm)
        if self.delta >= 1 / clients:
            raise PrivacyError(
                f"`delta` must be below 1 over the number of clients, {1 / clients:g}: a promise that may fail for one "
                f"whole client is none. Got {self.delta:g}."
            )
        if not algorithm.sums_suffice:
            raise PrivacyError(
                f"Under client-level privacy the server sees sums only, and that of {title} reads single replies.",
                hint="take a method whose server needs sums only: `atoll show NAME` says which.",
            )
        if algorithm.defines("prepare"):
            raise PrivacyError(
                f"{title} asks clients for more before their first round, and no mechanism covers that exchange.",
                hint="take a method without such an exchange.",
            )
        if not sampled:
            raise PrivacyError(
                "A cohort of fixed size is not what the account is made for: it would promise too much.",
                hint="let clients join by chance (`cohort='poisson:0.1'`), or ask all of them in every round.",
            )
        if late or schedule != "constant":
            raise PrivacyError(
                "Late replies and schedules of participation break the sampling that the account counts with. Got "
                f"late={late:g}, participation={schedule!r}."
            )
        public = set(filter(None, self.public.split("/")))
        open_fields = {name for name, kind in algorithm.sends.items() if kind in ("labels", "choice")} - public
        if open_fields:
            raise PrivacyError(
                f"No mechanism covers what {title} sends as {', '.join(sorted(open_fields))}.",
                hint=f"name it as public if it is: `public={'/'.join(sorted(open_fields))}`.",
            )

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

    def stages(self) -> tuple[Stage, ...]:
        """Return what clients do: cut their message, and count the same."""
        return (Clip(self.clip), EqualWeights())

    def rule(self, share: float, clients: int, rounds: int, seed: int) -> NoisySum:
        """Return what the server may see."""
        noise = self.resolve(share, rounds).noise
        assert noise is not None
        return NoisySum(noise * self.clip, share * clients, seed)

    def describe(self, share: float, clients: int, rounds: int) -> str:
        """Say in a sentence what is promised."""
        spent, found = self.spent(share, rounds), self.resolve(share, rounds)
        return (
            f"Client-level differential privacy: epsilon {spent['pld']:.2f} (RDP {spent['rdp']:.2f}) at delta "
            f"{self.delta:g} for adding or removing one of {clients} clients, after {rounds} rounds that each joins "
            f"with probability {share:g}; messages cut to norm {self.clip:g}, noise {found.noise:g} times that on "
            "their sum, drawn from the run's seed (simulated). Personal parts never leave their client and cost "
            "nothing. Scores and losses in this report are not covered."
        )


def parse_privacy(words: str) -> ClientPrivacy | None:
    """Parse privacy from words: `client:epsilon=4,delta=1e-5`, `client:noise=1,clip=0.1`; None for `none`."""
    if words == "none":
        return None
    kind, _, rest = words.partition(":")
    if kind != "client":
        raise unknown("kind of privacy", kind, ["client", "none"])
    known, values = {one.name for one in fields(ClientPrivacy)}, {}
    for pair in filter(None, rest.split(",")):
        name, given, value = pair.partition("=")
        name = "epsilon" if name == "eps" else name
        if name not in known:
            raise unknown("value of privacy", name, known)
        try:
            values[name] = value if name == "public" else float(value)
        except ValueError:
            raise HyperparameterError(f"`{name}` of privacy must be a number. Got {value!r}.") from None
        if not given:
            raise HyperparameterError(f"Values of privacy must be written name=value. Got {pair!r}.")
    return ClientPrivacy(**values)  # type: ignore[arg-type]
