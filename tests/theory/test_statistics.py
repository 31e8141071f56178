"""What methods are for, on data small enough to see it in a second; seeds are fixed, margins wide."""

import numpy as np
import pytest
import torch

from atoll import Algorithm, Task, Training
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedavg_ft import FedAvgFT
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.local import Local
from atoll.conformance import play
from atoll.models import MLP
from atoll.randomness import default_generator, generator

CLASSES, FEATURES, CLIENTS = 4, 6, 8
CHANCE = 1 / CLASSES


def blobs(samples: int, noise: float, *, shifted: bool) -> Task:
    """Clients with one cloud of points per class; `shifted` gives client k the label y + k instead of y."""
    draw = generator(0, "blobs")
    centers = draw.normal(size=(CLASSES, FEATURES))
    data = {}
    for client in range(CLIENTS):
        y = np.arange(samples) % CLASSES
        x = centers[y] + noise * draw.normal(size=(samples, FEATURES))
        labels = (y + client * shifted) % CLASSES
        data[str(client)] = (torch.from_numpy(x), torch.from_numpy(labels))
    with default_generator(0):
        model = MLP((FEATURES,), CLASSES, hidden=(16,)).double()
    return Task.of_clients(data, model, classes=CLASSES, training=Training(lr=0.3, batch_size=10))


def accuracy(task: Task, algorithm: Algorithm, rounds: int) -> float:
    """The mean over clients of the accuracy of their own models on their own test data."""
    report = play(task, algorithm, rounds, evaluation="all", eval_every=rounds)
    return report.summary()["macro"]


@pytest.fixture(scope="module")
def shifted() -> Task:
    """The same points mean another class to each client: no model is right for two of them."""
    return blobs(40, 0.3, shifted=True)


def test_one_model_is_at_chance_under_concept_shift(shifted: Task) -> None:
    assert accuracy(shifted, FedAvg(), 20) < CHANCE + 0.15


@pytest.mark.parametrize("algorithm", [Local(), Ditto(lam=0.1), FedPer(), FedAvgFT(tune_epochs=20)], ids=repr)
def test_personal_models_learn_under_concept_shift(shifted: Task, algorithm: Algorithm) -> None:
    assert accuracy(shifted, algorithm, 20) > 0.9


def test_federation_pays_when_clients_are_alike_and_have_few_samples() -> None:
    alike = blobs(12, 1.0, shifted=False)
    together, alone = (accuracy(alike, algorithm, 20) for algorithm in (FedAvg(), Local()))
    assert together > alone + 0.05
