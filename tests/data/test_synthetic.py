import math

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Task, Training, federate, models
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.data import datasets
from atoll.data.datasets import Dataset
from atoll.data.partition import parse
from atoll.data.shift import turn
from atoll.data.synthetic import FEDORA_SHARES, FEDORA_SIZES, Gaussian, Linear, rotate_clients
from atoll.kernel.errors import DataError
from atoll.kernel.objective import squared_error


def per_client(dataset):
    chosen = [dataset.owner == k for k in range(len(dataset.owners))]
    return {name: (dataset.x[own], dataset.y[own]) for name, own in zip(dataset.owners, chosen, strict=True)}


# -- Gaussian clusters -------------------------------------------------------------------------------------------------


def test_gaussian_clusters_lie_around_the_means_of_the_clients_group():
    made = Gaussian(clients=6, samples=2000, groups=3, classes=2, dimensions=4, noise=0.5)
    dataset, means = made.dataset(), made.means()
    assert dataset.groups.tolist() == [0, 1, 2, 0, 1, 2]
    np.testing.assert_allclose(np.linalg.norm(means, axis=-1), 3)
    for client in range(6):
        for label in range(2):
            chosen = (dataset.owner == client) & (dataset.y.numpy() == label)
            cluster = dataset.x.numpy()[chosen]
            assert chosen.sum() == 1000
            np.testing.assert_allclose(cluster.mean(0), means[client % 3, label], atol=4 * 0.5 / math.sqrt(1000))
            np.testing.assert_allclose(cluster.std(0), 0.5, atol=0.05)


def test_without_noise_the_nearest_mean_is_always_right():
    made = Gaussian(noise=0.0)
    dataset = made.dataset()
    distances = np.linalg.norm(dataset.x.numpy()[:, None] - made.means()[made.group[dataset.owner]], axis=-1)
    assert (distances.argmin(1) == dataset.y.numpy()).all()


def test_more_samples_and_clients_leave_the_truth_alone():
    assert np.array_equal(Gaussian().means(), Gaussian(clients=3, samples=7).means())
    assert np.array_equal(Linear().weights(), Linear(clients=3, samples=7).weights())
    assert not np.array_equal(Gaussian().means(), Gaussian(seed=1).means())


@pytest.mark.parametrize("made", [Gaussian(), Linear()])
def test_the_same_seed_gives_the_same_data(made):
    first, second, other = made.dataset(), made.dataset(), type(made)(seed=1).dataset()
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.y, second.y)
    assert not torch.equal(first.x, other.x)


# -- linear regression in groups ---------------------------------------------------------------------------------------


def test_least_squares_finds_the_weights_of_each_group():
    made = Linear(clients=4, samples=500, dimensions=3, noise=0.1)
    dataset = made.dataset()
    assert dataset.classes is None
    assert dataset.loss is squared_error
    for group, weights in enumerate(made.weights()):
        chosen = made.group[dataset.owner] == group
        found = np.linalg.lstsq(dataset.x.double().numpy()[chosen], dataset.y.double().numpy()[chosen], rcond=None)[0]
        np.testing.assert_allclose(found, weights, atol=4 * 0.1 / math.sqrt(1000))


def test_one_model_for_two_groups_converges_to_the_mean_of_their_weights():
    """FedAvg's optimum is known, and so is that of clients alone: the truth."""
    made = Linear(clients=4, samples=400, dimensions=3, noise=0.0)
    dataset = made.dataset()
    model = models.build("linear", (3,), 1).double()
    task = Task.of_clients(
        per_client(dataset), model, loss=squared_error, score=dataset.metric,
        training=Training(lr=0.05, batch_size=100), shares=(0.75, 0.0, 0.25),
    )  # fmt: skip
    engine = LocalEngine(strategy="whole", dtype=torch.float64)
    shared = federate(task, FedAvg(), rounds=60, engine=engine, eval_every=60)
    np.testing.assert_allclose(shared.server["head.weight"][0].numpy(), made.weights().mean(0), atol=0.25)
    alone = federate(task, Local(), rounds=60, engine=engine, eval_every=60)
    assert alone.scores().max() < 1e-6
    assert shared.scores().min() > 0.3


@pytest.mark.parametrize(
    ("kind", "field", "value", "smallest"),
    [(Gaussian, "clients", 0, 1), (Gaussian, "groups", 0, 1), (Linear, "samples", 0, 1), (Linear, "noise", -1.0, 0)],
)
def test_bad_parameters(kind, field, value, smallest):
    with pytest.raises(DataError) as caught:
        kind(**{field: value})
    assert str(caught.value) == f"`{field}` of {kind.__name__} must be at least {smallest}. Got {value!r} instead."


@pytest.mark.parametrize("name", ["gaussian", "linear"])
def test_they_are_known_by_name(name):
    dataset, entry = datasets.load(name), datasets.CATALOGUE[name]
    assert (dataset.name, f"{len(dataset.y):,}") == (name, entry.samples)
    assert (dataset.classes, len(dataset.owners)) == (entry.classes, entry.owners)
    assert len(dataset.groups) == entry.owners


# -- rotated images ----------------------------------------------------------------------------------------------------


@pytest.fixture
def images():
    """Each image is grey in a shade of its own, so that it is recognised after any rotation."""
    shades = (torch.arange(100) / 100 - 1).reshape(-1, 1, 1, 1).expand(-1, 1, 9, 9).clone()
    return Dataset("shades", shades, torch.arange(100) % 10, 10, None, "the test")


def test_every_client_has_images_of_its_own(images):
    made = rotate_clients(images, clients=4, samples=25)
    assert made.x.shape == (100, 1, 9, 9)
    assert np.bincount(made.owner).tolist() == [25] * 4
    assert made.owners == ("0°", "90°", "180°", "270°")
    assert made.name == "rotated-shades"
    shade = ((made.x[:, 0, 4, 4] + 1) * 100).round().long()  # the middle stays where it is
    assert shade.sort()[0].tolist() == [*range(100)]
    assert torch.equal(made.y, shade % 10)


def test_the_images_of_a_client_are_turned_by_its_angle(images):
    images.x[:] = torch.arange(81.0).reshape(9, 9) / 81
    made = rotate_clients(images, clients=4, samples=2)
    for client in range(4):
        expected = torch.rot90(images.x[:2], client, (2, 3))
        torch.testing.assert_close(made.x[made.owner == client], expected, atol=1e-5, rtol=0)


def test_seeds_deal_other_images(images):
    first, again, other = (rotate_clients(images, clients=4, samples=6, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.y, other.y)


def test_too_few_images(images):
    with pytest.raises(DataError, match="36 clients with 469 images each must fit into 100 images"):
        rotate_clients(images)


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_quarter_turns_are_exact_and_counter_clockwise(quarters):
    picture = torch.arange(49.0).reshape(1, 1, 7, 7) / 24.5 - 1
    found = turn(picture, 90 * quarters, background=-1.0)
    torch.testing.assert_close(found, torch.rot90(picture, quarters, (2, 3)), atol=1e-5, rtol=0)


def test_small_turns_are_bilinear_and_corners_become_black():
    white = torch.ones(1, 1, 8, 8)
    found = turn(white, 45, background=-1.0)[0, 0]
    assert found[0, 0] == found[-1, 0] == -1
    assert found[3:5, 3:5].min() == pytest.approx(1, abs=1e-5)
    # A ramp is linear, so that interpolation of it is exact: v = x becomes v = x cos 30° - y sin 30° (y points down).
    ramp = (torch.linspace(-0.3, 0.3, 15)).expand(1, 1, 15, 15)
    y, x = torch.meshgrid(torch.linspace(-0.3, 0.3, 15), torch.linspace(-0.3, 0.3, 15), indexing="ij")
    expected = x * math.cos(math.pi / 6) - y * math.sin(math.pi / 6)
    inside = slice(4, 11)
    found = turn(ramp, 30, background=-1.0)[0, 0, inside, inside]
    torch.testing.assert_close(found, expected[inside, inside], atol=1e-5, rtol=0)


def test_the_shares_of_fedora_cut_its_sizes():
    many = Dataset("many", torch.zeros(2 * 469, 1, 4, 4), torch.arange(2 * 469) % 10, 10, None, "the test")
    task = Task.build(rotate_clients(many, clients=2), parse("natural"), clients=2, shares=FEDORA_SHARES)
    sizes = [np.diff(task.splits[split].offsets).tolist() for split in ("train", "val", "test")]
    assert sizes == [[size, size] for size in FEDORA_SIZES]
