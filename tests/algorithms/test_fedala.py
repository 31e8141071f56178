"""FedALA, by hand: c = 1, 3, both begin at 0, steps are 0.5, weights of the replies 1 and 3."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from atoll import Report, Task, Training
from atoll.algorithms.fedala import FedALA, Kept
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.errors import ModelError
from atoll.testing.conformance import personal_models, play

WHOLE = FedALA(layers="all", first_epochs=1)  # W is for the only leaf there is


def kept(report: Report) -> Kept:
    return report.population.memory.save(round=0)["kept"]


def weights(report: Report) -> list[float]:
    return kept(report).weight["w"].flatten().tolist()


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_the_first_visit_is_that_of_fedavg(two_clients: Task) -> None:
    report = play(two_clients, WHOLE)
    assert report.server["w"] == pytest.approx(1.25)
    assert deployed(report) == pytest.approx([0.5, 1.5])  # what was trained, not w
    assert weights(report) == [1, 1]


def test_the_second_visit_learns_how_much_of_w_to_take(two_clients: Task) -> None:
    # v = 0.5, 1.5 and w = 1.25; at W = 1 the gradient is (w - c) (w - v) = 0.1875 and 0.4375.
    # catches: FedFSA's FedALA, whose weights are learned on other inputs than the model is trained on.
    report = play(two_clients, WHOLE, rounds=2)
    w = [1 - 0.1875, 1 - 0.4375]
    assert weights(report) == pytest.approx(w)
    theta = [0.5 + 0.75 * w[0], 1.5 - 0.25 * w[1]]
    assert deployed(report) == pytest.approx([(theta[0] + 1) / 2, (theta[1] + 3) / 2])


def test_weights_go_on_from_where_they_were(two_clients: Task) -> None:
    twice, once = (play(two_clients, WHOLE, rounds=rounds) for rounds in (3, 2))
    v, w, before = torch.tensor(deployed(once)), once.server["w"].item(), torch.tensor(weights(once))
    slope = (v + (w - v) * before - torch.tensor([1.0, 3.0])) * (w - v)
    assert weights(twice) == pytest.approx((before - slope).clamp(0, 1).tolist())


@pytest.mark.parametrize(("threshold", "epochs"), [(1e9, 10), (0.0, 30)])
def test_weights_are_learned_long_the_first_time_only(two_clients: Task, threshold: float, epochs: int) -> None:
    # Ten losses are needed to see that they lie close together; where they never do, the bound ends it.
    algorithm = FedALA(layers="all", threshold=threshold, first_epochs=30)
    gradients = [line["gradients"] for line in play(two_clients, algorithm, rounds=3).history]
    assert gradients == [2 * 1, 2 * (epochs + 1), 2 * (1 + 1)]


def test_each_client_has_a_first_time_of_its_own(two_clients: Task) -> None:
    algorithm = FedALA(layers="all", threshold=0.0, first_epochs=7)
    report = play(two_clients, algorithm, rounds=3, faults=lambda round, clients: (clients == 1) & (round == 1))
    # In the last round the second client learns for the first time, and the first one waits for it.
    assert [line["gradients"] for line in report.history] == [2, 8, 2 * 7 + 2]
    waited = play(two_clients, algorithm, rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0))
    assert weights(report)[0] == weights(waited)[0]


def test_a_lost_client_deploys_its_last_model(two_clients: Task) -> None:
    report = play(two_clients, WHOLE, rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0))
    assert deployed(report)[1] == pytest.approx(1.5)
    never = play(two_clients, WHOLE, rounds=2, faults=lambda round, clients: clients == 1)
    assert deployed(never)[1] == pytest.approx(never.server["w"].item())


def test_a_new_client_trains_from_w(two_clients: Task, make_cohort) -> None:
    w = two_clients.network.initial.map(lambda leaf: leaf + 2)
    model = FedALA().welcome(w, make_cohort(two_clients))
    assert model["w"].flatten().tolist() == pytest.approx([1.5, 2.5])


def test_with_fixed_weights_the_shared_model_is_that_of_fedavg(make_task) -> None:
    task = make_task(dtype=torch.float64)
    ala, plain = (play(task, one, rounds=3) for one in (FedALA(weights_lr=0.0), FedAvg()))
    assert all(torch.equal(ala.server[name], leaf) for name, leaf in plain.server.items())
    assert ala.ledger.entries == plain.ledger.entries


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("layers", "names"),
    [("none", ""), ("last:1", "2"), ("last:2", "12"), ("last:3", "012"), ("from:1", "12"), ("all", "012")],
)
def test_layers_count_from_the_top(make_task, layers: str, names: str) -> None:
    # catches: the authors' code, where p counts tensors, and 0 means all of them.
    report = play(make_task(three_layers, dtype=torch.float64), FedALA(layers=layers), rounds=2)
    assert set(kept(report).weight) == {f"{layer}.{leaf}" for layer in names for leaf in ("weight", "bias")}


def test_more_layers_than_there_are(make_task) -> None:
    with pytest.raises(ModelError, match="'last:4' must count at most all layers of the model, 3"):
        play(make_task(three_layers), FedALA(layers="last:4"))


def test_lower_layers_are_those_of_the_shared_model(make_task) -> None:
    task = make_task(three_layers, dtype=torch.float64)
    report = play(task, FedALA(epochs=0, initial_weight=0.0), rounds=1)  # nothing is trained
    assert all(torch.equal(model["0.weight"], report.server["0.weight"]) for model in personal_models(report))


class Slope(nn.Module):
    """F(w) = w, whatever the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


@pytest.mark.parametrize(("share", "batches"), [(0.0, 0), (0.4, 2), (0.5, 3), (1.0, 5)])
def test_weights_are_learned_on_a_share_of_the_samples(share: float, batches: int) -> None:
    # The gradient is 1 in every batch of 2 of the 10 samples: W falls by lr (w - v) in each that is used.
    data = {str(k): (torch.zeros(10, 1).double(), torch.zeros(10).double()) for k in range(2)}
    task = Task.of_clients(
        data,
        Slope(),
        loss=lambda outputs, _: outputs,
        score=lambda outputs, _: outputs,
        training=Training(lr=0.1, batch_size=2),
        shares=(1.0, 0.0, 0.0),
    )
    algorithm = replace(WHOLE, share=share, weights_lr=0.01, initial_weight=0.5)
    # In round 2 the second client goes on alone, 5 steps of 0.1, and w with it: then the first one has w - v = -0.5.
    report = play(task, algorithm, rounds=3, faults=lambda round, clients: (clients == 0) & (round == 1))
    assert weights(report)[0] == pytest.approx(0.5 + 0.01 * 0.5 * batches)
