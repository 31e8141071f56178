"""Queues, synthetic negatives and pools, against plain Python."""

from collections import deque
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll import Task
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.runtime.engines.plan import Plan
from atoll.toolbox.objectives.contrastive import ContrastSet, supervised_contrast
from atoll.toolbox.objectives.negatives import (
    MIXING,
    PAIRS,
    absent_classes,
    draw_rows,
    empty_queue,
    enqueue,
    filled_queue,
    mix_negatives,
    queue_set,
    queues,
)

Y = torch.tensor([0, 1, 0, 2, 1, 0])


def normal(*shape: int, purpose: str = "z") -> Tensor:
    return torch.from_numpy(generator(0, purpose).normal(size=shape))


def uniform(*shape: int) -> Tensor:
    return torch.from_numpy(generator(0, "draws").uniform(size=shape))


def unit(rows: Tensor) -> Tensor:
    return F.normalize(rows, dim=-1)


def float64(queue: Params) -> Params:
    return queue.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)


# -- queue -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("room", [10, 7, 2])
def test_first_in_is_first_out(room) -> None:
    queue = float64(empty_queue(10, 3)) | Params.of(room=torch.tensor(room))
    wanted: deque[tuple[Tensor, int, int]] = deque(maxlen=room)
    for step, real in enumerate([4, 4, 0, 1, 3, 4, 2]):
        z, y = normal(4, 3, purpose=f"step {step}"), torch.arange(4) + 10 * step
        mask = (torch.arange(4) >= 4 - real).double()  # padding comes first, to make it hard
        queue = enqueue(queue, z, y, mask)
        wanted.extend((row, label, step) for row, label, is_real in zip(unit(z), y, mask, strict=True) if is_real)
        oldest_first = (torch.arange(room) + queue["next"]) % room
        used = oldest_first[queue["age"][oldest_first] >= 0]
        assert len(used) == len(wanted)
        torch.testing.assert_close(queue["features"][used], torch.stack([row for row, _, _ in wanted]))
        assert queue["labels"][used].tolist() == [int(label) for _, label, _ in wanted]
        assert queue["age"][used].tolist() == [step - since for _, _, since in wanted]
        assert not queue["features"][room:].any()


def test_slots_that_hold_nothing_do_not_count() -> None:
    z = normal(6, 3)
    queue = enqueue(float64(empty_queue(10, 3)), normal(4, 3, purpose="old"), torch.arange(4))
    for mass in (None, 1.0):
        idle = supervised_contrast(z, Y, extra=[queue_set(queue, mass=mass)])
        torch.testing.assert_close(idle, supervised_contrast(z, Y))
        scaled = supervised_contrast(z, Y, extra=[queue_set(queue, filling="scaled", mass=mass)])
        four = ContrastSet(queue["features"][:4], torch.arange(4), weight=0.4, mass=mass)
        torch.testing.assert_close(scaled, supervised_contrast(z, Y, extra=[four]))
        full = enqueue(queue, normal(6, 3, purpose="new"), torch.arange(6))
        both = ContrastSet(full["features"], full["labels"], torch.tensor([0.99] * 4 + [1.0] * 6).double(), mass=mass)
        found = supervised_contrast(z, Y, extra=[queue_set(full, mass=mass)])
        torch.testing.assert_close(found, supervised_contrast(z, Y, extra=[both]))
        assert (found > idle)[Y < 2].all()


def test_a_label_aware_queue_never_pushes_from_its_own_label() -> None:
    z, own = normal(6, 3), enqueue(float64(empty_queue(6, 3)), normal(6, 3, purpose="old"), torch.zeros(6).long())
    y = torch.zeros_like(Y)
    plain = supervised_contrast(z, y)
    torch.testing.assert_close(supervised_contrast(z, y, extra=[queue_set(own)]), plain)
    assert (supervised_contrast(z, y, extra=[queue_set(own, same="negatives")]) > plain).all()
    # As positives they are pulled at: the loss is the mean over the batch and the queue together.
    pulled = supervised_contrast(z, y, extra=[queue_set(own, decay=1.0, same="positives", mass=None)])
    union, label = torch.cat([z, own["features"]]), torch.zeros(12).long()
    torch.testing.assert_close(pulled, supervised_contrast(union, label)[:6])


def test_a_filled_queue_is_used_at_once_and_overwritten_from_the_first() -> None:
    rows = unit(normal(5, 3, purpose="random"))
    queue = filled_queue(rows)
    z = normal(6, 3)
    blind = supervised_contrast(z, Y, extra=[queue_set(queue, decay=1.0, same="negatives", mass=None)])
    torch.testing.assert_close(blind, supervised_contrast(z, Y, extra=[ContrastSet(rows)]))
    later = enqueue(queue, z[:2], Y[:2])
    torch.testing.assert_close(later["features"], torch.cat([unit(z[:2]), rows[2:]]))


def test_no_slope_flows_into_a_queue() -> None:
    z = normal(6, 3).requires_grad_()
    assert not enqueue(float64(empty_queue(8, 3)), z, Y)["features"].requires_grad


# -- in a scan -------------------------------------------------------------------------------------------------------
def remember(carry: dict[str, Params], batch: Batch, w: Params) -> dict[str, Params]:
    """A step that uses everything in this file."""
    z, queue = batch.features(w), carry["queue"]
    extra = [queue_set(queue, filling="scaled"), absent_classes(queue["features"][:3], carry["seen"]["counts"])]
    mixed = mix_negatives(z, batch.y, batch.mask, batch.uniform("mix", len(z), MIXING), extra=extra[:1])
    here = draw_rows(batch.uniform("pool", len(queue["features"])), 2)
    losses = supervised_contrast(
        z, batch.y, batch.mask, temperature=0.5, extra=[*extra, mixed, ContrastSet(queue["features"][here])]
    )
    seen = Params.of(loss=carry["seen"]["loss"] + batch.mean(losses), counts=carry["seen"]["counts"])
    return {"queue": enqueue(queue, z, batch.y, batch.mask), "seen": seen}


@pytest.mark.parametrize("plan", [Plan("loop", mode="traced"), Plan("whole"), Plan("whole", mode="traced")])
def test_all_plans_remember_the_same(make_task: Callable[..., Task], make_cohort: Callable[..., Cohort], plan) -> None:
    task = make_task(sizes=(20, 5, 1, 12), dtype=torch.float64)

    def scan(plan: Plan) -> dict[str, Stack]:
        cohort = make_cohort(task, plan)
        start = {
            "queue": queues(cohort, 6, capacity=8, share=0.5),
            "seen": Params.of(loss=0.0, counts=torch.tensor([3.0, 0.0, 2.0])),
        }
        end: dict[str, Stack] = cohort.scan(remember, start, given=cohort.initial, epochs=2, draws=True)
        return end

    found, wanted = scan(plan), scan(Plan("loop"))
    assert wanted["seen"]["loss"][0] > 0.1
    assert (wanted["queue"]["age"] >= 0).sum(1).tolist() == [8, 2, 1, 6]  # of 20, 5, 1 and 12 samples
    for part in ("queue", "seen"):
        for name, leaf in wanted[part].items():
            torch.testing.assert_close(found[part][name], leaf)


# -- synthetic negatives ---------------------------------------------------------------------------------------------
def test_mixtures_lie_between_the_hardest_negatives_and_the_anchor() -> None:
    z, queue = unit(normal(6, 4)), ContrastSet(normal(3, 4, purpose="more"), torch.tensor([0, 5, 1]))
    draws = uniform(6, MIXING)
    found = mix_negatives(z, Y, None, draws, extra=[queue])
    items, labels = torch.cat([z, unit(queue.features)]), torch.cat([Y, queue.labels])
    for i in range(6):
        negatives = sorted((n for n, c in zip(items, labels, strict=True) if c != Y[i]), key=lambda n: -float(n @ z[i]))

        def pick(draw: Tensor, negatives: list[Tensor] = negatives) -> Tensor:
            return negatives[int(draw * len(negatives))]

        for j in range(PAIRS):
            first, second, u = draws[i, j], draws[i, PAIRS + j], draws[i, 2 * PAIRS + j]
            wanted = unit(u * pick(first) + (1 - u) * pick(second))
            torch.testing.assert_close(unit(found.features[i, j]), wanted)
        for j in range(MIXING - 3 * PAIRS - 8):
            v = draws[i, 3 * PAIRS + 8 + j] / 2
            wanted = unit(v * z[i] + (1 - v) * pick(draws[i, 3 * PAIRS + j]))
            torch.testing.assert_close(unit(found.features[i, PAIRS + j]), wanted)


def test_only_the_hardest_are_mixed(monkeypatch) -> None:
    monkeypatch.setattr("atoll.toolbox.objectives.negatives.HARDEST", 1)
    z = normal(6, 4)
    found = unit(mix_negatives(z, Y, None, uniform(6, MIXING), share=0.5).features[:, :PAIRS])
    s = (unit(z) @ unit(z).T).masked_fill(Y[:, None] == Y, -torch.inf)
    torch.testing.assert_close(found, unit(z)[s.argmax(1)][:, None].expand_as(found))


def test_anchors_without_negatives_and_padding_get_no_mixtures() -> None:
    z, draws = normal(6, 4).requires_grad_(), torch.full((6, MIXING), 0.999, dtype=torch.float64)
    alone = mix_negatives(z, torch.zeros_like(Y), None, draws)
    assert not alone.weight.any()
    assert not alone.features.requires_grad
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1]).double()  # those of label 0 stay
    assert not mix_negatives(z, Y, mask, draws).weight[mask > 0].any()
    mask = torch.tensor([1.0, 1, 1, 0, 0, 0]).double()
    torch.testing.assert_close(
        mix_negatives(z, Y, mask, draws).features[:3], mix_negatives(z[:3], Y[:3], None, draws[:3]).features
    )
    weight = mix_negatives(z, Y, None, draws, share=torch.tensor(0.25)).weight
    assert torch.equal(weight, torch.full((6, 24), 0.25, dtype=torch.float64))


# -- pools -----------------------------------------------------------------------------------------------------------
def test_rows_are_drawn_once_and_all_alike() -> None:
    rows = uniform(2000, 5)
    seen = torch.zeros(5)
    for row in rows:
        here = draw_rows(row, 2)
        assert len(set(here.tolist())) == 2
        seen[here] += 1
    assert (seen - 800).abs().max() < 4 * (2000 * 0.4 * 0.6) ** 0.5


def test_means_of_classes_that_a_client_has_are_left_out() -> None:
    z, means = normal(6, 4), normal(5, 4, purpose="means")
    counts = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0])
    found = supervised_contrast(z, Y, extra=[absent_classes(means, counts)])
    torch.testing.assert_close(found, supervised_contrast(z, Y, extra=[ContrastSet(means[3:])]))
