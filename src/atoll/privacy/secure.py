"""Secure sums in a federation: `--secure sums` adds up encoded integers, `--secure masks` runs the protocol of masks.

    e_k = round(S x_k w_k / w_max)  as integers mod 2^32,   with |x_k| <= R by clipping;   one more for w_k

Integers add up exactly in any order, so both words give the same bits. S is the largest power of two for which the sum
of all clients cannot overflow: K (S R + 1/2) < 2^31. Weights are added up under the same masks, so the server learns a
weighted mean, and nobody's weight. Whole numbers of a model (counters) are not sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Arrival
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, PrivacyError, unknown
from atoll.kernel.params import Params, Stack
from atoll.kernel.wrapper import title_of
from atoll.privacy.masks import LEAST_CLIENTS, message_bytes, sum_masked
from atoll.runtime.channel import Clip, Place, Sent, Stage
from atoll.runtime.channel.compression import form_of

log = logging.getLogger("atoll.privacy")

MODULUS = 2**32
WEIGHT = "weight"  # the field of encoded weights
LEAST_SCALE = 2**10


@dataclass(frozen=True)
class Encode(Stage):
    """Turn everything a client sends, and its weight, into integers of 32 bits."""

    scale: float  # S
    most: float  # w_max: the weight that counts as 1; larger ones are cut to it
    weight_scale: float

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Encode all fields; see `Stage.apply`."""
        made, forms = {}, dict(sent.forms)
        ones = torch.ones(len(place.clients), dtype=torch.float64)
        weight = ones if sent.weight is None else (sent.weight.double().cpu() / self.most).clamp(0, 1)
        for name, value in sent.fields.items():
            form = form_of(value)
            rows = form.to_rows(value).double().cpu()
            made[name] = Stack.of(masked=_to_words((rows * weight[:, None] * self.scale).round()))
            forms[name] = form
        made[WEIGHT] = Stack.of(masked=_to_words((weight * self.weight_scale).round()[:, None]))
        return Sent(made, None, forms)

    def restore(self, sent: Sent, place: Place) -> Sent:
        """Return the integers leaf by leaf, in float64, which adds them up exactly; see `Stage.restore`."""
        read = {WEIGHT: sent.fields[WEIGHT].map(_from_words)}
        for name, form in sent.forms.items():
            leaves = form._replace(dtype=torch.float64).to_leaves(_from_words(sent.fields[name]["masked"]))
            read[name] = Stack({leaf: leaves[leaf] for leaf in form.order if leaf in leaves}, form.layout)
        return Sent(read, None)


def _to_words(numbers: Tensor) -> Tensor:
    """Return whole numbers mod 2^32, as they travel."""
    return torch.remainder(numbers.to(torch.int64), MODULUS).to(torch.uint32)


def _from_words(words: Tensor) -> Tensor:
    """Return words as numbers from -2^31 to 2^31 - 1."""
    wide = words.to(torch.int64)
    return torch.where(wide >= MODULUS // 2, wide - MODULUS, wide).double()


@dataclass(frozen=True)
class SecureSum:
    """The rule by which the server reads the sum of encoded messages, and nothing else."""

    encoding: Encode
    masks: bool
    dtype: torch.dtype  # of what the server gets
    round: int = -1
    asked: tuple[int, ...] = ()

    @property
    def needs_replies(self) -> bool:
        """Whether the protocol of masks is run: it stands for what clients and server do together."""
        return self.masks

    def in_round(self, round: int, asked: NDArray[np.int64]) -> SecureSum:
        """Return the rule of a round, which has keys of its own."""
        return replace(self, round=round, asked=tuple(map(int, asked)))

    def overhead(self, clients: int) -> dict[str, int]:
        """Return the bytes of keys and shares that each client sends and receives."""
        return message_bytes(clients) if self.masks else {}

    def combine(self, arrivals: Sequence[Arrival], workbench: Workbench | None) -> dict[str, Params]:
        """Run the protocol; return the weighted means of the fields. See `Rule.combine`."""
        first = arrivals[0].fields
        leaves = [(name, leaf) for name, value in first.items() for leaf in value]
        inputs: dict[int, NDArray[np.uint32]] = {}
        for arrival in arrivals:
            rows = torch.cat([arrival.fields[name][leaf].flatten(1) for name, leaf in leaves], dim=1)
            words = _to_words(rows).cpu().numpy()
            inputs |= {int(client): words[place] for place, client in enumerate(arrival.clients)}
        gone = [client for client in self.asked if client not in inputs]
        total = _from_words(torch.from_numpy(sum_masked(inputs, self.round, gone=gone)))
        sizes = [first[name][leaf][0].numel() for name, leaf in leaves]
        parts = iter(torch.split(total, sizes))
        sums = {
            name: Params({leaf: next(parts).reshape(rows.shape[1:]) for leaf, rows in value.items()}, value.layout)
            for name, value in first.items()
        }
        found, weight = self.close(sums, torch.ones(()))
        return {name: value / weight for name, value in found.items()}

    def close(self, sums: Mapping[str, Params], total: Tensor) -> tuple[dict[str, Params], Tensor]:
        """Decode the sums; the total is the sum of weights, relative to the largest. See `Rule.close`."""
        weight = sums[WEIGHT]["masked"].sum() / self.encoding.weight_scale
        decoded = {
            name: value.map(lambda leaf: (leaf / self.encoding.scale).to(self.dtype))
            for name, value in sums.items()
            if name != WEIGHT
        }
        return decoded, weight.to(self.dtype)


@dataclass(frozen=True)
class Secure:
    """How sums are protected."""

    masks: bool
    clip: float = 10.0  # R: the largest norm of a message
    most: float = 10_000.0  # w_max: larger weights are cut to it

    def __post_init__(self) -> None:
        for name in ("clip", "most"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise HyperparameterError(f"`{name}` of secure sums must be a float in (0, inf). Got {value!r}.")

    def check(self, algorithm: Algorithm, cohort: int, *, late: float, rule: str, compress: str, dp: str) -> None:
        """Raise where sums cannot be protected, or where something needs more than sums."""
        title = title_of(algorithm)
        if not algorithm.sums_suffice or "choice" in algorithm.sends.values():
            raise PrivacyError(
                f"Secure sums hide single replies, and the server of {title} reads them.",
                hint="take a method whose server needs sums only: `atoll show NAME` says which.",
            )
        if algorithm.defines("prepare"):
            raise PrivacyError(f"{title} asks clients for more before their first round, which is not masked.")
        if rule != "mean":
            raise PrivacyError(f"Rules compare replies, which secure sums hide. Got aggregate={rule!r}.")
        if compress != "none":
            raise PrivacyError(f"Packed messages cannot be added up under masks. Got compress={compress!r}.")
        if dp != "none":
            raise PrivacyError("Noise on sums of masked integers is not offered. Got `dp` and `secure`.")
        if late:
            raise PrivacyError(f"A reply that is late has masks of another round. Got late={late:g}.")
        if cohort < LEAST_CLIENTS:
            raise PrivacyError(f"A secure sum must have at least {LEAST_CLIENTS} clients. Got {cohort} per round.")
        self.scale(cohort)

    def scale(self, cohort: int) -> float:
        """Return S: the largest power of two with which sums of so many clients cannot overflow."""
        found = 2.0 ** math.floor(math.log2(MODULUS / 2 / cohort - 0.5) - math.log2(self.clip))
        if found < LEAST_SCALE:
            raise PrivacyError(
                f"With {cohort} clients of norm {self.clip:g}, 32 bits leave less than {LEAST_SCALE} steps to 1.",
                hint="lower `clip` of secure sums, or ask fewer clients.",
            )
        return found

    def stages(self, cohort: int) -> tuple[Stage, ...]:
        """Return what clients do: cut their message, and encode it."""
        return (Clip(self.clip), self.encoding(cohort))

    def rule(self, cohort: int, dtype: torch.dtype) -> SecureSum:
        """Return what the server reads."""
        return SecureSum(self.encoding(cohort), self.masks, dtype)

    def encoding(self, cohort: int) -> Encode:
        """Return how messages of a cohort are encoded."""
        return Encode(self.scale(cohort), self.most, 2.0 ** math.floor(math.log2(MODULUS / 2 / cohort - 0.5)))


def parse_secure(words: str) -> Secure | None:
    """Parse secure sums from words: `sums`, `masks`, `masks:clip=5`; None for `none`."""
    if words == "none":
        return None
    kind, _, rest = words.partition(":")
    if kind not in ("sums", "masks"):
        raise unknown("kind of secure sums", kind, ["sums", "masks", "none"])
    known, values = {one.name for one in fields(Secure)} - {"masks"}, {}
    for pair in filter(None, rest.split(",")):
        name, given, value = pair.partition("=")
        if name not in known:
            raise unknown("value of secure sums", name, known)
        try:
            values[name] = float(value)
        except ValueError:
            raise HyperparameterError(f"`{name}` of secure sums must be a number. Got {value!r}.") from None
        if not given:
            raise HyperparameterError(f"Values of secure sums must be written name=value. Got {pair!r}.")
    return Secure(kind == "masks", **values)
