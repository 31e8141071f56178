"""Mixtures of Gaussians: their start, their density, and what is drawn from them."""

import pytest
import torch
from torch.distributions import Independent, Normal

from atoll import Params, Stack
from atoll.kernel.randomness import generator
from atoll.toolbox.server.mixtures import choose_spread, draw_from, fit, log_densities, maximise, variance_within


def rows_of(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(generator(0, "rows").normal(size=(count, 3)))
    same = torch.nn.functional.one_hot(torch.arange(count) % 2, 2).double()
    return rows, same


def test_components_start_at_different_rows_of_the_class() -> None:
    rows, same = rows_of()
    start = choose_spread(rows, same, torch.from_numpy(generator(0, "start").random((5, 2))))
    for label in range(2):
        mine = rows[same[:, label] > 0]
        assert all((mine == center).all(1).any() for center in start[label])
        assert len({tuple(center.tolist()) for center in start[label]}) == 5


def test_a_start_is_drawn_by_the_squared_distance() -> None:
    rows = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)  # from 0: chances 0, 1 and 9 of 10
    same = torch.ones(3, 1, dtype=torch.float64)
    for level, expected in ((0.05, 1.0), (0.15, 3.0), (0.95, 3.0)):
        start = choose_spread(rows, same, torch.tensor([[0.0], [level]], dtype=torch.float64))
        assert start[0, :, 0].tolist() == [0.0, expected]


def test_densities_are_those_of_normal_distributions() -> None:
    draw = generator(1, "density")
    mean, variance = torch.from_numpy(draw.normal(size=(2, 4, 3))), torch.from_numpy(draw.random((2, 4, 3))) + 0.1
    weight = torch.from_numpy(draw.random((2, 4)))
    live = torch.tensor([[True] * 4, [True, True, False, False]])
    rows, _ = rows_of(7)
    found = log_densities(Params.of(weight=weight, mean=mean, variance=variance), live, rows)
    theirs = Independent(Normal(mean, variance.sqrt()), 1).log_prob(rows[:, None, None]) + weight.log()
    torch.testing.assert_close(found[:, live], theirs[:, live], rtol=1e-10, atol=1e-10)
    assert (found[:, ~live] == -torch.inf).all()


def test_maximised_by_hand() -> None:
    rows = torch.tensor([[0.0], [2.0], [6.0]], dtype=torch.float64)
    share = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)[:, None]
    found = maximise(rows, share, torch.tensor([3.0], dtype=torch.float64), nu=0.5)
    assert found["weight"].tolist() == [[0.5, 0.5]]
    first, second = 2 / 3, 14 / 3
    assert found["mean"][0, :, 0].tolist() == pytest.approx([first, second])
    scatter = first**2 + 0.5 * (2 - first) ** 2, 0.5 * (2 - second) ** 2 + (6 - second) ** 2
    assert found["variance"][0, :, 0].tolist() == pytest.approx([(one + 1.5) / 2 for one in scatter])


def test_classes_and_features_without_variety_stay_finite() -> None:
    rows = torch.ones(30, 2, dtype=torch.float64)
    same = torch.nn.functional.one_hot(torch.zeros(30).long(), 3).double()  # classes 1 and 2 have nobody
    found = fit(rows, same, torch.from_numpy(generator(0, "start").random((3, 3))), iterations=5, nu=1.0)
    assert all(torch.isfinite(leaf).all() for leaf in found.values())
    assert float(found["weight"][0].sum()) == pytest.approx(1)
    assert variance_within(rows, same).tolist() == [0, 0]


def test_as_many_rows_are_drawn_as_were_there() -> None:
    mean = torch.tensor([[[[0.0], [100.0]], [[-50.0], [0.0]]], [[[7.0], [0.0]], [[9.0], [0.0]]]]).double()
    mixtures = Stack.of(
        count=torch.tensor([[2000.0, 3.0], [0.0, 1.0]]).double(),
        weight=torch.tensor([[[0.25, 0.75], [1.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]]).double(),
        mean=mean,
        variance=torch.full_like(mean, 0.01),
    )
    rows, classes = draw_from(mixtures, generator(0, "draw"))
    assert torch.bincount(classes).tolist() == [2000, 4]
    first = rows[classes == 0, 0]
    assert float((first > 50).double().mean()) == pytest.approx(0.75, abs=0.04)
    low = first[first < 50]
    assert float(low.std()) == pytest.approx(0.1, abs=0.01)
    assert rows[classes == 1, 0].round(decimals=0).tolist() == [-50, -50, -50, 9]
