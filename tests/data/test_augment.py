"""Augmented samples look different each time, and the same however clients are grouped."""

import colorsys
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from atoll import LocalEngine, Recipe, Task, federate
from atoll.compose import create
from atoll.data import datasets
from atoll.data.augment import OF_A_CROP, OF_COLOURS, CropAndFlip, RandomView, parse
from atoll.data.partition import Iid
from atoll.kernel.errors import TaskError, UnknownName
from atoll.kernel.randomness import Keys
from atoll.runtime.engines.plan import Plan


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


# -- random views ------------------------------------------------------------------------------------------------------

DRAWS = sum(OF_A_CROP) + OF_COLOURS
STILL = RandomView(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0, gray=0.0)


def images(samples: int, channels: int = 3, height: int = 9, width: int = 7) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    return 2 * torch.rand(samples, channels, height, width, generator=draw, dtype=torch.float64) - 1


def slow(rule: RandomView, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """One image, in plain loops; `draws` are its uniform numbers in the order the rule uses them."""
    area, shape, (down, right, flip, jitter, *strengths, gray) = draws[:10], draws[10:20], draws[20:]
    channels, height, width = image.shape
    high = wide = None
    for a, s in zip(area, shape, strict=True):
        pixels = height * width * (rule.scale[0] + (rule.scale[1] - rule.scale[0]) * a)
        ratio = math.exp(math.log(rule.ratio[0]) + (math.log(rule.ratio[1]) - math.log(rule.ratio[0])) * s)
        h, w = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 1 <= h <= height and 1 <= w <= width:
            high, wide = h, w
            break
    if high is None:
        high, wide = min(height, round(width / rule.ratio[0])), min(width, round(height * rule.ratio[1]))
    top, left = int(down * (height - high + 1)), int(right * (width - wide + 1))
    part = image[:, top : top + high, left : left + wide]
    seen = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = (max((i + 0.5) * n / size - 0.5, 0) for i, n, size in ((row, high, height), (column, wide, width)))
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, high - 1), min(x0 + 1, wide - 1)
            upper = part[:, y0, x0] * (1 - x + x0) + part[:, y0, x1] * (x - x0)
            lower = part[:, y1, x0] * (1 - x + x0) + part[:, y1, x1] * (x - x0)
            seen[:, row, width - 1 - column if flip < rule.flip else column] = upper * (1 - y + y0) + lower * (y - y0)
    v = seen * rule.std + rule.mean
    if jitter < rule.jitter:
        v = jittered(rule, v, [2 * strength - 1 for strength in strengths])
    if channels == 3 and gray < rule.gray:
        v[:] = 0.299 * v[0] + 0.587 * v[1] + 0.114 * v[2]
    return (v - rule.mean) / rule.std


def jittered(rule: RandomView, v: np.ndarray, strengths: list[float]) -> np.ndarray:
    brightness, contrast, saturation, hue = strengths
    v = np.clip(v * (1 + rule.brightness * brightness), 0, 1)
    middle = (0.299 * v[0] + 0.587 * v[1] + 0.114 * v[2]).mean() if len(v) == 3 else v.mean()
    factor = 1 + rule.contrast * contrast
    v = np.clip(factor * v + (1 - factor) * middle, 0, 1)
    if len(v) == 1:
        return v
    factor = 1 + rule.saturation * saturation
    v = np.clip(factor * v + (1 - factor) * (0.299 * v[0] + 0.587 * v[1] + 0.114 * v[2]), 0, 1)
    for row in range(v.shape[1]):
        for column in range(v.shape[2]):
            h, s, value = colorsys.rgb_to_hsv(*v[:, row, column])
            v[:, row, column] = colorsys.hsv_to_rgb((h + rule.hue * hue) % 1, s, value)
    return v


@pytest.mark.parametrize(
    "rule", [RandomView(), RandomView(jitter=1.0, hue=0.5, brightness=1.0, gray=0.5), RandomView(scale=(0.9, 1.0))]
)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 7), (4, 12)])
def test_views_are_those_of_a_slow_loop(rule: RandomView, channels: int, height: int, width: int) -> None:
    """Also where no draw of a crop fits, which is common for wide images of which nearly all is to be seen."""
    x, own = images(12, channels, height, width), keys(3)
    bits = own.bits(torch.arange(12 * DRAWS)).reshape(12, DRAWS)
    draws = ((bits >> 8).double() / 2**24).numpy()
    expected = np.stack([slow(rule, image, numbers) for image, numbers in zip(x.numpy(), draws, strict=True)])
    np.testing.assert_allclose(rule(x, own).numpy(), expected, rtol=0, atol=1e-12)


def test_images_are_changed_in_the_values_they_had_before_they_were_normalised() -> None:
    v = (images(6) + 1) / 2
    plain, scaled = RandomView(mean=0.0, std=1.0), RandomView(mean=0.2, std=3.0)
    torch.testing.assert_close(scaled((v - 0.2) / 3, keys(1)) * 3 + 0.2, plain(v, keys(1)), rtol=0, atol=1e-13)


def test_a_view_without_changes_is_the_image() -> None:
    x = images(5, width=9)
    assert torch.equal(STILL(x, keys(1)), x)
    nothing = replace(STILL, jitter=1.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    torch.testing.assert_close(nothing(x, keys(1)), x, rtol=0, atol=1e-15)
    weak = replace(STILL, jitter=1.0, brightness=1e-9, contrast=1e-9, saturation=1e-9, hue=1e-9)
    torch.testing.assert_close(weak(x, keys(1)), x, rtol=0, atol=1e-7)


def test_draws_have_the_shares_that_were_asked_for() -> None:
    """4,000 samples: shares within four standard errors; the visible area of a ramp tells how large a crop was."""
    samples, error = 4000, 4 * 0.5 / 4000**0.5
    ramp = torch.linspace(-1, 1, 16, dtype=torch.float64).expand(samples, 3, 16, 16)
    flipped = replace(STILL, flip=0.3)(ramp, keys(2))
    assert abs((flipped[:, 0, 0, 0] > 0).double().mean() - 0.3) < error
    coloured = images(1, width=9).expand(samples, 3, 9, 9)
    gray = replace(STILL, gray=0.2)(coloured, keys(2))
    assert abs((gray[:, 0] == gray[:, 1]).all((1, 2)).double().mean() - 0.2) < error
    jittered = replace(STILL, jitter=0.8)(coloured, keys(2))
    assert abs((jittered != coloured).any(3).any(2).any(1).double().mean() - 0.8) < error


def test_crops_have_the_areas_and_shapes_that_were_asked_for() -> None:
    """Ramps in both directions as two channels: their steps, in pixels, are the sides of the crop over those seen."""
    size, samples = 32, 600
    down = torch.arange(size, dtype=torch.float64)[:, None].expand(size, size)
    x = torch.stack([down, down.T, down]).expand(samples, 3, size, size)
    seen = replace(STILL, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3))(x, keys(4))
    middle = size // 2
    high = seen[:, 0, middle + 1, middle] - seen[:, 0, middle, middle]
    wide = seen[:, 1, middle, middle + 1] - seen[:, 1, middle, middle]
    area, ratio = high * wide, wide / high
    assert 0.18 < area.min() < 0.23  # sides are whole numbers
    assert 0.95 < area.max() <= 1
    assert 0.7 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.43
    assert seen.min() == 0  # some crops reach each edge
    assert seen.max() == size - 1
    assert abs(ratio.log().mean()) < 0.03


def test_samples_of_a_batch_differ_or_share_one_draw() -> None:
    x = images(1).expand(6, 3, 9, 7)
    single, shared = RandomView()(x, keys(1)), RandomView(per="batch")(x, keys(1))
    assert len({tuple(image.flatten().tolist()) for image in single}) == 6
    assert torch.equal(shared, shared[:1].expand_as(shared))
    assert not torch.equal(shared, RandomView(per="batch")(x, keys(2)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("rule", [RandomView(), RandomView(per="batch")])
def test_views_are_the_same_alone_in_a_cohort_and_traced(rule: RandomView, channels: int) -> None:
    many = torch.stack([images(4, channels), -images(4, channels), 0.5 * images(4, channels)])
    low, high = torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])

    def all_clients(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x, a, b: rule(x, Keys(a, b)))(x, low, high)

    together = all_clients(many, low, high)
    assert torch.equal(make_fx(all_clients)(many, low, high)(many, low, high), together)
    for client in range(3):
        assert torch.equal(together[client], rule(many[client], Keys(low[client], high[client])))


def test_single_precision_is_close_to_double() -> None:
    x = images(8)
    torch.testing.assert_close(RandomView()(x.float(), keys(1)), RandomView()(x, keys(1)).float(), rtol=0, atol=1e-5)


def test_a_step_gets_two_views_the_same_in_every_plan(make_task, make_cohort):
    still = make_task(shape=(3, 6, 6), dtype=torch.float64)
    moving = replace(still, augment=RandomView())

    def step(carry, batch, given):
        g, _, _ = batch.views(2).gradient(carry)
        return carry - 0.1 * g

    def trained(task, plan, clients=(0, 1, 2, 3)):
        cohort = make_cohort(task, plan, clients)
        after = cohort.scan(step, cohort.initial, epochs=2)
        return [after.client(row) for row in range(len(clients))]

    whole, traced = (trained(moving, Plan("whole", mode=mode)) for mode in ("eager", "traced"))
    alone = [trained(moving, Plan("loop"), [client])[0] for client in range(4)]
    for one, two, three, plain in zip(whole, traced, alone, trained(still, Plan("whole")), strict=True):
        assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], three[name]) for name in one)
        assert (one - plain).norm() > 1e-3


def test_random_views_by_name_suit_the_data_sets() -> None:
    """All images of `atoll.data.datasets` are (v - 0.5) / 0.5, so that views of them stay in -1 .. 1."""
    task = Recipe("digits", clients=3, augment="simclr").build()
    assert task.augment == RandomView()
    assert Recipe("digits", clients=3, augment="simclr-batch").build().augment == RandomView(per="batch")
    assert (task.x.min(), task.x.max()) == (-1, 1)
    seen = RandomView()(task.x, keys(1))
    assert seen.min() >= -1
    assert seen.max() <= 1
    assert (seen != task.x).any()


def test_views_that_cannot_be() -> None:
    for field, value in {
        "scale": (0.0, 1.0),
        "ratio": (2.0, 1.0),
        "flip": 1.5,
        "hue": 0.6,
        "std": 0.0,
        "per": "x",
    }.items():
        with pytest.raises(TaskError, match=f"`{field}` of RandomView must be"):
            RandomView(**{field: value})
    with pytest.raises(TaskError, match=r"of 1 or 3 channels. Got \(2, 8, 8\)"):
        RandomView().check((2, 8, 8))
