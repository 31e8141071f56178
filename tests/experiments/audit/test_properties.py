"""What messages tell about clients beside classes."""

import numpy as np
import pytest

from atoll import Recipe, federate
from atoll.experiments.audit import audit
from atoll.experiments.audit.properties import leave_one_out
from atoll.kernel.randomness import generator


def run(partition: str, method: str = "fedavg", clients: int = 12, **more: object):
    task = Recipe("digits", partition=partition, clients=clients, model="mlp:16").build()
    return federate(task, method, rounds=1, evaluation="none", progress=False, **more)


def test_a_linear_rule_finds_what_lies_along_a_line_and_nothing_in_noise() -> None:
    rng = generator(0, "rows")
    values = np.arange(40) % 2
    rows = rng.standard_normal((40, 300))
    assert 8 <= (leave_one_out(rows, values) == values).sum() <= 32
    rows[:, 0] += 30.0 * values
    assert (leave_one_out(rows, values) == values).all()


def test_three_kinds_are_told_apart() -> None:
    values = np.arange(30) % 3
    rows = np.eye(3)[values] + 0.1 * generator(1, "rows").standard_normal((30, 3))
    assert (leave_one_out(rows, values) == values).all()


def test_messages_tell_the_planted_group_and_noise_hides_it() -> None:
    plain = audit(run("iid+rotation:2"), attacks=["properties"]).properties
    assert plain is not None
    assert plain.name == "the planted group of a client"
    assert plain.right == plain.clients == 12
    assert plain.chance < 0.001
    hidden = audit(run("iid+rotation:2", dp="client:noise=4,clip=0.1"), attacks=["properties"])
    assert hidden.properties is not None
    assert hidden.properties.right < 12
    assert "do not tell the planted group" in hidden.sentences[0]


def test_without_groups_brightness_is_sought() -> None:
    found = audit(run("dirichlet:0.3"), attacks=["properties"])
    assert found.properties is not None
    assert "brighter than the median" in found.sentences[0]
    assert found.properties.guessing == 0.5
    assert found.figures()["properties"]["clients"] == 12


@pytest.mark.parametrize(("method", "clients"), [("fedavg", 4), ("local", 12)])
def test_few_clients_and_silent_ones_are_not_tried(method: str, clients: int) -> None:
    found = audit(run("dirichlet:0.3", method, clients), attacks=["properties"])
    assert found.properties is None
    assert any("No property was sought" in note for note in found.notes)
