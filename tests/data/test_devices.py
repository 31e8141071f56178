"""Devices of clients: what a file says, what follows from it in a run, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import Recipe, Task, compare, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.compose import create
from atoll.data.devices import Devices
from atoll.kernel.errors import CohortError, DataError, RunError, TaskError
from atoll.testing.conformance import personal_models, play, quadratics


def write(folder: Path, text: str) -> Path:
    path = folder / "devices.csv"
    path.write_text(text)
    return path


def quadratic(devices: Devices | Path | None = None, steps: int = 4) -> Task:
    """F_k(w) = (w - c_k)^2 / 2, c = 1, 3; four samples in four batches, steps of 0.5 from 0."""
    task = quadratics(torch.tensor([[1.0], [3.0]], dtype=torch.float64), samples=[steps, steps], lr=0.5)
    task = task.with_training(batch_size=1)
    return task if devices is None else task.with_devices(devices)


def test_a_file_by_names_and_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "client,speed,energy\nb,0.5,\n2,,3\n")
    found = Devices.read(path, 3, ("a", "b", "c"))
    assert found.speed.tolist() == [1.0, 0.5, 1.0]
    assert found.energy.tolist() == [np.inf, np.inf, 3.0]
    assert found.memory.tolist() == [np.inf] * 3


def test_a_slow_client_takes_a_share_of_its_steps(tmp_path: Path) -> None:
    # After K steps of 0.5 a client is at (1 - 0.5^K) c; the second one takes half of its four steps.
    task = quadratic(write(tmp_path, "client,speed\n1,0.5\n"))
    found = [float(v["w"]) for v in personal_models(play(task, Local()))]
    assert found == pytest.approx([(1 - 0.5**4) * 1, (1 - 0.5**2) * 3])
    report = play(task, Local())
    assert report.history[0]["gradients"] == 4 + 2


def test_a_piece_slows_a_slow_client_further(tmp_path: Path) -> None:
    task = quadratic(write(tmp_path, "client,speed\n0,0.5\n1,0.5\n"))
    plain = play(quadratic(), create("fedavg+partial:slowest=0.5"))
    slow = play(task, create("fedavg+partial:slowest=0.5"))
    halves = [plain.history[0].observed["work"][k] / 2 for k in ("0", "1")]
    assert [slow.history[0].observed["work"][k] for k in ("0", "1")] == pytest.approx(halves)


def test_a_client_without_energy_is_not_asked_again(tmp_path: Path) -> None:
    # Two rounds of whole work, or four of half of it.
    task = quadratic(write(tmp_path, "client,speed,energy\n0,1,2\n1,0.5,2\n"))
    report = play(task, FedAvg(), 6)
    assert [line["asked"] for line in report.history] == [2, 2, 1, 1, 0, 0]


def test_energy_is_remembered_by_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, "client,energy\n0,2\n1,5\n")
    task = Recipe(clients=4, partition="iid", devices=str(path)).build()
    whole = federate(task, "fedavg", rounds=4, progress=False)
    with pytest.raises(KeyboardInterrupt):
        federate(task, "fedavg", rounds=4, folder=tmp_path / "run", progress=False, on_round=stop_after(2))
    again = federate(task, "fedavg", rounds=4, folder=tmp_path / "run", resume=True, progress=False)
    assert [line["asked"] for line in again.history] == [line["asked"] for line in whole.history] == [4, 4, 3, 3]


def stop_after(rounds: int):
    def on_round(line) -> None:
        if line.round == rounds:
            raise KeyboardInterrupt

    return on_round


def test_a_run_is_not_resumed_on_other_devices(tmp_path: Path) -> None:
    path = write(tmp_path, "client,speed\n0,0.5\n")
    recipe = Recipe(clients=3, partition="iid", devices=str(path))
    with pytest.raises(KeyboardInterrupt):
        federate(recipe.build(), "fedavg", rounds=3, folder=tmp_path / "run", progress=False, on_round=stop_after(1))
    path.write_text("client,speed\n0,0.7\n")
    with pytest.raises(RunError):
        federate(recipe.build(), "fedavg", rounds=3, folder=tmp_path / "run", resume=True, progress=False)


def test_small_devices_get_small_networks(tmp_path: Path) -> None:
    path = write(tmp_path, "client,memory\n0,0.01\n1,0.01\n")
    task = Recipe(clients=4, model="mlp:8/mlp:64", devices=str(path)).build()
    assert task.architecture is not None
    assert task.architecture.tolist() == [0, 0, 1, 1]
    federate(task, "fedavg", rounds=1, progress=False)


def test_slow_clients_are_a_group_of_the_report(tmp_path: Path) -> None:
    lines = [f"{k},{0.1 if k < 2 else 1}" for k in range(6)]
    path = write(tmp_path, "\n".join(["client,speed", *lines]))
    task = Recipe(clients=6, partition="iid", devices=str(path)).build()
    comparison = compare(task, ["local", "fedavg"], seeds=1, rounds=1, progress=False)
    groups = comparison.groups("fedavg")["speed"]
    assert groups["slow"].clients == 2
    assert "speed" not in compare(quadratic_digits(), ["local"], seeds=1, rounds=1, progress=False).groups("local")


def quadratic_digits() -> Task:
    return Recipe(clients=3, partition="iid").build()


def test_clients_that_take_no_part_keep_their_devices(tmp_path: Path) -> None:
    path = write(tmp_path, "client,speed\n" + "\n".join(f"{k},{(k + 1) / 10}" for k in range(10)))
    task = Recipe(clients=10, partition="iid", devices=str(path), unseen=0.3).build()
    assert task.devices is not None
    assert task.unseen is not None
    assert task.unseen.devices is not None
    both = np.concatenate([task.devices.speed, task.unseen.devices.speed])
    assert sorted(both.tolist()) == pytest.approx([k / 10 for k in range(1, 11)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,speed\nhospitl,0.5\n", r"must name clients of the task. It names 'hospitl'.\nhint: did you mean hosp"),
        ("client,speed\n7,0.5\n", r"It names '7'.\nhint: clients have numbers from 0 to 1."),
        ("client,speed\n0,2\n", "`speed` .* above 0 and at most 1. Client 0 has '2'"),
        ("client,energy\n0,much\n", "`energy` .* above 0. Client 0 has 'much'"),
        ("client,speed\n0,0.5\n0,0.6\n", "every client once. It names '0' again"),
        ("client,weight\n0,1\n", "column client and any of speed, memory, energy. .* has client, weight"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Devices.read(write(tmp_path, text), 2, ("hospital", "b"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Devices.read(tmp_path / "nothing.csv", 2)


def test_a_network_that_nobody_can_hold(tmp_path: Path) -> None:
    path = write(tmp_path, "client,memory\n1,0.001\n")
    with pytest.raises(TaskError, match=r"client 1 has 0.001 MB, the smallest network takes"):
        Recipe(clients=3, partition="iid", devices=str(path)).build()


@pytest.mark.parametrize("rule", ["uniform", "turns", "oort", "power-of-choice:9"])
def test_more_clients_than_there_are(rule: str) -> None:
    with pytest.raises(CohortError, match="3"):
        federate(quadratic_digits(), "fedavg", rounds=1, cohort=7, select_clients=rule, progress=False)
