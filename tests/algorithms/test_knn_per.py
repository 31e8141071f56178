"""kNN-Per, by hand: the mixture of probabilities, its share, and what travels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll import Batch, Cohort, Params, Predictor, Stack, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.knn_per import SHARES, UNDECIDED, KNNPer
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import default_generator
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.client.datastore import say_neighbours

CLASSES = 3


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=(12, 3, 20, 16), shares=(0.5, 0.25, 0.25), dtype=torch.float64)


def batch_of(task: Task, client: int, split: str) -> Batch:
    one = task.splits[split]
    rows = one.order[one.offsets[client] : one.offsets[client + 1]]
    return Batch(task.x[rows], task.y[rows], None, None, task.network, Variant(train=False))


def deployed(method: KNNPer, task: Task, cohort: Cohort) -> Predictor:
    found = method.personalize(task.network.initial, cohort)
    assert isinstance(found, Predictor)
    return found


def both(method: KNNPer, task: Task, found: Predictor, client: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Probabilities by the model and by the neighbours."""
    assert isinstance(found.beside, Stack)
    store, z = found.beside.client(client), batch.features(task.network.initial)
    near = say_neighbours(store, z, count=method.neighbours, scale=method.scale, classes=CLASSES)
    return batch.outputs(task.network.initial).softmax(1), near


def test_probabilities_are_mixed_and_not_logits(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    # catches: the released default, which mixes logits with probabilities because a flag is the string "store_true".
    method = KNNPer(lam=0.3, neighbours=2)
    found, batch = deployed(method, task, make_cohort(task)), batch_of(task, 2, "test")
    own, near = both(method, task, found, 2, batch)
    assert isinstance(found.beside, Stack)
    logits = method.answer(task.network.initial, found.beside.client(2), batch)
    torch.testing.assert_close(logits.softmax(1), 0.7 * own + 0.3 * near, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(batch.y), dtype=torch.float64))


def test_the_share_is_the_best_on_validation_data(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    method = KNNPer(neighbours=3)
    found = deployed(method, task, make_cohort(task))
    chosen = set()
    for k in (0, 2, 3):
        batch = batch_of(task, k, "val")
        own, near = both(method, task, found, k, batch)
        right = torch.arange(len(batch.y)), batch.y
        losses = [-((1 - a) * own + a * near)[right].clamp(min=1e-300).log().sum() for a in SHARES]
        best = SHARES[int(torch.stack(losses).argmin())]
        assert found.beside["share"][k] == pytest.approx(best)
        chosen.add(best)
    assert len(chosen) > 1


def test_a_client_without_validation_samples_is_undecided(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    assert deployed(KNNPer(), task, make_cohort(task)).beside["share"].tolist() == [UNDECIDED] * 4


def test_without_neighbours_it_is_fedavg(task: Task) -> None:
    mine, theirs = (personal_models(play(task, one, rounds=2)) for one in (KNNPer(lam=0.0), FedAvg()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


def test_training_and_traffic_are_fedavgs(task: Task) -> None:
    mine, theirs = (play(task, one, rounds=2) for one in (KNNPer(), FedAvg()))
    assert all(torch.equal(mine.server[name], theirs.server[name]) for name in theirs.server)
    assert mine.ledger.bytes("up") == theirs.ledger.bytes("up")
    assert mine.ledger.bytes("down") == theirs.ledger.bytes("down")


def test_who_never_took_part_stores_its_samples_too(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    report = play(task, KNNPer(), faults=lambda r, clients: clients == 3)
    assert personal_models(report)[3]["beside.taken"].sum() == len(batch_of(task, 3, "train").y)
    new = KNNPer().welcome(report.server, make_cohort(task, clients=[1]))
    assert isinstance(new, Predictor)
    assert new.beside["taken"].sum() == len(batch_of(task, 1, "train").y)


def test_memory_finds_what_a_shared_model_cannot_say() -> None:
    # Two clients name the same two clouds the other way round: the shared model is at chance, the neighbours are right.
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64).repeat(8, 1)
    y = torch.tensor([0, 1]).repeat(8)
    with default_generator(0):
        model = MLP((2,), 2, hidden=(4,)).double()
    task = Task.of_clients({"0": (x, y), "1": (x, 1 - y)}, model, shares=(0.5, 0.25, 0.25))
    report = play(task, KNNPer(neighbours=3), rounds=2, evaluation="all")
    assert report.scores().tolist() == [1.0, 1.0]
    assert report.scores(model="shared").mean() == pytest.approx(0.5, abs=0.2)


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="KNNPer needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), KNNPer())


def test_values_beside_the_model_are_the_clients_own(task: Task) -> None:
    models = personal_models(play(task, KNNPer()))
    assert isinstance(models[0], Params)
    assert {name for name in models[0] if name.startswith("beside.")} == {
        "beside.features", "beside.labels", "beside.share", "beside.taken",
    }  # fmt: skip
