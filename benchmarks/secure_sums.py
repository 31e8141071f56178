"""What secure sums cost beside plain ones: seconds and bytes of masks and of CKKS, and the error of their sums.

python benchmarks/secure_sums.py --clients 5 --numbers 100000
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.kernel.randomness import generator
from atoll.protect.encrypted import ClientsKey, add_ciphertexts, error_bound
from atoll.protect.masks import MaskingClient, default_threshold, masks_left, message_bytes, neighbours_of


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


def measure_masks(rows: np.ndarray) -> None:
    count, numbers = rows.shape
    words = (rows * 2**20).round().astype(np.int64).astype(np.uint32)
    clients = {who: MaskingClient(who, 0, default_threshold(count)) for who in range(count)}

    def agree() -> dict[int, tuple[bytes, bytes]]:
        keys = {who: one.publish_keys() for who, one in clients.items()}
        sealed = {who: one.send_shares(keys) for who, one in clients.items()}
        for who, one in clients.items():
            one.take_shares({other: sealed[other][who] for other in clients if other != who})
        return keys

    keys, agreeing = timed(agree)
    masked, masking = timed(lambda: [one.mask(words[who]) for who, one in clients.items()])

    def unmask() -> np.ndarray:
        answers = {who: one.help_unmask([*clients], []) for who, one in clients.items()}
        around, threshold = neighbours_of(clients, 0, 0, 0), default_threshold(count)
        return sum(masked[1:], masked[0]) - masks_left(answers, keys, [*clients], [], 0, numbers, around, threshold)

    total, unmasking = timed(unmask)
    assert np.array_equal(total, words.sum(0, dtype=np.uint32))
    print(
        f"masks: {4 * numbers + message_bytes(count)['up']:,} bytes up per client; keys and shares "
        f"{agreeing / count:.4f} s, masking {masking / count:.4f} s per client; unmasking {unmasking:.4f} s; exact"
    )


def measure_ckks(rows: np.ndarray) -> None:
    count, numbers = rows.shape
    key = ClientsKey()
    _ = key.parameters
    messages, encrypting = timed(lambda: [key.encrypt(row) for row in rows])
    sums, adding = timed(lambda: add_ciphertexts(key.parameters, messages))
    found, decrypting = timed(lambda: key.decrypt(sums, numbers))
    print(
        f"ckks: {sum(map(len, messages[0])):,} bytes up per client; encrypting {encrypting / count:.4f} s per client; "
        f"adding {adding:.4f} s; decrypting {decrypting:.4f} s; off by {np.abs(found - rows.sum(0)).max():.1e} before "
        f"the noise of decryption, bound {error_bound(count):.1e} and rounding"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--numbers", type=int, default=100_000)
    given = parser.parse_args()
    rows = 0.01 * generator(0, "rows").standard_normal((given.clients, given.numbers))
    print(f"plain: {4 * given.numbers:,} bytes up per client")
    measure_masks(rows)
    measure_ckks(rows)
