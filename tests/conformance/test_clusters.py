"""The battery on cluster methods that do cluster: with their defaults its short runs end before the first split."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from atoll.algorithms.cfl import CFL
from atoll.algorithms.flhc import FLHC
from atoll.algorithms.ifca import IFCA
from atoll.kernel.algorithm import Count, Epochs, Limits, NonNegative
from atoll.testing.conformance import Check, Method, checks

CHECKS = [
    "strategies-agree", "clients-are-isolated", "order-of-clients-does-not-matter", "inputs-are-unchanged",
    "stop-and-resume", "clients-may-drop-out", "odd-clients-are-served", "batchnorm-and-dropout-work",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Splitting(CFL):
    eps1: NonNegative = 1e9
    eps2: NonNegative = 0.0
    rounds_before: Epochs = 0
    limits: ClassVar[Limits] = {}


@dataclass(frozen=True, kw_only=True)
class Grouping(FLHC):
    rounds_before: Epochs = 1
    clusters: Count | None = 2


@dataclass(frozen=True, kw_only=True)
class Descending(FLHC):
    rounds_before: Epochs = 1
    clusters: Count | None = 4
    signature: Literal["update", "embedding"] = "embedding"
    levels: Count = 2


@dataclass(frozen=True, kw_only=True)
class FarApart(IFCA):
    starts: Literal["random", "kmeans++"] = "kmeans++"


@pytest.mark.parametrize("check", [one for one in checks() if one.name in CHECKS], ids=lambda one: one.name)
@pytest.mark.parametrize("method", [Splitting, Grouping, Descending, FarApart])
def test_passes(method: Method, check: Check) -> None:
    check.run(method)
