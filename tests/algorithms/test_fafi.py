"""FAFI by hand: a step of either profile, prototypes and their average, what travels, and who cannot take part."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samples import Shaken, answers, own
from torch import Tensor, nn

from atoll import Batch, Cohort, Params, Task
from atoll.algorithms.answers import features
from atoll.algorithms.answers.features import TEST_BATCH, in_training
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.trainings import fafi
from atoll.federation.loop import federate
from atoll.kernel.batch import Augment
from atoll.kernel.errors import ModelError, OneShotError, TaskError
from atoll.kernel.network import Variant
from atoll.models import BodyAndHead
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play
from atoll.toolbox.objectives.contrastive import supervised_contrast
from atoll.toolbox.objectives.prototypical import Given

WEIGHT = "head.weight"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def normalised_batch_model() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 3))


@pytest.mark.parametrize("profile", ["clean", "faithful"])
def test_two_steps_by_hand(make_task: Callable[..., Task], profile: str) -> None:
    # catches: prototypes that get no gradient, a contrast of one view only, clipping before the terms are added up.
    task = make_task(sizes=(8,), dtype=torch.float64, batch_size=8, lr=0.3, momentum=0.9, clip=0.5)
    report = play(task, FAFI(profile=profile, epochs=2))  # type: ignore[arg-type]
    x, y = own(task, 0)
    module = task.network._original.requires_grad_(True)
    module.load_state_dict(dict(report.server.start.model))
    parameters = [leaf for name, leaf in module.named_parameters() if name != "head.bias"]
    for epoch in range(2):
        if epoch == 0 or profile == "faithful":
            optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
        z = F.normalize(module.features(torch.cat([x, x])))  # type: ignore[operator]
        labels, p = torch.cat([y, y]), module.get_parameter(WEIGHT)
        if profile == "faithful":
            fit = 2 * F.cross_entropy(z @ p.T, labels)
            apart = F.cross_entropy(p @ p.T, torch.arange(3))
        else:
            fit = F.cross_entropy(16 * F.cosine_similarity(z[:, None], p[None], dim=2), labels)
            apart = F.cross_entropy(16 * F.cosine_similarity(p[:, None], p[None], dim=2), torch.arange(3))
        temperature = 0.07 if profile == "faithful" else 0.1
        loss = fit + apart + supervised_contrast(z, labels, temperature=temperature).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        length = torch.stack([leaf.grad.square().sum() for leaf in parameters if leaf.grad is not None]).sum().sqrt()
        for leaf in parameters:
            assert leaf.grad is not None
            leaf.grad *= (0.5 / length).clamp(max=1)
        optimizer.step()
    found = report.server.answer.models.client(0)
    for name, leaf in module.named_parameters():
        torch.testing.assert_close(found[name], leaf.detach(), rtol=0, atol=1e-9)


def test_two_different_views_are_seen(make_task: Callable[..., Task]) -> None:
    shaken: Augment = Shaken()
    plain = make_task(dtype=torch.float64, batch_size=12)
    models = [play(replace(plain, augment=rule), FAFI(epochs=1)).server.answer.models for rule in (None, shaken)]
    assert not torch.equal(models[0][WEIGHT], models[1][WEIGHT])


@pytest.mark.parametrize(
    ("half", "option"),
    [
        *(("training", one) for one in fafi.PROFILES["clean"]),
        *(("answering", one) for one in features.PROFILES["clean"]),
    ],
)
def test_an_option_overrides_its_profile(half: str, option: str) -> None:
    def says(method: FAFI, name: str) -> object:
        return getattr(method, half).value_of(name)

    clean, faithful = (FAFI(profile=profile) for profile in ("clean", "faithful"))  # type: ignore[arg-type]
    assert says(clean, option) != says(faithful, option)
    mixed = FAFI(profile="faithful", **{option: says(clean, option)})
    assert says(mixed, option) == says(clean, option)
    others = [name for name in (fafi if half == "training" else features).PROFILES["clean"] if name != option]
    assert all(says(mixed, name) == says(faithful, name) for name in others)


def test_faithful_prototypes_begin_at_normal_draws_the_same_for_all(make_task: Callable[..., Task]) -> None:
    task = make_task(lambda: BodyAndHead(nn.Linear(4, 512), nn.Linear(512, 3)), dtype=torch.float64)
    still = play(task, FAFI(profile="faithful", epochs=0)).server.answer.models[WEIGHT]
    assert all(torch.equal(one, still[0]) for one in still)
    lengths = still[0].norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 512**0.5), rtol=0.1, atol=0)
    head = play(task, FAFI(epochs=0)).server.answer.models[WEIGHT][0]
    assert torch.equal(head, task.network.initial[WEIGHT])


@pytest.mark.parametrize("profile", ["clean", "faithful"])
def test_prototypes_are_averaged_over_owners_or_all(task: Task, profile: str) -> None:
    report = play(task, FAFI(profile=profile))  # type: ignore[arg-type]
    rows, found = report.server.answer.models[WEIGHT], report.server.answer.prototypes
    for label in range(3):
        owners = [k for k in range(4) if profile == "faithful" or (own(task, k)[1] == label).any()]
        each = rows[owners, label]
        expected = (each if profile == "faithful" else F.normalize(each)).mean(0)
        torch.testing.assert_close(found[label], expected, rtol=0, atol=1e-12)


def test_a_class_that_nobody_owns_has_the_mean_of_all(task: Task) -> None:
    rows = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([[9.0, 1, 0], [3, 4, 0], [0, 8, 0], [1, 1, 0]], dtype=torch.float64)
    found = FAFI(scale=0.0, least=2).answering.average(rows, counts)
    torch.testing.assert_close(found[0], rows[:2, 0].mean(0))
    torch.testing.assert_close(found[1], rows[1:3, 1].mean(0))
    torch.testing.assert_close(found[2], rows[:, 2].mean(0))
    by_volume = FAFI(scale=0.0, averaging="volume").answering.average(rows, counts)
    torch.testing.assert_close(by_volume[1], (rows[0, 1] + 4 * rows[1, 1] + 8 * rows[2, 1] + rows[3, 1]) / 14)


def test_answers_by_hand(task: Task) -> None:
    # catches: the released "informativeness", averaged over clients before it weighs any of them.
    report = play(task, FAFI())
    server, x = report.server, task.x
    models = [server.answer.models.client(k) for k in range(4)]
    features = [Batch(x, x[:, :0], None, None, task.network, Variant(train=False)).features(w) for w in models]
    said = [1 - F.cosine_similarity(f, s[None]) for f, s in zip(features, server.answer.noise["features"], strict=True)]
    mixed = sum(s[:, None] * F.normalize(f) for s, f in zip(said, features, strict=True))
    assert isinstance(mixed, Tensor)
    expected = 16 * F.cosine_similarity(mixed[:, None], server.answer.prototypes[None], dim=2)
    torch.testing.assert_close(answers(task, FAFI().shared(server), x), expected, rtol=0, atol=1e-9)


def test_in_the_faithful_profile_answers_depend_on_who_is_tested_together(make_task: Callable[..., Task]) -> None:
    task = make_task(normalised_batch_model, sizes=(8, 9, 8), dtype=torch.float64)
    report = play(task, FAFI(profile="faithful"))
    before = {name: leaf.clone() for name, leaf in report.server.answer.models.items()}
    deployed = report.algorithm.shared(report.server)
    assert deployed is not None
    together, alone = answers(task, deployed, task.x), answers(task, deployed, task.x[:5])
    assert not torch.allclose(together[:5], alone)
    assert all(torch.equal(leaf, before[name]) for name, leaf in report.server.answer.models.items())


def test_noise_is_seen_with_the_statistics_of_the_samples(make_task: Callable[..., Task]) -> None:
    # catches: informativeness that compares features under statistics of the test batch with some under running ones.
    task = make_task(normalised_batch_model, sizes=(8, 9, 8), dtype=torch.float64)
    report = play(task, FAFI(batch_statistics=True))
    server, x = report.server, task.x[:11]
    images = torch.from_numpy(
        Workbench(report.population, report.engine, round=0).generator("noise").normal(size=(8, 4))
    )
    mixed = torch.zeros(11, 6, dtype=torch.float64)
    shares = []
    for k in range(3):
        w = server.answer.models.client(k)
        linear = {
            name: F.linear(rows, w["body.0.weight"], w["body.0.bias"]) for name, rows in (("x", x), ("noise", images))
        }
        mean, variance = linear["x"].mean(0), linear["x"].var(0, correction=0)
        scale = w["body.1.weight"] / (variance + 1e-5).sqrt()
        f, noise = (F.relu((linear[name] - mean) * scale + w["body.1.bias"]) for name in ("x", "noise"))
        shares.append((1 - F.cosine_similarity(f, noise.mean(0)[None])).clamp(min=1e-6))
        mixed = mixed + shares[-1][:, None] * F.normalize(f)
    expected = 16 * F.cosine_similarity(mixed[:, None], server.answer.prototypes[None], dim=2)
    torch.testing.assert_close(answers(task, report.algorithm.shared(server), x), expected, rtol=0, atol=1e-9)


def test_statistics_are_those_of_at_most_256_test_samples(task: Task) -> None:
    x = torch.zeros(TEST_BATCH + 3, 4)
    batch = Batch(x, x[:, 0].long(), torch.ones(len(x)), None, task.network, Variant(train=False))
    pieces = list(in_training(batch))
    assert [(len(one.x), len(one.mask), one.variant.train) for one in pieces] == [(256, 256, True), (3, 3, True)]  # type: ignore[arg-type]
    assert [len(one.x) for one in in_training(replace(batch, mask=None))] == [256, 3]


def test_each_client_uploads_once(task: Task) -> None:
    ledger = play(task, FAFI()).ledger
    assert set(ledger.by_kind()) == {("up", "model"), ("up", "statistic"), ("down", "model")}
    numbers = sum(leaf.numel() for leaf in task.network.initial.values())
    for way, more in (("up", 3), ("down", 0)):
        each = ledger.bytes(way) / task.clients
        assert (numbers + more) * 8 <= each < (numbers + more) * 8 + 700
    with pytest.raises(OneShotError):
        federate(task, FAFI(), rounds=2)


def test_of_too_few_samples_no_step_is_made(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    # Clients have 5, 1, 12 and 7 samples, batches 4.
    for algorithm, still in ((FAFI(), [1]), (FAFI(drop_last=True), [1]), (FAFI(profile="faithful"), [1])):
        caplog.clear()
        models = play(task, replace(algorithm, normal_start=False)).server.answer.models
        moved = [k for k in range(4) if not torch.equal(models[WEIGHT][k], task.network.initial[WEIGHT])]
        assert moved == [k for k in range(4) if k not in still]
        assert "take no step" in caplog.text


def test_incomplete_batches_are_steps_or_not(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    # The first client has 4 + 2 samples, or 4 + 1, or 4: two samples are a step in the clean profile, one is not.
    for algorithm, steps in ((FAFI(), (6, 3, 3)), (FAFI(drop_last=True), (3, 3, 3))):
        for size, expected in zip((6, 5, 4), steps, strict=True):
            cohort = make_cohort(make_task(sizes=(size, 8), dtype=torch.float64))
            step = algorithm.training.step(cohort)
            given = Given(cohort.lr, epoch=None, total=None, own=None)
            end = cohort.scan(step, step.start(cohort, cohort.initial), given=given, epochs=3)
            assert end.time[0] == 3 * -(-size // 4)
            assert end.seen["steps"][0] == expected


def test_a_head_that_is_not_one_linear_layer_is_refused(make_task: Callable[..., Task]) -> None:
    deep = make_task(lambda: BodyAndHead(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))))
    with pytest.raises(ModelError, match="one linear layer of 6 features and 3 classes"):
        FAFI().start(deep.public_facts())
    free = make_task(lambda: BodyAndHead(nn.Linear(4, 6), nn.Linear(6, 3, bias=False)))
    assert FAFI().start(free.public_facts()).start.model is free.network.initial


def test_classes_are_needed_and_numbers_to_compare_with_noise(task: Task) -> None:
    with pytest.raises(TaskError, match="one class each"):
        FAFI().start(replace(task, classes=None).public_facts())
    words = BodyAndHead(nn.Sequential(nn.Embedding(9, 3), nn.Flatten()), nn.Linear(12, 3))
    data = {"0": (torch.zeros(5, 4, dtype=torch.int64), torch.tensor([0, 1, 2, 0, 1]))}
    text = Task.of_clients(data, words, classes=3)
    with pytest.raises(TaskError, match="no numbers"):
        FAFI().start(text.public_facts())
    assert FAFI(fusion="uniform").start(text.public_facts()).start.model is text.network.initial


def test_terms_are_logged_by_name(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    cohort = make_cohort(task)
    FAFI(epochs=2).training.train(task.network.initial, cohort)
    assert set(cohort.notes) == {"loss/classification", "loss/contrast", "loss/separation"}
    assert (cohort.notes["loss/classification"][[0, 2, 3]] > 0).all()
    assert cohort.notes["loss/classification"][1] == 0  # it has one sample


def test_nobody_replied(task: Task) -> None:
    report = play(task, FAFI(), faults=lambda round, clients: clients >= 0)
    assert isinstance(report.algorithm.shared(report.server), Params)


def test_the_step_size_falls_by_half_a_cosine(make_task: Callable[..., Task]) -> None:
    # One batch an epoch: of two steps the second is half as long, w_2 = w_1 - lr / 2 g(w_1).
    task = make_task(sizes=(9, 7), dtype=torch.float64, batch_size=16)
    one, two, falling = (
        play(task, FAFI(epochs=epochs, falling=fall)).server.answer.models
        for epochs, fall in ((1, False), (2, False), (2, True))
    )
    for name, leaf in falling.items():
        torch.testing.assert_close(leaf, (one[name] + two[name]) / 2, rtol=0, atol=1e-12)
