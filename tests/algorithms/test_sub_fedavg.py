"""Sub-FedAvg, by hand: what is pruned, what is averaged over whom, and when pruning ends."""

import numpy as np
import pytest
import torch

from atoll import Task
from atoll.algorithms.sub_fedavg import SubFedAvg, kept_gradient
from atoll.kernel.batch import Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Arrival, Replies
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task
from atoll.toolbox.client.pruning import Decision, masked, prune_least


def weights_of(model: Params) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in model.trained.items() if leaf.ndim > 1}


def pruned(model: Params) -> float:
    leaves = weights_of(model).values()
    return sum(int((leaf == 0).sum()) for leaf in leaves) / sum(leaf.numel() for leaf in leaves)


def test_the_smallest_of_what_is_kept_are_pruned() -> None:
    w = Params.of(layer=torch.tensor([[5.0, -1.0, 0.5], [2.0, -3.0, 0.1]]))
    mask = Params.of(layer=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))  # 0.1 is pruned already
    sizes = w.map(torch.abs)
    after = prune_least(mask, sizes, Decision(torch.tensor(True)), share=0.5)  # two of five
    assert after["layer"].tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    same = prune_least(mask, sizes, Decision(torch.tensor(False)), share=0.5)
    assert same["layer"].tolist() == mask["layer"].tolist()


def test_a_weight_is_averaged_over_those_who_keep_it() -> None:
    w = Params.of(layer=torch.zeros(1, 3))
    fields = {
        "delta": Stack({"layer": torch.tensor([[[1.0, 2.0, 0.0]], [[3.0, 0.0, 0.0]]])}),
        "mask": Stack({"layer": torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]])}),
    }
    arrival = Arrival(np.array([0, 1]), fields, torch.tensor([1.0, 3.0]))
    after = SubFedAvg().aggregate(w, Replies([arrival], keep=False))
    assert after["layer"].tolist() == [pytest.approx([(1 + 9) / 4, 2.0, 0.0])]


def test_what_is_pruned_is_neither_trained_nor_deployed() -> None:
    """catches: a mask that is applied at the start only, or to the gradient only."""
    task = build_task()
    report = play(task, SubFedAvg(prune=0.3, least=0.0), rounds=3)
    models = personal_models(report)
    kept = report.population.memory.save(round=3)["kept"]
    assert max(map(pruned, models)) > 0.4
    for k, model in enumerate(models):
        for name, leaf in weights_of(model).items():
            assert not leaf[kept[name][k] == 0].any()


def test_pruning_ends_at_the_target() -> None:
    found = [pruned(one) for one in personal_models(play(build_task(), SubFedAvg(prune=0.2, target=0.3, least=0.0), 6))]
    assert 0.3 <= max(found) < 0.3 + 0.2


def test_a_client_that_is_not_good_enough_does_not_prune() -> None:
    never = personal_models(play(build_task(), SubFedAvg(least=1.0, prune=0.3, epochs=0), 2))
    assert max(map(pruned, never)) == 0


def test_masks_differ_between_clients() -> None:
    task = build_task()
    one, *others = personal_models(play(task, SubFedAvg(prune=0.3, least=0.0), rounds=2))
    (name, *_) = weights_of(one)
    assert any(not torch.equal(one[name] == 0, other[name] == 0) for other in others)


def test_a_mask_leaves_other_leaves_alone() -> None:
    w = Params.of(layer=torch.ones(2, 2), bias=torch.ones(2))
    after = masked(w, Params.of(layer=torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
    assert after["bias"].tolist() == [1.0, 1.0]
    assert after["layer"].tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_gradients_stay_within_the_mask() -> None:
    task = build_task()
    w, (name, *_) = task.network.initial, weights_of(task.network.initial)
    mask = Params({name: torch.zeros_like(w[name])}, w.layout)
    batch = Batch(task.x[:4], task.y[:4], None, None, task.network, Variant())
    g, _, _ = kept_gradient(w, batch, mask)
    assert not g[name].any()
    assert torch.equal(g["head.bias"], batch.gradient(w)[0]["head.bias"])


def test_a_task_without_classes_is_refused(two_clients: Task) -> None:
    with pytest.raises(TaskError, match="classes"):
        play(two_clients, SubFedAvg())
