"""A method with a step size of its own does what it does on a task with that step size."""

import numpy as np
import pytest

from atoll import Recipe, Report, Training, compare, create, federate
from atoll.algorithms import name_of
from atoll.compose import from_record, to_record
from atoll.federation.labels import label
from atoll.kernel.errors import AtollError

SMALL = Recipe("digits", clients=3, samples=120, model="mlp:4")


@pytest.mark.parametrize("text", ["ditto", "ditto+gate", "fedper@ifca", "fafi/margins"])
def test_it_is_written_down_and_read_again(text):
    method = create(f"{text}:lr=0.05")
    assert method.step_size == 0.05
    assert create(text).step_size is None
    assert name_of(method) == name_of(create(text))
    assert from_record(to_record(method)) == method
    assert create(label(method)) == method


@pytest.mark.parametrize("text", ["ditto:lam=0.5", "fedper+prox", "fedavg-ft"])
def test_it_is_the_task_with_this_step_size(text):
    with_prefix = text if ":" in text else f"{text}:"
    own = federate(SMALL.build(), f"{with_prefix},lr=0.03".replace(":,", ":"), rounds=2)
    other = federate(Recipe(**{**vars(SMALL), "training": Training(lr=0.03)}).build(), text, rounds=2)
    assert own.scores().tolist() == other.scores().tolist()
    assert own.curve(figure="loss") == other.curve(figure="loss")
    assert own.config.training["lr"] == 0.03


def test_newcomers_are_tuned_by_it():
    task = Recipe(**{**vars(SMALL), "clients": 4, "unseen": 0.25}).build().with_training(lr=0.03)
    assert task.unseen.training.lr == task.training.lr == 0.03


def test_one_comparison_holds_several_and_a_run_goes_on_with_its_own(tmp_path):
    methods = ["local", "fedavg", "ditto:lr=0.02", "ditto"]
    found = compare(SMALL, methods, seeds=1, rounds=2, folder=tmp_path)
    assert list(found.outcomes) == ["local", "fedavg", "ditto:lr=0.02", "ditto"]
    assert not np.array_equal(*(found.outcomes[one][0].variances() for one in methods[2:]))
    read = Report.read(tmp_path / "ditto-lr=0.02-seed0")
    assert read.label == "ditto:lr=0.02"
    again = federate(SMALL.with_seed(0).build(), read.algorithm, rounds=2, folder=read.folder, resume=True)
    assert again.scores().tolist() == found.outcomes["ditto:lr=0.02"][0].scores().tolist()


def test_bad_ones_are_refused():
    with pytest.raises(AtollError, match=r"`lr` of Ditto must be a float in \(0, inf\). Got 0.0 instead."):
        create("ditto:lr=0")
    with pytest.raises(AtollError, match="Did you mean: lr?"):
        create("ditto:lrr=0.1")
