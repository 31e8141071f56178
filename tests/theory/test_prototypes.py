"""Methods that exchange or store features: where they are other methods, and closed forms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll import Batch, Params, Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedcr import FedCR
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.fedproto import FedProto
from atoll.algorithms.fedrod import FedRoD
from atoll.algorithms.knn_per import KNNPer
from atoll.algorithms.local import Local
from atoll.kernel.network import Variant
from atoll.kernel.objective import accuracy
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client.datastore import say_neighbours

ETA, LAM, SIZE = 0.3, 0.5, 2


# -- FedProto ----------------------------------------------------------------------------------------------------------


class Points(nn.Module):
    """Features that do not depend on the sample: one point z, the same for all classes."""

    head_modules = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.head = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return self.z + 0 * x

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.features(x))
        return outputs


def nothing_to_fit(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0 * outputs.sum(1) + 0 * targets


def drawn_to(outputs: Tensor, targets: Tensor) -> Tensor:
    """Client k, all of whose labels are k, wants z = (k, k)."""
    return 0.5 * (outputs - targets[:, None]).square().sum(1)


@pytest.mark.closed_form("fedproto")
def test_fedproto_is_held_to_the_prototypes_of_the_last_round() -> None:
    # Client k alone has class k and wants its features at k. A step is z <- z - eta ((z - k) + 2 lam (z - C_k) / d);
    # C_k is z as it was after the last round; in the first round there is no C_k yet.
    data = {str(k): (torch.zeros(2, SIZE, dtype=torch.float64), torch.full((2,), k)) for k in range(2)}
    task = Task.of_clients(
        data, Points(), loss=drawn_to, score=accuracy, classes=2,
        training=Training(lr=ETA, batch_size=2), shares=(1.0, 0.0, 0.0),
    )  # fmt: skip
    z = torch.zeros(2, dtype=torch.float64)
    center = None
    for rounds in range(1, 4):
        for _ in range(2):  # epochs of one step
            pull = 0 if center is None else 2 * LAM / SIZE * (z - center)
            z = z - ETA * ((z - torch.tensor([0.0, 1.0])) + pull)
        center = z.clone()
        report = play(task, FedProto(lam=LAM, epochs=2, answer="head"), rounds=rounds)
        found = torch.stack([model["z"] for model in personal_models(report)])
        torch.testing.assert_close(found, z[:, None].expand(2, SIZE), rtol=0, atol=1e-12)
        torch.testing.assert_close(report.server.prototypes["mean"], found, rtol=0, atol=1e-12)


@pytest.mark.closed_form("fedproto")
def test_fedproto_alone_would_gather_all_clients_at_one_point() -> None:
    # Without a loss of their own, clients with one class in common move to C, the mean weighted by samples, by the
    # factor 1 - 2 eta lam / d a step; C stays where it is.
    sizes, starts = (1, 3), torch.tensor([[1.0, 0.0], [-3.0, 2.0]], dtype=torch.float64)
    data = {str(k): (starts[k].expand(n, SIZE).clone(), torch.zeros(n, dtype=torch.int64)) for k, n in enumerate(sizes)}

    class Moved(Points):
        def features(self, x: Tensor) -> Tensor:
            return self.z + x  # so that clients begin at different points

    task = Task.of_clients(
        data, Moved(), loss=nothing_to_fit, score=accuracy, classes=2,
        training=Training(lr=ETA, batch_size=3), shares=(1.0, 0.0, 0.0),
    )  # fmt: skip
    center = (sizes[0] * starts[0] + sizes[1] * starts[1]) / 4
    for rounds in (1, 2, 4):  # in the first there are no prototypes yet
        report = play(task, FedProto(lam=LAM, answer="head"), rounds=rounds)
        left = (1 - 2 * ETA * LAM / SIZE) ** (rounds - 1)
        for k, model in enumerate(personal_models(report)):
            expected = center + left * (starts[k] - center)
            torch.testing.assert_close(model["z"] + starts[k], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(report.server.prototypes["mean"][0], center, rtol=0, atol=1e-12)


@pytest.mark.limit("fedproto")
def test_fedproto_without_a_pull_is_local(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    mine, theirs = (
        personal_models(play(task, one, rounds=3))
        for one in (FedProto(lam=0.0, answer="head", epochs=2), Local(epochs=2))
    )
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


# -- FedRoD ------------------------------------------------------------------------------------------------------------


@pytest.mark.limit("fedrod")
def test_fedrod_with_equally_many_samples_of_each_class_trains_as_fedavg() -> None:
    # log n_c is then the same for all classes, and a softmax does not see what is added to all logits.
    draw = generator(0, "equal counts")
    data = {
        str(k): (torch.from_numpy(draw.normal(size=(n * 3, 4))), torch.arange(n * 3) % 3) for k, n in enumerate((2, 5))
    }
    with default_generator(0):
        model = MLP((4,), 3, hidden=(6,)).double()
    task = Task.of_clients(data, model, training=Training(lr=0.2, batch_size=4), shares=(1.0, 0.0, 0.0))
    mine, theirs = (play(task, one, rounds=3).server for one in (FedRoD(gamma=2.0), FedAvg()))
    for name, leaf in theirs.items():
        torch.testing.assert_close(mine[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.purpose("fedrod")
def test_fedrod_generic_model_does_not_favour_the_frequent_class() -> None:
    # One feature says nothing of the class, and nine of ten samples are of class 0: plain training comes to the
    # logarithm of the odds, log 9, the balanced softmax to none.
    x, y = torch.ones(20, 1, dtype=torch.float64), torch.arange(20) % 10 // 9
    with default_generator(0):
        model = MLP((1,), 2, hidden=()).double()
    task = Task.of_clients({"0": (x, y)}, model, training=Training(lr=1.0, batch_size=20), shares=(1.0, 0.0, 0.0))
    for method, odds in ((FedAvg(epochs=100), torch.tensor(9.0).log()), (FedRoD(epochs=100), torch.tensor(0.0))):
        server = play(task, method, rounds=3).server
        logits = Batch(x[:1], y[:1], None, None, task.network, Variant(train=False)).outputs(server)[0]
        assert float(logits[0] - logits[1]) == pytest.approx(float(odds), abs=1e-3)


# -- kNN-Per -----------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("knn-per")
def test_all_neighbours_under_a_wide_kernel_say_how_frequent_classes_are() -> None:
    draw = generator(0, "store")
    labels = torch.tensor([0, 0, 2, 0, 1, 2])
    taken = torch.tensor([True] * 5 + [False])
    store = Params.of(features=torch.from_numpy(draw.normal(size=(6, 3))), labels=labels, taken=taken)
    said = say_neighbours(store, torch.from_numpy(draw.normal(size=(2, 3))), count=6, scale=1e15, classes=3)
    torch.testing.assert_close(said, torch.tensor([[3, 1, 1]] * 2).double() / 5, rtol=0, atol=1e-12)


@pytest.mark.closed_form("knn-per")
def test_one_neighbour_alone_decides() -> None:
    store = Params.of(features=torch.eye(3), labels=torch.tensor([1, 0, 1]), taken=torch.ones(3, dtype=torch.bool))
    said = say_neighbours(store, torch.tensor([[0.1, 0.9, 0.0]]), count=1, scale=1.0, classes=2)
    assert said.tolist() == [[1.0, 0.0]]


@pytest.mark.limit("knn-per")
def test_knn_per_without_a_share_of_the_neighbours_is_fedavg(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (KNNPer(lam=0.0, epochs=2), FedAvg(epochs=2)))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


# -- FedCR -------------------------------------------------------------------------------------------------------------


@pytest.mark.limit("fedcr")
def test_fedcr_without_noise_and_divergence_is_fedper(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, momentum=0.5, weight_decay=0.01)
    plain = FedCR(beta=0.0, offset=1000.0, draws=1, final_epochs=0, epochs=2)
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (plain, FedPer(epochs=2)))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


@pytest.mark.closed_form("fedcr")
def test_fedcr_experts_of_n_equal_samples_have_n_times_their_precision() -> None:
    # All samples have features z and sigma = log 2: precision 1 + n / log(2)^2, mean z n / (n + log(2)^2).
    x, z = torch.zeros(4, SIZE, dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)

    class There(Points):
        def __init__(self) -> None:
            super().__init__()
            self.z.data = z.clone()

    data = {"0": (x, torch.zeros(4).long()), "1": (x[:3], torch.tensor([0, 1, 1]))}
    task = Task.of_clients(data, There(), classes=2, training=Training(batch_size=2), shares=(1.0, 0.0, 0.0))
    prior = play(task, FedCR(epochs=0, final_epochs=0)).server.prior
    variance = torch.log(torch.tensor(2.0, dtype=torch.float64)) ** 2
    for label, n in ((0, 5), (1, 2)):
        torch.testing.assert_close(prior["sigma"][label], (1 + n / variance).rsqrt().expand(SIZE), rtol=0, atol=1e-12)
        torch.testing.assert_close(prior["mean"][label], z * n / (n + variance), rtol=0, atol=1e-12)
