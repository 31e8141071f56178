"""A private part that leaves all or nothing to share is allowed, and said."""

import logging
from collections.abc import Callable

import pytest
import torch

from atoll import Algorithm, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedbabu import FedBABU
from atoll.algorithms.fedbn import FedBN
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.fedrep import FedRep
from atoll.algorithms.lg_fedavg import LGFedAvg
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


def warnings(task: Task, algorithm: Algorithm, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "atoll"):
        play(task, algorithm)
    return caplog.text


@pytest.mark.parametrize(
    "algorithm",
    [FedPer(private="last:2"), FedRep(private="first:2"), LGFedAvg(private="last:2"), FedBABU(frozen="last:2")],
)
def test_nothing_shared_is_said(
    make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture, algorithm: Algorithm
) -> None:
    said = warnings(make_task(), algorithm, caplog)  # a network of two layers
    assert f"{type(algorithm).__name__} shares nothing: " in said
    assert "this is Local" in said


@pytest.mark.parametrize("algorithm", [FedBN(), FedPer(private="norm")])
def test_everything_shared_is_said(
    make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture, algorithm: Algorithm
) -> None:
    assert f"{type(algorithm).__name__} shares everything" in warnings(make_task(), algorithm, caplog)


@pytest.mark.parametrize("algorithm", [FedPer(), FedPer(private="last:1"), FedRep(), LGFedAvg(), FedBABU()])
def test_otherwise_nothing_is_said(
    make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture, algorithm: Algorithm
) -> None:
    assert "shares" not in warnings(make_task(), algorithm, caplog)


def test_what_is_said_is_so(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    for private, other in ((FedPer(private="first:2"), Local()), (FedBN(), FedAvg())):
        mine, theirs = (personal_models(play(task, one, rounds=2)) for one in (private, other))
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)
