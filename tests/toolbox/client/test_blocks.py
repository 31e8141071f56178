"""Blocks of networks: their leaves, what they say, and training above some of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import own
from torch import Tensor, nn

from atoll import Batch, Cohort, Params, Stack, Task
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Network, Variant
from atoll.kernel.randomness import default_generator
from atoll.models import BodyAndHead, build
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import (
    BlockFeatures,
    HeldBelow,
    blocks_of,
    train_above,
    with_block_features,
)

CLASSES = 3


def three_blocks() -> nn.Module:
    """Two layers with BatchNorm and a head."""
    return BodyAndHead(
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()),
        nn.Linear(5, CLASSES),
    )


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(three_blocks, dtype=torch.float64, momentum=0.5, weight_decay=0.1)


def of_model(name: str, shape: tuple[int, ...]) -> Task:
    with default_generator(0):
        x, model = torch.randn(2, *shape), build(name, shape, 10)
    return Task.of_clients({"0": (x, torch.zeros(2).long())}, model, classes=10, shares=(1.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("name", "shape", "widths"),
    [
        ("linear", (4,), (10,)),
        ("mlp", (4,), (128, 128, 10)),
        ("lenet", (3, 32, 32), (6, 16, 120, 84, 10)),
        ("simple-cnn", (3, 32, 32), (32, 64, 128, 10)),
        ("resnet18", (3, 8, 8), (64, 64, 128, 256, 512, 10)),
    ],
)
def test_the_blocks_of_models(name: str, shape: tuple[int, ...], widths: tuple[int, ...]) -> None:
    task = of_model(name, shape)
    blocks = blocks_of(task.public_facts())
    assert blocks.widths == widths
    assert len(blocks) == len(widths)
    assert blocks.above(0) == blocks.below(len(blocks)) == frozenset(task.network.initial)
    assert sum(map(len, blocks.leaves)) == len(task.network.initial)  # no leaf in two
    assert blocks.leaves[-1] == task.network.layout.head
    assert not blocks.below(0)
    assert not blocks.above(len(blocks))


def test_a_norm_belongs_to_the_layer_before_it(task: Task) -> None:
    blocks = blocks_of(task.public_facts())
    assert {name.rpartition(".")[0] for name in blocks.leaves[0]} == {"body.0", "body.1"}
    assert {name.rpartition(".")[0] for name in blocks.leaves[1]} == {"body.3", "body.4"}


def test_blocks_say_their_outputs_averaged_over_places() -> None:
    task = of_model("lenet", (3, 32, 32))
    module, x = task.network._original, task.x
    network, variant = task.network.through(BlockFeatures), Variant(train=False)
    batch = Batch(x, task.y, None, None, network, variant)
    said = blocks_of(task.public_facts()).split_by_block(batch.features(task.network.initial))
    first = module.body[:3](x)
    torch.testing.assert_close(said[0], first.mean((2, 3)))
    torch.testing.assert_close(said[3], module.features(x))
    torch.testing.assert_close(said[4], module(x))
    torch.testing.assert_close(batch.outputs(task.network.initial), module(x))  # it still answers as it did


def test_a_network_without_a_body_in_parts_is_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)

    data = {"0": (torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(2).long())}
    task = Task.of_clients(data, Other(), classes=CLASSES, shares=(1.0, 0.0, 0.0))
    with pytest.raises(ModelError, match="must be a `body`") as caught:
        blocks_of(task.public_facts())
    assert "BodyAndHead" in str(caught.value)


# -- training above a split --------------------------------------------------------------------------------------------


def trained(cohort: Cohort, start: Stack, names: frozenset[str]) -> Stack:
    return sgd(cohort, start, epochs=2, only=names)


@pytest.mark.parametrize("splits", [(2, 2, 2, 2), (0, 1, 3, 2)])
def test_the_base_stays_bit_for_bit(task: Task, make_cohort: Callable[..., Cohort], splits: tuple[int, ...]) -> None:
    # Also under weight decay and momentum, and with the statistics of its BatchNorm.
    cohort, blocks = make_cohort(task), blocks_of(task.public_facts())
    start = cohort.stacked(cohort.initial)
    w = train_above(cohort, blocks, start, torch.tensor(splits), trained)
    assert list(w) == list(start)
    for k, split in enumerate(splits):
        for name in blocks.below(split):
            assert torch.equal(w.client(k)[name], task.network.initial[name])
        for name in (f"{layer}.weight" for layer in ("body.0", "body.3", "head")):  # a weight decays at least
            assert torch.equal(w.client(k)[name], task.network.initial[name]) == (name in blocks.below(split))


def test_each_client_trains_as_it_would_alone(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    cohort, blocks, splits = make_cohort(task), blocks_of(task.public_facts()), torch.tensor([1, 0, 2, 1])
    w = train_above(cohort, blocks, cohort.stacked(cohort.initial), splits, trained)
    assert set(cohort.notes) == {"loss/main"}
    assert bool((cohort.notes["loss/main"] > 0).all())
    for k in range(4):
        alone = make_cohort(task, clients=[k])
        one = train_above(alone, blocks, alone.stacked(alone.initial), splits[k : k + 1], trained).client(0)
        for name, leaf in w.client(k).items():
            torch.testing.assert_close(leaf, one[name], rtol=0, atol=1e-14)


def test_who_shares_nothing_trains_as_usual_and_who_shares_all_not_at_all(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    cohort, blocks = make_cohort(task), blocks_of(task.public_facts())
    start, plain = cohort.stacked(cohort.initial), sgd(cohort, cohort.initial, epochs=2)
    everything = train_above(cohort, blocks, start, torch.zeros(4).long(), trained)
    nothing = train_above(cohort, blocks, start, torch.full((4,), 3), trained)
    assert all(torch.equal(everything[name], leaf) for name, leaf in plain.items())
    assert all(torch.equal(nothing[name], leaf) for name, leaf in start.items())


def test_training_above_is_training_on_what_the_base_says(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    # Because the base works as when deployed, what it says can be computed once and trained on as samples.
    cohort, split = make_cohort(task), 1
    w = train_above(
        cohort, blocks_of(task.public_facts()), cohort.stacked(cohort.initial), torch.full((4,), split), trained
    )
    module = task.network._original
    with torch.no_grad():
        cached = module.eval().body[:3](task.x)
    above_only = replace(task, x=cached, network=Network(BodyAndHead(module.body[3:], module.head)))
    alone = make_cohort(above_only)
    expected = sgd(alone, alone.initial, epochs=2)
    for k in range(4):
        mine = dict(
            zip(
                expected,
                (w.client(k)[name] for name in w if name in blocks_of(task.public_facts()).above(split)),
                strict=True,
            )
        )
        for name, leaf in expected.client(k).items():
            torch.testing.assert_close(mine[name], leaf, rtol=0, atol=1e-12)


def test_held_parts_are_always_deployed(task: Task) -> None:
    for split, held in ((0, 0), (1, 3), (2, 6), (3, 6)):
        network = HeldBelow(task.network._original, split).train()
        assert [part.training for part in network.body] == [False] * held + [True] * (6 - held)
        assert network.head.training == (split < 3)
        assert f"split={split}" in str(network)
    task.network._original.train()


def test_talking_clients_say_the_same_as_their_blocks(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    def step(seen: Params, batch: Batch, w: Params) -> Params:
        real = batch.features(w) if batch.mask is None else batch.features(w) * batch.mask[:, None]
        return Params.of(sum=seen["sum"] + real.sum(0))

    start = Params.of(sum=torch.zeros(6 + 5 + CLASSES))
    found = with_block_features(make_cohort(task)).scan(
        step, start, given=task.network.initial, shuffle=False, train=False
    )
    module = task.network._original.eval()
    with torch.no_grad():
        x = own(task, 2)[0]
        expected = torch.cat([module.body[:3](x), module.body(x), module(x)], 1).sum(0)
    torch.testing.assert_close(found["sum"][2], expected)
