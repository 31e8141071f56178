"""Outliers: what becomes of a sample, by hand, and that it depends on nothing but the sample and its draws."""

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.toolbox.objectives.outliers import (
    CROPPED,
    DRAWS,
    ERASED,
    IMAGE_KINDS,
    OTHER_KINDS,
    blur,
    box,
    destroy_images,
    destroy_values,
)

SIDE = 8
IMAGE = torch.arange(SIDE * SIDE, dtype=torch.float64).reshape(1, 1, SIDE, SIDE)
PICTURE = IMAGE[0, 0].numpy()


def made(kind: str, *draws: float, upright: bool = True, image: Tensor = IMAGE) -> Tensor:
    """One image, destroyed in one way."""
    first = (IMAGE_KINDS.index(kind) + 0.5) / len(IMAGE_KINDS)
    more = [*draws, *[0.0] * (4 - len(draws))]
    return destroy_images(image, torch.tensor([[first, 0.0 if upright else 0.9, *more]], dtype=image.dtype))


def test_halves_are_swapped() -> None:
    np.testing.assert_array_equal(made("swap")[0, 0], np.concatenate([PICTURE[4:], PICTURE[:4]]))
    turned = np.concatenate([PICTURE[:, 4:], PICTURE[:, :4]], axis=1)
    np.testing.assert_array_equal(made("swap", upright=False)[0, 0], turned)


def test_a_band_covers_another_one() -> None:
    expected = PICTURE.copy()
    expected[0:4] = PICTURE[2:6]  # from 2, the nearest that is far enough, to 0
    np.testing.assert_array_equal(made("copy")[0, 0], expected)
    expected = PICTURE.copy()
    expected[:, 4:8] = PICTURE[:, 1:5]
    np.testing.assert_array_equal(made("copy", 0.4, 0.99, 0.9, upright=False)[0, 0], expected)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("top", [0, 3])
def test_two_blocks_are_turned(turns: int, top: int) -> None:
    expected = PICTURE.copy()
    for left in (0, 4):
        expected[top : top + 4, left : left + 4] = np.rot90(PICTURE[top : top + 4, left : left + 4], k=turns)
    found = made("rotate", (top + 0.5) / 5, (turns - 0.5) / 3)[0, 0]
    np.testing.assert_array_equal(found, expected)


def test_a_part_takes_the_darkest_value() -> None:
    image = IMAGE - 5
    found = made("erase", 0.0, 0.5, 0.0, 0.0, image=image)[0, 0].numpy()
    side = round(SIDE * ERASED[0] ** 0.5)
    expected = image[0, 0].numpy().copy()
    expected[:side, :side] = -5
    np.testing.assert_array_equal(found, expected)


def test_a_part_is_enlarged() -> None:
    side = round(SIDE * CROPPED[0] ** 0.5)  # 3 of 8
    places = np.floor((np.arange(SIDE) + 0.5) * side / SIDE).astype(int)
    np.testing.assert_array_equal(made("crop", 0.0, 0.5)[0, 0], PICTURE[np.ix_(places, places)])
    last = SIDE - side + places
    np.testing.assert_array_equal(made("crop", 0.0, 0.5, 0.99, 0.99)[0, 0], PICTURE[np.ix_(last, last)])


def test_a_blur_is_the_mean_over_a_window() -> None:
    found = made("blur", 0.3, 0.4)[0, 0].numpy()  # 2 up and down, 1 to the sides
    assert found[4, 4] == pytest.approx(PICTURE[2:7, 3:6].mean())
    edge = np.concatenate([PICTURE[[2, 1, 0, 1, 2]]])[:, [1, 0, 1]]
    assert found[0, 0] == pytest.approx(edge.mean())
    flat = torch.full((1, 2, SIDE, SIDE), 3.0, dtype=torch.float64)
    always = torch.ones(1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(blur(flat, always, *torch.full((4, 1, 1, 1), 0.99).double()), flat)


@pytest.mark.parametrize("areas", [CROPPED, ERASED])
def test_parts_lie_inside_and_are_as_large_as_they_should_be(areas: tuple[float, float]) -> None:
    draws = torch.from_numpy(np.random.default_rng(0).uniform(size=(4, 500, 1, 1)))
    top, left, high, wide = box(28, 32, areas, *draws)
    assert ((top >= 0) & (left >= 0) & (top + high <= 28) & (left + wide <= 32)).all()
    share = high * wide / (28 * 32)
    assert areas[0] - 0.03 < float(share.min()) < float(share.max()) < areas[1] + 0.03


def test_every_kind_changes_an_image_and_none_leaves_its_range() -> None:
    draw = np.random.default_rng(1)
    x = torch.from_numpy(draw.uniform(-1, 1, size=(600, 3, 9, 7)))
    found = destroy_images(x, torch.from_numpy(draw.uniform(size=(600, DRAWS))))
    assert ((found - x).abs().amax((1, 2, 3)) > 0.01).all()
    assert (found.amax((1, 2, 3)) <= x.amax((1, 2, 3)) + 1e-12).all()
    assert (found.amin((1, 2, 3)) >= x.amin((1, 2, 3)) - 1e-12).all()


def test_an_outlier_does_not_depend_on_its_neighbours() -> None:
    draw = np.random.default_rng(2)
    x, draws = torch.from_numpy(draw.normal(size=(12, 1, 8, 8))), torch.from_numpy(draw.uniform(size=(12, DRAWS)))
    each = torch.cat([destroy_images(x[k : k + 1], draws[k : k + 1]) for k in range(12)])
    torch.testing.assert_close(destroy_images(x, draws), each, rtol=0, atol=1e-12)


def test_values_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(3, 1).double()
    kinds = (torch.arange(3).double()[:, None] + 0.5) / len(OTHER_KINDS)
    first = torch.tensor([0.4, 0.1, 0.3, 0.2]).double().expand(3, -1)
    second, third = torch.tensor([0.1, 0.6, 0.2, 0.9]).double().expand(3, -1), torch.zeros(3, 4).double()
    shuffled, erased, noisy = destroy_values(x, torch.cat([kinds, first, second, third], 1))
    assert shuffled.tolist() == [2, 4, 3, 1]
    assert erased.tolist() == [0, 2, 0, 4]
    wanted = x[0] + 7.5**0.5 * (-2 * torch.log(1 - second[0])).sqrt()
    torch.testing.assert_close(noisy, wanted)


def test_noise_is_normal_and_as_large_as_the_sample() -> None:
    draw = np.random.default_rng(3)
    x = torch.full((1, 50_000), 2.0).double()
    draws = torch.from_numpy(draw.uniform(size=(1, 1 + 3 * 50_000)))
    draws[0, 0] = 0.9
    added = destroy_values(x, draws) - x
    assert float(added.mean()) == pytest.approx(0, abs=0.04)
    assert float(added.std()) == pytest.approx(2, abs=0.03)
