"""FedMask, by hand: bits, votes, the slope of the threshold, and what never changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedmask import START, FedMask, Given, Kept, State, agree, pack, score_gradient, unpack
from atoll.kernel.batch import Batch
from atoll.kernel.errors import PrivacyError
from atoll.kernel.network import Variant
from atoll.kernel.objective import squared_error
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Arrival, Replies
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task
from atoll.toolbox.client.pruning import layer_weights, masked


class Features(nn.Module):
    """A weight of 1 for each of four features, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def task_of(*wanted: list[float]) -> Task:
    """Clients whose targets are the sums of some of the features."""
    x = torch.eye(4, dtype=torch.float64).repeat(4, 1)
    data = {str(k): (x, x @ torch.tensor(one, dtype=torch.float64)[:, None]) for k, one in enumerate(wanted)}
    training = Training(lr=0.1, batch_size=16)
    return Task.of_clients(data, Features(), training=training, shares=(1.0, 0.0, 0.0), loss=squared_error)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 30])
def test_a_mask_takes_a_bit_for_a_weight(size: int) -> None:
    like = Params.of(a=torch.zeros(size), b=torch.zeros(2, 3))
    draw = torch.Generator().manual_seed(size)
    mask = Stack({name: (torch.rand(5, *leaf.shape, generator=draw) > 0.5).float() for name, leaf in like.items()})
    packed = pack(mask)
    assert packed["bits"].shape == (5, -(-(size + 6) // 8))
    assert packed["bits"].dtype == torch.uint8
    again = unpack(packed, like)
    assert all(torch.equal(again[name], leaf) for name, leaf in mask.items())


def test_those_who_have_a_weight_vote_on_it() -> None:
    """catches: votes of clients that have pruned a weight, and votes that count heads where samples should count."""
    kept = Stack({"layer": torch.tensor([[[1.0, 1, 0, 0, 0]], [[0.0, 0, 0, 0, 1]], [[1.0, 0, 0, 0, 0]]])})
    held = Stack({"layer": torch.tensor([[[1.0, 1, 1, 0, 1]], [[1.0, 0, 1, 0, 1]], [[1.0, 0, 0, 0, 1]]])})
    arrival = Arrival(np.arange(3), {"kept": pack(kept), "held": pack(held)}, torch.tensor([1.0, 3.0, 2.0]))
    before = State(Params.of(layer=torch.ones(1, 5)), Params.of(layer=torch.tensor([[0.0, 0, 1, 0, 0]])))
    after = FedMask().aggregate(before, Replies([arrival], keep=False))
    # 3 of 6 want the first, which suffices; who has the second wants it; nobody has the fourth.
    assert after.votes["layer"].tolist() == [[1, 1, 0, 0, 1]]


def test_a_client_that_disagrees_begins_anew() -> None:
    scores = Stack.of(layer=torch.tensor([[0.5, 0.5, -0.3, -0.3]]))
    found = agree(Kept(scores, scores), Stack.of(layer=torch.tensor([[1.0, 0, 0, 1]])))
    torch.testing.assert_close(found["layer"], torch.tensor([[0.5, -START, -0.3, START]]))


def test_gradients_pass_the_threshold_with_the_slope_of_the_sigmoid() -> None:
    task = build_task()
    w = task.network.initial
    weights = layer_weights(w)
    draw = torch.Generator().manual_seed(0)
    scores = weights.map(lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype))
    held = weights.map(lambda leaf: (torch.rand(leaf.shape, generator=draw) > 0.3).to(leaf))
    batch = Batch(task.x[:4], task.y[:4], None, None, task.network, Variant())
    g, after, loss = score_gradient(w.buffers | scores, batch, Given(w, masked(weights, held)))  # type: ignore[arg-type]
    mask = Params({name: held[name] * (scores[name] > 0) for name in weights}, w.layout)
    theirs, _, expected = batch.gradient(masked(w, mask))
    torch.testing.assert_close(loss, expected)
    for name, leaf in weights.items():
        soft = torch.sigmoid(scores[name])
        torch.testing.assert_close(g[name], theirs[name] * leaf * held[name] * soft * (1 - soft))
        assert torch.equal(after[name], scores[name])


def test_weights_never_change() -> None:
    """catches: biases that are trained, and weights that are neither kept nor 0."""
    task = build_task()
    w = task.network.initial
    weights, dropped = layer_weights(w), 0
    for model in personal_models(play(task, FedMask(score_lr=100.0, epochs=3), rounds=3)):
        for name, leaf in model.trained.items():
            assert ((leaf == w[name]) | ((leaf == 0) & (name in weights))).all(), name
            dropped += int((leaf == 0).sum())
    assert dropped > 0


def test_a_client_prunes_once() -> None:
    """catches: pruning in every round, and masks that grow beyond what is left."""
    task = build_task()

    def held(rounds: int) -> Params:
        kept = play(task, FedMask(prune=0.3, score_lr=100.0), rounds).population.memory.save(round=rounds)["kept"]
        return kept.held

    once, later = held(1), held(4)
    for name, leaf in once.items():
        assert torch.equal(leaf, later[name])
        assert ((leaf == 0).flatten(1).sum(1) == int(0.3 * leaf[0].numel())).all()


@pytest.mark.closed_form("fedmask")
def test_without_steps_and_pruning_everybody_deploys_the_network_as_it_came() -> None:
    task = build_task()
    for model in personal_models(play(task, FedMask(score_lr=0.0, prune=0.0), rounds=2)):
        assert all(torch.equal(leaf, task.network.initial[name]) for name, leaf in model.trained.items())


@pytest.mark.purpose("fedmask")
def test_clients_keep_the_features_that_count_for_them() -> None:
    wanted = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]
    found = personal_models(play(task_of(*wanted), FedMask(prune=0.0, epochs=20), rounds=3))
    assert [model["layer.weight"].flatten().tolist() for model in found] == [*wanted]


@pytest.mark.limit("fedmask")
def test_clients_that_are_alike_find_one_mask() -> None:
    (alone,) = personal_models(play(task_of([1.0, 0, 0, 1]), FedMask(epochs=5), rounds=3))
    together = personal_models(play(task_of(*[[1.0, 0, 0, 1]] * 3), FedMask(epochs=5), rounds=3))
    assert all(torch.equal(one["layer.weight"], alone["layer.weight"]) for one in together)


def test_a_client_that_never_took_part_deploys_what_the_others_vote_for() -> None:
    task = task_of(*[[1.0, 0, 0, 1]] * 3)
    models = personal_models(play(task, FedMask(prune=0.0, epochs=20), 2, faults=lambda _, clients: clients == 2))
    assert models[2]["layer.weight"].tolist() == [[1, 0, 0, 1]]


def test_masks_are_a_small_part_of_a_model(make_task: Callable[..., Task]) -> None:
    """Two bits for a weight, where FedAvg sends 64 here."""
    task = make_task(lambda: MLP((4,), 3, hidden=(200, 200)))
    masks, models = (play(task, one, rounds=2).bytes for one in (FedMask(), FedAvg()))
    assert 1 / 32 < masks["up", "mask"] / models["up", "model"] < 1 / 31
    assert ("up", "model") not in masks


def test_noise_that_would_hide_all_is_refused() -> None:
    """catches: a run in which the server learns nothing, and says so to nobody."""
    with pytest.raises(PrivacyError, match="No mechanism covers what FedMask sends as held, kept"):
        play(build_task(), FedMask(), rounds=2, dp="local:epsilon=50")
