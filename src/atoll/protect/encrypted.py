"""Encrypted sums: `--secure ckks`. Clients encrypt under a key of theirs, the server adds up what it cannot read.

    c_k = Enc(x_k w_k / w_max, w_k / w_max),     c = c_1 + ... + c_K,     one client tells  Dec(c) + N(0, f^2 I)

All clients have one secret key, agreed on without the server, which has the parameters of the scheme and nothing else.
Any number of them may drop out. A message takes 64 bytes for each number, sixteen times what float32 does.

    |error of a sum| <= K B / S + rounding of float64,     B = 8 sqrt(2) s N + 6 s sqrt(N) + 16 s sqrt(h N)

B bounds the error of a fresh encryption (Cheon et al. 2017, Lemma 1; s = 3.2, h = 2 N / 3 for the ternary key): with
N = 8192 and S = 2^90 it is 6e5 / 2^90, far below float64. Whoever has ciphertexts and is told a decryption with this
error can solve for the key (Li and Micciancio 2021). So the client that decrypts adds noise with f = 2^-30, in which
the error drowns: each number of the sum is within 6e-9.

Clients that help the server give their key away, and with it everybody's messages; the same holds if it has one message
decrypted instead of a sum, which no client can tell. Masks protect from both.

References: Cheon, Kim, Kim, Song. "Homomorphic Encryption for Arithmetic of Approximate Numbers." ASIACRYPT 2017.
https://eprint.iacr.org/2016/421 - Li, Micciancio. "On the Security of Homomorphic Encryption on Approximate Numbers."
EUROCRYPT 2021. https://eprint.iacr.org/2020/1533
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernel.algorithm import Arrival
from atoll.kernel.errors import PrivacyError, SumLost
from atoll.kernel.params import Stack
from atoll.protect.draws import draws_of
from atoll.protect.ledger import Direction
from atoll.protect.masks import LEAST_CLIENTS
from atoll.protect.stages import Form, Place, Sent, Stage, form_of

DEGREE, MODULI, LOG_SCALE = 8192, (60, 60, 60), 90  # N; 180 bits, of which 128-bit security allows 218; S = 2^90
SLOTS = DEGREE // 2  # numbers in one ciphertext
FLOOD = 2.0**-30  # f
LARGEST_SUM = 2.0**28  # what fits beside S into the 120 bits of a ciphertext
SEALED = "encrypted"  # the field that holds all others, and the weight
Numbers = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def require_library() -> Any:
    """Return TenSEAL; raise if it is not installed."""
    try:
        import tenseal
    except ImportError as error:
        raise PrivacyError(
            "Encrypted sums need tenseal, which is not installed.", hint="pip install 'atoll[ckks]'"
        ) from error
    return tenseal


def error_bound(clients: int) -> float:
    """Return by how much encryption moves a number of a sum at most, before the noise of decryption."""
    sigma, weight = 3.2, 2 * DEGREE / 3
    fresh = 8 * math.sqrt(2) * sigma * DEGREE + 6 * sigma * math.sqrt(DEGREE) + 16 * sigma * math.sqrt(weight * DEGREE)
    return clients * fresh / 2.0**LOG_SCALE


class ClientsKey:
    """The key that all clients have, and the server does not; and what is publicly known of their messages."""

    def __init__(self) -> None:
        self.forms: dict[str, Form] = {}  # of the fields of a round's messages
        self._round: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"forms": self.forms, "_round": self._round}  # the key does not travel

    def agree(self, forms: dict[str, Form], round: int) -> None:
        """Take the form of a round's messages; raise if two of them differ."""
        if self._round == round and forms != self.forms:
            raise PrivacyError("Messages can be added up only if all of them have one form. Two differ.")
        self.forms, self._round = forms, round

    @cached_property
    def _context(self) -> Any:
        library = require_library()
        made = library.context(library.SCHEME_TYPE.CKKS, poly_modulus_degree=DEGREE, coeff_mod_bit_sizes=[*MODULI])
        made.global_scale = 2.0**LOG_SCALE
        return made

    @cached_property
    def parameters(self) -> bytes:
        """What the server gets: the parameters of the scheme, without any key."""
        without = dict.fromkeys(("secret_key", "public_key", "galois_keys", "relin_keys"), False)
        found: bytes = self._context.serialize(**{f"save_{name}": keep for name, keep in without.items()})
        return found

    def encrypt(self, numbers: Numbers) -> list[bytes]:
        """Return the ciphertexts of a client's numbers, as many in each as fit."""
        padded = np.zeros(-(-len(numbers) // SLOTS) * SLOTS)
        padded[: len(numbers)] = numbers
        library = require_library()
        return [library.ckks_vector(self._context, part.tolist()).serialize() for part in padded.reshape(-1, SLOTS)]

    def decrypt(self, ciphertexts: Iterable[bytes], count: int) -> Numbers:
        """Return the numbers in some ciphertexts, with the error of their encryption: not to be told."""
        library = require_library()
        parts = [library.ckks_vector_from(self._context, one).decrypt() for one in ciphertexts]
        return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])[:count]


def add_ciphertexts(parameters: bytes, messages: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Add up the ciphertexts of some clients, as the server does: it has no key."""
    library = require_library()
    context = library.context_from(parameters)
    sums = []
    for column in zip(*messages, strict=True):
        total = library.ckks_vector_from(context, column[0])
        for one in column[1:]:
            total += library.ckks_vector_from(context, one)
        sums.append(total.serialize())
    return sums


@dataclass(frozen=True)
class Encrypt(Stage):
    """Encrypt everything a client sends, times its weight, and the weight, as one message."""

    most: float  # w_max: the weight that counts as 1; larger ones are cut to it
    key: ClientsKey = field(repr=False, compare=False)

    hides_weight: ClassVar[bool] = True

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Encrypt, client by client; see `Stage.apply`. The server cannot undo it."""
        forms = {name: form_of(value) for name, value in sorted(sent.fields.items())}
        self.key.agree(forms, place.round)
        ones = torch.ones(len(place.clients), dtype=torch.float64)
        weight = ones if sent.weight is None else (sent.weight.double().cpu() / self.most).clamp(0, 1)
        rows = [form.to_rows(sent.fields[name]).double().cpu() * weight[:, None] for name, form in forms.items()]
        joint: Numbers = torch.cat([*rows, weight[:, None]], dim=1).numpy()
        sealed = np.stack([np.frombuffer(b"".join(self.key.encrypt(row)), dtype=np.uint8) for row in joint])
        return sent._replace(fields={SEALED: Stack.of(ciphertext=torch.from_numpy(sealed))}, weight=None)


@dataclass(frozen=True)
class EncryptedSums:
    """Adds up ciphertexts without a key, and has one client decrypt the sum."""

    key: ClientsKey = field(repr=False)
    seed: int
    weight: str  # the field in which sums of weights are read

    neighbours: ClassVar[int] = 0

    def overhead(self, clients: int) -> dict[Direction, int]:
        """Return the bytes beside messages that each client sends and receives: none, before the sum is there."""
        return {}

    def add_up(self, arrivals: Sequence[Arrival], *, round: int, asked: NDArray[np.int64]) -> Arrival:
        """Add up and have it decrypted; see `Adder.add_up`."""
        clients = np.sort(np.concatenate([arrival.clients for arrival in arrivals]))
        if len(clients) < LEAST_CLIENTS:
            raise SumLost(
                f"At least {LEAST_CLIENTS} clients must stay to the end of a round for its sum to be read. "
                f"{len(clients)} did.",
                hint="ask more clients, or lose fewer.",
            )
        count = sum(form.size for form in self.key.forms.values()) + 1
        parts = -(-count // SLOTS)
        rows = [row for arrival in arrivals for row in arrival.fields[SEALED]["ciphertext"].cpu().numpy()]
        sealed = add_ciphertexts(self.key.parameters, [_cut(row, parts) for row in rows])
        total = self.key.decrypt(sealed, count)
        total += FLOOD * draws_of(self.seed, "decryption", round).standard_normal((count,))
        return arrivals[0]._replace(
            clients=clients, fields=self._read(torch.from_numpy(total)[None]), unicast=None, summed=True,
            weight=torch.full((1,), float(len(clients)), dtype=torch.float64),
        )  # fmt: skip

    def opening(self, clients: int) -> dict[Direction, int]:
        """Return what the client that decrypts a sum receives, its ciphertexts, and what it tells, its numbers."""
        count = sum(form.size for form in self.key.forms.values()) + 1
        return {"down": -(-count // SLOTS) * ciphertext_bytes(self.key), "up": 8 * count}

    def _read(self, rows: torch.Tensor) -> Mapping[str, Stack]:
        sizes = [form.size for form in self.key.forms.values()]
        *parts, weight = torch.split(rows, [*sizes, 1], dim=1)
        read = {self.weight: Stack.of(masked=weight)}
        for (name, form), part in zip(self.key.forms.items(), parts, strict=True):
            leaves = form._replace(dtype=torch.float64).to_leaves(part)
            read[name] = Stack({leaf: leaves[leaf] for leaf in form.order if leaf in leaves}, form.layout)
        return read


def ciphertext_bytes(key: ClientsKey) -> int:
    """Return the bytes of one ciphertext; all have as many."""
    return len(key.encrypt(np.zeros(1))[0])


def _cut(row: Bytes, parts: int) -> list[bytes]:
    return [part.tobytes() for part in np.split(row, parts)]
