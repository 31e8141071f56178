"""ABHS over rounds, by hand: cuts, what is averaged and with whom, what never leaves, and who comes later."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from samples import own

from atoll import Cohort, Task
from atoll.algorithms.abhs_rounds import ABHSRounds
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.local import Local
from atoll.kernel.errors import TaskError
from atoll.kernel.replies import Replies
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.client.blocks import blocks_of
from atoll.toolbox.server import depth


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64, sizes=(20, 3, 14, 9))


@dataclass(frozen=True, kw_only=True)
class Cut(ABHSRounds):
    """Has the cuts that it is given."""

    splits: str = "1021"

    def absorb(self, server, replies: Replies):
        server = super().absorb(server, replies)
        return replace(server, splits=torch.tensor([*map(int, self.splits)]))


def test_cuts_are_found_from_what_clients_told(task: Task) -> None:
    server = play(task, ABHSRounds(theta=0.5)).server
    assert server.known.all()
    u = depth.likeness(blocks_of(task.public_facts()), server.labels.value, server.blocks, 0.5)
    assert torch.equal(server.splits, depth.depth(u >= 0.5))
    counts = torch.stack([torch.bincount(own(task, k)[1], minlength=3) for k in range(4)])
    assert torch.equal(server.labels.value, counts.to(server.labels.value))


def test_a_block_is_averaged_over_those_who_share_it(task: Task) -> None:
    # Of the body clients 0, 2 and 3, of the head client 2 alone.
    report, alone = play(task, Cut()), personal_models(play(task, Local()))
    n = torch.tensor([len(own(task, k)[0]) for k in range(4)], dtype=torch.float64)
    bodies = torch.stack([model["body.1.weight"] for model in alone])
    share = n * torch.tensor([1.0, 0, 1, 1])
    body = torch.tensordot(share / share.sum(), bodies, dims=1)
    torch.testing.assert_close(report.server.w["body.1.weight"], body)
    torch.testing.assert_close(report.server.w["head.weight"], alone[2]["head.weight"])
    for k, model in enumerate(personal_models(report)):
        torch.testing.assert_close(model["body.1.weight"], body if k != 1 else bodies[1])
        torch.testing.assert_close(model["head.weight"], alone[k]["head.weight"])


def test_what_is_not_shared_does_not_leave(task: Task) -> None:
    sent = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(Cut):
        def local(self, w, cohort: Cohort):
            update = super().local(w, cohort)
            sent.update({int(k): update.send["delta"].client(row) for row, k in enumerate(cohort.clients)})
            return update

    play(task, Watched(), rounds=2)
    for k, split in enumerate(map(int, Cut().splits)):
        assert bool(sent[k]["body.1.weight"].any()) == (split > 0)
        assert bool(sent[k]["head.weight"].any()) == (split > 1)


@pytest.mark.limit("abhs-rounds")
def test_with_a_cut_below_the_head_it_is_fedper(task: Task) -> None:
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (Cut(splits="1111"), FedPer()))
    for a, b in zip(mine, theirs, strict=True):
        for name, leaf in b.items():
            torch.testing.assert_close(a[name], leaf, rtol=0, atol=1e-14)


@pytest.mark.limit("abhs-rounds")
@pytest.mark.parametrize(("theta", "other"), [(0.0, FedAvg()), (2.0, Local())], ids=["all", "none"])
def test_the_ends_are_fedavg_and_local(task: Task, theta: float, other) -> None:
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (ABHSRounds(theta=theta), other))
    assert all(torch.equal(a[name], leaf) for a, b in zip(mine, theirs, strict=True) for name, leaf in b.items())


def test_a_cut_stays_when_others_come(task: Task) -> None:
    seen: list[list[int]] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(ABHSRounds):
        def aggregate(self, server, replies: Replies):
            seen.append([int(s) if k else -1 for s, k in zip(server.splits, server.known, strict=True)])
            return super().aggregate(server, replies)

    report = play(task, Watched(theta=0.5), rounds=8, cohort=2, seed=3)
    assert (torch.tensor(seen[0]) < 0).any()
    for before, after in pairwise(seen):
        assert all(a == b for a, b in zip(before, after, strict=True) if a >= 0)
    assert report.server.known.sum() > 2


def test_what_clients_told_is_not_handed_on(task: Task) -> None:
    report = play(task, ABHSRounds(), rounds=2)
    sent = report.algorithm.state_for(report.server, torch.arange(1).numpy())
    assert sent.labels is None
    assert sent.blocks is None


def test_tasks_without_classes_are_refused() -> None:
    with pytest.raises(TaskError, match="samples of one class each"):
        play(quadratics(torch.ones(2, 1).double()), ABHSRounds())
