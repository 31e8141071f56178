"""Augmented samples look different each time, and the same however clients are grouped."""

import pytest
import torch
from torch.func import vmap

from atoll import LocalEngine, Recipe, Task, federate
from atoll.algorithms import create
from atoll.data import datasets
from atoll.data.augment import CropAndFlip, parse
from atoll.data.partition import Iid
from atoll.errors import TaskError, UnknownName
from atoll.randomness import Keys


def keys(number: int) -> Keys:
    return Keys(torch.tensor(number), torch.tensor(7))


IMAGES = torch.arange(2 * 1 * 5 * 6, dtype=torch.float64).reshape(2, 1, 5, 6)


def test_every_image_is_padded_cropped_and_flipped() -> None:
    """Against torch's own padding, over many draws, all of which occur."""
    rule, seen = CropAndFlip(padding=2), set()
    padded = torch.nn.functional.pad(IMAGES, (2, 2, 2, 2), mode="reflect")
    for draw in range(200):
        found = rule(IMAGES, keys(draw))
        for image, wide in zip(found, padded, strict=True):
            matches = [
                (down, right, flip)
                for down in range(5)
                for right in range(5)
                for flip in (False, True)
                for crop in [wide[:, down : down + 5, right : right + 6]]
                if torch.equal(image, crop.flip(2) if flip else crop)
            ]
            assert matches
            seen.update(matches)
    assert {flip for _, _, flip in seen} == {False, True}
    assert {down for down, _, _ in seen} == set(range(5))
    assert {right for _, right, _ in seen} == set(range(5))


def test_without_padding_and_flip_nothing_changes() -> None:
    assert torch.equal(CropAndFlip(padding=0, flip=False)(IMAGES, keys(1)), IMAGES)


def test_many_clients_at_once_are_as_one_by_one() -> None:
    rule, many = CropAndFlip(padding=1), torch.stack([IMAGES, 2 * IMAGES, -IMAGES])
    low, high = torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])
    together = vmap(lambda x, a, b: rule(x, Keys(a, b)))(many, low, high)
    for client in range(3):
        assert torch.equal(together[client], rule(many[client], Keys(low[client], high[client])))


@pytest.fixture
def task() -> Task:
    return Task.build(datasets.load("digits"), Iid(), clients=3, augment=CropAndFlip(padding=1))


def test_groupings_agree_and_training_changes(task: Task) -> None:
    servers = {
        strategy: federate(
            task,
            create("fedavg"),
            rounds=1,
            evaluation="none",
            engine=LocalEngine(strategy=strategy, dtype=torch.float64),
        ).server
        for strategy in ("whole", "loop", "chunk:2")
    }
    plain = Task.build(datasets.load("digits"), Iid(), clients=3)
    other = federate(
        plain, create("fedavg"), rounds=1, evaluation="none", engine=LocalEngine(dtype=torch.float64)
    ).server
    for name, leaf in servers["whole"].items():
        assert torch.equal(leaf, servers["loop"][name])
        assert torch.equal(leaf, servers["chunk:2"][name])
    assert (servers["whole"] - other).norm() > 0.01 * (other - plain.network.initial).norm()


def test_what_is_evaluated_is_not_changed(task: Task) -> None:
    """Without a step the model is the same, and so are its scores with and without augmentation."""
    still = Task.build(datasets.load("digits"), Iid(), clients=3)
    scores = [federate(one, create("fedavg:epochs=0"), rounds=1).scores() for one in (task, still)]
    assert (scores[0] == scores[1]).all()


def test_it_is_part_of_a_recipe() -> None:
    assert Recipe("digits", clients=3, augment="crop-flip").build().augment == CropAndFlip()
    assert Recipe("digits", clients=3).build().augment is None
    with pytest.raises(UnknownName, match="Unknown augmentation 'crop-flp'. Did you mean: crop-flip"):
        parse("crop-flp")
    with pytest.raises(TaskError, match=r"sides above 9. Got \(1, 8, 8\)"):
        Task.build(datasets.load("digits"), Iid(), clients=3, augment=CropAndFlip(padding=9))
