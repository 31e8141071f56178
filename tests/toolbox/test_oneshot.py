"""What one-shot methods have in common: training, uploads, the server's state, weights, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll import Batch, Params, Stack, Task
from atoll.algorithms.local import Local
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.kernel.algorithm import Arrival, Predictor, Replies
from atoll.kernel.errors import OneShotError, TaskError
from atoll.kernel.predictor import ensemble, members_of
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.oneshot import average_models, class_shares, require_public, shares, uploads
from atoll.toolbox.pairs import LocalTraining, Models, Pair, ServerAnswer, Start, keep_models


class OfTheFirst(ServerAnswer):
    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Models:
        return keep_models(replies)

    def deploy(self, training: LocalTraining, start: Start, answer: Models) -> Predictor:
        return ensemble(answer.models, Params.of(), first)


@dataclass(frozen=True, kw_only=True)
class First(Pair, training=CrossEntropy, answering=OfTheFirst):
    """Everybody deploys the model of the first client that replied."""

    epochs: int = 2


def first(model: Params, beside: Params, batch: Batch) -> Tensor:
    return batch.outputs(members_of(beside)[0])


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(shares=(0.6, 0.2, 0.2), dtype=torch.float64)


def counts(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_clients_train_alone_from_the_initial_model(task: Task) -> None:
    models = play(task, First(epochs=3)).server.answer.models
    alone = personal_models(play(task, Local(epochs=3)))
    for k, model in enumerate(alone):
        assert all(torch.equal(models.client(k)[name], leaf) for name, leaf in model.items())


def test_the_server_holds_models_and_label_counts_in_the_order_of_clients(task: Task) -> None:
    lost = play(task, First(), faults=lambda round, clients: clients == 1).server.answer
    whole = play(task, First()).server.answer
    assert lost.models.clients == len(lost.counts) == task.clients - 1
    for name, leaf in lost.models.items():
        assert torch.equal(leaf, whole.models[name][[0, 2, 3]])
    split = task.splits["train"]
    own = [task.y[split.order[split.offsets[k] : split.offsets[k + 1]]] for k in range(task.clients)]
    expected = torch.stack([torch.bincount(y, minlength=3) for y in own])
    assert torch.equal(whole.counts, expected.to(torch.float64))


def test_uploads_are_sorted_by_client() -> None:
    arrivals = [
        Arrival(np.array(who), {"model": Stack.of(w=torch.tensor(who))}, torch.ones(len(who))) for who in ([4, 0], [2])
    ]
    assert uploads(Replies(arrivals, keep=True), "model")["w"].tolist() == [0, 2, 4]


def test_one_model_goes_down_and_a_model_with_counts_comes_up_once(task: Task) -> None:
    messages = list(play(task, First()).ledger.messages())
    per_client = [(one.direction, one.field) for one in messages if one.client == 2]
    assert sorted(per_client) == [("down", "broadcast"), ("up", "labels"), ("up", "model")]


def test_everybody_deploys_the_initial_model_if_nobody_replied(task: Task) -> None:
    report = play(task, First(), faults=lambda round, clients: np.ones(len(clients), bool))
    assert report.server.answer is None  # catches: a phase told by what else the state holds
    for model in personal_models(report):
        assert all(torch.equal(model[name], leaf) for name, leaf in task.network.initial.items())


def test_what_is_fused_is_evaluated_once_as_the_model_for_everybody(task: Task) -> None:
    report = play(task, First(), evaluation="all")
    found = report.evaluations[-1]["evaluation"]
    assert "shared" not in found  # it would be the same
    local = play(task, Local(epochs=2), evaluation="all").evaluations[-1]["evaluation"]
    assert found["personal"]["test"]["losses"][0] == local["personal"]["test"]["losses"][0]
    assert found["personal"]["test"]["losses"][2] != local["personal"]["test"]["losses"][2]


def test_shares_of_clients() -> None:
    labels = counts((1, 3, 0), (16, 0, 0))
    assert shares(labels, "uniform").tolist() == [0.5, 0.5]
    assert shares(labels, "samples").tolist() == [0.2, 0.8]
    assert shares(labels, "sqrt").tolist() == pytest.approx([1 / 3, 2 / 3])


def test_shares_of_clients_in_classes() -> None:
    labels = counts((1, 3, 0), (3, 0, 0))
    expected = torch.tensor([[0.25, 1.0, 0.5], [0.75, 0.0, 0.5]], dtype=torch.float64)  # nobody has the last class
    assert torch.equal(class_shares(labels, "classes"), expected)
    assert torch.equal(class_shares(labels, "samples"), shares(labels, "samples")[:, None].expand(2, 3))


def test_shares_of_clients_without_samples() -> None:
    assert shares(counts((0, 0), (0, 0)), "samples").tolist() == [0.5, 0.5]
    assert class_shares(counts((0, 0), (2, 0)), "classes").tolist() == [[0.0, 0.5], [1.0, 0.5]]


def test_averages_pool_the_statistics_of_batchnorm() -> None:
    # Two clients with 1 and 3 samples of one feature each: together they are the samples 1, 2, 4, 9.
    parts = [torch.tensor([1.0]), torch.tensor([2.0, 4.0, 9.0])]
    models = Stack.of(**{
        "a.running_mean": torch.stack([part.mean() for part in parts])[:, None],
        "a.running_var": torch.stack([part.var(correction=0) for part in parts])[:, None],
        "a.num_batches_tracked": torch.tensor([3, 5]),
    })  # fmt: skip
    share = torch.tensor([0.25, 0.75])
    found, every = average_models(models, share), torch.cat(parts)
    torch.testing.assert_close(found["a.running_mean"], every.mean()[None])
    torch.testing.assert_close(found["a.running_var"], every.var(correction=0)[None])
    assert int(found["a.num_batches_tracked"]) == 5
    plain = average_models(models, share, "mean")["a.running_var"]
    torch.testing.assert_close(plain, 0.75 * parts[1].var(correction=0)[None])


def test_a_task_without_classes_is_refused() -> None:
    with pytest.raises(TaskError, match="ce needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), First())


def test_a_task_with_several_targets_per_sample_is_refused(task: Task) -> None:
    several = replace(task, y=task.y[:, None].expand(-1, 2))
    with pytest.raises(TaskError, match="one class each"):
        First().start(several.public_facts())


def test_public_data_are_asked_for(task: Task) -> None:
    with pytest.raises(TaskError, match="First with these options needs public data"):
        require_public(First(), task.public_facts())
    require_public(First(), replace(task, public=(task.x, task.y)).public_facts())


def test_more_rounds_are_refused(task: Task) -> None:
    with pytest.raises(OneShotError, match="uploads once"):
        play(task, First(), rounds=2)


def test_a_method_must_say_what_it_makes_of_the_uploads(task: Task) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(Pair, training=CrossEntropy, answering=ServerAnswer):
        """An answer that never comes."""

    with pytest.raises(NotImplementedError, match=r"ServerAnswer must define conclude\(\)"):
        play(task, Silent(epochs=0))
