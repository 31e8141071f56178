"""Secure aggregation: the server learns the sum of what clients send, and nothing about one of them.

    1. keys      every client makes two key pairs, one to encrypt, one to mask; the server passes the public ones on
    2. shares    a client draws a seed b, and cuts b and its masking key into shares, one for each other, encrypted
    3. input     y_u = e_u + G(b_u) + sum_{v > u} G(s_uv) - sum_{v < u} G(s_uv)   mod 2^32,   s_uv known to u and v only
    4. unmask    of who sent y, the seed b is put together from shares; of who dropped out, the masking key

Masks of pairs cancel in the sum; those of drop-outs, and the seeds, are removed with t of n shares. A client never
gives both shares of the same other one, so no single e_u can be uncovered. It protects against a server that is curious
and follows the protocol, and against fewer than t clients that help it.

With `neighbours` k the clients of a round stand in a ring, in an order that is public and drawn anew each round. A
client has keys, shares and masks with the k/2 before it and the k/2 after it, and t is of these k + 1, itself included:
work and messages grow with k instead of n. It promises less than masks with all others:

- A client's input is uncovered by a server that t of its own k neighbours help, who hold shares of both its secrets,
  or t - 1 if all its other neighbours are gone: then the server knows the masks of all its pairs.
- Inputs of some clients add up apart, to a sum that the server can read, where helpers of the server and drop-outs cut
  the ring around them: k/2 next to each other on either side. Fewer than k of both together cannot. A neighbourhood
  that loses more than k + 1 - t has no sum, so drop-outs alone cannot either, and it takes at least 2t - k - 2 helpers.
- Any k + 1 - t drop-outs are survived; more of them if no neighbourhood loses so many. As before, t(n) of all n that
  were asked must be in a sum: the server and each client see to it.

With k = 20 of n = 100 clients, t is 15: 15 neighbours uncover a client, fewer than 8 helpers anywhere learn nothing but
the sum of all others, and any 6 may drop out. With all others it takes 67 helpers, and any 33 may drop out. Who knows
the order beforehand, as everybody does who knows the seed, can choose whom to win as a helper.

References: Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. "Practical Secure Aggregation for
Privacy-Preserving Machine Learning." CCS 2017. https://eprint.iacr.org/2017/281
Bell, Bonawitz, Gascón, Lepoint, Raykova. "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead." CCS 2020.
https://eprint.iacr.org/2020/704
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.errors import PrivacyError, SumLost
from atoll.kernel.randomness import generator
from atoll.protect.ledger import Direction
from atoll.runtime.cores import count_cores

PRIME = 2**256 + 297  # shares live in this field
LEAST_CLIENTS = 3
KEY_BYTES, SHARE_BYTES = 32, 33
BLOCK = 2**18  # bytes of a mask that are drawn at a time
Words = NDArray[np.uint32]
Around = Mapping[int, frozenset[int]]  # by client: with whom it has masks, itself included

_ZEROS = memoryview(bytes(BLOCK))


@cache
def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise PrivacyError(
            "Secure aggregation needs cryptography, which is not installed.", hint="pip install 'atoll[privacy]'"
        ) from error
    return hashes, serialization, x25519, Cipher, algorithms, ChaCha20Poly1305, HKDF


def split_secret(
    secret: int, holders: Iterable[int], threshold: int, prime: int = PRIME, draw: Callable[[int], int] | None = None
) -> dict[int, int]:
    """Cut a secret into shares, any `threshold` of which give it back, and fewer tell nothing (Shamir).

    `draw(prime)` draws a number below the prime, by default from the operating system's generator.
    """
    factors = [secret, *((draw or secrets.randbelow)(prime) for _ in range(threshold - 1))]
    return {who: _evaluate(factors, who + 1, prime) for who in holders}


def _evaluate(factors: list[int], at: int, prime: int) -> int:
    value = 0
    for factor in reversed(factors):
        value = (value * at + factor) % prime
    return value


def join_shares(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Put a secret together from shares."""
    factors = weigh_shares(frozenset(shares), prime)
    return sum(share * factors[who] for who, share in shares.items()) % prime


@lru_cache(maxsize=16)
def weigh_shares(holders: frozenset[int], prime: int = PRIME) -> dict[int, int]:
    """Return by what the share of each holder is multiplied before shares are added up (Lagrange, at 0)."""
    found = {}
    for one in holders:
        above, below = 1, 1
        for other in holders:
            if other != one:
                above = above * (other + 1) % prime
                below = below * (other - one) % prime
        found[one] = above * pow(below, -1, prime) % prime
    return found


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Derive a key of 32 bytes for a purpose from a secret that two clients share."""
    hashes, *_, hkdf = _library()
    key: bytes = hkdf(algorithm=hashes.SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret)
    return key


def mask_words(key: bytes, count: int) -> Words:
    """Return as many 32-bit words of the ChaCha20 stream of a key."""
    words = np.zeros(count, dtype="<u4")
    add_mask(words, key)
    return words


def add_mask(words: Words, key: bytes, *, subtract: bool = False) -> None:
    """Add the stream of a key to words, in place, or subtract it; block by block, so it stays in the cache."""
    _, _, _, cipher, algorithms, _, _ = _library()
    stream = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    combine = np.subtract if subtract else np.add
    block = memoryview(bytearray(min(BLOCK, words.nbytes)))
    for start in range(0, len(words), BLOCK // 4):
        part = words[start : start + BLOCK // 4]
        stream.update_into(_ZEROS[: part.nbytes], block)
        combine(part, np.frombuffer(block[: part.nbytes], dtype="<u4"), out=part)


@dataclass
class MaskingClient:
    """One client in the four steps of a round; it refuses what would uncover somebody.

    The others that it knows, and of whom it holds shares, are those whose keys it is given: its neighbours. All that it
    draws follows from its `secret`, which is of this round alone: so it can be put away between steps.
    """

    number: int
    round: int  # of the masks: no other use of masks between these clients has this number
    threshold: int  # of its neighbours and itself
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    least: int = 0  # of all clients that were asked, how many must be in the sum
    _keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _shares: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # of others: their seed, their key
    _channels: dict[int, bytes] = field(default_factory=dict, repr=False)
    _answered: tuple[frozenset[int], frozenset[int]] | None = None

    @cached_property
    def _encrypting(self) -> Any:
        return self._make_key("to encrypt")

    @cached_property
    def _masking(self) -> Any:
        return self._make_key("to mask")

    @cached_property
    def _seed(self) -> bytes:
        return self._derive("seed")

    def _make_key(self, purpose: str) -> Any:
        _, _, x25519, *_ = _library()
        return x25519.X25519PrivateKey.from_private_bytes(self._derive(purpose))

    def _derive(self, purpose: str) -> bytes:
        return derive_key(self.secret, f"{purpose} {self.round} {self.number}")

    def _drawing(self, purpose: str) -> Callable[[int], int]:
        """Return a function that draws numbers below a prime; twice the bits that it has make them even."""
        stream = mask_words(self._derive(purpose), 16 * self.threshold).tobytes()
        drawn = (stream[start : start + 64] for start in itertools.count(0, 64))
        return lambda prime: int.from_bytes(next(drawn), "big") % prime

    def publish_keys(self) -> tuple[bytes, bytes]:
        """Return the public keys: to encrypt, to mask."""
        return tuple(one.public_key().public_bytes_raw() for one in (self._encrypting, self._masking))

    def send_shares(self, keys: Mapping[int, tuple[bytes, bytes]]) -> dict[int, bytes]:
        """Return the shares for all others whose keys these are, each encrypted to its holder."""
        if len({key for both in keys.values() for key in both}) != 2 * len(keys):
            raise PrivacyError("Every client must have keys of its own. Two have the same one.")
        self._require_threshold(len(keys), "take part")
        if keys.get(self.number) != self.publish_keys():
            raise PrivacyError(f"The keys of a round must have those of client {self.number}, as it sent them.")
        self._keys, self._channels = dict(keys), {}
        parts = (int.from_bytes(self._seed, "big"), int.from_bytes(self._masking.private_bytes_raw(), "big"))
        seeds, masks = (
            split_secret(part, keys, self.threshold, draw=self._drawing(f"share of part {place}"))
            for place, part in enumerate(parts)
        )
        self._shares[self.number] = (seeds[self.number], masks[self.number])
        return {other: self._seal(other, seeds[other], masks[other]) for other in keys if other != self.number}

    def _channel(self, other: int) -> bytes:
        """Return the key of all that two clients send each other, with which shares are sealed and opened."""
        if other not in self._channels:
            _, _, x25519, *_ = _library()
            public = x25519.X25519PublicKey.from_public_bytes(self._keys[other][0])
            pair = sorted((self.number, other))
            self._channels[other] = derive_key(self._encrypting.exchange(public), f"shares {self.round} {pair}")
        return self._channels[other]

    def _seal(self, other: int, seed: int, mask: int) -> bytes:
        *_, chacha, _ = _library()
        text = seed.to_bytes(SHARE_BYTES, "big") + mask.to_bytes(SHARE_BYTES, "big")
        nonce = secrets.token_bytes(12)
        sealed: bytes = chacha(self._channel(other)).encrypt(nonce, text, f"{self.number} to {other}".encode())
        return nonce + sealed

    def take_shares(self, sealed: Mapping[int, bytes]) -> None:
        """Keep the shares of others; raise for one that is not meant for this client, or was changed."""
        *_, chacha, _ = _library()
        for other, message in sealed.items():
            try:
                text = chacha(self._channel(other)).decrypt(
                    message[:12], message[12:], f"{other} to {self.number}".encode()
                )
            except Exception as error:
                raise PrivacyError(f"The share of client {other} is not for client {self.number}.") from error
            seed, mask = (int.from_bytes(part, "big") for part in (text[:SHARE_BYTES], text[SHARE_BYTES:]))
            self._shares[other] = (seed, mask)

    def mask(self, words: Words) -> Words:
        """Return the words with the own mask and those of all pairs."""
        _, _, x25519, *_ = _library()
        self._require_threshold(len(self._shares), "have given their shares")
        masked = words.copy()
        add_mask(masked, derive_key(self._seed, f"own {self.round}"))
        for other in self._shares.keys() - {self.number}:
            public = x25519.X25519PublicKey.from_public_bytes(self._keys[other][1])
            key = pair_key(self._masking.exchange(public), self.number, other, self.round)
            add_mask(masked, key, subtract=self.number > other)
        return masked

    def help_unmask(self, there: Iterable[int], gone: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return shares of the seeds of those who sent their input, and of the masking keys of those who did not."""
        both = frozenset(there), frozenset(gone)
        if both[0] & both[1]:
            raise PrivacyError("A client is either there or gone: both shares would uncover what it sent.")
        if self._answered not in (None, both):
            raise PrivacyError("Who is there was asked once; another answer would uncover what somebody sent.")
        self._require_threshold(len(both[0] & self._shares.keys()), "be in the sum")  # of few, masks would hide little
        if len(both[0]) < self.least:
            raise PrivacyError(f"At least {self.least} of all clients must be in the sum. {len(both[0])} are.")
        self._answered = both
        seeds = {who: self._shares[who][0] for who in both[0] if who in self._shares}
        return seeds, {who: self._shares[who][1] for who in both[1] if who in self._shares}

    def _require_threshold(self, clients: int, what: str) -> None:
        least = max(self.threshold, LEAST_CLIENTS)
        if clients < least:
            raise PrivacyError(f"At least {least} clients must {what}. {clients} do.")


def pair_key(secret: bytes, one: int, other: int, round: int) -> bytes:
    """Return the key of the mask that a pair of clients shares in a round."""
    low, high = sorted((one, other))
    return derive_key(secret, f"pair {round} {low} {high}")


def default_threshold(clients: int) -> int:
    """Return how many clients must stay to the end: more than two thirds."""
    return 2 * clients // 3 + 1


def threshold_among(neighbours: int, least: int) -> int:
    """Return how many of a client's neighbourhood must stay to the end, if `least` of all clients must."""
    return min(least, default_threshold(neighbours + 1)) if neighbours else least


def neighbours_of(clients: Iterable[int], neighbours: int, seed: int, round: int) -> dict[int, frozenset[int]]:
    """Return with whom each client of a round has masks, itself included: who is near in a ring, in a drawn order.

    All with all if `neighbours` is 0, or there are not more others.
    """
    everybody = sorted({*clients})
    if not 0 < neighbours < len(everybody) - 1:
        return dict.fromkeys(everybody, frozenset(everybody))
    ring: list[int] = generator(seed, "ring of masks", round).permutation(everybody).tolist()
    reach, count = neighbours // 2, len(ring)
    return {
        who: frozenset(ring[(place + step) % count] for step in range(-reach, reach + 1))
        for place, who in enumerate(ring)
    }


def sum_masked(
    inputs: Mapping[int, Words], round: int, *, keyed: Iterable[int] = (), gone: Iterable[int] = (),
    silent: Iterable[int] = (), neighbours: int = 0, seed: int = 0,
) -> Words:  # fmt: skip
    """Run the protocol between clients, all in this process; return the sum of the inputs mod 2^32.

    Clients that were only `keyed` drop out after they sent their keys, `gone` ones after they sent their shares,
    `silent` ones after they sent their input. The sum is of all who sent their input. Each has masks with as many
    `neighbours`, in a ring that follows from the `seed` and the round; 0: with all others.
    """
    asked = sorted({*inputs, *gone, *keyed})
    require_enough(len(asked), len(asked))
    least = default_threshold(len(asked))
    threshold, around = threshold_among(neighbours, least), neighbours_of(asked, neighbours, seed, round)
    helpers = inputs.keys() - {*silent}
    everybody = sorted({*inputs, *gone})
    require_enough(len(helpers), len(asked))
    require_neighbours(helpers, everybody, around, threshold)
    clients = {who: MaskingClient(who, round, threshold, least=least) for who in asked}
    keys = {who: one.publish_keys() for who, one in clients.items()}
    near = {who: [other for other in everybody if other in around[who] and other != who] for who in everybody}
    sealed = {who: clients[who].send_shares({other: keys[other] for other in sorted(around[who])}) for who in everybody}
    for who in everybody:
        clients[who].take_shares({other: sealed[other][who] for other in near[who]})
    count = len(next(iter(inputs.values())))
    total = np.zeros(count, dtype=np.uint32)
    with ThreadPoolExecutor(count_cores()) as pool:  # integers add up to the same in any order
        for masked in pool.map(lambda who: clients[who].mask(inputs[who]), inputs):
            total += masked
    missing = [who for who in everybody if who not in inputs]
    answers = {who: clients[who].help_unmask(inputs, missing) for who in inputs if who in helpers}
    return total - masks_left(answers, keys, inputs, missing, round, count, around, threshold)


def require_enough(left: int, asked: int) -> None:
    """Raise unless enough clients are left of those that were asked for their sum to be read."""
    if asked < LEAST_CLIENTS:
        raise PrivacyError(f"A secure sum must have at least {LEAST_CLIENTS} clients. Got {asked}.")
    threshold = default_threshold(asked)
    if left < threshold:
        raise SumLost(
            f"At least {threshold} of {asked} clients must stay to the end of a round for its sum to be read. {left} "
            "did.",
            hint="ask more clients, or lose fewer.",
        )


def require_neighbours(left: Collection[int], sharing: Iterable[int], around: Around, threshold: int) -> None:
    """Raise unless enough clients are left around each one that gave shares to its neighbours."""
    stay = frozenset(left)
    for who in sharing:
        near = len(around[who] & stay)
        if near < threshold:
            raise SumLost(
                f"At least {threshold} of the {len(around[who])} clients of every neighbourhood must stay to the end "
                f"of a round for its sum to be read. In that of client {who}, {near} did.",
                hint="take more `neighbours`, or lose fewer clients.",
            )


def masks_left(
    answers: Mapping[int, tuple[Mapping[int, int], Mapping[int, int]]],
    keys: Mapping[int, tuple[bytes, bytes]],
    there: Iterable[int],
    missing: Iterable[int],
    round: int,
    count: int,
    around: Around,
    threshold: int,
) -> Words:
    """Return what masks are left in the sum: the own ones of those who are there, those of pairs with drop-outs.

    A secret is put together from the answers of its client's neighbourhood; raise SumLost if one has too few.
    """
    _, _, x25519, *_ = _library()
    there, missing = frozenset(there), [*missing]
    require_neighbours(answers.keys(), [*there, *missing], around, threshold)

    def join(who: int, part: int) -> bytes:
        holders = sorted(around[who] & answers.keys())[:threshold]
        return join_shares({holder: answers[holder][part][who] for holder in holders}).to_bytes(KEY_BYTES, "big")

    left = np.zeros(count, dtype=np.uint32)
    for who in there:
        add_mask(left, derive_key(join(who, 0), f"own {round}"))
    for who in missing:
        key = x25519.X25519PrivateKey.from_private_bytes(join(who, 1))
        for other in there & around[who]:
            public = x25519.X25519PublicKey.from_public_bytes(keys[other][1])
            add_mask(left, pair_key(key.exchange(public), who, other, round), subtract=other > who)
    return left


def message_bytes(clients: int, neighbours: int = 0) -> dict[Direction, int]:
    """Return what a client sends and receives beside its input: keys, sealed shares, shares to unmask.

    Each row of a message says whose it is, in 8 bytes for each client that it names. In a ring, all clients in it are
    named with the keys of neighbours, so everybody can tell who these are.
    """
    sealed = 8 + 8 + 12 + 2 * SHARE_BYTES + 16
    ring = 0 < neighbours < clients - 1
    others = neighbours if ring else clients - 1
    return {
        "up": (8 + 2 * KEY_BYTES) + others * sealed + (8 + (others + 1) * SHARE_BYTES),
        "down": (others + 1) * (8 + 2 * KEY_BYTES) + others * sealed + clients * 8 + (clients * 8 if ring else 0),
    }
