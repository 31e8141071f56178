"""FedMF: a round by hand, rows gathered or whole, keyed negatives without the leak, and what a message gives away."""

import numpy as np
import pytest
import torch

from atoll import Task, federate
from atoll.algorithms.fedmf import FedMF
from atoll.data.datasets import Dataset
from atoll.data.partition import Natural
from atoll.data.ratings import list_interactions
from atoll.kernel.errors import PayloadError, TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Arrival, Replies
from atoll.runtime.engines import LocalEngine
from atoll.toolbox.client.items import Touched, draw_negatives, drop_repeats

ITEMS, USERS = 12, 7


def make(permutation=None, *, leak=False, seed=0) -> Task:
    """Make users with 5 to 9 of 12 items each."""
    draw = np.random.Generator(np.random.Philox(3))
    rows = [
        (user, item, time) for user in range(USERS) for time, item in enumerate(draw.permutation(ITEMS)[: 5 + user % 5])
    ]
    user, item, time = np.array(rows).T
    item = item if permutation is None else permutation[item]
    fields = list_interactions("tiny", "a test", user, item, time, fewest=(5, 1), leak=leak)
    return Task.build(Dataset(**fields), Natural(), seed=seed)


class Notes:
    """What clients did, noted by a method that is FedMF otherwise."""

    def __init__(self):
        self.touched, self.updates = [], []


def watched(notes: Notes, **values):
    class Watched(FedMF):
        def local(self, w, cohort):
            notes.touched.append((cohort.clients, Touched(cohort, self.negatives, self.epochs)))
            update = super().local(w, cohort)
            notes.updates.append((cohort.clients, w, update))
            return update

    return Watched(**values)


def items_of(task: Task, split: str) -> list[set[int]]:
    part = task.splits[split]
    return [set(task.y[part.order[a:b]].tolist()) for a, b in zip(part.offsets, part.offsets[1:], strict=False)]


def run(task, method, rounds, **more):
    engine = LocalEngine(strategy="whole eager", dtype=torch.float64)
    return federate(task, method, rounds=rounds, progress=False, engine=engine, **more)


def test_negatives_are_all_items_but_those_trained_on():
    task, notes = make(), Notes()
    run(task, watched(notes), 60)
    train, held = items_of(task, "train"), [items_of(task, split) for split in ("val", "test")]
    drawn = [set() for _ in range(task.clients)]
    for clients, touched in notes.touched:
        for row, client in enumerate(clients):
            places = touched.drawn[0][row]
            found = touched.ids[row][places[: len(train[client])]].flatten().tolist()
            drawn[client] |= set(found)
    for client in range(task.clients):
        assert drawn[client] == set(range(task.classes)) - train[client]  # held-out items are among them
        assert all(one[client] <= drawn[client] for one in held)


def test_the_published_leak_spares_held_out_items():
    task, notes = make(leak=True), Notes()
    run(task, watched(notes), 30)
    held = [a | b for a, b in zip(items_of(task, "val"), items_of(task, "test"), strict=True)]
    for clients, touched in notes.touched:
        for row, client in enumerate(clients):
            assert not held[client] & set(touched.ids[row].tolist())


def test_negatives_are_uniform():
    task, notes = make(), Notes()
    run(task, watched(notes, negatives=50), 40)
    train = items_of(task, "train")
    counts = np.zeros(ITEMS)
    for clients, touched in notes.touched:
        for row, client in enumerate(clients):
            if client == 0:
                places = touched.drawn[0][row][: len(train[0])].flatten()
                counts += np.bincount(touched.ids[row][places].numpy(), minlength=ITEMS)
    others = counts[counts > 0]
    assert len(others) == task.classes - len(train[0])
    assert abs(others / others.sum() * len(others) - 1).max() < 0.08


def test_one_step_by_hand_and_untouched_rows_stay():
    task, notes = make(), Notes()
    method = watched(notes, l2=0.0, rate=0.5)
    report = run(task, method, 2)
    w = notes.updates[-1][1]
    second = [update for _, start, update in notes.updates if start is w]
    sums = {name: torch.zeros_like(leaf) for name, leaf in report.server.items()}
    total = torch.zeros(task.classes, dtype=torch.float64)
    assert sum(len(update.keep["head.vector"]) for update in second) == USERS
    for update in second:
        rows = update.send["rows"]
        real = rows["row"] < task.classes
        total.index_add_(0, rows["row"][real].long(), rows["count"][real].to(total.dtype))
        for name in sums:
            share = rows["count"][real].reshape(-1, *[1] * (sums[name].ndim - 1))
            sums[name].index_add_(0, rows["row"][real].long(), rows[name][real] * share)
    for name, start in w.items():
        moved = sums[name] / total.clamp(min=1).reshape(-1, *[1] * (start.ndim - 1)).to(start.dtype)
        torch.testing.assert_close(report.server[name], start + moved)
    assert (report.server["body.bias"][total == 0] == w["body.bias"][total == 0]).all()


def test_a_message_gives_the_vector_away_after_one_step():
    """The documented leak: delta q / delta b is p, though p is never sent."""
    task, notes = make(), Notes()
    report = run(task, watched(notes, l2=0.0), 3)
    before = {}
    for clients, _, update in notes.updates:
        rows = update.send["rows"]
        assert "head.vector" not in rows
        for row, client in enumerate(clients.tolist()):
            moved = rows["body.bias"][row].abs() > 0
            told = rows["body.vector"][row][moved] / rows["body.bias"][row][moved][:, None]
            if client in before:
                torch.testing.assert_close(told, before[client].expand_as(told), rtol=1e-3, atol=1e-5)
            before[client] = update.keep["head.vector"][row]
    assert {message.field for message in report.ledger.messages() if message.direction == "up"} == {"rows"}
    assert {message.kind for message in report.ledger.messages() if message.direction == "up"} == {"rows"}


def test_permuted_items_are_permuted_rows():
    """Other numbers of the same items change nothing but the numbers, where the draws are the same items."""
    known = torch.tensor([[1, 4, 7, 12], [0, 12, 12, 12]])
    shuffled = drop_repeats(torch.tensor([[7, 1, 4, 4], [0, 12, 0, 12]]), 12)
    assert torch.equal(shuffled, known)


def test_order_of_rows_does_not_matter():
    w = Params({"q": torch.zeros(4, 2, dtype=torch.float64)})
    rows = torch.tensor([[0, 2, 4], [2, 3, 4]])
    values = torch.arange(12, dtype=torch.float64).reshape(2, 3, 2)
    count = torch.tensor([[1.0, 2.0, 0.0], [4.0, 1.0, 0.0]], dtype=torch.float64)

    def mean(order, *, over_all=False):
        fields = {"rows": Stack.of(row=rows[:, order], count=count[:, order], q=values[:, order])}
        arrival = Arrival(np.arange(2), fields, torch.ones(2, dtype=torch.float64))
        return Replies([arrival], keep=True).mean_rows("rows", w, over_all=over_all)["q"]

    expected = torch.stack([values[0, 0], (2 * values[0, 1] + 4 * values[1, 0]) / 6, values[1, 1]])
    assert torch.equal(mean([0, 1, 2])[[0, 2, 3]], expected)
    assert torch.equal(mean([2, 1, 0]), mean([0, 1, 2]))
    assert torch.equal(mean([0, 1, 2], over_all=True)[2], (2 * values[0, 1] + 4 * values[1, 0]) / 2)
    assert (mean([0, 1, 2])[1] == 0).all()


def test_bad_rows_are_refused():
    w = Params({"q": torch.zeros(4, 2)})
    fields = {"rows": Stack.of(row=torch.tensor([[5]]), count=torch.ones(1, 1), q=torch.zeros(1, 1, 2))}
    with pytest.raises(PayloadError, match="Numbers of rows must be from 0 to 4"):
        Replies([Arrival(np.arange(1), fields, torch.ones(1))], keep=True).mean_rows("rows", w)
    short = {"rows": Stack.of(row=torch.tensor([[1]]), count=torch.ones(1, 1), q=torch.zeros(1, 2, 2))}
    with pytest.raises(PayloadError, match="count and values for each"):
        Replies([Arrival(np.arange(1), short, torch.ones(1))], keep=True).mean_rows("rows", w)


def test_learns_who_likes_what():
    """Two tastes, by item number: each user's last item is of its own half."""
    draw = np.random.Generator(np.random.Philox(0))
    rows = [(u, i + 10 * (u % 2), t) for u in range(20) for t, i in enumerate(draw.permutation(10)[:8])]
    fields = list_interactions("tastes", "a test", *np.array(rows).T, fewest=(5, 1))
    task = Task.build(Dataset(**fields), Natural())
    report = run(task, FedMF(l2=0.0), 60, metric="mrr")
    assert report.summary()["macro"] > 0.45  # of 12 or 13 candidates, chance is 0.25


def test_other_tasks_are_refused():
    from atoll.data import datasets, partition

    task = Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)
    with pytest.raises(TaskError, match="FedMF recommends items to users. digits is no such task"):
        run(task, "fedmf", 1)


def test_a_user_that_knows_everything_draws_nothing():
    class One:
        task = type("Facts", (), {"classes": 3, "seed": 0})
        ids, round, width, device = torch.arange(1), 0, 4, torch.device("cpu")

        def __len__(self):
            return 1

    drawn = draw_negatives(One(), torch.tensor([[0, 1, 2, 3]]), 2, 0)
    assert (drawn == 3).all()
