"""A one-shot training is scored after some of its epochs, and is the same training."""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LocalEngine, Recipe, Report, Task, Training, federate
from atoll.kernel.errors import CohortError

BANKED = "fafi-two-stage:epochs=5,teacher_epochs=1,profile=faithful,stage_share=0.4"
QUEUED = "fafi-queue:epochs=5,queue=16,queue_momentum=0.9"
SCHEDULED = "fafi-etf:epochs=5,falling=True"


@pytest.fixture(scope="module")
def task() -> Task:
    training = Training(lr=0.05, momentum=0.9, clip=1.0, batch_size=8)
    return Recipe(
        "digits", partition="dirichlet:0.5", clients=3, model="mlp:16", samples=200, central="0.2", public=0.1,
        augment="crop", training=training,
    ).build()  # fmt: skip


@functools.cache
def engine_of(strategy: str) -> LocalEngine:
    """One engine for all runs: it traces each step once."""
    return LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy=strategy)


def run(task: Task, method: str, curve: Sequence[int] = (), strategy: str = "loop", **more: Any) -> Report:
    return federate(task, method, rounds=1, curve=tuple(curve), engine=engine_of(strategy), progress=False, **more)


def models(report: Report) -> dict[str, torch.Tensor]:
    return dict(report.server.answer.models)


def same(one: Report, other: Report) -> bool:
    mine, theirs = models(one), models(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def shown(report: Report) -> list[tuple[int, float, list[float]]]:
    """The points: epoch, score on the server's test set, scores of clients."""
    return [
        (point["epoch"], point["evaluation"]["central"]["score"], point["evaluation"]["personal"]["test"]["clients"])
        for point in report.history[0]["curve"]
    ]


@pytest.mark.parametrize("strategy", ["loop", "whole"])
@pytest.mark.parametrize("method", [BANKED, QUEUED, SCHEDULED, "ensemble:epochs=5", "fedov:epochs=5"])
def test_a_curve_leaves_the_training_as_it_is(task: Task, method: str, strategy: str) -> None:
    plain, drawn = run(task, method, strategy=strategy), run(task, method, (1, 2, 4), strategy)
    assert same(plain, drawn)
    (before,), (after,) = plain.history, drawn.history
    assert [epoch for epoch, *_ in shown(drawn)] == [1, 2, 4]
    for name in ("bytes", "gradients", "loss", "replied"):
        assert before[name] == after[name]
    assert before["evaluation"]["central"] == after["evaluation"]["central"]


@pytest.mark.parametrize("method", ["fafi", "ensemble"])
def test_a_point_without_a_schedule_is_a_shorter_training(task: Task, method: str) -> None:
    points = shown(run(task, f"{method}:epochs=5", (2, 3, 5)))
    for epoch, central, clients in points:
        (alone,) = run(task, f"{method}:epochs={epoch}").history
        assert alone["evaluation"]["central"]["score"] == central
        assert alone["evaluation"]["personal"]["test"]["clients"] == pytest.approx(clients, nan_ok=True)


def test_a_point_of_a_schedule_is_of_the_long_training(task: Task) -> None:
    servers: dict[int, Any] = {}

    def on_point(point: dict[str, Any], server: Any) -> None:
        servers[point["epoch"]] = dict(server.answer.models)

    long = run(task, SCHEDULED, (2, 5), on_point=on_point)
    short = models(run(task, SCHEDULED.replace("epochs=5", "epochs=2")))
    assert all(torch.equal(servers[5][name], leaf) for name, leaf in models(long).items())
    assert any(not torch.equal(servers[2][name], leaf) for name, leaf in short.items())  # its step size fell to 0


def test_an_interrupted_run_goes_on_and_draws_the_same_curve(task: Task, tmp_path: Path) -> None:
    whole, stop = run(task, QUEUED, (1, 3, 4)), threading.Event()

    def on_point(point: dict[str, Any], server: Any) -> None:
        if point["epoch"] == 3:
            stop.set()

    with pytest.raises(KeyboardInterrupt):
        run(task, QUEUED, (1, 3, 4), folder=tmp_path / "run", stop=stop, on_point=on_point)
    epochs: list[tuple[int, int, int]] = []
    resumed = run(
        task, QUEUED, (1, 3, 4), folder=tmp_path / "run", resume=True, on_epoch=lambda *one: epochs.append(one)
    )
    assert same(whole, resumed)
    assert shown(whole) == shown(resumed)
    assert min(done for _, done, _ in epochs) == 4  # epochs 1 to 3 were found


def test_answers_of_one_training_share_its_points(task: Task, tmp_path: Path) -> None:
    epochs: list[tuple[int, int, int]] = []
    for method in ("fafi:epochs=3", "fafi/ensemble:epochs=3"):
        report = run(task, method, (1, 2, 3), trained=tmp_path, on_epoch=lambda *one: epochs.append(one))
        assert shown(report) == shown(run(task, method, (1, 2, 3)))
    assert len(epochs) == 3 * 3  # clients times epochs, once


@pytest.mark.parametrize(
    ("method", "curve", "more", "message"),
    [
        ("fafi:epochs=5", (1, 6), {}, "the last epoch at the latest: FAFI trains for 5. Got 6."),
        ("fafi:epochs=5", (3, 1), {}, "each larger than the one before. Got [3, 1]."),
        ("fafi:epochs=5", (2, 2), {}, "each larger than the one before. Got [2, 2]."),
        ("fafi:epochs=5", (0, 2), {}, "from 1 on"),
        ("fedavg:epochs=5", (1, 2), {}, "FedAvg trains in rounds."),
        ("afl", (1, 2), {}, "Clients of AFL have none."),
        ("fafi:epochs=5", (1, 2), {"compress": "topk:0.1"}, "Got compress=topk:0.1."),
        ("fafi:epochs=5", (1, 2), {"late": 0.5}, "Got late=0.5."),
        ("fafi:epochs=5", (1, 2), {"evaluation": "none"}, "somebody to score"),
    ],
)  # fmt: skip
def test_curves_that_make_no_sense(
    task: Task, method: str, curve: tuple[int, ...], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(CohortError) as caught:
        run(task, method, curve, **more)
    assert message in str(caught.value)


def test_only_the_last_point_of_a_transductive_answer_is_scored_one_at_a_time(task: Task) -> None:
    *before, last = (point["evaluation"]["central"] for point in run(task, BANKED, (1, 2, 5)).history[0]["curve"])
    assert [set(one) for one in before] == [{"score", "loss"}] * 2
    assert "inductive" in last
