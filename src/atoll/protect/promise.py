"""What promises of privacy have in common: their numbers, the fields they leave out, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import HyperparameterError, PrivacyError, unknown
from atoll.kernel.wrapper import title_of
from atoll.protect.stages import Place, Sent, Stage
from atoll.toolbox.client.private import UNCOVERED_KINDS


@dataclass(frozen=True)
class EqualWeights(Stage):
    """Every client counts the same, and nobody says how many samples it has."""

    hides_weight: ClassVar[bool] = True

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Leave the weight out; see `Stage.apply`."""
        return sent._replace(weight=None)


@dataclass(frozen=True)
class Course:
    """How a run goes, as far as a promise counts with it."""

    clients: int
    sampled: bool  # each client joins a round by chance, by itself; or all are asked
    by_chance: bool = False  # the former
    late: float = 0.0
    schedule: str = "constant"
    selects: bool = False  # clients are asked by what is known of them
    aggregate: str = "mean"
    compress: str = "none"
    secure: bool = False
    one_shot: bool = False
    mixed: bool = False  # clients have different architectures


Release = tuple[float, float, int]  # the noise of a run, the share of clients in a round, and its rounds or messages


@dataclass(frozen=True)
class Promise:
    """Base of promises: either `epsilon`, or the `noise` itself."""

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0  # C: the largest norm of a message
    noise: float | None = None  # z: standard deviation of the noise, over C
    public: str = ""  # fields that need no protection, joined by "/"

    kind: ClassVar[str]
    drawn_at_sites: ClassVar[str] = "drawn at each site from the operating system's generator"  # the noise

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise is None):
            raise HyperparameterError("Privacy must be given by either `epsilon` or `noise`, not by both or neither.")
        for name in ("epsilon", "noise", "clip"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise HyperparameterError(f"The value {name} of privacy must be a float in (0, inf). Got {value!r}.")
        if not 0 < self.delta < 1:
            raise HyperparameterError(f"The value delta of privacy must be a float in (0, 1). Got {self.delta!r}.")

    @property
    def public_fields(self) -> frozenset[str]:
        """The fields that the user says need no protection."""
        return frozenset(filter(None, self.public.split("/")))

    def spent_together(self, releases: Sequence[Release]) -> float:
        """Return epsilon of a client after all of these releases: of several methods, seeds and folds."""
        raise NotImplementedError(f"{type(self).__name__} must define spent_together().")

    def say_drawn(self, *, sites: bool) -> str:
        """Say what noise is drawn from: with `sites`, it protects real clients."""
        return self.drawn_at_sites if sites else "drawn from the run's seed (simulated)"

    def require_small_delta(self, clients: int) -> None:
        """Raise for a delta with which a promise may fail for a whole client."""
        if self.delta >= 1 / clients:
            raise PrivacyError(
                f"`delta` must be below 1 over the number of clients, {1 / clients:g}: a promise that may fail for one "
                f"whole client is none. Got {self.delta:g}."
            )

    def require_covered(self, algorithm: Algorithm, kinds: Iterable[str] = UNCOVERED_KINDS) -> None:
        """Raise for fields of kinds that no mechanism covers, unless they are named as public."""
        unsent = sorted(self.public_fields - algorithm.sends.keys())
        if unsent:
            raise unknown(f"field of {title_of(algorithm)}", unsent[0], algorithm.sends)
        if algorithm.sends and self.public_fields >= algorithm.sends.keys():
            raise PrivacyError(
                f"A promise must cover something. {', '.join(sorted(self.public_fields))} is all that "
                f"{title_of(algorithm)} sends, and is named as public.",
                hint="leave out `public`, or `dp`.",
            )
        open_fields = {name for name, kind in algorithm.sends.items() if kind in kinds} - self.public_fields
        if open_fields:
            raise PrivacyError(
                f"No mechanism covers what {title_of(algorithm)} sends as {', '.join(sorted(open_fields))}.",
                hint="take a method that sends numbers: `atoll show NAME` says what leaves a client."
                if open_fields | self.public_fields >= algorithm.sends.keys()
                else f"name it as public if it is: `public={'/'.join(sorted(open_fields))}`.",
            )

    def require_unpacked(self, course: Course) -> None:
        """Raise for compressions that pack numbers which cannot be cut to a norm."""
        if course.compress != "none" and not course.compress.startswith("randk"):
            raise PrivacyError(
                f"Under {self.kind} privacy a message is cut to a norm after it was packed, and `{course.compress}` "
                "packs numbers that cannot be cut.",
                hint="leave out `compress`.",
            )
