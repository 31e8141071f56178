import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll import LocalEngine, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.data.batches import Split
from atoll.data.datasets import Dataset, load
from atoll.data.partition import Fafi, Iid, Natural, Shifted, parse
from atoll.data.synthetic import Gaussian, Linear
from atoll.data.task import Task, Training
from atoll.kernel.errors import ModelError, TaskError


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
        ("lr", math.inf, r"a float in \[0, inf\)"), ("lr", math.nan, r"a float in \[0, inf\)"),
        ("lr", None, r"a float in \[0, inf\)"), ("batch_size", 2.5, "an int of at least 1"),
        ("batch_size", True, "an int of at least 1"), ("momentum", math.nan, r"a float in \[0, 1\)"),
        ("weight_decay", math.inf, r"a float in \[0, inf\)"), ("clip", math.inf, r"a float in \(0, inf\), or None"),
        ("clip", math.nan, r"a float in \(0, inf\), or None"), ("lr_decay", math.nan, r"a float in \(0, 1\]"),
        ("momentum", 1.0, r"a float in \[0, 1\)"), ("weight_decay", -0.1, r"a float in \[0, inf\)"),
        ("clip", 0.0, r"a float in \(0, inf\), or None"), ("lr_decay", 1.5, r"a float in \(0, 1\]"),
    ],
)  # fmt: skip
def test_a_bad_training_rule_says_what_was_expected(field, value, expected):
    with pytest.raises(TaskError, match=f"`{field}` of Training must be {expected}. Got {value} instead."):
        Training(**{field: value})


def test_the_step_size_decays_per_round():
    assert Training(lr=0.5, lr_decay=0.5).lr_in(3) == 0.5 * 0.5**3


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (1.2, -0.2, 0.0)])
def test_shares_must_sum_to_one(shares):
    with pytest.raises(TaskError, match="`shares` must be three shares"):
        Task.of_clients(data(5), nn.Linear(4, 3), shares=shares)


# -- clients that are somebody -------------------------------------------------------------------------------------

PLANTED = Gaussian(clients=6, samples=10, dimensions=4, groups=3, classes=3)


def parts_of(task):
    """The samples of each client, all splits together."""
    return [
        np.sort(
            np.concatenate([
                split.order[split.offsets[client] : split.offsets[client + 1]].numpy() for split in task.splits.values()
            ])
        )
        for client in range(task.clients)
    ]  # fmt: skip


def test_a_natural_client_has_its_own_samples_its_name_and_its_group():
    task = Task.build(PLANTED.dataset(), Natural())
    assert task.names == tuple(f"client {k}" for k in range(6))
    assert task.groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert [part.tolist() for part in parts_of(task)] == np.arange(60).reshape(6, 10).tolist()


def test_natural_clients_that_are_drawn_keep_name_and_group():
    task = Task.build(PLANTED.dataset(), Natural(), clients=3, partition_seed=1)
    owners = [int(part[0]) // 10 for part in parts_of(task)]
    assert len(set(owners)) == 3
    assert owners != [0, 1, 2]
    assert task.names == tuple(f"client {owner}" for owner in owners)
    assert task.groups.tolist() == [owner % 3 for owner in owners]


def test_clients_of_other_partitions_are_numbers_without_groups():
    task = Task.build(PLANTED.dataset(), Iid(), clients=4)
    assert task.names is None
    assert task.groups is None
    assert task.client_name(3) == "3"


def test_a_natural_partition_needs_owners():
    with pytest.raises(TaskError) as error:
        Task.build(dataset(), Natural())
    assert str(error.value) == (
        "A natural partition needs data that belong to somebody. toy has no owners.\n"
        "hint: choose another partition; `atoll list partitions` shows them."
    )


# -- clients that see the same thing differently -------------------------------------------------------------------


def originals(task, source):
    """Where the samples of a task stand in the data set they come from."""
    return (task.x[:, None] == source.x).all(-1).int().argmax(1)


def test_a_concept_shift_renames_the_classes_of_each_group():
    source = dataset()
    task = Task.build(source, parse("iid+concept:3"), clients=4, model=lambda: nn.Linear(4, 3))
    assert task.groups.tolist() == [0, 1, 2, 0]
    before = source.y[originals(task, source)]
    for part, group in zip(parts_of(task), task.groups, strict=True):
        assert torch.equal(task.y[part], (before[part] + group) % 3)
    assert sorted(originals(task, source).tolist()) == list(range(60))
    assert torch.equal(source.y, torch.arange(60) % 3)  # what was given stays


def test_a_sample_that_clients_share_has_a_label_for_each_of_them():
    source = dataset()
    partition = Shifted(Fafi(alpha=100.0), parse("iid+concept:2").shifts)
    task = Task.build(source, partition, clients=2, model=lambda: nn.Linear(4, 3))
    first, second = parts_of(task)
    assert [part.tolist() for part in (first, second)] == [[*range(60)], [*range(60, 120)]]
    where = originals(task, source)
    assert torch.equal(where[first], where[second])  # both have every sample
    assert torch.equal((task.y[first] + 1) % 3, task.y[second])


@pytest.mark.parametrize("words", ["fafi:0.5", "fafi:0.5+concept:2"])
def test_what_one_client_is_tested_with_no_other_trains_on(words):
    source = dataset(200)
    task = Task.build(source, parse(words), clients=3, model=lambda: nn.Linear(4, 3))
    train, val, test = (set(originals(task, source)[split.order].tolist()) for split in task.splits.values())
    assert not train & val
    assert not train & test
    assert not val & test
    rows = {name: len(split.order) for name, split in task.splits.items()}
    assert sum(rows.values()) > 1.2 * len(train | val | test)  # samples are shared
    assert abs(len(train) / len(train | val | test) - 0.6) < 0.05
    together = [set(originals(task, source)[part].tolist()) for part in parts_of(task)]
    alone = Task.build(source, parse(words), clients=3, shares=(1.0, 0.0, 0.0), model=lambda: nn.Linear(4, 3))
    assert together == [set(originals(alone, source)[part].tolist()) for part in parts_of(alone)]


def test_groups_of_a_shift_do_not_hide_those_of_the_data():
    shifted = Task.build(PLANTED.dataset(), parse("natural+concept:2"))
    assert shifted.groups.tolist() == [0, 1, 2, 0, 1, 2]
    assert Task.build(PLANTED.dataset(), parse("iid+noise:0.1"), clients=3).groups is None


# -- what is nobody's ----------------------------------------------------------------------------------------------


def numbered(samples=50, **more):
    """Samples that say which ones they are."""
    x = torch.arange(samples).float()[:, None].expand(samples, 4).contiguous()
    return Dataset("numbered", x, torch.arange(samples) % 3, 3, source="toy", **{"central": None} | more)


def test_what_is_held_out_is_nobodys_and_held_out_once():
    task = Task.build(numbered(), Iid(), clients=4, central=0.2, public=0.1, model=lambda: nn.Linear(4, 3))
    dealt = set(task.x[:, 0].int().tolist())
    central, public = (set(pair[0][:, 0].int().tolist()) for pair in (task.central, task.public))
    assert (len(dealt), len(central), len(public)) == (35, 10, 5)
    assert dealt | central | public == set(range(50))
    for x, y in (task.central, task.public, (task.x, task.y)):
        assert torch.equal(x[:, 0].long() % 3, y)
    assert sorted(np.concatenate(parts_of(task))) == list(range(35))


def test_owners_keep_their_samples_when_some_are_held_out():
    owner = np.repeat(np.arange(5), 10)
    task = Task.build(
        numbered(owner=owner, owners=tuple("abcde")), Natural(), public=0.3, model=lambda: nn.Linear(4, 3)
    )
    for client, part in enumerate(parts_of(task)):
        assert set(owner[task.x[part][:, 0].int()]) == {"abcde".index(task.names[client])}


def test_what_is_held_out_depends_on_the_partition_seed_only():
    def public(**seeds):
        task = Task.build(numbered(), Iid(), clients=2, public=0.2, model=lambda: nn.Linear(4, 3), **seeds)
        return task.public[1].tolist(), task.public[0].tolist()

    assert public(seed=0, partition_seed=4) == public(seed=1, partition_seed=4)
    assert public(seed=0, partition_seed=4) != public(seed=0, partition_seed=5)


def test_public_samples_of_ones_own_must_be_new():
    source = numbered(central=(torch.full((3, 4), 70.0), torch.zeros(3, dtype=torch.int64)))
    task = Task.build(source, Iid(), clients=5, model=lambda: nn.Linear(4, 3)).hold_out(0.2)
    new = np.arange(90, 94, dtype=np.float64)[:, None].repeat(4, axis=1)
    found = task.with_public(new, [0, 1, 2, 0])
    assert torch.equal(found.public[0], torch.from_numpy(new).float())
    assert found.public[1].tolist() == [0, 1, 2, 0]
    assert found.facts["public"].startswith("4 samples, ")
    assert found.facts != task.with_public(new + 1, [0, 1, 2, 0]).facts
    for taken, whose in (
        (0.0, "clients'"),
        (-0.0, "clients'"),
        (49.0, "clients'"),
        (70.0, "in the server's test set"),
    ):
        some = new.copy()
        some[1:3] = taken
        with pytest.raises(TaskError, match=rf"2 of 4 are {whose}, the first is number 1\.\n.*leave them out"):
            task.with_public(some, [0, 1, 2, 0])


GOOD_X, GOOD_Y = np.full((4, 4), 90.0), np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (GOOD_X, GOOD_Y[:3], r"samples of shape \(4,\), .* Got 4 samples of shape \(4,\) and 3 targets"),
        (GOOD_X[:, :3], GOOD_Y, r"samples of shape \(4,\), .* Got 4 samples of shape \(3,\) and 4 targets"),
        (GOOD_X, GOOD_Y + 1, r"classes from 0 to 2 as targets\. Got 1 to 3"),
        (GOOD_X, GOOD_Y - 1, r"classes from 0 to 2 as targets\. Got -1 to 1"),
        (np.where(np.arange(16).reshape(4, 4) == 9, np.nan, GOOD_X), GOOD_Y, "finite numbers. Sample 2 holds others"),
    ],
)
def test_samples_given_by_hand_must_fit(x, y, message):
    task = Task.build(numbered(), Iid(), clients=5, model=lambda: nn.Linear(4, 3))
    with pytest.raises(TaskError, match="Public data must.*" + message):
        task.with_public(x, y)
    with pytest.raises(TaskError, match="The data of client b must.*" + message):
        Task.of_clients({"a": (GOOD_X, GOOD_Y), "b": (x, y)}, nn.Linear(4, 3), classes=3)


def test_public_data_must_not_be_empty():
    task = Task.build(numbered(), Iid(), clients=5, model=lambda: nn.Linear(4, 3))
    with pytest.raises(TaskError, match="Public data must be at least 1 sample. Got 0"):
        task.with_public(GOOD_X[:0], GOOD_Y[:0])


def test_public_samples_may_be_those_of_owners_who_were_left_out():
    source = numbered(owner=np.array([0] * 49 + [1]), owners=("a", "b"))
    task = Task.build(source, Natural(), model=lambda: nn.Linear(4, 3))
    assert task.clients == 1
    assert len(task.with_public(source.x[49:], source.y[49:]).public[1]) == 1


def test_the_official_test_set_is_the_servers():
    official = (torch.zeros(7, 4), torch.zeros(7, dtype=torch.int64))
    source = Dataset("toy", dataset().x, dataset().y, 3, official, "toy")
    assert Task.build(source, Iid(), clients=4).central is official
    with pytest.raises(TaskError, match="toy has a central test set already, so `central` must be 0."):
        Task.build(source, Iid(), clients=4, central=0.1)


@pytest.mark.parametrize(
    "shares",
    [
        {"central": -0.1},
        {"public": 1.0},
        {"central": 0.5, "public": 0.5},
        {"central": float("nan")},
        {"public": float("nan")},
    ],
)
def test_shares_that_are_held_out_must_leave_something(shares):
    with pytest.raises(TaskError, match="The shares taken before dealing must be at least 0 and leave something. Got"):
        Task.build(numbered(), Iid(), clients=2, **shares)


# -- what a task is known by ---------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_data_and_splits_and_with_nothing_else():
    def build(source=None, partition=None, **more):
        more = {"seed": 0, "partition_seed": 0, "model": lambda: nn.Linear(4, 3), **more}
        return Task.build(source or dataset(), partition or Iid(), clients=4, **more).fingerprint

    def changed(name, place, value):
        values = {"x": dataset().x.clone(), "y": dataset().y.clone()}
        values[name][place] = value
        return Dataset("toy", values["x"], values["y"], 3, None, "toy")

    usual = build()
    others = [
        build(changed("x", (7, 2), 9.0)), build(changed("y", 7, 0)), build(partition_seed=1),
        build(shares=(0.5, 0.25, 0.25)), build(partition=parse("shards:1")), build(public=0.1),
    ]  # fmt: skip
    assert len({usual, *others}) == 7
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert usual == build() == build(seed=1) == build(model=model) == build(training=Training(lr=0.5))
    assert usual == build(facts={"said": "otherwise"})


def test_each_part_of_the_data_changes_the_fingerprint_by_itself(make_task):
    task = make_task(sizes=(6, 6), shares=(0.5, 0.5, 0.0))
    train, y, x = task.splits["train"], task.y.clone(), task.x.clone()
    y[0], x[0, 0] = (y[0] + 1) % 3, 9.0
    moved = {**task.splits, "train": Split(train.order, train.offsets + np.array([0, 1, 0]))}  # to the first client
    renamed = {"train": train, "val": task.splits["test"], "test": task.splits["val"]}
    changed = [replace(task, **one) for one in ({"x": x}, {"y": y}, {"splits": moved}, {"splits": renamed})]
    assert len({task.fingerprint, *(one.fingerprint for one in changed)}) == 5
    assert replace(task, names=("a", "b"), groups=np.array([0, 1])).fingerprint == task.fingerprint


def test_statistics_are_of_the_training_samples(make_task):
    task = make_task(sizes=(5, 1, 12), shares=(0.6, 0.15, 0.25))
    train = task.splits["train"]
    found = task.statistics
    assert found.samples.tolist() == np.diff(train.offsets).tolist()
    for client in range(3):
        mine = train.order[train.offsets[client] : train.offsets[client + 1]]
        assert found.counts[client].tolist() == torch.bincount(task.y[mine], minlength=3).tolist()
    assert found.names == ("client 0", "client 1", "client 2")
    planted = Task.build(PLANTED.dataset(), Natural()).statistics
    assert planted.groups.tolist() == [0, 1, 2, 0, 1, 2]


# -- other targets than classes ------------------------------------------------------------------------------------


def tokens():
    """Three roles that count upwards by 1, 2 and 3; y is x one place later."""
    start = torch.arange(24)[:, None]
    step = torch.arange(24)[:, None] // 8 + 1
    text = (start + step * torch.arange(7)) % 5
    owner = np.repeat(np.arange(3), 8)
    return Dataset(
        "counting", text[:, :-1].contiguous(), text[:, 1:].contiguous(), 5, None, "toy", owner, ("one", "two", "three"),
        gap=0, model="char-transformer",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "metric"),
    [(Linear(clients=3, samples=20, dimensions=3).dataset(), "mean absolute error"), (tokens(), "accuracy")],
    ids=["regression", "tokens"],
)
def test_numbers_and_tokens_are_learned_alike_by_loop_and_whole(source, metric):
    task = Task.build(source, Natural(), training=Training(lr=0.05, batch_size=4))
    assert task.network.score.name == metric

    def run(strategy):
        return federate(task, Ditto(), rounds=4, engine=LocalEngine(strategy=strategy, dtype=torch.float64))

    whole, loop = run("whole"), run("loop")
    for split in ("val", "test"):
        np.testing.assert_array_equal(whole.scores(split), loop.scores(split))
    np.testing.assert_array_equal(whole.outcomes["test"], loop.outcomes["test"])
    assert all(torch.equal(whole.server[name], loop.server[name]) for name in whole.server)
    first, last = (line["loss"] for line in (whole.history[0], whole.history[-1]))
    assert all(last[name] < first[name] for name in first)


def test_the_statistics_of_numbers_and_tokens():
    found = Task.build(Linear(clients=3, samples=20, dimensions=3).dataset(), Natural()).statistics
    assert found.counts is None
    assert found.target_mean.shape == (3,)
    found = Task.build(tokens(), Natural()).statistics
    assert found.target_mean is None
    assert found.counts.sum(axis=1).tolist() == (6 * found.samples).tolist()  # six places each


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


def test_some_clients_are_a_task_of_their_own():
    task = Task.build(load("digits"), parse("iid+rotation:2"), clients=5)
    some = task.of(np.array([3, 1]))
    assert some.clients == 2
    for name, split in some.splits.items():
        for mine, theirs in enumerate((3, 1)):
            whole = task.splits[name]
            expected = whole.order[whole.offsets[theirs] : whole.offsets[theirs + 1]]
            assert torch.equal(split.order[split.offsets[mine] : split.offsets[mine + 1]], expected)
    assert some.groups.tolist() == [1, 1]


def test_what_everybody_may_know_holds_no_sample():
    task = Task.build(load("digits"), parse("dirichlet:0.3"), clients=5)
    facts, sizes = task.public_facts(seed=3), task.splits["train"].sizes(np.arange(5))
    assert (facts.clients, facts.classes, facts.seed, facts.largest["train"]) == (5, 10, 3, int(sizes.max()))
    assert facts.sample.shape == task.x.shape[1:]
    assert not facts.sample.any()
    assert not facts.target.any()
    other = 2.0 * task.network.initial
    some = facts.of(2, other)
    assert some.clients == 2
    assert all(torch.equal(some.network.initial[name], leaf) for name, leaf in other.items())
    assert not torch.equal(task.network.initial["head.weight"], some.network.initial["head.weight"])


# -- clients with different architectures --------------------------------------------------------------------------


def test_models_are_dealt_in_turn():
    task = Task.of_clients(data(5, 4, 3), [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))], classes=3)
    assert task.architecture.tolist() == [0, 1, 0]
    assert [one.network for one in task.by_architecture] == list(task.networks)
    assert [one.own_architecture for one in task.by_architecture] == [0, 1]
    moved = task.to(torch.device("cpu"), torch.float64)
    assert [network.dtype for network in moved.networks] == [torch.float64] * 2
    assert moved.network is moved.networks[0]
    assert task.of(np.array([1, 2])).architecture.tolist() == [1, 0]


def test_a_list_of_one_model_is_one_architecture():
    task = Task.build(dataset(), Iid(), clients=4, model=["mlp:8"])
    assert task.architecture is None
    assert task.networks == ()
    assert task.by_architecture == (task,)


def test_a_named_model_begins_alike_alone_and_among_others():
    alone = Task.build(dataset(), Iid(), clients=4, model="mlp:8", seed=3)
    among = Task.build(dataset(), Iid(), clients=4, model=["linear", "mlp:8"], seed=3)
    assert all(torch.equal(leaf, among.networks[1].initial[name]) for name, leaf in alone.network.initial.items())


def test_own_data_take_several_models():
    draw = np.arange(12, dtype=float)
    rows = {name: (draw.reshape(6, 2), np.arange(6) % 2) for name in ("Ulm", "Porto", "Lund")}
    task = Task.own(rows, model=["mlp:8", lambda: nn.Linear(2, 2)])
    assert task.architecture.tolist() == [0, 1, 0]
    other = replace(task, architecture=np.array([1, 1, 0]))
    assert other.architecture.tolist() == [1, 1, 0]


@pytest.mark.parametrize("architecture", [[0, 1], [0, 1, 2], [0, -1, 1]])
def test_every_client_must_have_one_of_the_networks(architecture):
    task = Task.of_clients(data(5, 4, 3), [nn.Linear(4, 3), nn.Linear(4, 3)], classes=3)
    with pytest.raises(TaskError, match="must have the number of a network, 0 to 1, for each of 3 clients. Got array"):
        replace(task, architecture=np.array(architecture))


@pytest.mark.parametrize(
    ("models", "error", "said"),
    [
        ([nn.Linear(4, 3)] * 3, TaskError, "at least 1 model, and at most one per client, 2. Got 3."),
        ([nn.Linear(4, 3), nn.Linear(9, 3)], ModelError, r"Linear must take samples of shape \(4,\)"),
        ([nn.Linear(4, 3), nn.Linear(4, 2)], ModelError, "must give one output per class, 3"),
    ],
)
def test_models_that_do_not_fit_are_refused(models, error, said):
    with pytest.raises(error, match=said):
        Task.of_clients(data(5, 4), models, classes=3)
