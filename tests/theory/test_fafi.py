"""FAFI: terms of its objective that are the same or nothing, and fusions that are the same or one client's answer."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from samples import answers
from torch import Tensor, nn

from atoll import Batch, Cohort, Params, Predictor, Task
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_plus import FAFIPlus
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import default_generator, generator
from atoll.models import BodyAndHead
from atoll.testing.conformance import play
from atoll.toolbox.objectives.etf import simplex_etf
from atoll.toolbox.objectives.prototypical import Given, Objective, cosine_of, train, without_conflict
from atoll.toolbox.server.fusion import Fusion, fuse, informativeness, stack_features

RULES: tuple[Fusion, ...] = get_args(Fusion)
each_rule = pytest.mark.parametrize("rule", RULES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(generator(seed, "theory").normal(size=shape))


# -- the objective -----------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fafi")
def test_two_of_the_four_published_terms_are_the_same_number() -> None:
    # L_cls = CE(z P^T, y) and L_pf = CE(z P^T / 1.0, y): so the classification counts twice, and nothing else does.
    z, p, y = F.normalize(normal(8, 5)), normal(3, 5, seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
    classification, prototypes = F.cross_entropy(z @ p.T, y), F.cross_entropy(z @ p.T / 1.0, y)
    assert torch.equal(classification, prototypes)
    objective = FAFI(profile="faithful").training.objective
    twice = objective.classification * F.cross_entropy(objective.logits(z, p), y)
    assert torch.equal(twice, classification + prototypes)


@pytest.mark.closed_form("fafi")
def test_prototypes_drawn_from_a_normal_distribution_are_not_kept_apart() -> None:
    # |p|^2 is about 512 and p . p' about 23: in single precision, both the term and its gradient are exactly 0.
    p = normal(10, 512).float().requires_grad_()
    crowding = Objective(scale=0.0).crowding(p)
    crowding.backward()  # type: ignore[no-untyped-call]
    assert crowding.item() == 0
    assert p.grad is not None
    assert p.grad.abs().max() == 0


@pytest.mark.closed_form("fafi")
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_unit_prototypes_of_a_simplex_have_a_floor_that_only_a_scale_removes(classes: int) -> None:
    # Cosines are 1 and -1 / (C - 1), so both the separation and the classification of perfect features are
    # log(1 + (C - 1) exp(-s C / (C - 1))): 1.377 for C = 10 and s = 1, which no training gets below.
    p, y = simplex_etf(classes, 128, generator(0, "etf")), torch.arange(classes)
    for scale in (1.0, 16.0):
        objective = Objective(scale=scale)
        floor = math.log1p((classes - 1) * math.exp(-scale * classes / (classes - 1)))
        assert objective.crowding(p).item() == pytest.approx(floor, rel=1e-9)
        assert F.cross_entropy(objective.logits(p, p), y).item() == pytest.approx(floor, rel=1e-9)
    assert Objective(scale=0.0).crowding(p).item() == pytest.approx(Objective(scale=1.0).crowding(p).item())
    if classes == 10:
        assert Objective(scale=1.0).crowding(p).item() == pytest.approx(1.377, abs=5e-4)


@pytest.mark.closed_form("fafi")
def test_lengths_of_prototypes_do_not_matter_with_a_scale() -> None:
    z, p = F.normalize(normal(6, 4)), normal(3, 4, seed=1)
    longer = p * torch.tensor([[2.0], [0.1], [30.0]])
    objective = Objective()
    torch.testing.assert_close(objective.logits(z, p), objective.logits(z, longer), rtol=0, atol=1e-12)
    torch.testing.assert_close(objective.crowding(p), objective.crowding(longer), rtol=0, atol=1e-12)


@pytest.mark.limit("fafi")
@pytest.mark.parametrize("profile", ["clean", "faithful"])
def test_training_in_two_halves_is_training_at_once(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort], profile: str
) -> None:
    # With one batch per epoch its order does not matter. Only momentum passes from one half to the other.
    task = make_task(sizes=(6, 6), dtype=torch.float64, batch_size=6, momentum=0.9)
    cohort, algorithm = make_cohort(task), FAFI(profile=profile)  # type: ignore[arg-type]
    step = algorithm.training.step(cohort)
    given = Given(cohort.lr, epoch=cohort.steps(1), total=None, own=None)
    at_once = cohort.scan(step, step.start(cohort, cohort.initial), given=given, epochs=4)
    half = cohort.scan(step, step.start(cohort, cohort.initial), given=given, epochs=2)
    whole = cohort.scan(step, half, given=given, epochs=2)
    restarted = train(cohort, half.w, step, epochs=2)
    for name, leaf in at_once.w.items():
        torch.testing.assert_close(whole.w[name], leaf, rtol=0, atol=1e-12)
        if name == "head.weight":  # a new optimizer in every round, as published, is what `momentum_reset` says
            assert torch.allclose(restarted[name], leaf, rtol=0, atol=1e-12) is (profile == "faithful")


# -- conflicting gradients ---------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fafi")
def test_gradients_lose_what_points_against_each_other(make_task: Callable[..., Task]) -> None:
    w = make_task(dtype=torch.float64).network.initial
    one, two = w.map(lambda leaf: normal(*leaf.shape)), w.map(lambda leaf: normal(*leaf.shape, seed=1))
    for sign in (1.0, -1.0):  # the second leans towards the first, or away from it
        rest = two + one * (10 * sign)
        g, cosine = without_conflict(one + rest, one), cosine_of(one + rest, one, w.without_part("head"))
        body = [name for name in w if not name.startswith("head")]
        a, b = (torch.cat([part[name].flatten() for name in body]) for part in (one, rest))
        assert cosine.item() == pytest.approx(F.cosine_similarity(a, b, dim=0).item())
        assert (cosine > 0).item() is (sign > 0)
        if sign < 0:
            a, b = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
        torch.testing.assert_close(torch.cat([g[name].flatten() for name in body]), a + b, rtol=0, atol=1e-9)
        torch.testing.assert_close(g["head.weight"], (one + rest)["head.weight"])


# -- fusion ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def features() -> Tensor:
    return normal(3, 7, 5).abs()  # after a ReLU


NOISE = normal(3, 5, seed=9).abs()
SHARES = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


def direction(features: Tensor, rule: Fusion, **more: object) -> Tensor:
    return F.normalize(fuse(features, rule, **{"shares": SHARES, "noise": NOISE, **more}), dim=1)  # type: ignore[arg-type]


@pytest.mark.closed_form("fafi")
def test_the_released_fusion_by_informativeness_is_the_plain_mean(features: Tensor) -> None:
    torch.testing.assert_close(direction(features, "iffi_code"), direction(features, "uniform"), rtol=0, atol=1e-12)
    assert not torch.allclose(direction(features, "iffi"), direction(features, "uniform"))


@pytest.mark.limit("fafi")
def test_clients_that_are_as_informative_count_the_same(features: Tensor) -> None:
    # Noise that is orthogonal to everything: s_k(x) = 1 for all.
    wide, nothing = F.pad(features, (0, 1)), torch.zeros(3, 6, dtype=torch.float64)
    nothing[:, 5] = 1.0
    assert torch.equal(informativeness(wide, nothing), torch.ones(3, 7, dtype=torch.float64))
    found = fuse(wide, "iffi", shares=SHARES, noise=nothing)
    torch.testing.assert_close(found, fuse(wide, "uniform", shares=SHARES), rtol=0, atol=1e-12)


@pytest.mark.limit("fafi")
def test_clients_of_one_size_count_the_same(features: Tensor) -> None:
    alike = torch.full((3,), 1 / 3, dtype=torch.float64)
    found = fuse(features, "size", shares=alike)
    torch.testing.assert_close(found, fuse(features, "uniform", shares=alike), rtol=0, atol=1e-12)


@each_rule
@pytest.mark.limit("fafi")
def test_identical_clients_are_one(features: Tensor, rule: Fusion) -> None:
    same, noise = features[:1].expand(3, -1, -1), NOISE[:1].expand(3, -1)
    torch.testing.assert_close(direction(same, rule, noise=noise), F.normalize(features[0], dim=1), rtol=0, atol=1e-12)


@each_rule
@pytest.mark.closed_form("fafi")
def test_the_order_of_clients_does_not_matter(features: Tensor, rule: Fusion) -> None:
    order = [2, 0, 1]
    found = direction(features[order], rule, shares=SHARES[order], noise=NOISE[order])
    torch.testing.assert_close(found, direction(features, rule), rtol=0, atol=1e-12)


@each_rule
@pytest.mark.closed_form("fafi")
def test_long_features_dominate_unless_they_are_normalised(features: Tensor, rule: Fusion) -> None:
    longer = features * torch.tensor([1.0, 40.0, 1.0], dtype=torch.float64)[:, None, None]
    assert not torch.allclose(direction(longer, rule), direction(features, rule))
    found = direction(longer, rule, normalise=True)
    torch.testing.assert_close(found, direction(features, rule, normalise=True), rtol=0, atol=1e-12)


@each_rule
@pytest.mark.closed_form("fafi")
def test_what_looks_like_noise_to_everybody_is_still_fused(rule: Fusion) -> None:
    found = direction(NOISE[:, None].expand(-1, 7, -1), rule)
    assert torch.isfinite(found).all()


@pytest.mark.limit("fafi")
def test_features_of_different_sizes_are_refused(features: Tensor) -> None:
    with pytest.raises(ModelError, match="one size for all clients. Got sizes 4, 5"):
        stack_features([features[0], features[1, :, :4]])


@each_rule
@pytest.mark.parametrize("profile", ["clean", "faithful"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.limit("fafi")
def test_of_one_client_its_own_prototypes_answer(
    make_task: Callable[..., Task], rule: Fusion, profile: str, normalise: bool
) -> None:
    task = make_task(sizes=(12,), dtype=torch.float64)
    algorithm = FAFI(profile=profile, fusion=rule, normalise=normalise, averaging="all")  # type: ignore[arg-type]
    report = play(task, algorithm)
    w, shared = report.server.answer.models.client(0), report.algorithm.shared(report.server)
    assert isinstance(shared, Predictor)
    features = Batch(task.x, task.y, None, None, task.network, Variant(train=False)).features(w)
    own = algorithm.training.objective.logits(F.normalize(features, dim=1), w["head.weight"])
    found = answers(task, shared, task.x)
    assert torch.equal(found.argmax(1), own.argmax(1))
    torch.testing.assert_close(found, own, rtol=0, atol=1e-9)


@pytest.mark.limit("fafi-plus")
@pytest.mark.parametrize("own", [0.5, 1.0])
def test_of_one_client_or_identical_ones_its_own_prototypes_answer_in_any_mixture(
    make_task: Callable[..., Task], own: float
) -> None:
    task = make_task(sizes=(12,), dtype=torch.float64)
    one, thrice = play(task, FAFIPlus(own=own)).server, torch.zeros(3, dtype=torch.int64)
    models, noise = (part.rows(thrice) for part in (one.answer.models, one.answer.noise))
    several = replace(one.answer, models=models, counts=one.answer.counts[thrice], noise=noise)
    many = replace(one, answer=several)
    alone = answers(task, FAFI().shared(one), task.x)
    for server in (one, many):
        found = answers(task, FAFIPlus(own=own).shared(server), task.x)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


# -- evaluation --------------------------------------------------------------------------------------------------------


def with_batchnorm() -> nn.Module:
    with default_generator(0):
        return BodyAndHead(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 3))


@pytest.mark.closed_form("fafi")
def test_an_answer_does_not_depend_on_who_is_tested_beside(make_task: Callable[..., Task]) -> None:
    task = make_task(with_batchnorm, sizes=(9, 12, 7), dtype=torch.float64)
    report = play(task, FAFI())
    shared = report.algorithm.shared(report.server)
    assert shared is not None
    before = {name: leaf.clone() for name, leaf in report.server.answer.models.items()}
    together_, order = answers(task, shared, task.x), torch.randperm(len(task.x), generator=torch.Generator())
    torch.testing.assert_close(answers(task, shared, task.x[order]), together_[order], rtol=0, atol=1e-12)
    single = torch.cat([answers(task, shared, one) for one in task.x.split(1)])
    torch.testing.assert_close(single, together_, rtol=0, atol=1e-12)
    assert all(torch.equal(leaf, before[name]) for name, leaf in report.server.answer.models.items())


@pytest.mark.purpose("fafi")
def test_fused_features_know_classes_that_no_client_has_together() -> None:
    # Three clients with one half of the classes each, in two directions of their own; nobody sees all three classes.
    draw = generator(0, "purpose")
    centers = torch.tensor([[3.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 3.0, 0]], dtype=torch.float64)

    def samples(labels: tuple[int, int]) -> tuple[Tensor, Tensor]:
        y = torch.tensor(labels * 20)
        return centers[y] + torch.from_numpy(draw.normal(size=(40, 4))) * 0.3, y

    data = {str(k): samples(labels) for k, labels in enumerate([(0, 1), (1, 2), (2, 0)])}
    with default_generator(0):
        model = BodyAndHead(nn.Sequential(nn.Linear(4, 16), nn.ReLU()), nn.Linear(16, 3)).double()
    task = Task.of_clients(data, model, classes=3, shares=(0.5, 0.0, 0.5))
    report = play(replace(task, training=replace(task.training, batch_size=10)), FAFI(epochs=20))
    shared = report.algorithm.shared(report.server)
    assert shared is not None
    found = answers(task, shared, task.x).argmax(1)
    assert (found == task.y).double().mean() > 0.95
    alone = [Params(dict(report.server.answer.models.client(k)), task.network.layout) for k in range(3)]
    worst = [(answers(task, one, task.x).argmax(1) == task.y).double().mean() for one in alone]
    assert max(worst) < 0.8
