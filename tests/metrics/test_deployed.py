"""What the average of deployed models is worth, and how sharp they are: by hand, and from a run's folder."""

import math
from pathlib import Path

import pytest
import torch

from atoll import LocalEngine, Recipe, Report, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.compose import create
from atoll.kernel.errors import HyperparameterError, ModelError
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task

CENTERS = torch.tensor([[1.0], [3.0]], dtype=torch.float64)


def test_the_average_of_equal_models_is_the_model() -> None:
    """With BatchNorm: counts of batches are kept whole."""
    report = federate(build_task("odd"), FedAvg(), rounds=2, engine=LocalEngine(dtype=torch.float64), progress=False)
    assert report.score_average().score.tolist() == pytest.approx(report.scores().tolist(), nan_ok=True)


def test_the_average_is_made_of_all_clients() -> None:
    report = play(build_task(), Local(), 2)
    models = personal_models(report)
    mean = {name: torch.stack([one[name] for one in models]).mean(0) for name in models[0]}
    task = report.task
    rows = task.splits["test"].order[task.splits["test"].offsets[0] : task.splits["test"].offsets[1]]
    hidden = torch.relu(task.x[rows] @ mean["body.0.weight"].T + mean["body.0.bias"])
    right = (hidden @ mean["head.weight"].T + mean["head.bias"]).argmax(1) == task.y[rows]
    assert report.score_average().score[0] == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize("strategy", ["whole", "chunk:2"])
def test_the_parts_that_clients_share_do_not_differ(strategy: str) -> None:
    report = play(build_task(), create("fedper"), 2, strategy=strategy)
    names, apart = report.personal_parts()
    heads = torch.stack([one["head.weight"] for one in personal_models(report)])
    mean = heads.mean(0)
    expected = [float((one - mean).norm() / mean.norm()) for one in heads]
    assert apart[:, names.index("head.weight")].tolist() == pytest.approx(expected)
    assert [bool((leaf > 1e-9).any()) for leaf in apart.T] == [name.startswith("head") for name in names]


def test_personal_statistics_of_batchnorm_are_parts_too() -> None:
    names, apart = play(build_task("odd"), create("fedbn"), 2).personal_parts()
    own = {name for name, leaf in zip(names, apart.T, strict=True) if (leaf > 1e-9).any()}
    assert any(name.endswith("running_mean") for name in own)
    assert "head.weight" not in own


@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_sharpness_of_quadratics_is_known(rho: float) -> None:
    # F(v) = (v - c)^2 / 2 has F(v + rho sign(v - c)) - F(v) = rho |v - c| + rho^2 / 2.
    report = play(quadratics(CENTERS, lr=0.5), Local())
    expected = [rho * abs(v - c) + rho**2 / 2 for v, c in ((0.5, 1.0), (1.5, 3.0))]
    assert report.sharpness(rho).tolist() == pytest.approx(expected)


def test_training_where_it_is_flat_ends_where_it_is_flatter() -> None:
    task = Recipe(clients=4, partition="iid").build()
    plain, flat = (
        federate(task, create(name), rounds=8, progress=False).sharpness(0.5).mean()
        for name in ("fedavg", "fedavg+sam:rho=0.5")
    )
    assert flat < plain


def test_a_run_in_a_folder_is_measured_later(tmp_path: Path) -> None:
    task = Recipe(clients=3, partition="iid").build()
    live = federate(task, "ditto", rounds=2, folder=tmp_path / "run", progress=False)
    again = Report.read(tmp_path / "run")
    assert again.sharpness().tolist() == pytest.approx(live.sharpness().tolist(), rel=1e-4)
    assert again.score_average().macro == pytest.approx(live.score_average().macro, abs=0.02)


def test_what_cannot_be_measured_is_said() -> None:
    report = play(build_task(), create("knn-per"))
    with pytest.raises(ModelError, match="deploy more"):
        report.score_average()
    with pytest.raises(HyperparameterError, match="rho"):
        report.sharpness(0)
    mixed = federate(Recipe(clients=4, model="mlp:8/mlp:12").build(), "local", rounds=1, progress=False)
    with pytest.raises(ModelError, match="one architecture"):
        mixed.score_average()
    with pytest.raises(ModelError, match="one architecture"):
        mixed.personal_parts()
    assert not math.isnan(mixed.sharpness().sum())
