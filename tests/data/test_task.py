import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll import federate
from atoll.algorithms.fedavg import FedAvg
from atoll.data.datasets import Dataset
from atoll.data.partition import Iid
from atoll.data.task import Task, Training
from atoll.errors import ModelError, TaskError


def data(*sizes, shape=(4,), classes=3):
    return {f"c{k}": (torch.zeros(size, *shape), torch.arange(size) % classes) for k, size in enumerate(sizes)}


def dataset(samples=60):
    return Dataset(
        "toy", torch.randn(samples, 4, generator=torch.Generator()), torch.arange(samples) % 3, 3, None, "toy"
    )


def test_splits_are_disjoint_and_complete():
    task = Task.build(dataset(), Iid(), clients=4, model=lambda: nn.Linear(4, 3))
    every = torch.cat([split.order for split in task.splits.values()])
    assert sorted(every.tolist()) == list(range(60))
    sizes = {name: split.sizes(np.arange(4)).tolist() for name, split in task.splits.items()}
    assert sizes == {"train": [9] * 4, "val": [2] * 4, "test": [4] * 4}  # 15 each: 0.15 and 0.25 of it, rounded


@pytest.mark.parametrize(("size", "cut"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (2, 0, 1)), (4, (2, 1, 1))])
def test_a_client_with_few_samples_keeps_one_for_training(size, cut):
    task = Task.of_clients(data(size), nn.Linear(4, 3), classes=3)
    assert tuple(int(split.sizes(np.array([0]))[0]) for split in task.splits.values()) == cut


def test_the_partition_seed_deals_and_the_seed_initialises():
    def build(**seeds):
        task = Task.build(dataset(), Iid(), clients=4, model=lambda: nn.Linear(4, 3), **seeds)
        return task.splits["train"].order.tolist(), task.network.initial["weight"].flatten().tolist()

    (deal, model), (deal_2, model_2) = build(seed=0, partition_seed=5), build(seed=1, partition_seed=5)
    assert deal == deal_2
    assert model != model_2
    assert build(seed=1, partition_seed=6)[0] != deal
    assert build(seed=0, partition_seed=5) == (deal, model)


def test_building_a_task_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    Task.build(dataset(), Iid(), clients=4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_client_without_training_samples_is_named():
    with pytest.raises(TaskError) as error:
        Task.of_clients(data(5, 0, 3), nn.Linear(4, 3), classes=3)
    assert str(error.value) == (
        "Every client must have at least 1 training sample. 1 of 3 have none, the first is client c1.\n"
        "hint: leave these clients out, or raise the partition's `min_samples`."
    )


def test_no_clients_at_all_is_refused():
    with pytest.raises(TaskError, match="A task must have at least 1 client. Got 0."):
        Task.of_clients({}, nn.Linear(4, 3))


def test_a_model_of_the_wrong_width_is_refused_with_the_classes():
    with pytest.raises(ModelError) as error:
        Task.of_clients(data(5), nn.Linear(4, 2), classes=3)
    assert str(error.value) == (
        "Linear must give one output per class, 3. Got outputs of shape (2, 2) for 2 samples.\n"
        "hint: set the width of its last layer to the number of classes."
    )


def test_a_model_that_does_not_take_the_samples_is_refused():
    with pytest.raises(ModelError, match=r"Linear must take samples of shape \(4,\). It failed: mat1 and mat2"):
        Task.of_clients(data(5), nn.Linear(9, 3), classes=3)


def test_a_model_that_fails_in_training_only_is_refused_before_the_first_round():
    class Fails(nn.Linear):
        def forward(self, x):
            assert not self.training, "only for show"
            return super().forward(x)

    with pytest.raises(ModelError, match="Fails must take samples .* It failed: only for show"):
        Task.of_clients(data(5), Fails(4, 3), classes=3)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("lr", -1.0, r"a float in \[0, inf\)"), ("batch_size", 0, "an int of at least 1"),
        ("momentum", 1.0, r"a float in \[0, 1\)"), ("weight_decay", -0.1, r"a float in \[0, inf\)"),
        ("clip", 0.0, "a float above 0, or None"), ("lr_decay", 1.5, r"a float in \(0, 1\]"),
    ],
)  # fmt: skip
def test_a_bad_training_rule_says_what_was_expected(field, value, expected):
    with pytest.raises(TaskError, match=f"`{field}` of Training must be {expected}. Got {value} instead."):
        Training(**{field: value})


def test_the_step_size_decays_per_round():
    assert Training(lr=0.5, lr_decay=0.5).lr_in(3) == 0.5 * 0.5**3


@pytest.mark.parametrize("shares", [(0.0, 0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.2, 0.0)])
def test_shares_must_sum_to_one(shares):
    with pytest.raises(TaskError, match="`shares` must be three shares"):
        Task.of_clients(data(5), nn.Linear(4, 3), shares=shares)


# -- models that draw from torch's own generator -------------------------------------------------------------------


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.dropout(x, 0.5, self.training))


def test_a_model_that_draws_by_itself_is_found_out(make_task):
    assert make_task(FunctionalDropout).network.draws_globally
    assert make_task(lambda: nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 3))).network.draws_globally
    assert not make_task(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))).network.draws_globally
    assert not make_task().network.draws_globally


def test_such_a_model_runs_one_client_at_a_time_with_the_same_bits_for_the_same_seed(make_task, caplog):
    task = make_task(FunctionalDropout, shares=(0.6, 0.2, 0.2))

    def trained(seed, strategy="auto"):
        from atoll import LocalEngine

        return federate(task, FedAvg(), rounds=2, seed=seed, engine=LocalEngine(strategy=strategy)).server[
            "head.weight"
        ]

    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING, "atoll"):
        first = trained(0)
    assert "the model draws random numbers of its own in its forward pass: it runs one client at a time" in caplog.text
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(10)  # whatever else draws changes nothing
    assert torch.equal(trained(0), first)
    assert torch.equal(trained(0, "whole"), first)
    assert not torch.equal(trained(1), first)
