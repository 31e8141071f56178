"""Methods that share one part of a model and keep the other: identities, closed forms, and what each is for.

On f_k(u, h) = 1/2 (u - a_k)^2 + 1/2 (h - b_k - u)^2, with a body u and a head h that has to make up for it, the
minimisers are known: who shares what decides which numbers are averaged.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from theory.tools import P, bodies_and_heads, body_and_head
from torch import nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedbabu import FedBABU
from atoll.algorithms.fedbn import FedBN
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.fedrep import FedRep
from atoll.algorithms.lg_fedavg import LGFedAvg
from atoll.algorithms.local import Local
from atoll.algorithms.sub_fedavg import SubFedAvg
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP, BodyAndHead
from atoll.testing.conformance import personal_models, play

ETA = 0.6
MANY = 35  # epochs after which a head is fitted: 0.4^35 < 1e-13
EXACT = {"rtol": 0.0, "atol": 1e-12}
A = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
B = torch.tensor([-1.0, 0.3, 2.0, 0.7], dtype=torch.float64)


@pytest.fixture
def quadratic() -> Task:
    return body_and_head(A, B, lr=ETA)


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedrep")
def test_fedrep_minimises_over_the_shared_body_and_the_best_heads(quadratic: Task) -> None:
    # A head that is fitted exactly is h_k = b_k + u and leaves 1/2 (u - a_k)^2: u goes to sum_k p_k a_k.
    u, h = bodies_and_heads(play(quadratic, FedRep(head_epochs=MANY), MANY))
    torch.testing.assert_close(u, (P @ A).expand(4), **EXACT)
    torch.testing.assert_close(h, B + P @ A, **EXACT)


@pytest.mark.closed_form("fedrep")
def test_a_round_of_fedrep_is_a_step_of_the_mean_once_heads_are_fitted(quadratic: Task) -> None:
    # Under fitted heads an epoch is u <- u - eta (u - a_k) at each client: T rounds leave (1 - eta)^T of the way.
    u, _ = bodies_and_heads(play(quadratic, FedRep(head_epochs=MANY), 3))
    torch.testing.assert_close(u, ((1 - (1 - ETA) ** 3) * (P @ A)).expand(4), **EXACT)


@pytest.mark.closed_form("lg-fedavg")
def test_lg_fedavg_minimises_over_the_shared_head_and_all_bodies(quadratic: Task) -> None:
    # The best body is u_k = (a_k + h - b_k) / 2 and leaves 1/4 (h - a_k - b_k)^2: h goes to sum_k p_k (a_k + b_k).
    u, h = bodies_and_heads(play(quadratic, LGFedAvg(), 150))
    torch.testing.assert_close(h, (P @ (A + B)).expand(4), **EXACT)
    torch.testing.assert_close(u, (A + P @ (A + B) - B) / 2, **EXACT)


@pytest.mark.closed_form("fedbabu")
def test_fedbabu_minimises_over_the_body_under_the_initial_head(quadratic: Task) -> None:
    # Under h = 0 the loss is 1/2 (u - a_k)^2 + 1/2 (b_k + u)^2: u goes to sum_k p_k (a_k - b_k) / 2.
    u, h = bodies_and_heads(play(quadratic, FedBABU(tune_epochs=0), MANY))
    torch.testing.assert_close(u, (P @ (A - B) / 2).expand(4), **EXACT)
    assert not h.any()


@pytest.mark.closed_form("fedbabu")
def test_fedbabu_tuned_long_enough_is_at_the_own_optimum(quadratic: Task) -> None:
    u, h = bodies_and_heads(play(quadratic, FedBABU(tune_epochs=150), 1))
    torch.testing.assert_close(u, A, **EXACT)
    torch.testing.assert_close(h, A + B, **EXACT)
    u, h = bodies_and_heads(play(quadratic, FedBABU(tune="head", tune_epochs=MANY), MANY))
    torch.testing.assert_close(u, (P @ (A - B) / 2).expand(4), **EXACT)
    torch.testing.assert_close(h, B + P @ (A - B) / 2, **EXACT)


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> Task:
    """Three clients of unequal size and a network of three layers."""
    draw = generator(0, "decomposition")
    data = {
        str(k): (torch.from_numpy(draw.normal(size=(n, 4))), torch.from_numpy(draw.integers(3, size=n)))
        for k, n in enumerate((12, 5, 9))
    }
    with default_generator(0):
        model = MLP((4,), 3, hidden=(6, 5)).double()
    training = Training(lr=0.1, batch_size=4, momentum=0.5)
    return Task.of_clients(data, model, classes=3, training=training, shares=(1.0, 0.0, 0.0))


def require_equal(mine: list[Params], theirs: list[Params]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert set(a) == set(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.limit("fedper", "lg-fedavg")
@pytest.mark.parametrize(
    ("lg", "per"),
    [
        (LGFedAvg(), FedPer(private="body")),
        (LGFedAvg(private="first:1"), FedPer(private="before:body.3")),
        (LGFedAvg(private="last:2"), FedPer(private="from:body.3")),
        (LGFedAvg(private="head"), FedPer()),
    ],
)
def test_lg_fedavg_that_shares_a_part_is_fedper_that_keeps_the_rest(network: Task, lg: LGFedAvg, per: FedPer) -> None:
    mine, theirs = play(network, lg, 3), play(network, per, 3)
    require_equal([mine.server], [theirs.server])
    require_equal(personal_models(mine), personal_models(theirs))


@pytest.mark.limit("fedbabu", "fedrep")
def test_fedrep_that_never_trains_the_head_is_the_training_of_fedbabu(network: Task) -> None:
    rep = play(network, FedRep(head_epochs=0, final_epochs=0, epochs=2), 3)
    babu = play(network, FedBABU(tune_epochs=0, epochs=2), 3)
    require_equal(personal_models(rep), personal_models(babu))
    assert all(torch.equal(rep.server[name], babu.server[name]) for name in rep.server)


@pytest.mark.limit("fedbn")
@pytest.mark.parametrize("private", ["batchnorm", "norm"])
def test_fedbn_on_a_model_without_norm_layers_is_fedavg(network: Task, private: str) -> None:
    bn, avg = (personal_models(play(network, one, 3)) for one in (FedBN(private=private), FedAvg()))  # type: ignore[arg-type]
    require_equal(bn, avg)


@pytest.mark.limit("fedper", "fedrep", "lg-fedavg")
def test_nothing_private_is_fedavg_and_everything_is_local(network: Task) -> None:
    avg, alone = (personal_models(play(network, one, 3)) for one in (FedAvg(), Local()))
    for method in (FedPer, LGFedAvg):
        require_equal(personal_models(play(network, method(private="before:body.1"), 3)), avg)
        require_equal(personal_models(play(network, method(private="first:3"), 3)), alone)
    require_equal(personal_models(play(network, FedRep(private="before:body.1"), 3)), avg)
    require_equal(personal_models(play(network, FedRep(private="last:3", head_epochs=1, final_epochs=0), 3)), alone)


# -- what they are for -------------------------------------------------------------------------------------------------


@pytest.mark.purpose("fedrep")
def test_fedrep_finds_a_planted_representation_that_no_client_could_find_alone() -> None:
    """Targets are w_k . (B x) with B of rank 2 in 10 dimensions; 8 samples per client are fewer than dimensions."""
    dimensions, rank, clients, samples = 10, 2, 30, 8
    draw = generator(0, "representation")
    planted, _ = np.linalg.qr(draw.normal(size=(dimensions, rank)))
    data = {}
    for client in range(clients):
        x = draw.normal(size=(samples, dimensions))
        data[str(client)] = (torch.from_numpy(x), torch.from_numpy(x @ planted @ draw.normal(size=rank)))
    with default_generator(0):
        body = nn.Linear(dimensions, rank, bias=False)
        head = nn.Sequential(nn.Linear(rank, 1, bias=False), nn.Flatten(0))
        model = BodyAndHead(body, head).double()
    task = Task.of_clients(
        data,
        model,
        loss=squared_error,
        score=absolute_error,
        training=Training(lr=0.1, batch_size=samples),
        shares=(1.0, 0.0, 0.0),
    )

    def furthest(model: Params) -> float:
        """The sine of the largest angle between the planted subspace and the one found."""
        found, _ = torch.linalg.qr(model["body.weight"].T)
        outside = torch.from_numpy(planted) - found @ (found.T @ torch.from_numpy(planted))
        return float(torch.linalg.matrix_norm(outside, ord=2))

    assert furthest(task.network.initial) > 0.9
    assert furthest(play(task, FedRep(head_epochs=10), 60).server) < 0.01
    alone = [furthest(one) for one in personal_models(play(task, Local(epochs=20), 30))]
    assert min(alone) > 0.3


def scaled_inputs() -> Task:
    """Two classes; every client measures the same inputs on a scale of its own, x = s_k z + m_k."""
    draw = generator(0, "scales")
    data = {}
    for client in range(6):
        y = np.arange(60) % 2
        z = np.where(y, 1.0, -1.0)[:, None] + 0.3 * draw.normal(size=(60, 3))
        scale, shift = 10.0 ** draw.uniform(-1, 1), 20 * draw.normal(size=3)
        data[str(client)] = (torch.from_numpy(scale * z + shift), torch.from_numpy(y))
    with default_generator(0):
        body = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.ReLU())
        model = BodyAndHead(body, nn.Linear(8, 2)).double()
    return Task.of_clients(data, model, classes=2, training=Training(lr=0.1, batch_size=20))


@pytest.mark.purpose("fedbn")
def test_fedbn_serves_clients_with_scales_of_their_own_where_averaged_statistics_are_nobodys() -> None:
    scores = {
        type(algorithm): play(scaled_inputs(), algorithm, 30, evaluation="all").summary()["macro"]
        for algorithm in (FedBN(), FedAvg())
    }
    assert scores[FedBN] > 0.95
    assert scores[FedAvg] < 0.8


class Weights(nn.Module):
    """A linear model of four features that begins small, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-0.01, 0.01, 8, dtype=torch.float64).reshape(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.purpose("sub-fedavg")
def test_masks_keep_the_features_that_a_client_has() -> None:
    # Client 0 sees features 0 and 1, client 1 the others; what a client never sees is never trained and stays small.
    with default_generator(0):
        x = torch.randn(40, 2, dtype=torch.float64)
    y, nothing = (x.sum(1) > 0).long(), torch.zeros(40, 2, dtype=torch.float64)
    data = {"first": (torch.cat([x, nothing], 1), y), "last": (torch.cat([nothing, x], 1), y)}
    task = Task.of_clients(data, Weights(), classes=2, training=Training(lr=0.5, batch_size=64), shares=(0.8, 0.2, 0.0))
    first, last = personal_models(play(task, SubFedAvg(prune=0.5, least=0.0, epochs=5), rounds=4))
    assert (first["layer.weight"] != 0).tolist() == [[True, True, False, False]] * 2
    assert (last["layer.weight"] != 0).tolist() == [[False, False, True, True]] * 2


@pytest.mark.limit("sub-fedavg")
def test_clients_that_are_alike_find_one_sparse_network() -> None:
    with default_generator(1):
        x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(2, (20,))
    training = Training(lr=0.5, batch_size=64)

    def deployed(clients: int) -> list[Params]:
        data = {str(k): (x, y) for k in range(clients)}
        task = Task.of_clients(data, Weights(), classes=2, training=training, shares=(1.0, 0.0, 0.0))
        val = replace(task, splits={**task.splits, "val": task.splits["train"]})
        return personal_models(play(val, SubFedAvg(prune=0.3, least=0.0), rounds=3))

    (alone,) = deployed(1)
    assert (alone["layer.weight"] == 0).any()
    for one in deployed(3):
        torch.testing.assert_close(one["layer.weight"], alone["layer.weight"], **EXACT)
