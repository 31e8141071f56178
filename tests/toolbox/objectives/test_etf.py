"""Fixed directions: what a simplex frame is, and where there is none."""

import pytest
import torch

from atoll.kernel.errors import ModelError
from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.etf import random_directions, simplex_etf


@pytest.mark.parametrize(("classes", "size"), [(2, 1), (2, 5), (10, 9), (10, 64), (7, 7)])
def test_its_cosines_are_those_of_a_simplex(classes, size) -> None:
    frame = simplex_etf(classes, size, generator(0, "frame"))
    eye = torch.eye(classes, dtype=torch.float64)
    torch.testing.assert_close(frame @ frame.T, classes / (classes - 1) * (eye - 1 / classes))
    torch.testing.assert_close(frame.norm(dim=1), torch.ones(classes, dtype=torch.float64))
    torch.testing.assert_close(frame.sum(0), torch.zeros(size, dtype=torch.float64))


def test_one_seed_makes_one_frame() -> None:
    first, again, other = (simplex_etf(5, 8, generator(seed, "frame")) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1


@pytest.mark.parametrize(("classes", "size"), [(10, 8), (1, 4)])
def test_a_frame_that_does_not_exist_is_refused(classes, size) -> None:
    with pytest.raises(ModelError, match=f"Got {classes} classes and {size} dimensions") as caught:
        simplex_etf(classes, size, generator(0, "frame"))
    assert caught.value.hint is not None


def test_random_directions_have_length_one_and_no_common_one() -> None:
    rows = random_directions(400, 16, generator(0, "rows"))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(400, dtype=torch.float64))
    assert rows.mean(0).norm() < 3 / 400**0.5  # its expected square is 1 / 400
    assert torch.equal(rows, random_directions(400, 16, generator(0, "rows")))
