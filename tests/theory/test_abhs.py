"""Adaptive base-head splitting: where it is another method, what is known in closed form, and what it is for."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll import Batch, LocalEngine, Recipe, Task, Training, federate
from atoll.algorithms.abhs import ABHS
from atoll.algorithms.abhs_local import ABHSLocal
from atoll.algorithms.abhs_rounds import ABHSRounds
from atoll.algorithms.local import Local
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client.blocks import BlockFeatures, blocks_of
from atoll.toolbox.server import prototypes
from atoll.toolbox.server.splitting import TEMPERATURE, student_gradient

CLASSES, FEATURES = 3, 4
plain = partial(ABHS, base="initial", epochs=2, student_epochs=0, personal_epochs=0)


def rows(samples: int, labels: tuple[int, ...], seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    draw = generator(seed, "abhs")
    return torch.from_numpy(draw.normal(size=(samples, FEATURES)) + shift), torch.from_numpy(
        draw.choice(labels, samples)
    )


def clients(*data: tuple[Tensor, Tensor]) -> Task:
    with default_generator(0):
        model = MLP((FEATURES,), CLASSES, hidden=(6, 5)).double()
    training = Training(lr=0.1, batch_size=8)
    named = {str(k): one for k, one in enumerate(data)}
    return Task.of_clients(named, model, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))


def assert_equal(left: list[Params], right: list[Params]) -> None:
    assert all(torch.equal(a[name], leaf) for a, b in zip(left, right, strict=True) for name, leaf in b.items())


@pytest.mark.limit("abhs")
def test_abhs_that_shares_nothing_is_local(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, momentum=0.5, weight_decay=0.01)
    mine, theirs = (personal_models(play(task, one)) for one in (plain(theta=2.0), Local(epochs=2)))
    assert_equal(mine, theirs)


@pytest.mark.limit("abhs-local")
def test_abhs_local_that_shares_nothing_is_local(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, momentum=0.5, weight_decay=0.01)
    alone = ABHSLocal(theta=2.0, epochs=2, personal_epochs=0)
    mine, theirs = (personal_models(play(task, one)) for one in (alone, Local(epochs=2)))
    assert_equal(mine, theirs)


@pytest.mark.limit("abhs")
def test_abhs_of_identical_clients_shares_everything_and_learns_what_each_learns() -> None:
    # However strict the threshold: u = 1 in every block. Their models are the same, if their batches are.
    task = clients(*[rows(8, (0, 1, 2), seed=0)] * 3)
    report = play(task, plain(theta=1.0 - 1e-9, hold=0.0, personal_epochs=2))
    assert report.server.splits.tolist() == [3, 3, 3]
    for mine, theirs in zip(personal_models(report), personal_models(play(task, Local(epochs=2))), strict=True):
        for name, leaf in theirs.items():
            torch.testing.assert_close(mine[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.limit("abhs")
def test_abhs_that_shares_everything_is_one_shot_averaging(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, momentum=0.5)
    mine, theirs = (
        personal_models(play(task, one)) for one in (plain(theta=0.0, hold=0.0, personal="none"), OneShotAvg(epochs=2))
    )
    assert_equal(mine, theirs)


@pytest.mark.limit("abhs-local")
def test_abhs_local_of_identical_clients_averages_nothing_away() -> None:
    # They make the same model, if their batches are the same: then an average is any of them.
    task = clients(*[rows(8, (0, 1, 2), seed=0)] * 3)
    report = play(task, ABHSLocal(theta=0.0, epochs=3))
    assert report.server.splits.tolist() == [3, 3, 3]
    torch.testing.assert_close(report.server.alike, torch.ones(3).double())
    alone = personal_models(play(task, Local(epochs=3)))[0]
    for name, leaf in alone.items():
        torch.testing.assert_close(report.server.found.one[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.closed_form("abhs", "abhs-local")
def test_a_student_that_is_its_only_teacher_has_nothing_to_learn() -> None:
    task = clients(rows(8, (0, 1, 2), seed=0))
    blocks, network, w = blocks_of(task.public_facts()), task.network.through(BlockFeatures), task.network.initial
    batch = Batch(task.x, task.x, None, None, network, Variant())
    said = batch.features(w)
    wanted = torch.cat([said, (blocks.split_by_block(said)[-1] / TEMPERATURE).softmax(1), torch.zeros(8, CLASSES)], 1)
    g, _, loss = student_gradient(blocks, 2, 1.0, 0.0, w, replace(batch, y=wanted))
    assert abs(float(loss)) < 1e-12
    assert float(g.norm()) < 1e-12


@pytest.mark.closed_form("abhs", "abhs-local")
def test_weights_by_volume_and_confidence_give_the_likeliest_common_direction() -> None:
    # Clients draw unit features around one direction with different concentrations kappa_k: its likelihood is
    # sum_k kappa_k <p, sum_i z_ki>, which is largest at the direction of sum_k kappa_k sum_i z_ki.
    noise = torch.from_numpy(generator(0, "von Mises").normal(size=(10, 1, 40, 6)))
    spread = torch.linspace(0.2, 1.0, 10).double()[:, None, None, None]
    z = prototypes.unit(torch.ones(6).double() + spread * noise)
    sums, counts = z.sum(2), torch.full((10, 1), 40.0).double()
    lengths = sums.norm(dim=-1) / counts
    kappa = prototypes.concentration(lengths, 6)
    kappa = torch.minimum(kappa, torch.quantile(kappa, 0.9))
    expected = prototypes.unit((kappa[..., None] * sums).sum(0))
    omega = prototypes.weights(counts, confidence=prototypes.confidence(sums, counts))
    torch.testing.assert_close(prototypes.fuse(sums, omega), expected, rtol=0, atol=1e-12)


@pytest.mark.closed_form("abhs", "abhs-local")
def test_one_client_alone_answers_with_its_own_directions() -> None:
    task = clients(rows(60, (0, 1, 2), seed=0))
    report = play(task, ABHSLocal(theta=2.0, epochs=2, shrinkage=0.0, personal="none", answer="prototypes"))
    shared = report.algorithm.shared(report.server)
    batch = Batch(task.x, task.y, None, None, task.network, Variant(train=False))
    z = prototypes.unit(batch.features(report.server.found.models.client(0)))
    means = torch.stack([z[task.y == c].mean(0) for c in range(CLASSES)])
    expected = (z @ prototypes.unit(means).T).argmax(1)
    assert torch.equal(shared.answer(shared.model, shared.beside, batch).argmax(1), expected)


@pytest.mark.purpose("abhs")
def test_clients_that_are_alike_share_more_blocks() -> None:
    # Three like each other, one with another class and samples from elsewhere.
    alike = [rows(40, (0, 1), seed=k) for k in range(3)]
    task = clients(*alike, rows(40, (2,), seed=3, shift=5.0))
    server = play(task, plain(theta=0.5)).server
    assert server.splits[:3].min() > server.splits[3]
    assert server.splits[3] == 0
    closer = play(clients(*alike), plain(theta=0.5)).server
    assert bool((closer.alike.mean(0) > server.alike.mean(0)).all())


@pytest.mark.purpose("abhs-local")
def test_clients_that_differ_by_degrees_share_some_blocks_but_not_all() -> None:
    def split(*data: tuple[Tensor, Tensor]) -> list[int]:
        splits: list[int] = play(clients(*data), ABHSLocal(epochs=20)).server.splits.tolist()
        return splits

    alike = [rows(60, (0, 1, 2), seed=k) for k in range(3)]
    assert split(*[alike[0]] * 3) == [3, 3, 3]
    assert set(split(*alike)) <= {1, 2}
    assert min(split(*alike)) >= max(split(*[rows(60, (k,), seed=k) for k in range(3)]))


@pytest.mark.purpose("abhs", "abhs-rounds")
def test_alike_clients_are_better_for_sharing() -> None:
    # On iid clients sharing is better than not sharing, than the public model, and than averaging once.
    engine = LocalEngine()  # traces each step once for all runs
    shared, alone, base, averaged, rounds, local = (
        np.mean([federate(digits(seed), one, rounds=r, seed=seed, engine=engine).scores() for seed in range(3)])
        for one, r in (
            (ABHS(), 1), (ABHS(theta=2.0), 1), (ABHS(theta=0.0, epochs=0, student_epochs=0), 1),
            (OneShotAvg(epochs=15), 1), (ABHSRounds(), 8), (Local(), 8),
        )
    )  # fmt: skip
    assert shared > max(alone, base, averaged) + 0.01
    assert rounds > local + 0.1


def digits(seed: int) -> Task:
    return Recipe(partition="iid", clients=10, samples=1000, public=0.08, seed=seed).build()
