"""Clients that were never seen."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from atoll import Recipe, Settings, Training, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.experiments.comparison import Comparison
from atoll.kernel.errors import LabelsNeeded, TaskError
from atoll.metrics.newcomers import EPOCHS

RECIPE = Recipe(samples=900, clients=8, partition="dirichlet:0.3", unseen=0.25, training=Training(lr=0.1))


def test_unseen_clients_take_no_part_and_share_no_sample() -> None:
    whole, task = replace(RECIPE, unseen=0.0).build(), RECIPE.build()
    assert task.unseen is not None
    assert (task.clients, task.unseen.clients) == (6, 2)
    seen = {name: set(split.order.tolist()) for name, split in task.splits.items()}
    new = {name: set(split.order.tolist()) for name, split in task.unseen.splits.items()}
    assert not set.union(*seen.values()) & set.union(*new.values())
    for name, split in whole.splits.items():
        assert seen[name] | new[name] == set(split.order.tolist())


def test_samples_are_moved_once() -> None:
    here = RECIPE.build().to(torch.device("cpu"), torch.float64)
    assert here.unseen is not None
    assert here.unseen.x is here.x
    assert here.unseen.network is here.network


@pytest.mark.parametrize("share", [-0.1, 1.0, 0.99])
def test_somebody_must_be_left(share: float) -> None:
    with pytest.raises(TaskError, match="unseen"):
        Recipe(clients=8, unseen=share).build()


def test_training_is_that_of_the_seen_alone() -> None:
    task = RECIPE.build()
    with_new, without = (federate(one, create("fedavg"), rounds=2).server for one in (task, replace(task, unseen=None)))
    assert all(torch.equal(with_new[name], without[name]) for name in with_new)


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    task = RECIPE.build()
    names = ("fedavg", "ditto", "local", "ifca", "fedamp", "fedper")
    return {
        name: federate(task, create(name), settings=Settings(rounds=4)).evaluations[-1]["evaluation"]["newcomers"]
        for name in names
    }


def test_tuning_helps_and_every_stage_is_there(found: dict[str, dict]) -> None:
    for name, one in found.items():
        assert [*one["labelled"]] == [*map(str, EPOCHS)]
        scores = [one["labelled"][str(epochs)]["macro"] for epochs in EPOCHS]
        assert scores[-1] > scores[0], name
        assert len(one["labelled"]["0"]["clients"]) == 2


def test_the_shared_model_serves_those_without_labels(found: dict[str, dict]) -> None:
    one = found["fedavg"]
    assert one["unlabelled"]["way"] == "welcome"
    assert one["unlabelled"]["macro"] == one["labelled"]["0"]["macro"]
    assert found["ditto"]["labelled"]["0"]["clients"] == one["labelled"]["0"]["clients"]  # v begins at w


def test_a_method_that_needs_labels_says_so(found: dict[str, dict]) -> None:
    assert found["fedamp"]["unlabelled"] == {"way": "none"}


def test_a_method_may_tune_in_its_own_way() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stubborn(FedAvg):
        """Its new clients stay where they are."""

        def tune_newcomer(self, given, model, cohort, *, epochs, stream):  # type: ignore[no-untyped-def]
            assert cohort.splits == {"train", "val"}
            asked.append((epochs, stream))
            return given

    asked: list[tuple[int, str]] = []
    one = federate(RECIPE.build(), Stubborn(), rounds=2).evaluations[-1]["evaluation"]["newcomers"]["labelled"]
    assert {*asked} == {(1, "tune 1"), (4, "tune 5"), (5, "tune 10")}
    assert one["0"]["macro"] == one["1"]["macro"] == one["10"]["macro"]


def test_labels_cannot_be_read_where_there_are_none() -> None:
    from atoll.toolbox.client import sgd

    report = federate(RECIPE.build(), create("fedavg"), rounds=1)
    seen: list[str] = []

    class Curious(type(report.algorithm)):  # type: ignore[misc]
        def welcome(self, server, cohort):  # type: ignore[no-untyped-def]
            with pytest.raises(LabelsNeeded, match="reads targets"):
                sgd(cohort.without("labels"), start=server, epochs=1)
            seen.append("asked")
            return server

    algorithm = Curious()
    federate(RECIPE.build(), algorithm, rounds=1)
    assert seen


def test_a_comparison_shows_them() -> None:
    task = RECIPE.build()
    runs = [federate(task, create(name), rounds=2) for name in ("local", "fedavg")]
    comparison = Comparison.of_runs(runs)
    assert [row["method"] for row in comparison.newcomers] == ["local", "fedavg"]
    assert {row["clients"] for row in comparison.newcomers} == {2}
    from atoll.report.export import write_markdown

    assert "2 clients that took no part" in write_markdown(comparison)


# -- one new client of a federation that is over ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def over():  # type: ignore[no-untyped-def]
    return federate(RECIPE.build(), create("ifca:clusters=2"), rounds=2)


def test_a_new_client_is_given_a_model(over) -> None:  # type: ignore[no-untyped-def]
    task = over.task.unseen
    mine = task.splits["train"].order[: task.splits["train"].offsets[1]]
    model = over.welcome(task.x[mine].numpy(), task.y[mine].numpy())
    assert set(model) == set(task.network.initial)
    rows = over.server.models
    assert any(all(torch.equal(rows[name][k], model[name]) for name in model) for k in range(2))


def test_bad_newcomers(over) -> None:  # type: ignore[no-untyped-def]
    x = over.task.x[:4].numpy()
    with pytest.raises(TaskError, match="shape of the others"):
        over.welcome(x[..., :4], np.zeros(4, dtype=np.int64))
    with pytest.raises(TaskError, match="one target per sample"):
        over.welcome(x, np.zeros(3, dtype=np.int64))
    with pytest.raises(TaskError, match=r"among the 10 classes.*\n?.*|Got \[12\]"):
        over.welcome(x, np.full(4, 12))


def test_labels_may_be_names_of_classes_where_the_task_has_some():
    from atoll import Task, federate
    from atoll.kernel.errors import TaskError, UnknownName
    from atoll.kernel.randomness import generator

    draw = generator(0, "words")
    words = np.array(["no", "yes"])
    data = {name: (draw.normal(size=(12, 3)), words[draw.integers(2, size=12)]) for name in ("Ulm", "Porto")}
    over = federate(Task.own(data, model="linear"), "fedavg-ft", rounds=1)
    x, y = draw.normal(size=(6, 3)), words[[0, 1, 1, 0, 1, 0]]
    by_name, by_number = over.welcome(x, y), over.welcome(x, [0, 1, 1, 0, 1, 0])
    assert all(torch.equal(by_name[leaf], by_number[leaf]) for leaf in by_number)
    with pytest.raises(UnknownName, match="Unknown label 'Yes'. Did you mean: yes?"):
        over.welcome(x, ["Yes"] * 6)
    with pytest.raises(TaskError, match="samples must be numbers. Got 'a'"):
        over.welcome([["a"]])
