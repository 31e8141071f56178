"""FAFI with a public bank: as it was run, and the same with what was wrong left out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import with_public

from atoll import Task
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_bank import FAFIBank
from atoll.kernel.errors import TaskError
from atoll.testing.conformance import play

WEIGHT = "head.weight"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(sizes=(16, 12), dtype=torch.float64))


def test_by_default_it_is_as_it_was_run() -> None:
    objective = FAFIBank().training.objective
    assert (objective.pool, objective.masked, objective.mass) == ("features", False, 0.0)
    assert FAFIBank().pool_size == 4096
    assert FAFIBank.needs_public_data


@pytest.mark.limit("fafi-bank")
def test_a_masked_bank_of_the_only_class_there_is_changes_nothing(task: Task) -> None:
    assert task.public is not None
    x, y = task.public
    alike = replace(task, y=torch.zeros_like(task.y), public=(x, torch.zeros_like(y)))
    plain, masked, blind = (
        play(alike, algorithm).server.answer.models
        for algorithm in (FAFI(epochs=3), FAFIBank(epochs=3, masked=True), FAFIBank(epochs=3))
    )
    assert all(torch.equal(leaf, masked[name]) for name, leaf in plain.items())
    assert not torch.equal(plain[WEIGHT], blind[WEIGHT])


def test_the_bank_travels_once_to_each_client(task: Task) -> None:
    plain, bank = (play(task, algorithm).ledger for algorithm in (FAFI(epochs=0), FAFIBank(epochs=0)))
    more = (bank.bytes("down") - plain.bytes("down")) / task.clients
    numbers = 12 * 6 + 12
    assert numbers * 8 <= more < numbers * 8 + 400
    assert bank.bytes("up") == plain.bytes("up")


def test_without_public_samples_there_is_no_bank(task: Task) -> None:
    with pytest.raises(TaskError, match="public=0.1"):
        play(replace(task, public=None), FAFIBank())
