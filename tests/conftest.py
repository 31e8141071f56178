"""What several tests build on: a small task, and a cohort of it under any plan."""

import gc
import math
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from atoll.data.task import Task, Training
from atoll.kernel.cohort import Cohort
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.runtime.engines import planning
from atoll.runtime.engines.measuring import FORCED
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population


def pytest_configure() -> None:
    """Look for no garbage among the tests that are being collected: there is none, and they are many."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _plans_do_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that wants plans to be tried says so; otherwise a busy moment would change which one is chosen."""
    for worth in ("WORTH_MEASURING", "WORTH_COMPILING", "WORTH_LOADING"):
        monkeypatch.setattr(planning, worth, math.inf)


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which methods a user has run is written to a folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one test measures is found neither by another test nor by the user."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path_factory.getbasetemp() / "cache" / uuid.uuid4().hex))


@pytest.fixture(autouse=True)
def _draws_do_not_depend_on_other_tests() -> Iterator[None]:
    """Modules that a test builds draw from the default generator; where it stands would depend on what ran before."""
    with default_generator(0):
        yield


@pytest.fixture
def make_task() -> Callable[..., Task]:
    """Clients of these sizes with normal samples; all of them for training unless `shares` says otherwise."""

    def make(
        model: Callable[[], nn.Module] | None = None,
        *,
        sizes=(5, 1, 12, 7),
        shape=(4,),
        classes=3,
        shares=(1.0, 0.0, 0.0),
        dtype=torch.float32,
        **training,
    ) -> Task:
        draw = generator(0, "test data")
        data = {
            f"client {number}": (
                torch.from_numpy(draw.normal(size=(size, *shape))).float(),
                torch.from_numpy(draw.integers(classes, size=size)),
            )
            for number, size in enumerate(sizes)
        }
        with default_generator(0):
            module = MLP(shape, classes, hidden=(6,)) if model is None else model()
        rule = Training(**{"lr": 0.1, "batch_size": 4, **training})
        task = Task.of_clients(data, module, classes=classes, training=rule, shares=shares)
        return task.to(torch.device("cpu"), dtype)

    return make


@pytest.fixture
def make_cohort() -> Callable[..., Cohort]:
    """Some clients of a task in a round, run as a plan says."""

    def make(task, plan=None, clients=None, *, round=0, seed=0, programs=None, calls=FORCED, splits=None):
        population = Population(task, RamMemory(task.clients), seed)
        allowed = frozenset(splits or {"train", "val"})
        scanner = Scanner(population, plan or Plan(), programs or Programs(), calls=calls, splits=allowed)
        who = np.arange(task.clients) if clients is None else np.asarray(clients)
        return Cohort(population.facts, who, round, scanner)

    return make
