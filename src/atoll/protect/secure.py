"""Secure sums in a federation: `--secure sums` adds up encoded integers, `--secure masks` runs the protocol of masks.

`--secure ckks` encrypts instead: see `atoll.protect.encrypted`.

    e_k = round(S x_k w_k / w_max)  as integers mod 2^32,   with |x_k| <= R by clipping;   one more for w_k

Integers add up exactly in any order, so both words give the same bits. S is the largest power of two for which the sum
of all clients cannot overflow: K (S R + 1/2) < 2^31. Weights are added up under the same masks, so the server learns a
weighted mean, and nobody's weight. Whole numbers of a model (counters) are not sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Arrival
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, PrivacyError, unknown
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Rule
from atoll.kernel.wrapper import title_of
from atoll.protect.compression import parse_compression
from atoll.protect.encrypted import LARGEST_SUM, ClientsKey, Encrypt, EncryptedSums, require_library
from atoll.protect.ledger import Direction
from atoll.protect.masks import LEAST_CLIENTS, default_threshold, message_bytes, sum_masked
from atoll.protect.protection import Adder
from atoll.protect.stages import Clip, Place, Sent, Stage, form_of

log = logging.getLogger("atoll.protect")

MODULUS = 2**32
WEIGHT = "weight"  # the field of encoded weights
ENCODED = "encoded "  # before the names of fields whose forms are those before they were encoded
LEAST_SCALE = 2**10
KINDS = ("sums", "masks", "ckks")


@dataclass(frozen=True)
class Encode(Stage):
    """Turn everything a client sends, and its weight, into integers of 32 bits."""

    scale: float  # S
    most: float  # w_max: the weight that counts as 1; larger ones are cut to it
    weight_scale: float

    hides_weight: ClassVar[bool] = True

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Encode all fields; see `Stage.apply`."""
        made, forms = {}, dict(sent.forms)  # those of a compression stay
        ones = torch.ones(len(place.clients), dtype=torch.float64)
        weight = ones if sent.weight is None else (sent.weight.double().cpu() / self.most).clamp(0, 1)
        for name, value in sent.fields.items():
            form = form_of(value)
            if not form.shapes:
                made[name] = value.only(())
                continue
            rows = form.to_rows(value).double().cpu()
            made[name] = Stack.of(masked=_to_words((rows * weight[:, None] * self.scale).round()))
            forms[ENCODED + name] = form
        made[WEIGHT] = Stack.of(masked=_to_words((weight * self.weight_scale).round()[:, None]))
        return sent._replace(fields=made, weight=None, forms=forms)

    def restore(self, sent: Sent, place: Place) -> Sent:
        """Return the integers leaf by leaf, in float64, which adds them up exactly; see `Stage.restore`."""
        read = {WEIGHT: sent.fields[WEIGHT].map(_from_words)}
        for name in sent.fields.keys() - {WEIGHT}:
            if ENCODED + name not in sent.forms:
                read[name] = sent.fields[name]
                continue
            form = sent.forms[ENCODED + name]
            leaves = form._replace(dtype=torch.float64).to_leaves(_from_words(sent.fields[name]["masked"]))
            read[name] = Stack({leaf: leaves[leaf] for leaf in form.order if leaf in leaves}, form.layout)
        packed = {
            name: form._replace(dtype=torch.float64)
            for name, form in sent.forms.items()
            if not name.startswith(ENCODED)
        }
        return sent._replace(fields=read, weight=None, forms=packed)


def _to_words(numbers: Tensor) -> Tensor:
    """Return whole numbers mod 2^32, as they travel: the low bits of an integer of 64."""
    return numbers.to(torch.int64).to(torch.int32).view(torch.uint32)


def _from_words(words: Tensor) -> Tensor:
    """Return words as numbers from -2^31 to 2^31 - 1."""
    return words.view(torch.int32).double()


@dataclass(frozen=True)
class SecureSum(Rule):
    """The rule by which the server reads the sum of encoded messages, and nothing else."""

    encoding: Encode
    dtype: torch.dtype  # of what the server gets

    needs_replies: ClassVar[bool] = False

    def combine(self, arrivals: object, workbench: Workbench | None) -> dict[str, Params]:
        """Raise: this rule never sees single replies."""
        raise PrivacyError("Under secure sums the server never sees single replies.")

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
class Masks:
    """Adds up encoded messages under masks: the protocol between clients and server, here all in one process."""

    neighbours: int = 0  # with how many others a client has masks; 0: with all
    seed: int = 0  # from which the order of neighbours follows

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes of keys and shares that each client sends and receives."""
        return message_bytes(clients, self.neighbours)

    def opening(self, clients: int) -> dict[Direction, int]:
        """Return what it takes to read a sum beside that: nothing, shares are among it."""
        return {}

    def add_up(self, arrivals: Sequence[Arrival], *, round: int, asked: NDArray[np.int64]) -> Arrival:
        """Run the protocol; see `Adder.add_up`."""
        first = arrivals[0]
        leaves = [(name, leaf) for name, value in sorted(first.fields.items()) for leaf in value]
        inputs: dict[int, NDArray[np.uint32]] = {}
        for arrival in arrivals:
            rows = torch.cat(
                [arrival.fields[name][leaf].reshape(len(arrival.clients), -1) for name, leaf in leaves], dim=1
            )
            words = _to_words(rows).cpu().numpy()
            inputs |= {int(client): words[place] for place, client in enumerate(arrival.clients)}
        gone = [client for client in asked.tolist() if client not in inputs]
        summed = sum_masked(inputs, round, gone=gone, neighbours=self.neighbours, seed=self.seed)
        total = _from_words(torch.from_numpy(summed))
        parts = iter(torch.split(total, [first.fields[name][leaf][0].numel() for name, leaf in leaves]))
        sums = {
            name: Stack({leaf: next(parts).reshape(1, *rows.shape[1:]) for leaf, rows in value.items()}, value.layout)
            for name, value in sorted(first.fields.items())
        }
        clients = np.array(sorted(inputs), dtype=np.int64)
        return first._replace(
            clients=clients, fields=sums, weight=total.new_full((1,), len(clients)), unicast=None, summed=True
        )


@dataclass(frozen=True)
class Secure:
    """How sums are protected."""

    kind: str  # one of KINDS
    clip: float = 10.0  # R: the largest norm of a message
    most: float = 10_000.0  # w_max: larger weights are cut to it
    neighbours: int = 0  # of masks: with how many others a client has them; 0: with all

    def __post_init__(self) -> None:
        for name in ("clip", "most"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise HyperparameterError(
                    f"The value {name} of secure sums must be a float in (0, inf). Got {value!r}."
                )
        if self.neighbours and not self.masks:
            raise HyperparameterError(
                f"Only masks are shared with neighbours. Got neighbours={self.neighbours} of {self.kind}.",
                hint="leave out `neighbours`, or use secure='masks:neighbours=20'.",
            )
        if self.neighbours and (self.neighbours < LEAST_CLIENTS or self.neighbours % 2):
            raise HyperparameterError(
                "The value neighbours of masks must be even, as many before a client as after it, and at least "
                f"{LEAST_CLIENTS + 1}, or 0 for all others. Got {self.neighbours!r}.",
                hint="for example masks:neighbours=20.",
            )

    @property
    def masks(self) -> bool:
        """Whether clients agree on masks."""
        return self.kind == "masks"

    @property
    def encrypts(self) -> bool:
        """Whether clients encrypt what they send."""
        return self.kind == "ckks"

    def check(
        self, algorithm: Algorithm, cohort: int, *, late: float, rule: str, compress: str, dp: str,
        attack: str = "none", drop: float = 0.0, mixed: bool = False,
    ) -> None:  # fmt: skip
        """Raise where sums cannot be protected, or where something needs more than sums."""
        if self.encrypts:
            require_library()
        title = title_of(algorithm)
        if not algorithm.sums_suffice or "choice" in algorithm.sends.values():
            raise PrivacyError(
                f"Secure sums hide single replies, and the server of {title} reads them.",
                hint="take a method whose server needs sums only: `atoll show NAME` says which.",
            )
        if algorithm.reads_total:
            raise PrivacyError(
                "Secure sums tell how much replies weigh relative to the largest weight only, and the server of "
                f"{title} reads it.",
                hint="leave out `secure`, or use dp='client:epsilon=4', under which all replies weigh 1.",
            )
        if algorithm.defines("prepare"):
            raise PrivacyError(f"{title} asks clients for more before their first round, which is not protected.")
        if mixed and self.kind != "sums":
            raise PrivacyError(
                "Clients of different architectures are added up apart, and a secure sum has one form for all.",
                hint="use one architecture.",
            )
        if rule != "mean":
            raise PrivacyError(f"Rules compare replies, which secure sums hide. Got aggregate={rule!r}.")
        if self.encrypts and compress != "none":
            raise PrivacyError(
                f"Encrypted messages have room for every number, so packing saves nothing. Got compress={compress!r}.",
                hint="leave out `compress`, or use secure='masks' with randk.",
            )
        if self.encrypts and attack != "none":
            raise PrivacyError(
                f"Attackers replace messages that the server can read. Got attack={attack!r} with encrypted ones.",
                hint="secure='sums' has the same sums, and shows what an attack does to them.",
            )
        packing = parse_compression(compress)
        if packing is not None and not packing.linear:
            raise PrivacyError(
                f"Only messages that are packed at the same places can be added up. Got compress={compress!r}.",
                hint="take `compress=randk:0.1`, or leave it out.",
            )
        if dp != "none":
            raise PrivacyError(
                f"Noise in shares needs masks, which say how many clients a sum has at least. Got dp={dp!r} without.",
                hint="use secure='masks'.",
            )
        if late:
            of = "is not in the sum that was decrypted" if self.encrypts else "has masks of another round"
            raise PrivacyError(f"A reply that is late {of}. Got late={late:g}.")
        if cohort < LEAST_CLIENTS:
            raise PrivacyError(f"A secure sum must have at least {LEAST_CLIENTS} clients. Got {cohort} per round.")
        self._require_left(cohort, (1 - drop) * cohort, drop)
        if not self.encrypts:
            self.scale(cohort)
        elif cohort * self.clip > LARGEST_SUM:
            raise PrivacyError(
                f"A sum must stay below {LARGEST_SUM:g} to be decrypted. That of {cohort} clients of norm "
                f"{self.clip:g} may not.",
                hint="lower clip of secure sums, or ask fewer clients.",
            )

    def _require_left(self, asked: int, left: float, drop: float) -> None:
        """Raise if fewer clients are left of a round, on average, than its sum needs."""
        needed = default_threshold(asked) if self.masks else LEAST_CLIENTS
        if left < needed and self.kind != "sums":
            raise PrivacyError(
                f"At least {needed} of {asked} clients must stay to the end of a round for its sum to be read. With "
                f"drop={drop:g} about {left:.1f} do.",
                hint="lower `drop`, or ask more clients.",
            )
        near = self.neighbours + 1
        if self.neighbours and near < asked and (1 - drop) * near < default_threshold(near):
            raise PrivacyError(
                f"At least {default_threshold(near)} of the {near} clients of every neighbourhood must stay to the end "
                f"of a round for its sum to be read. With drop={drop:g} about {(1 - drop) * near:.1f} do.",
                hint="lower `drop`, or take more `neighbours`.",
            )

    def scale(self, cohort: int) -> float:
        """Return S: the largest power of two with which sums of so many clients cannot overflow."""
        found = 2.0 ** math.floor(math.log2(MODULUS / 2 / cohort - 0.5) - math.log2(self.clip))
        if found < LEAST_SCALE:
            raise PrivacyError(
                f"With {cohort} clients of norm {self.clip:g}, 32 bits leave less than {LEAST_SCALE} steps to 1.",
                hint="lower clip of secure sums, or ask fewer clients.",
            )
        return found

    def stages(self, cohort: int) -> tuple[Stage, ...]:
        """Return what clients do: cut their message, and encode or encrypt it."""
        sealing = Encrypt(self.most, self._key) if self.encrypts else self.encoding(cohort)
        return (Clip(self.clip), sealing)

    @cached_property
    def _key(self) -> ClientsKey:
        return ClientsKey()

    def rule(self, cohort: int, dtype: torch.dtype) -> SecureSum:
        """Return what the server reads."""
        return SecureSum(Encode(1.0, self.most, 1.0) if self.encrypts else self.encoding(cohort), dtype)

    def adder(self, seed: int = 0) -> Adder | None:
        """Return who adds up before the server reads; None where it is trusted to read sums only."""
        if self.encrypts:
            return EncryptedSums(self._key, seed, WEIGHT)
        return Masks(self.neighbours, seed) if self.masks else None

    def encoding(self, cohort: int) -> Encode:
        """Return how messages of a cohort are encoded."""
        return Encode(self.scale(cohort), self.most, 2.0 ** math.floor(math.log2(MODULUS / 2 / cohort - 0.5)))


def parse_secure(words: str) -> Secure | None:
    """Parse secure sums from words: `sums`, `masks`, `masks:neighbours=20,clip=5`, `ckks`; None for `none`."""
    if words == "none":
        return None
    kind, _, rest = words.partition(":")
    if kind not in KINDS:
        raise unknown("kind of secure sums", kind, [*KINDS, "none"])
    known = {one.name for one in fields(Secure)} - {"kind"}
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, given, value = pair.partition("=")
        if name not in known:
            raise unknown("value of secure sums", name, known)
        try:
            values[name] = int(value) if name == "neighbours" else float(value)
        except ValueError:
            number = "a whole number" if name == "neighbours" else "a number"
            raise HyperparameterError(f"The value {name} of secure sums must be {number}. Got {value!r}.") from None
        if not given:
            raise HyperparameterError(f"Values of secure sums must be written name=value. Got {pair!r}.")
    return Secure(kind, **values)
