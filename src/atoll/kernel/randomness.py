"""Every random draw is a function of (seed, purpose, round, client, stream): nothing else draws.

Two forms. `generator` gives a NumPy generator for the few draws made on the host: partitions, cohorts. `Keys` are
counters hashed on the device, one key per client, for the many draws made inside training: batch orders and
dropout masks. A hash has no state, so the draws of a client do not depend on who trains beside it, on chunking,
on the device, or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def number(seed: int, purpose: str, *counters: int | str) -> int:
    """Hash this seed, purpose and counters to a 64-bit number."""
    text = "\x1f".join(map(str, (seed, purpose, *counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *counters: int | str) -> np.random.Generator:
    """Make a NumPy generator for this seed, purpose and counters."""
    return np.random.Generator(np.random.Philox(number(seed, purpose, *counters)))


@contextmanager
def default_generator(key: int) -> Iterator[None]:
    """Let code that draws from torch's default generator, such as `nn.Module` constructors, draw from `key`."""
    seed = key & 0x7FFFFFFFFFFFFFFF
    with torch.random.fork_rng(devices := _devices()):
        torch.random.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def moves_default_generator(function: Callable[[], object]) -> bool:
    """Return whether `function` draws from torch's default generator, and leave the generator as it was."""
    with torch.random.fork_rng(devices := _devices()):
        before = _states(devices)
        function()
        return any(not torch.equal(old, new) for old, new in zip(before, _states(devices), strict=True))


def _devices() -> list[int]:
    """Return the GPU in use, if any is: each has a default generator of its own."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.current_device()] if used else []


def _states(devices: list[int]) -> list[Tensor]:
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@dataclass(frozen=True)
class Keys:
    """Two 32-bit words per client, held in int64 tensors so no product overflows."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, clients: Tensor, seed: int, purpose: str, *counters: int | str) -> Keys:
        """Make the keys of these clients for this seed, purpose and counters."""
        word = number(seed, purpose, *counters)
        return cls(torch.full_like(clients, word & _MASK), torch.full_like(clients, word >> 32)).fold(clients)

    def fold(self, counter: Tensor | int) -> Keys:
        """Return the keys for one more counter."""
        low = _mix(self.low ^ counter)
        return Keys(low, _mix(self.high ^ ((low + counter) & _MASK)))

    def bits(self, counter: Tensor) -> Tensor:
        """Draw 32 random bits, as int64, for each counter; keys and counters broadcast."""
        return _mix(_mix(counter ^ self.low) ^ self.high)

    def uniform(self, counter: Tensor, dtype: torch.dtype) -> Tensor:
        """Draw a number in [0, 1) for each counter, with as many bits as fp32 can tell apart."""
        return (self.bits(counter) >> 8).to(dtype) / 2**24


def _mix(word: Tensor) -> Tensor:
    """Mix the bits of a 32-bit word; both multipliers are below 2^31, so int64 products never overflow.

    In int32 it would take a third of the time on a CPU, but compiled programs rely on it that nothing overflows.
    """
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _MASK
    word = (word ^ (word >> 15)) * 0x735A2D97 & _MASK
    return word ^ (word >> 15)
