"""The generated task: a sample is the same whenever it is made, and a run is that of a task that stores them all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import LocalEngine, federate
from atoll.data import datasets
from atoll.data.batches import Split, find_offsets
from atoll.data.million import Million
from atoll.data.recipe import Recipe
from atoll.data.splits import SPLITS, Cut, cut_splits
from atoll.data.task import Training
from atoll.kernel.errors import DataError, EngineError, TaskError
from atoll.toolbox.server import mixing

CLIENTS = 12
RUN = {"rounds": 3, "cohort": 5, "eval_every": 1}


def make_task(clients=CLIENTS, **more):
    return Million(clients, **{"most": 24, **more}).task(model="mlp:6", training=Training(batch_size=4))


def samples_of(task, client, split="train"):
    x, y, held, members = task.splits[split].hold(task.x, task.y, np.array([client]))
    rows = held.order[held.offsets[members[0]] : held.offsets[members[0] + 1]]
    return x[rows], y[rows]


def store(task):
    """The same task with all samples in tensors."""
    every, x, y, start = np.arange(task.clients), [], [], 0
    splits = {}
    for name in SPLITS:
        held = task.splits[name].hold(task.x, task.y, every)
        rows = len(held.split.order)
        splits[name] = Split(torch.arange(start, start + rows), held.split.offsets)
        x.append(held.x[:rows])
        y.append(held.y[:rows])
        start += rows
    return replace(task, x=torch.cat(x), y=torch.cat(y), splits=splits)


def lines(report):
    return [{name: line[name] for name in line if name not in ("seconds", "memory")} for line in report.history]


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_who_is_asked_with_it():
    task = make_task()
    for split in SPLITS:
        x, y, held, members = task.splits[split].hold(task.x, task.y, np.array([7, 2, 9]))
        for client, member in zip((7, 2, 9), members, strict=True):
            rows = held.order[held.offsets[member] : held.offsets[member + 1]]
            alone = samples_of(task, client, split)
            assert torch.equal(x[rows], alone[0])
            assert torch.equal(y[rows], alone[1])
            assert len(rows) == task.splits[split].sizes(np.array([client]))[0]


def test_some_clients_compute_as_all_do():
    train = make_task().splits["train"]
    even = np.flatnonzero(train.sizes(np.arange(CLIENTS)) % 4 == 0)[:1]  # alone, it has no short batch
    held = train.hold(torch.zeros(1, 20), torch.zeros(1, dtype=torch.int64), even).split
    assert len(even)
    assert held.has_short_batch(4)
    assert held.evenness(4) == train.evenness(4) < 1


def test_more_clients_leave_the_others_as_they_are():
    few, many = make_task(3), make_task(1000)
    for client in range(3):
        assert torch.equal(samples_of(few, client)[0], samples_of(many, client)[0])


def test_the_splits_of_a_client_have_no_sample_in_common():
    task = make_task(3)
    every = torch.cat([samples_of(task, 1, split)[0] for split in SPLITS])
    assert len(every.unique(dim=0)) == len(every) == Million(3, most=24).sizes[1]


def test_splits_are_as_large_as_those_of_stored_clients():
    made = Million(200)
    parts = np.split(np.arange(made.sizes.sum()), np.cumsum(made.sizes)[:-1])
    for name, split in cut_splits(parts, Cut((0.5, 0.2, 0.3)), None, None, 0).items():
        mine = made.task(shares=(0.5, 0.2, 0.3)).splits[name]
        np.testing.assert_array_equal(mine.offsets, split.offsets)


def test_the_law_is_as_it_says():
    made = Million(5000, seed=1)
    sizes = made.sizes
    assert sizes.min() == made.least
    assert sizes.max() == made.most
    assert np.mean(sizes >= 48) == pytest.approx((12 / 48) ** 1.5, abs=0.02)
    task = made.task()
    x, y, held, _ = task.splits["train"].hold(task.x, task.y, np.arange(5000))
    rows = len(held.order)
    assert (y[:rows].bincount(minlength=10) / rows).numpy() == pytest.approx(np.full(10, 0.1), abs=0.02)
    owner = np.repeat(np.arange(5000), np.diff(held.offsets))
    counts = np.zeros((5000, 10))
    np.add.at(counts, (owner, y[:rows].numpy()), 1)
    top = np.sort(counts, axis=1)[:, -3:].sum() / rows  # half among three, and 0.3 of the rest
    assert top > 0.6
    # Without the class and the client's own numbers, the noise is left.
    keys = torch.zeros(4000, dtype=torch.int64)
    x, y = made.draw(keys, torch.arange(4000))
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    noise = x - means[y]
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert noise.abs().max() < 4


def test_seeds_give_other_clients_and_models_apart():
    one, other = Recipe("million", clients=4).build(), Recipe("million", clients=4, partition_seed=1).build()
    assert one.fingerprint != other.fingerprint
    assert torch.equal(one.network.initial["head.weight"], other.network.initial["head.weight"])
    assert not torch.equal(samples_of(one, 0)[0][:2], samples_of(other, 0)[0][:2])
    assert Recipe("million", clients=4).build().fingerprint == one.fingerprint
    assert Recipe("million", clients=5).build().fingerprint != one.fingerprint


def test_a_million_clients_are_built_at_once():
    task = Recipe("million").build()
    assert task.clients == 1_000_000
    assert sum(split.order.numel() for split in task.splits.values()) == 0  # nothing is stored
    assert len(task.statistics.samples) == 1_000_000
    assert task.statistics.entropy is None  # labels are not drawn for it


def test_statistics_of_few_clients_are_whole():
    task = make_task()
    stored = store(task).statistics
    np.testing.assert_array_equal(task.statistics.counts, stored.counts)
    np.testing.assert_array_equal(task.statistics.samples, stored.samples)


def test_some_clients_keep_their_samples():
    task = make_task()
    some = task.of(np.array([8, 3]))
    assert torch.equal(samples_of(some, 1, "test")[0], samples_of(task, 3, "test")[0])
    assert some.fingerprint != task.of(np.array([3, 8])).fingerprint
    held_out = task.hold_out(0.25)
    assert (held_out.clients, held_out.unseen.clients) == (9, 3)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("ditto", "whole eager"), ("ditto", "chunk:2 traced"), ("fedavg+sam", "loop eager"),
        ("fedper@ifca:cluster_rounds=1", "whole traced"),
    ],
)  # fmt: skip
def test_a_run_is_that_of_stored_samples(method, plan):
    task = make_task()

    def run(one):
        engine = LocalEngine(device="cpu", strategy=plan, dtype=torch.float64)
        return federate(one, method, engine=engine, **RUN)

    np.testing.assert_equal(lines(run(task)), lines(run(store(task))))


def test_unseen_clients_are_welcomed_as_stored_ones():
    task = make_task()
    held_out = task.hold_out(0.25)
    stored = store(task).hold_out(0.25)
    engine = LocalEngine(device="cpu", strategy="whole eager", dtype=torch.float64)
    np.testing.assert_equal(
        lines(federate(held_out, "fedavg", engine=engine, **RUN)),
        lines(federate(stored, "fedavg", engine=engine, **RUN)),
    )


def test_programs_are_made_once_for_cohorts_of_one_size():
    engine = LocalEngine(device="cpu", strategy="whole traced")
    federate(make_task(40), "fedavg", engine=engine, rounds=6, cohort=5, evaluation="none")
    made = len(engine.programs._made)
    federate(make_task(40), "fedavg", engine=engine, rounds=12, cohort=5, evaluation="none")
    assert len(engine.programs._made) == made > 0


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_a_run_goes_on_where_it_stopped(tmp_path, memory):
    task = make_task()
    whole = federate(task, "ditto", memory=memory, folder=tmp_path / "whole", **RUN)

    def stop(line):
        if line.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(task, "ditto", memory=memory, folder=tmp_path / "run", on_round=stop, **RUN)
    again = federate(make_task(), "ditto", memory=memory, folder=tmp_path / "run", resume=True, **RUN)
    np.testing.assert_equal(lines(again), lines(whole))


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [{"partition": "iid"}, {"samples": 10}, {"central": "0.1"}, {"public": 0.1}, {"augment": "crop"}],
    ids=lambda chosen: next(iter(chosen)),
)
def test_what_does_not_apply_is_refused(chosen):
    with pytest.raises(TaskError, match=f"made for their clients, so {next(iter(chosen))} cannot be chosen"):
        Recipe("million", clients=4, **chosen).build()


def test_it_is_not_read_as_a_whole():
    with pytest.raises(DataError, match="made client by client"):
        datasets.load("million")
    with pytest.raises(TaskError, match="has never all of them"):
        make_task().with_public(torch.zeros(2, 20), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match="`clients` of million must be between 1 and"):
        Million(0)


def test_offsets_begin_at_nothing():
    assert find_offsets(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("method", ["fedamp", "fedora", "fedpac", "mocha", "fedfomo"])
def test_a_server_that_holds_something_of_every_pair_of_clients_is_refused(method, monkeypatch):
    monkeypatch.setattr(mixing, "_memory", lambda device: 3_000_000)  # bytes: for all models, not for all pairs
    with pytest.raises(EngineError, match=r"The server must hold .* clients.*: [\d,]+ bytes"):
        federate(make_task(1000), method, rounds=1, cohort=5, evaluation="none")
