"""Rules, mixings and attacks beside those of byzfl 0.0.11, on the same replies.

It is given NumPy arrays, because it casts tensors to float32. Where the two differ, a test says how, and works out by
hand who is right.
"""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest
import torch

from atoll.kernel.algorithm import Arrival
from atoll.kernel.params import Stack
from atoll.kernel.randomness import generator
from atoll.protect.attacks import Scene, parse_attack
from atoll.protect.rules import NearestMixing, krum_scores, parse_rule
from atoll.protect.vectors import gram

FOUND = importlib.util.find_spec("byzfl")
pytestmark = pytest.mark.skipif(FOUND is None, reason="byzfl is not installed: `pip install --no-deps byzfl`")

SHAPES = {"conv": (3, 2), "bias": (5,), "scalar": ()}  # a reply is one vector, however many leaves it has
HAND = np.array([[0, 0], [1, 0], [0, 2], [3, 1], [50, -40]], dtype=np.float64)


@pytest.fixture(scope="module")
def byzfl():
    """The rules and attacks of byzfl, under a stand-in package: its own imports torchvision."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "byzfl"}
    parent = types.ModuleType("byzfl")
    parent.__path__ = list(FOUND.submodule_search_locations)
    sys.modules["byzfl"] = parent
    try:
        names = ("aggregators", "attacks")
        yield types.SimpleNamespace(**{name: importlib.import_module(f"byzfl.{name}") for name in names})
    finally:
        for name in [one for one in sys.modules if one.partition(".")[0] == "byzfl"]:
            del sys.modules[name]
        sys.modules.update(before)


def draw_rows(replies=15, hostile=3, seed=0):
    """Replies of one round, the last ones far away."""
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    rows = generator(seed, "rows").normal(size=(replies, size))
    rows[replies - hostile :] += 20
    return rows


def stack(rows):
    """The same replies as stacked leaves."""
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    leaves = {
        name: torch.from_numpy(part.copy()).reshape(len(rows), *shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }
    return Stack.of(**leaves)


def flatten(params):
    return torch.cat([params[name].reshape(-1) for name in SHAPES]).numpy()


def combine(words, rows):
    arrival = Arrival(np.arange(len(rows)), {"delta": stack(rows)}, torch.ones(len(rows)))
    return flatten(parse_rule(words).combine([arrival], None)["delta"])


RULES = {
    "mean": ("trimmed:0", lambda a: a.Average()),
    "median": ("median", lambda a: a.Median()),
    "trimmed": ("trimmed:3", lambda a: a.TrMean(f=3)),
    "meamed": ("meamed:3", lambda a: a.Meamed(f=3)),
    "geometric": ("geometric", lambda a: a.GeometricMedian(nu=1e-9, T=1000)),
    "centered-clip": ("centered-clip:4", lambda a: a.CenteredClipping(L=3, tau=4.0)),
}


@pytest.mark.parametrize("replies", [14, 15])
@pytest.mark.parametrize("name", RULES)
def test_rules_agree(byzfl, name, replies):
    ours, theirs = RULES[name]
    rows = draw_rows(replies)
    expected = theirs(byzfl.aggregators)(rows.copy())
    assert combine(ours, rows) == pytest.approx(expected, abs=1e-12 if name != "geometric" else 1e-8)


def test_norm_bounds_agree_with_the_mean_of_clipped_replies(byzfl):
    rows = draw_rows()
    a = byzfl.aggregators
    expected = a.Average()(a.Clipping(c=3.0)(rows.copy()))
    assert combine("norm-bound:3", rows) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["mean", "median", "trimmed", "meamed", "geometric", "centered-clip"])
def test_rules_agree_after_mixing_with_nearest_neighbours(byzfl, name):
    ours, theirs = RULES[name]
    rows, a = draw_rows(), byzfl.aggregators
    expected = theirs(a)(a.NNM(f=3)(rows.copy()))
    # 12 mixed rows are the same, so the geometric median is a row; both come near it and guard a division by 0
    assert combine(f"nnm:3+{ours}", rows) == pytest.approx(expected, abs=1e-12 if name != "geometric" else 1e-6)


def test_mixed_rows_agree_one_by_one(byzfl):
    rows = draw_rows()
    shares = NearestMixing(3).matrix(gram([torch.from_numpy(rows)], centred=True), None)
    assert (shares.numpy() @ rows) == pytest.approx(byzfl.aggregators.NNM(f=3)(rows.copy()), abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])  # 15 replies: the last group is smaller where the size does not divide them
@pytest.mark.parametrize("name", ["mean", "median", "geometric"])
def test_rules_agree_after_dealing_into_groups(byzfl, monkeypatch, name, size):
    ours, theirs = RULES[name]
    rows, a = draw_rows(), byzfl.aggregators
    monkeypatch.setattr(np.random, "permutation", lambda x: x)  # in the order of clients, as ours without a server
    expected = theirs(a)(a.Bucketing(s=size)(rows.copy()))
    assert combine(f"bucket:{size}+{ours}", rows) == pytest.approx(expected, abs=1e-12 if name != "geometric" else 1e-8)


@pytest.mark.parametrize("hostile", [1, 3, 5])
def test_krum_agrees_once_both_count_the_same_neighbours(byzfl, hostile):
    """Ours with F counts K - F - 2 nearest others, byzfl's with F + 1 as many."""
    for seed in range(10):  # one neighbour more or less changes the choice in some of these
        rows = draw_rows(hostile=hostile, seed=seed)
        assert combine(f"krum:{hostile}", rows) == pytest.approx(byzfl.aggregators.Krum(f=hostile + 1)(rows.copy()))


def test_krum_counts_the_neighbours_that_its_paper_counts(byzfl):
    """They differ: Blanchard et al. (NeurIPS 2017, section 4) sum over the K - F - 2 closest, byzfl over K - F - 1.

    By hand, K = 5 and F = 1, so 2 neighbours. Squared distances from (0,0): 1, 4, 10; from (1,0): 1, 5, 5; so their
    scores are 5 and 6, and (0,0) is chosen. With a third neighbour they are 15 and 11, and byzfl chooses (1,0).
    """
    scores = krum_scores(gram([torch.from_numpy(HAND)]), 1)
    assert scores.tolist() == pytest.approx([5, 6, 9, 15, 7891])
    arrival = Arrival(np.arange(5), {"delta": Stack.of(w=torch.from_numpy(HAND))}, torch.ones(5))
    assert parse_rule("krum:1").combine([arrival], None)["delta"]["w"].tolist() == [0, 0]
    assert byzfl.aggregators.Krum(f=1)(HAND.copy()).tolist() == [1, 0]


@pytest.mark.parametrize("hostile", [1, 3])
def test_multi_krum_agrees_where_one_neighbour_more_changes_no_choice(byzfl, hostile):
    """The same difference as in Krum; with hostile replies this far away the K - F best are the honest ones in both."""
    rows = draw_rows(hostile=hostile)
    expected = rows[: 15 - hostile].mean(0)
    assert byzfl.aggregators.MultiKrum(f=hostile)(rows.copy()) == pytest.approx(expected)
    assert combine(f"multi-krum:{hostile}", rows) == pytest.approx(expected)


def test_mixing_then_krum_agrees_once_both_count_the_same_neighbours(byzfl):
    rows, a = draw_rows(), byzfl.aggregators
    expected = a.Krum(f=4)(a.NNM(f=3)(rows.copy()))
    assert combine("nnm:3+krum:3", rows) == pytest.approx(expected, abs=1e-12)


def test_the_geometric_median_of_byzfl_stops_far_from_it_by_default(byzfl):
    """They differ: byzfl takes 3 steps from 0. By hand, the point of least total distance to (0,0), (2,0), (3,2), (0,1)
    is where the diagonals of this convex quadrangle cross, (6/7, 4/7)."""
    rows = np.array([[0, 0], [2, 0], [3, 2], [0, 1]], dtype=np.float64)
    exact = np.array([6 / 7, 4 / 7])
    arrival = Arrival(np.arange(4), {"delta": Stack.of(w=torch.from_numpy(rows))}, torch.ones(4))
    ours = parse_rule("geometric").combine([arrival], None)["delta"]["w"].numpy()
    theirs = byzfl.aggregators.GeometricMedian()(rows.copy())
    assert ours == pytest.approx(exact, abs=1e-6)
    assert np.abs(theirs - exact).max() > 0.05


# -- attacks -----------------------------------------------------------------------------------------------------------


def forge(words, rows, **more):
    """What one attacker sends beside these honest replies."""
    own = Arrival(np.array([len(rows)]), {"delta": stack(rows[:1])}, torch.ones(1))
    scene = Scene(
        {"delta": stack(rows)}, own, **{"replies": len(rows) + 1, "hostile": 1, "seed": 0, "round": 0, **more}
    )
    return flatten(parse_attack(words).replies(scene)["delta"].client(0))


def test_attacks_of_the_wire_agree(byzfl):
    rows, a = draw_rows(hostile=0), byzfl.attacks
    assert forge("sign-flip", rows) == pytest.approx(a.SignFlipping()(rows), abs=1e-14)
    assert forge("ipm:factor=2", rows) == pytest.approx(a.InnerProductManipulation(tau=2.0)(rows), abs=1e-14)


def test_little_is_enough_goes_the_other_way_and_as_far_as_its_paper_says(byzfl):
    """They differ: byzfl adds tau = 1.5 standard deviations. Baruch et al. (NeurIPS 2019, algorithm 3) subtract, and
    choose how many by the majority that must hide them; the same number with the sign turned is the same reply."""
    rows, a = draw_rows(hostile=0), byzfl.attacks
    assert forge("alie:factor=-1.5", rows) == pytest.approx(a.ALittleIsEnough(tau=1.5)(rows), abs=1e-12)
    assert forge("alie:factor=1.5", rows) == pytest.approx(a.ALittleIsEnough(tau=-1.5)(rows), abs=1e-12)


def test_mimic_copies_an_honest_reply_and_chooses_it(byzfl):
    """They differ: byzfl copies the client that it is told. Karimireddy et al. (ICLR 2022) copy the one furthest along
    the direction of largest variance; here that is the third, by hand the only one off the line."""
    rows = np.zeros((6, 12))
    rows[:, 0] = [0.1, -0.1, 0, 0.1, -0.1, 0]
    rows[2, 5] = 3
    assert forge("mimic", rows).tolist() == byzfl.attacks.Mimic(epsilon=2)(rows).tolist()


def test_noise_has_the_same_mean_and_spread(byzfl, monkeypatch):
    """Both draw from generators of their own, so only the distribution can be compared: 4 standard errors."""
    rows = np.zeros((2, 40_000))
    monkeypatch.setattr(np.random, "normal", generator(1, "noise").normal)
    theirs = byzfl.attacks.Gaussian(mu=0.0, sigma=2.0)(rows)
    own = Arrival(np.array([2]), {"delta": Stack.of(w=torch.from_numpy(rows[:1]))}, torch.ones(1))
    scene = Scene({"delta": Stack.of(w=torch.from_numpy(rows))}, own, 3, 1, 0, 0)
    ours = parse_attack("gaussian:std=2").replies(scene)["delta"]["w"][0].numpy()
    for draws in (ours, theirs):
        assert abs(draws.mean()) < 4 * 2 / len(draws) ** 0.5
        assert abs(draws.std() - 2) < 4 * 2 / (2 * len(draws)) ** 0.5


def test_replies_without_end_are_not_finite_in_both(byzfl):
    """Theirs is infinity, ours what is not a number; a server that looks for finite numbers loses either."""
    rows = draw_rows(hostile=0)
    assert not np.isfinite(byzfl.attacks.Inf()(rows)).any()
    assert not np.isfinite(forge("not-finite", rows)).any()
