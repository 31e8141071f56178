"""Methods that choose how much to take from whom: FedALA, FedPHP, FedFomo and FedPAC on tasks with known answers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from theory.tools import ALIKE, SIZE, deployed, each, kept, optima_and_curvatures
from torch import Tensor, nn

from atoll import Algorithm, Task, Training
from atoll.algorithms.fedala import FedALA
from atoll.algorithms.fedamp import FedAMP
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedfomo import FedFomo
from atoll.algorithms.fedora import Fedora
from atoll.algorithms.fedpac import FedPAC
from atoll.algorithms.fedphp import FedPHP
from atoll.algorithms.fedrep import FedRep
from atoll.algorithms.local import Local
from atoll.algorithms.mocha import Mocha
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play, quadratics

ETA = 0.4
C, H = optima_and_curvatures(5)
EXACT = {"rtol": 0.0, "atol": 1e-12}
SAMPLES = (12, 5, 9)


@pytest.fixture(scope="module")
def network() -> Task:
    """Three clients of unequal size and a network of three layers."""
    draw = generator(0, "collaboration")
    data = {
        str(k): (torch.from_numpy(draw.normal(size=(n, 4))), torch.from_numpy(draw.integers(3, size=n)))
        for k, n in enumerate(SAMPLES)
    }
    with default_generator(0):
        model = MLP((4,), 3, hidden=(6, 5)).double()
    training = Training(lr=0.1, batch_size=4, momentum=0.5)
    return Task.of_clients(data, model, classes=3, training=training, shares=(1.0, 0.0, 0.0))


def models_of(task: Task, algorithm: Algorithm, rounds: int = 3) -> list[dict[str, Tensor]]:
    return [dict(model) for model in personal_models(play(task, algorithm, rounds))]


def require_equal(mine: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


# -- clients that come late, or never ----------------------------------------------------------------------------------


@pytest.mark.limit("fedamp", "fedfomo", "fedora", "mocha")
@pytest.mark.parametrize(
    "algorithm",
    [FedAMP(lam=0.0), FedFomo(models=0), Fedora(lam_max=0.0), Mocha(lam=0.0)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("normed", [False, True])
def test_who_takes_nothing_from_others_trains_alone_however_late(
    make_task: Callable[..., Task], algorithm: Algorithm, normed: bool
) -> None:
    # One client comes in the second round, one in the third, one never.
    layers = [nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if normed else []), nn.Linear(3, 3)]
    task = make_task(lambda: nn.Sequential(*layers), dtype=torch.float64, shares=(0.6, 0.4, 0.0), sizes=(9, 12, 8, 10))
    mine, theirs = (
        personal_models(play(task, one, rounds=3, faults=lambda round, clients: clients > round))
        for one in (algorithm, Local())
    )
    require_equal([dict(one) for one in mine], [dict(one) for one in theirs])


# -- FedALA --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedala")
def test_fedala_finds_the_best_weight_on_a_line() -> None:
    # In one dimension the loss along v + (w - v) W is least at W = (c - v) / (w - v), cut to [0, 1].
    c = torch.tensor([1.0, 3.0, 0.5, 1.2], dtype=torch.float64)
    task = quadratics(c[:, None], lr=0.5)
    v, w = 0.5 * c, 0.5 * c.mean()
    found = play(task, FedALA(layers="all", threshold=0.0, first_epochs=400), rounds=2)
    best = ((c - v) / (w - v)).clamp(0, 1)
    assert best.unique().numel() == 3  # at both ends, and between
    torch.testing.assert_close(kept(found).weight["w"].flatten(), best, rtol=0, atol=1e-9)
    theta = v + (w - v) * best
    torch.testing.assert_close(deployed(found).flatten(), theta - 0.5 * (theta - c), rtol=0, atol=1e-9)


@pytest.mark.closed_form("fedala")
def test_the_gradient_of_fedala_is_that_of_its_weights() -> None:
    # One step on W from 0.5 against finite differences of f(v + (w - v) W).
    task, rate = quadratics(C, H, lr=ETA), 0.01
    algorithm = FedALA(layers="all", initial_weight=0.5, weights_lr=rate, first_epochs=1)
    v = ETA * each(H, C)
    w = v.mean(0)
    weight = kept(play(task, algorithm, rounds=2)).weight["w"]

    def value(many: Tensor) -> Tensor:
        theta = v + (w - v) * many
        return 0.5 * ((theta - C) * each(H, theta - C)).sum(1)

    half, tiny = torch.full_like(v, 0.5), 1e-6
    for axis in range(SIZE):
        bump = torch.zeros_like(v)
        bump[:, axis] = tiny
        slope = (value(half + bump) - value(half - bump)) / (2 * tiny)
        torch.testing.assert_close(weight[:, axis], 0.5 - rate * slope, rtol=0, atol=1e-8)


@pytest.mark.limit("fedala")
def test_fedala_with_fixed_weights_ends_in_fedavg_and_local(network: Task) -> None:
    all_shared = play(network, FedALA(weights_lr=0.0, layers="all"), rounds=3)
    plain = play(network, FedAvg(), rounds=3)
    assert all(torch.equal(all_shared.server[name], leaf) for name, leaf in plain.server.items())
    own = FedALA(layers="all", initial_weight=0.0, weights_lr=0.0, epochs=2)
    require_equal(models_of(network, own), models_of(network, Local(epochs=2)))
    # catches: the authors' code, where p = 0 weighs all layers.
    none = play(network, FedALA(layers="none"), rounds=3)
    assert all(torch.equal(none.server[name], leaf) for name, leaf in plain.server.items())


# -- FedPHP --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedphp")
def test_fedphp_ends_where_its_last_models_do() -> None:
    # With lam = 0, w comes to rest at the optimum w* of one step, and h_k, whatever mu < 1, at w* - eta H (w* - c).
    task = quadratics(C, H, lr=ETA)
    best = torch.linalg.solve(torch.einsum("k,kij->ij", ALIKE, H), torch.einsum("k,kij,kj->i", ALIKE, H, C))
    found = deployed(play(task, FedPHP(lam=0.0, mu=0.5, ramp=3), rounds=80))
    torch.testing.assert_close(found, best - ETA * each(H, best - C), rtol=0, atol=1e-10)


@pytest.mark.limit("fedphp")
def test_fedphp_without_lessons_and_memory_keeps_the_last_model(network: Task) -> None:
    # h_k = w_k, whose mean is the shared model, and that is FedAvg's.
    mine, plain = (play(network, one, rounds=3) for one in (FedPHP(lam=0.0, mu=0.0), FedAvg()))
    models = personal_models(mine)
    for name, leaf in plain.server.items():
        assert torch.equal(mine.server[name], leaf)
        mean = sum(n * model[name] for n, model in zip(SAMPLES, models, strict=True)) / sum(SAMPLES)
        torch.testing.assert_close(mean, leaf, **EXACT)


# -- FedFomo -------------------------------------------------------------------------------------------------------


def validated(task: Task) -> Task:
    """With the training samples as validation samples, too."""
    return replace(task, splits={**task.splits, "val": task.splits["train"]})


@pytest.mark.limit("fedfomo")
@pytest.mark.parametrize("algorithm", [FedFomo(models=0, epochs=2), FedFomo(epochs=2)])
def test_fedfomo_with_the_own_model_only_is_local(network: Task, algorithm: FedFomo) -> None:
    # Without models of others, or without validation samples to judge them by.
    require_equal(models_of(network, algorithm), models_of(network, Local(epochs=2)))


@pytest.mark.closed_form("fedfomo")
def test_fedfomo_moves_by_the_slope_of_the_loss() -> None:
    # v_k after the first round, then the weights of the paper's equation, all positive ones normalised.
    task = validated(quadratics(C, H, lr=ETA))
    v = ETA * each(H, C)

    def value(of: int, at: Tensor) -> Tensor:
        return 0.5 * (at - C[of]) @ H[of] @ (at - C[of])

    expected = torch.zeros_like(v)
    for k in range(len(C)):
        omega = [(value(k, v[k]) - value(k, v[j])) / (v[j] - v[k]).norm() if j != k else 0.0 for j in range(len(C))]
        positive = torch.tensor([max(0.0, float(one)) for one in omega], dtype=torch.float64)
        share = positive / positive.sum() if positive.any() else positive
        start = v[k] + share @ (v - v[k])
        expected[k] = start - ETA * H[k] @ (start - C[k])
    assert not torch.allclose(expected, v - ETA * each(H, v - C))  # somebody moved
    torch.testing.assert_close(deployed(play(task, FedFomo(), rounds=2)), expected, **EXACT)


@pytest.mark.purpose("fedfomo")
def test_fedfomo_learns_within_planted_groups() -> None:
    # Two groups of four around +-2, three models each: affinity is highest within a group, and so is what is taken.
    with default_generator(0):
        noise = 0.05 * torch.randn(8, SIZE, dtype=torch.float64)
    groups = torch.tensor([2.0, -2.0], dtype=torch.float64).repeat(4)[:, None] + noise
    report = play(validated(quadratics(groups, lr=0.1)), FedFomo(models=3), rounds=12)
    chosen = report.server.chosen
    assert ((chosen % 2) == (torch.arange(8) % 2)[:, None]).all()
    mixing = report.algorithm.mixing(report.server)
    assert mixing[0::2, 1::2].max() == 0


# -- FedPAC --------------------------------------------------------------------------------------------------------


@pytest.mark.limit("fedpac")
@pytest.mark.parametrize("epochs", [1, 2])
def test_fedpac_without_alignment_and_with_own_heads_is_fedrep(network: Task, epochs: int) -> None:
    pac = FedPAC(lam=0.0, heads="own", epochs=epochs)
    rep = FedRep(head_epochs=1, epochs=epochs, final_epochs=0)
    for mine, theirs in zip(models_of(network, pac), models_of(network, rep), strict=True):
        for name, leaf in theirs.items():
            torch.testing.assert_close(mine[name], leaf, **EXACT)


@pytest.mark.closed_form("fedpac")
def test_clients_with_the_same_data_share_their_heads_alike() -> None:
    # The same samples everywhere: no bias, equal variances, so that all weights are 1/3 and all heads the same.
    draw = generator(0, "the same")
    x, y = torch.from_numpy(draw.normal(size=(9, 4))), torch.from_numpy(draw.integers(3, size=9))
    with default_generator(0):
        model = MLP((4,), 3, hidden=(5,)).double()
    training = Training(lr=0.1, batch_size=9)
    task = Task.of_clients(dict.fromkeys("abc", (x, y)), model, classes=3, training=training, shares=(1.0, 0.0, 0.0))
    report = play(task, FedPAC(), rounds=2)
    matrix = report.algorithm.mixing(report.server)
    torch.testing.assert_close(matrix, torch.full((3, 3), 1 / 3).double(), rtol=0, atol=1e-6)


@pytest.mark.purpose("fedpac")
def test_fedpac_mixes_heads_within_planted_groups() -> None:
    # Concept shift: half of the clients have their labels exchanged, and take next to nothing from the others' heads.
    draw = generator(0, "concepts")
    data = {}
    for client in range(8):
        y = draw.integers(2, size=60)
        x = draw.normal(size=(60, 4)) + 3 * (2 * y[:, None] - 1)
        data[str(client)] = (torch.from_numpy(x), torch.from_numpy(1 - y if client % 2 else y))
    with default_generator(0):
        model = MLP((4,), 2, hidden=(8,)).double()
    training = Training(lr=0.1, batch_size=20)
    task = Task.of_clients(data, model, classes=2, training=training)
    scores = {}
    for algorithm in (FedPAC(lam=0.0, epochs=1), FedAvg()):
        report = play(task, algorithm, 10, evaluation="all")
        scores[type(algorithm)] = report.summary()["macro"]
        if isinstance(algorithm, FedPAC):
            matrix = report.algorithm.mixing(report.server)
            assert matrix[0::2, 0::2].sum(1).min() > 0.95
            assert matrix[1::2, 1::2].sum(1).min() > 0.95
            assert matrix.diagonal().max() < 0.9  # and nobody keeps to itself
    assert scores[FedPAC] > 0.95
    assert scores[FedAvg] < 0.7
