"""Heads and layers that the server computes in one go: equal to the solution in one place, and what they come to."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from samples import own
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from atoll import Algorithm, Batch, Cohort, Params, Replies, Stack, Task, Training
from atoll.algorithms.afl import AFL
from atoll.algorithms.answers.fedlpa import most_likely
from atoll.algorithms.ccvr import CCVR
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedcgs import FedCGS
from atoll.algorithms.fedlpa import FedLPA
from atoll.algorithms.fedpft import FedPFT
from atoll.algorithms.local import Local
from atoll.algorithms.regmean import RegMean
from atoll.kernel.algorithm import Arrival
from atoll.kernel.network import Variant
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.models.linear import Linear
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.server.mixtures import fit, log_densities, variance_within

CLASSES, INPUTS, ALL = 3, 4, 24
PARTITIONS = [(ALL,), (5, 1, 11, 7), (1,) * ALL]  # one client, some, and one sample each


def samples() -> tuple[Tensor, Tensor]:
    draw = generator(0, "closed form heads")
    y = torch.arange(ALL) % CLASSES
    return torch.from_numpy(draw.normal(size=(ALL, INPUTS))) + y[:, None] / 2, y


def dealt(sizes: Sequence[int], *, hidden: tuple[int, ...] = (6,), lr: float = 0.1) -> Task:
    """The same samples, dealt to clients of these sizes; all are for training."""
    x, y = samples()
    ends = np.cumsum([0, *sizes])
    data = {str(k): (x[a:b], y[a:b]) for k, (a, b) in enumerate(itertools.pairwise(ends))}
    return of(data, hidden=hidden, lr=lr)


def of(data: dict[str, tuple[Tensor, Tensor]], *, hidden: tuple[int, ...] = (6,), lr: float = 0.1) -> Task:
    with default_generator(0):
        model = MLP((INPUTS,), CLASSES, hidden=hidden) if hidden else Linear((INPUTS,), CLASSES)
    training = Training(lr=lr, batch_size=5)
    return Task.of_clients(data, model.double(), classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))


def features(task: Task, x: Tensor) -> Tensor:
    return Batch(x, x[:, 0], None, None, task.network, Variant(train=False)).features(task.network.initial)


def head(task: Task, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    model = play(task, algorithm).server.answer
    return model["head.weight"], model["head.bias"]


# -- AFL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("afl")
@pytest.mark.parametrize("sizes", PARTITIONS, ids=len)
@pytest.mark.parametrize("gamma", [1.0, 1e-3])
def test_afl_is_the_ridge_regression_of_all_samples(sizes: tuple[int, ...], gamma: float) -> None:
    # catches: the ridge counted once per client, which the paper has to take out again.
    task, (x, y) = dealt(sizes), samples()
    rows = torch.cat([features(task, x), torch.ones(ALL, 1)], 1)
    ridge = gamma**0.5 * torch.eye(rows.shape[1]).double()
    wanted = torch.nn.functional.one_hot(y, CLASSES).double()
    above, below = torch.cat([rows, ridge]), torch.cat([wanted, torch.zeros(len(ridge), CLASSES)])
    solution = torch.linalg.lstsq(above, below).solution
    weight, bias = head(task, AFL(gamma=gamma))
    torch.testing.assert_close(weight, solution[:-1].T, rtol=0, atol=1e-8)
    torch.testing.assert_close(bias, solution[-1], rtol=0, atol=1e-8)


@pytest.mark.closed_form("afl")
def test_afl_sums_are_the_pairwise_law_of_the_paper() -> None:
    # The absolute aggregation law merges the solutions W_u, W_v of two clients, with their Gram matrices C_u, C_v.
    task, gamma = dealt((5, 1, 11, 7)), 0.5
    merged, gram = torch.zeros(0), torch.zeros(0)
    for k in range(task.clients):
        x, y = own(task, k)
        rows = torch.cat([features(task, x), torch.ones(len(x), 1)], 1)
        c = rows.T @ rows + gamma * torch.eye(rows.shape[1])
        w = torch.linalg.solve(c, rows.T @ torch.nn.functional.one_hot(y, CLASSES).double())
        merged, gram = (w, c) if k == 0 else (pairwise(merged, gram, w, c), gram + c)
    surplus = (task.clients - 1) * gamma * torch.eye(len(gram))  # each client has put its own γ in; one is to stay
    merged = torch.linalg.solve(gram - surplus, gram @ merged)
    weight, bias = head(task, AFL(gamma=gamma))
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1).T, merged, rtol=0, atol=1e-8)


def pairwise(w_u: Tensor, c_u: Tensor, w_v: Tensor, c_v: Tensor) -> Tensor:
    def share(c: Tensor, other: Tensor) -> Tensor:
        turned = torch.linalg.solve(c, other)
        return torch.eye(len(c)) - turned + turned @ torch.linalg.solve(c + other, other)

    return share(c_u, c_v) @ w_u + share(c_v, c_u) @ w_v


@pytest.mark.closed_form("afl", "fedcgs")
@pytest.mark.parametrize("algorithm", [AFL(), FedCGS()], ids=["afl", "fedcgs"])
def test_a_client_without_samples_changes_nothing(algorithm: Algorithm, make_cohort: Callable[..., Cohort]) -> None:
    # A task does not admit one; its reply would be zeros.
    task = dealt((5, 1, 18))
    sent = algorithm.local(None, make_cohort(task)).send["moments"]
    beside = sent.map(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf[:1])]))
    heads = [head_of(algorithm, task, moments) for moments in (sent, beside)]
    for name, leaf in heads[0].items():
        torch.testing.assert_close(heads[1][name], leaf, rtol=0, atol=1e-12)


def head_of(algorithm: Algorithm, task: Task, moments: Stack) -> Params:
    """The head that a server makes of these replies."""
    arrival = Arrival(np.arange(moments.clients), {"moments": moments}, torch.ones(moments.clients))
    bench = Workbench(Population(task, RamMemory(1), 0), LocalEngine(device="cpu"), round=0)
    after = algorithm.aggregate(algorithm.start(task.public_facts()), Replies([arrival], keep=False, workbench=bench))
    made: Params = after.answer.part("head")
    return made


# -- FedCGS ------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedcgs")
@pytest.mark.parametrize("sizes", PARTITIONS, ids=len)
@pytest.mark.parametrize("covariance", ["within", "total"])
def test_fedcgs_is_bayes_rule_on_all_samples(sizes: tuple[int, ...], covariance: str) -> None:
    task, (x, y) = dealt(sizes), samples()
    z, share = features(task, x), 0.2
    centers = torch.stack([z[y == label].mean(0) for label in range(CLASSES)])
    apart = z - (centers[y] if covariance == "within" else z.mean(0))
    s = apart.T @ apart / ALL
    s = (1 - share) * s + share * s.diagonal().mean() * torch.eye(len(s)).double()
    weight, bias = head(task, FedCGS(covariance=covariance, shrinkage=share))
    torch.testing.assert_close(weight, centers @ torch.linalg.inv(s), rtol=0, atol=1e-8)
    prior = torch.bincount(y).double() / ALL
    quadratic = torch.stack([one @ torch.linalg.solve(s, one) for one in centers])
    torch.testing.assert_close(bias, prior.log() - quadratic / 2, rtol=0, atol=1e-8)


@pytest.mark.closed_form("fedcgs")
def test_fedcgs_without_shrinkage_is_linear_discriminant_analysis() -> None:
    task, (x, y) = dealt((5, 1, 11, 7), hidden=()), samples()  # features are the samples: of full rank
    weight, bias = head(task, FedCGS(shrinkage=1e-13))
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    torch.testing.assert_close(weight, torch.from_numpy(theirs.coef_), rtol=0, atol=1e-8)
    torch.testing.assert_close(bias, torch.from_numpy(theirs.intercept_), rtol=0, atol=1e-8)


# -- FedPFT ------------------------------------------------------------------------------------------------------------


def mixture_data() -> tuple[Tensor, Tensor]:
    draw = generator(1, "mixtures")
    rows = torch.from_numpy(draw.normal(size=(90, 2))) + 4.0 * torch.from_numpy(draw.integers(3, size=(90, 1)))
    same = torch.nn.functional.one_hot(torch.arange(90) % 4 // 3, 2).double()  # 68 and 22 rows: 6 and 2 components
    same[-5:] = 0  # padding
    return rows, same


@pytest.mark.closed_form("fedpft")
@pytest.mark.parametrize("nu", [0.0, 1.0])
def test_every_iteration_of_em_makes_the_rows_more_likely(nu: float) -> None:
    rows, same = mixture_data()
    draws = torch.from_numpy(generator(0, "start").random((6, 2)))
    live = torch.arange(6) < torch.tensor([[6], [2]])
    pooled = variance_within(rows, same)

    def objective(iterations: int) -> float:
        found = fit(rows, same, draws, iterations=iterations, nu=nu)
        likely = (log_densities(found, live, rows).logsumexp(2) * same).sum()
        variance = found["variance"][live]
        return float(likely - nu / 2 * (variance.log() + pooled / variance).sum())

    reached = [objective(iterations) for iterations in range(1, 25)]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(reached))
    assert reached[-1] > reached[0] + 1


@pytest.mark.closed_form("fedpft")
def test_em_finds_a_planted_mixture() -> None:
    draw = generator(2, "planted")
    centers = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]], dtype=torch.float64)
    which = torch.from_numpy(draw.choice(3, size=3000, p=(0.5, 0.3, 0.2)))
    scale = torch.tensor([[1.0, 0.5], [0.5, 1.0], [1.0, 1.0]], dtype=torch.float64)
    rows = centers[which] + scale[which] * torch.from_numpy(draw.normal(size=(3000, 2)))
    found = fit(rows, torch.ones(3000, 1).double(), torch.from_numpy(draw.random((3, 1))), iterations=30, nu=0.0)
    order = torch.cdist(centers, found["mean"][0]).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    torch.testing.assert_close(found["weight"][0][order], share, rtol=0, atol=0.03)
    torch.testing.assert_close(found["mean"][0][order], centers, rtol=0, atol=0.1)
    torch.testing.assert_close(found["variance"][0][order], scale.square(), rtol=0.15, atol=0)


@pytest.mark.limit("fedpft")
def test_few_rows_have_one_gaussian_drawn_to_the_variance_within_classes() -> None:
    rows, same = mixture_data()
    few = torch.cat([same[:, :1], torch.zeros(90, 1)], 1)
    few[[3, 7, 11], 1] = 1  # three rows
    found = fit(rows, few, torch.from_numpy(generator(0, "start").random((6, 2))), iterations=3, nu=2.0)
    three = rows[[3, 7, 11]]
    assert found["weight"][1].tolist() == [1, 0, 0, 0, 0, 0]
    torch.testing.assert_close(found["mean"][1, 0], three.mean(0), rtol=0, atol=1e-12)
    expected = (3 * three.var(0, correction=0) + 2 * variance_within(rows, few)) / 5
    torch.testing.assert_close(found["variance"][1, 0], expected, rtol=0, atol=1e-10)


@pytest.mark.purpose("fedpft")
def test_fedpft_tells_classes_apart_that_no_client_has_together() -> None:
    x, y = samples()
    x = x + 4 * y[:, None]
    data = {str(label): (x[y == label], y[y == label]) for label in range(CLASSES)}
    task = of(data, hidden=())
    for algorithm, right in ((FedPFT(server_epochs=100), True), (Local(epochs=10), False)):
        for w in personal_models(play(task, algorithm)):
            answers = (x @ w["head.weight"].T + w["head.bias"]).argmax(1)
            assert (float((answers == y).double().mean()) > 0.9) is right


# -- RegMean -----------------------------------------------------------------------------------------------------------


@pytest.mark.limit("regmean")
def test_regmean_of_clients_with_the_same_inputs_is_the_mean_of_their_models() -> None:
    x, y = samples()
    task = of({"0": (x, y), "1": (x, (y + 1) % CLASSES)}, hidden=())
    mean, found = play(task, FedAvg(epochs=3)).server, play(task, RegMean(epochs=3)).server.answer
    for name, leaf in mean.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-10)


@pytest.mark.limit("fedlpa", "regmean")
@pytest.mark.parametrize("algorithm", [RegMean(epochs=3), FedLPA(epochs=3)], ids=["regmean", "fedlpa"])
def test_one_client_alone_keeps_its_model(algorithm: Algorithm) -> None:
    task = dealt((ALL,))
    alone, found = personal_models(play(task, Local(epochs=3)))[0], play(task, algorithm).server.answer
    for name, leaf in alone.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-8)


@pytest.mark.closed_form("regmean")
def test_regmean_undamped_answers_nearest_to_the_clients_own_models_on_their_samples() -> None:
    task = dealt((9, 1, 14), hidden=())
    rows, answers = [], []
    for k, w in enumerate(personal_models(play(task, Local(epochs=3)))):
        x, _ = own(task, k)
        rows.append(torch.cat([x, torch.ones(len(x), 1)], 1))
        answers.append(x @ w["head.weight"].T + w["head.bias"])
    nearest = torch.linalg.lstsq(torch.cat(rows), torch.cat(answers)).solution.T
    weight, bias = head(task, RegMean(epochs=3, damping=1.0))
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), nearest, rtol=0, atol=1e-4)  # but for the ridge


# -- FedLPA ------------------------------------------------------------------------------------------------------------


def posteriors(clients: int = 3, outputs: int = 4, inputs: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = generator(0, "posteriors")

    def definite(size: int) -> Tensor:
        root = torch.from_numpy(draw.normal(size=(clients, size, size)))
        return root @ root.mT + 0.1 * torch.eye(size)

    models = torch.from_numpy(draw.normal(size=(clients, outputs, inputs)))
    return models, definite(inputs), definite(outputs), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.limit("fedlpa")
def test_fedlpa_with_factors_of_the_identity_is_the_weighted_mean() -> None:
    models, a, b, p = posteriors()
    ones = (torch.eye(size).double().expand(3, size, size) for size in (a.shape[-1], b.shape[-1]))
    found = most_likely(models, *ones, p, iterations=5)
    torch.testing.assert_close(found, torch.einsum("k,koi->oi", p, models), rtol=0, atol=1e-14)


@pytest.mark.closed_form("fedlpa")
def test_fedlpa_solves_its_linear_system() -> None:
    models, a, b, p = posteriors()
    found = most_likely(models, a, b, p, iterations=500)
    kron = sum(p[k] * torch.kron(b[k], a[k]) for k in range(3))  # of the rows of M one after another
    wanted = sum(p[k] * (b[k] @ models[k] @ a[k]).flatten() for k in range(3))
    torch.testing.assert_close(found.flatten(), torch.linalg.solve(kron, wanted), rtol=0, atol=1e-8)


@pytest.mark.limit("fedlpa")
def test_fedlpa_that_is_damped_without_end_is_fedavg() -> None:
    task = dealt((5, 1, 11, 7))
    mean, found = play(task, FedAvg(epochs=3)).server, play(task, FedLPA(epochs=3, damping=1e8)).server.answer
    for name, leaf in mean.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-6)


@pytest.mark.purpose("fedlpa", "regmean")
@pytest.mark.parametrize("algorithm", [RegMean(epochs=10), FedLPA(epochs=10)], ids=["regmean", "fedlpa"])
def test_a_client_does_not_count_in_weights_that_it_never_uses(algorithm: Algorithm) -> None:
    # Each client sees half of the inputs, the others are 0: in a mean, initial weights count as much as trained ones.
    x, y = samples()
    left, right = x.clone(), x.clone()
    left[:, 2:], right[:, :2] = 0, 0
    task = of({"0": (left, y), "1": (right, y)}, hidden=())
    each = personal_models(play(task, Local(epochs=10)))
    weight, _ = head(task, algorithm)
    used = torch.cat([each[0]["head.weight"][:, :2], each[1]["head.weight"][:, 2:]], 1)
    mean = (each[0]["head.weight"] + each[1]["head.weight"]) / 2
    assert float((weight - used).norm()) < 0.3 * float((mean - used).norm())


# -- CCVR --------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("ccvr")
@pytest.mark.parametrize("sizes", PARTITIONS, ids=len)
def test_ccvr_has_the_gaussians_of_all_samples_however_they_are_dealt(sizes: tuple[int, ...]) -> None:
    task, (x, y) = dealt(sizes), samples()
    z, found = features(task, x), play(task, CCVR()).server.gaussians
    for c in range(CLASSES):
        mine = z[y == c]
        torch.testing.assert_close(found["mean"][c], mine.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(found["covariance"][c], torch.cov(mine.T, correction=0), rtol=0, atol=1e-12)


@pytest.mark.closed_form("ccvr")
def test_ccvr_on_gaussians_of_one_covariance_is_fishers_discriminant() -> None:
    # The log odds of two such classes are linear, with the slope S^-1 (mu_1 - mu_0).
    task, draw = dealt((ALL,), hidden=()), generator(0, "one covariance")
    root = torch.from_numpy(draw.normal(size=(INPUTS, INPUTS))) + 2 * torch.eye(INPUTS)
    mean = torch.from_numpy(draw.normal(size=(2, INPUTS)))
    s = (root @ root.T).expand(2, INPUTS, INPUTS)
    slope = torch.linalg.solve(s[0], mean[1] - mean[0])
    known = Params.of(share=torch.ones(2).double() / 2, mean=mean, covariance=s)
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False)
    bench = Workbench(Population(task, RamMemory(task.clients), 0), engine, round=0)
    method = CCVR(draws=20_000, shrinkage=1e-9, server_epochs=20, server_batch=500, server_lr=0.1)
    weight = method.calibrate(task.network.initial, known, bench)["head.weight"]
    torch.testing.assert_close(weight[1] - weight[0], slope, rtol=0, atol=0.1 * float(slope.norm()))


@pytest.mark.purpose("ccvr")
def test_ccvr_hears_rare_classes_that_no_client_has_with_others() -> None:
    draw = generator(0, "apart")

    def some(c: int, n: int) -> tuple[Tensor, Tensor]:
        return 3 * torch.eye(INPUTS).double()[c] + torch.from_numpy(draw.normal(size=(n, INPUTS))), torch.full((n,), c)

    task = of({str(c): some(c, n) for c, n in enumerate((160, 40, 10))}, hidden=(16,))
    x, y = map(torch.cat, zip(*[some(c, 100) for c in range(CLASSES)], strict=True))

    def accuracy(model: Params) -> float:
        answers = Batch(x, y, None, None, task.network, Variant(train=False)).outputs(model)
        return float((answers.argmax(1) == y).double().mean())

    calibrated = accuracy(play(task, CCVR(), rounds=4).server.deployed)
    assert calibrated > 0.9
    assert calibrated > accuracy(play(task, FedAvg(), rounds=4).server) + 0.1
