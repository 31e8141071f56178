"""Lanes: who trains where and when, and that it changes nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, federate
from atoll.compose import create
from atoll.kernel.params import flatten
from atoll.kernel.randomness import generator
from atoll.runtime.engines.lanes import Lanes, choose_width

SKEWED = (40, 3, 17, 1, 9, 25, 2, 2)


def lanes_of(seed: int, clients: int, width: int) -> Lanes:
    return Lanes(generator(seed, "steps").geometric(0.1, clients) - 1, width)


@pytest.mark.parametrize("width", [1, 2, 5, 30])
@pytest.mark.parametrize("seed", range(5))
def test_every_client_takes_all_of_its_steps_in_their_order(seed: int, width: int) -> None:
    lanes = lanes_of(seed, 20, width)
    client, step = lanes.table
    ends = {(tick, int(one)) for tick, turn in lanes.turns(torch.device("cpu")).items() for one in turn.ended}
    for one in range(20):
        took = [
            (tick, int(step[tick, lane]))
            for lane in range(width)
            for tick in range(lanes.ticks)
            if client[tick, lane] == one and one in lanes.queues[lane] and tick < busy_until(lanes, lane)
        ]
        assert [number for _, number in took] == list(range(lanes.steps[one]))
        if took:
            assert np.diff([tick for tick, _ in took]).tolist() == [1] * (len(took) - 1)
            assert (took[-1][0] + 1, one) in ends
    assert len(ends) == np.count_nonzero(lanes.steps)


def busy_until(lanes: Lanes, lane: int) -> int:
    return int(lanes.steps[lanes.queues[lane]].sum())


def test_who_ends_makes_place_for_the_next() -> None:
    lanes = Lanes(np.array([2, 5, 3, 1]), 2)
    assert lanes.queues == [[1, 3], [2, 0]]
    turns = {tick: [part.tolist() for part in turn] for tick, turn in sorted(lanes.turns(torch.device("cpu")).items())}
    assert turns == {3: [[1], [2], [0]], 5: [[0, 1], [1, 0], [3]], 6: [[0], [3], []]}
    assert (lanes.ticks, lanes.busy(5), lanes.busy(99)) == (6, 10, 11)


def test_nobody_has_anything_to_do() -> None:
    lanes = Lanes(np.zeros(3, dtype=np.int64), 2)
    assert (lanes.ticks, lanes.turns(torch.device("cpu"))) == (0, {})


@pytest.mark.parametrize("seed", range(5))
def test_lanes_are_busy_until_the_end(seed: int) -> None:
    """Longest first: the last lane ends at most the shortest clients' steps after the mean."""
    steps = generator(seed, "steps").geometric(0.05, 200)
    lanes = Lanes(steps, choose_width(200, steps.mean() / steps.max()))
    assert lanes.busy(lanes.ticks) == steps.sum()
    assert steps.sum() > 0.9 * lanes.ticks * lanes.width


@pytest.mark.parametrize(
    ("clients", "evenness", "width"), [(100, 1.0, 100), (100, 0.22, 22), (3, 0.05, 1), (1, 1.0, 1)]
)
def test_equal_clients_have_a_lane_each(clients: int, evenness: float, width: int) -> None:
    assert choose_width(clients, evenness) == width


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("model", [None, with_dropout, with_batchnorm])
@pytest.mark.parametrize("method", ["ditto", "scaffold", "perfedavg", "apfl"])
def test_in_lanes_clients_do_the_same(make_task, method: str, model) -> None:
    """Unequal clients, of whom some drop out and some have little more than one batch, bit for bit."""
    options = {} if model is None else {"model": model}
    task = make_task(*options.values(), sizes=SKEWED, shares=(0.8, 0.1, 0.1), dtype=torch.float64)

    def run(strategy: str):
        engine = LocalEngine(device="cpu", dtype=torch.float64, strategy=strategy)
        report = federate(task, create(method), rounds=3, drop=0.3, engine=engine)
        return [*flatten(report.server)[0], *flatten(report.population.memory.save(round=3))[0]], report.scores()

    (alone, scores), (whole, same) = run("loop eager"), run("whole traced")
    assert all(torch.equal(one, other) for one, other in zip(alone, whole, strict=True))
    np.testing.assert_array_equal(scores, same)
