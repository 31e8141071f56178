"""ABHS, by hand: what is told before training, what is trained and sent, and what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from samples import Shaken, own
from torch import Tensor, nn

from atoll import Batch, Cohort, Params, Predictor, Replies, Stack, Task
from atoll.algorithms.abhs import ABHS, Given, aligned_gradient
from atoll.kernel.errors import ModelError, TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP, build
from atoll.runtime.serialise import size_of
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.client.blocks import BlockFeatures, Blocks, blocks_of
from atoll.toolbox.objectives.margins import margin_logits, margins, own_moments
from atoll.toolbox.server.prototypes import unit
from atoll.toolbox.server.splitting import (
    SCALE,
    TEMPERATURE,
    Found,
    Pull,
    held_gradient,
    relative,
    sizes,
    student_gradient,
    votes,
)

CLASSES, SIZE = 3, 6
quick = partial(ABHS, epochs=2, base_epochs=2, student_epochs=3, personal_epochs=1)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    task = make_task(dtype=torch.float64, sizes=(20, 3, 14, 9), shares=(0.6, 0.2, 0.2))
    draw = generator(1, "public")
    x, y = torch.from_numpy(draw.normal(size=(8, 4))), torch.from_numpy(draw.integers(CLASSES, size=8))
    return replace(task, public=(x, y))


def features_of(task: Task, w: Params, x: Tensor) -> Tensor:
    return Batch(x, torch.zeros(len(x)).long(), None, None, task.network, Variant(train=False)).features(w)


def outputs_of(task: Task, w: Params, x: Tensor) -> Tensor:
    return Batch(x, torch.zeros(len(x)).long(), None, None, task.network, Variant(train=False)).outputs(w)


# -- before training ---------------------------------------------------------------------------------------------------


def test_what_is_told_is_counts_means_and_deviations(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    update = quick().prepare(None, make_cohort(task))
    assert set(update.send) == {"labels", "blocks"}
    module = task.network._original
    for k in range(task.clients):
        x, y = own(task, k)
        said = torch.cat([module.features(x), module(x)], 1).detach()
        told = {name: part.client(k) for name, part in update.send.items()}
        assert torch.equal(told["labels"]["counts"], torch.bincount(y, minlength=CLASSES).double())
        torch.testing.assert_close(told["blocks"]["mean"], said.mean(0))
        torch.testing.assert_close(told["blocks"]["deviation"], said.std(0, correction=0), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("base", "theta"), [("public", 0.01), ("public", 2.0), ("initial", 2.0)])
def test_what_travels(task: Task, base: str, theta: float) -> None:
    # Once down: the base, and the split; once up: the model. Before: statistics, no model.
    messages = [m for m in play(task, quick(base=base, theta=theta)).ledger.messages() if m.client == 0]
    found = {(m.direction, m.round, m.field): (m.kind, m.bytes) for m in messages}
    base_down = {("down", -1, "broadcast")} if base == "public" else set()
    others = {("down", 0, "unicast"), ("up", 0, "model"), ("up", 0, "evidence"), ("up", 0, "moments")}
    before = {("up", -1, "labels"), ("up", -1, "blocks")}
    assert {one for one in found if one[2] not in ("weight", "last broadcast")} == before | base_down | others
    whole = 8 * sum(leaf.numel() for leaf in task.network.initial.values())
    told = found["up", -1, "labels"][1] + found["up", -1, "blocks"][1]
    assert told < 8 * (CLASSES + 2 * (SIZE + CLASSES)) + 400  # numbers, and their names
    assert {field: kind for (way, round, field), (kind, _) in found.items() if way == "up" and round < 0} == {
        "labels": "labels", "blocks": "statistic",
    }  # fmt: skip
    assert found["up", 0, "model"][1] > whole
    assert found["down", 0, "unicast"][1] < 400


@pytest.mark.parametrize("student_epochs", [0, 2])
@pytest.mark.parametrize("personal", ["head", "prototypes", "none"])
def test_what_comes_back_after_the_upload_is_in_the_ledger(task: Task, personal: str, student_epochs: int) -> None:
    # catches: clients that train on what they never downloaded.
    report = play(task, quick(theta=2.0, personal=personal, student_epochs=student_epochs))
    back = [m for m in report.ledger.messages() if m.field == "last broadcast"]
    if personal == "none":
        assert not back
        return
    assert sorted(m.client for m in back) == [0, 1, 2, 3]
    server = report.server
    sent = (
        {"one": server.found.one} if student_epochs else {"models": server.found.models, "shares": sizes(server.found)}
    )
    if personal == "prototypes":
        sent |= {"prototypes": Params.of(prototypes=server.found.prototypes)}
    assert {m.bytes for m in back} == {size_of(sent)}
    assert {m.direction for m in back} == {"down"}
    assert report.history[-1]["bytes"]["down"] >= sum(m.bytes for m in back)  # of the last round


def test_clients_have_their_own_splits(task: Task) -> None:
    # The first two clients are the same, and unlike the others.
    blocks, counts = blocks_of(task.public_facts()), torch.tensor([[9.0, 0, 0], [5, 0, 0], [0, 9, 0], [0, 0, 9]])
    mean = torch.tensor([[0.0], [0.0], [9.0], [-9.0]]).expand(4, SIZE + CLASSES)
    said = Stack.of(mean=mean, deviation=torch.ones(4, SIZE + CLASSES))
    good, u = ABHS(theta=0.3).shareable(blocks, counts, said)
    assert good.tolist() == [[True, True], [True, True], [False, False], [False, False]]
    torch.testing.assert_close(u[0], torch.full((2,), 1 / 3).double())
    together, _ = ABHS(theta=0.3, scope="all").shareable(blocks, counts, said)
    assert not together.any()  # the mean over clients is 1/6
    by_variance, _ = ABHS(rule="variance").shareable(blocks, counts, replace_mean(said, 0.0))
    assert by_variance.all()
    assert not ABHS(rule="variance").shareable(blocks, counts, said)[0].any()
    assert not ABHS(rule="variance", scope="all").shareable(blocks, counts, said)[0].any()


def replace_mean(said: Stack, value: float) -> Stack:
    return Stack.of(mean=torch.full_like(said["mean"], value), deviation=said["deviation"])


def test_the_base_is_trained_by_the_server_alone(task: Task) -> None:
    report = play(task, quick())
    assert not torch.equal(report.server.model["head.weight"], task.network.initial["head.weight"])
    initial = play(task, quick(base="initial"))
    assert all(torch.equal(initial.server.model[name], leaf) for name, leaf in task.network.initial.items())


@dataclass(frozen=True, kw_only=True)
class SharesTheBody(ABHS):
    """All but the second client share the body, whatever they told."""

    everybody: bool = False

    def shareable(self, blocks: Blocks, counts: Tensor, said: Stack) -> tuple[Tensor, Tensor]:
        good = torch.tensor([[True, False], [self.everybody, False], [True, False], [True, False]])
        return good, super().shareable(blocks, counts, said)[1]


@pytest.mark.parametrize("everybody", [True, False])
def test_shared_blocks_are_averages_over_those_who_share_them(task: Task, everybody: bool) -> None:
    # catches: shared blocks that stay as they were broadcast, so nobody learns anything from anybody.
    options = {"epochs": 2, "base_epochs": 2, "student_epochs": 0, "hold": 0.0, "personal_epochs": 1}
    report = play(task, SharesTheBody(everybody=everybody, **options))
    alone = play(task, ABHS(theta=2.0, **options)).server.found.models
    n = torch.tensor([len(own(task, k)[0]) for k in range(4)], dtype=torch.float64)
    n = n if everybody else n * torch.tensor([1.0, 0.0, 1.0, 1.0])
    mean = torch.tensordot(n / n.sum(), alone["body.1.weight"], dims=1)
    assert not torch.allclose(mean, report.server.model["body.1.weight"])
    models = report.server.found.models
    for k, w in enumerate(personal_models(report)):
        shares = everybody or k != 1
        for body in (models["body.1.weight"][k], w["body.1.weight"]) if shares else (models["body.1.weight"][k],):
            torch.testing.assert_close(body, mean if shares else alone["body.1.weight"][k])
        assert torch.equal(models["head.weight"][k], alone["head.weight"][k])  # personal blocks stay on top
        assert not torch.equal(w["head.weight"], alone["head.weight"][k])  # and train on
    assert torch.equal(personal_models(report)[0]["body.1.weight"], models["body.1.weight"][0])


def test_a_client_that_was_lost_has_shared_blocks_under_the_first_model(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    method = SharesTheBody(epochs=2, base_epochs=2, student_epochs=0, personal_epochs=1, everybody=True)
    server, there = play(task, method).server, torch.tensor([0, 1, 3])
    found = replace(server.found, clients=there, models=server.found.models.rows(there))
    models = method.own(server, found, make_cohort(task))
    for k in range(4):
        assert torch.equal(models["body.1.weight"][k], server.found.one["body.1.weight"])
        first = server.model["head.weight"] if k == 2 else server.found.models["head.weight"][k]
        assert torch.equal(models["head.weight"][k], first)


@pytest.mark.parametrize("split", [0, 1])
def test_the_gradient_while_clients_train_by_hand(task: Task, split: int) -> None:
    blocks, base = blocks_of(task.public_facts()), task.network.initial
    w = base.map(lambda leaf: 1.3 * leaf + 0.1)
    batch = Batch(task.x[:5], task.y[:5], None, None, task.network.through(BlockFeatures), Variant())
    g, _, loss = aligned_gradient(blocks, w, batch, Given(base, torch.tensor(split), 0.7))
    module, held = task.network._original, features_of(task, base, batch.x)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    z = torch.func.functional_call(Body(module), {f"net.{name}": leaf for name, leaf in leaves.items()}, (batch.x,))
    logits = F.linear(z, leaves["head.weight"], leaves["head.bias"])
    fit = F.cross_entropy(logits, batch.y)
    apart = (z - held).square().sum() / held.square().sum()
    expected = torch.autograd.grad(fit + 0.7 * split * apart, list(leaves.values()))
    for name, one in zip(leaves, expected, strict=True):
        torch.testing.assert_close(g[name], one, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss, fit.detach())


class Body(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def test_clients_that_share_stay_nearer_to_what_the_base_says(task: Task) -> None:
    def distance(hold: float, theta: float) -> float:
        method = quick(epochs=10, hold=hold, theta=theta, student_epochs=0, personal="none")
        report = play(task, method)
        models, base = report.server.found.models, report.server.model
        return float((models["body.1.weight"] - base["body.1.weight"]).norm())

    assert distance(3.0, 0.0) < 0.9 * distance(0.0, 0.0)
    assert distance(3.0, 2.0) == distance(0.0, 2.0)  # what is not shared is free


@dataclass(frozen=True, kw_only=True)
class Uploaded(ABHS):
    """Remembers what clients sent."""

    models: ClassVar[dict[str, Stack]] = {}

    def distil(self, w: Params, found: Found, splits: Tensor, replies: Replies) -> Params:
        self.models["sent"] = found.models
        return super().distil(w, found, splits, replies)


def test_alignment_brings_the_student_block_by_block_to_those_who_share(task: Task) -> None:
    # catches: a term that never acts, because the student begins with the very blocks that it is to be like.
    x, _ = task.public
    n = torch.tensor([len(own(task, k)[0]) for k in range(4)], dtype=torch.float64)

    def apart(align: float) -> float:
        method = Uploaded(
            theta=0.0, epochs=10, base_epochs=2, student_epochs=40, student_lr=0.05, align=align, personal="none"
        )
        student = play(task, method).server.found.one
        sent = Uploaded.models["sent"]
        said = sum(n[k] / n.sum() * features_of(task, sent.client(k), x) for k in range(4))
        return float(relative(features_of(task, student, x), said).mean())

    assert apart(10.0) < 0.5 * apart(0.0)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_the_prototypes_answer_together(task: Task) -> None:
    report = play(task, quick(theta=2.0, student_epochs=0, personal="none", answer="prototypes"))
    shared = report.algorithm.shared(report.server)
    assert isinstance(shared, Predictor)
    x, server = task.x[:5], report.server
    batch = Batch(x, task.y[:5], None, None, task.network, Variant(train=False))
    members = [server.found.models.client(k) for k in range(4)]
    n = torch.tensor([len(own(task, k)[0]) for k in range(4)], dtype=torch.float64)
    z = sum(n[k] / n.sum() * unit(features_of(task, w, x)) for k, w in enumerate(members))
    expected = SCALE * unit(z) @ server.found.prototypes.T
    torch.testing.assert_close(shared.answer(shared.model, shared.beside, batch), expected)


def test_who_has_no_sample_of_a_class_is_not_heard_about_it(task: Task) -> None:
    report = play(task, quick(theta=2.0, student_epochs=0, personal="none", answer="outputs"))
    told, share = report.server.found.evidence, votes(report.server.found)
    assert bool((share[told["count"] == 0] == 0).all())
    torch.testing.assert_close(share.sum(0), torch.ones(CLASSES, dtype=torch.float64))
    counted = told | Stack.of(count=told["count"] * torch.tensor([1.0, 1.0, 0.0]))
    nobody = replace(report.server.found, evidence=counted)
    assert votes(nobody)[:, 2].tolist() == [0.25] * 4
    torch.testing.assert_close(sizes(report.server.found).sum(), torch.ones(()).double())


def test_features_that_point_elsewhere_are_not_mixed(task: Task) -> None:
    server = play(task, quick(theta=2.0, student_epochs=0)).server
    for agreement, beside in ((0.29, {"shares"}), (0.31, {"shares", "prototypes"})):
        found = replace(server.found, agreement=torch.tensor(agreement))
        shared = quick().shared(replace(server, found=found))
        assert isinstance(shared, Predictor)
        assert {name for name in shared.beside if not name.startswith("member.")} == beside


def test_a_client_that_was_lost_and_shares_nothing_has_what_was_broadcast(task: Task) -> None:
    report = play(task, quick(theta=2.0), faults=lambda round, clients: clients == 2)
    assert report.server.found.clients.tolist() == [0, 1, 3]
    assert report.server.found.models.clients == 3
    models = personal_models(report)
    assert all(torch.equal(models[2][name], leaf) for name, leaf in report.server.model.items())
    assert not torch.equal(models[1]["head.weight"], report.server.model["head.weight"])


def test_personal_prototypes_stand_beside_the_own_model(task: Task) -> None:
    report = play(task, quick(theta=2.0, personal="prototypes"))
    for k, model in enumerate(personal_models(report)):
        x, y = own(task, k)
        w = Params({name: leaf for name, leaf in model.items() if not name.startswith("beside.")}, model.layout)
        z = unit(features_of(task, w, x))
        for c in range(CLASSES):
            n, shared = int((y == c).sum()), report.server.found.prototypes[c]
            mine = n / (n + 50) * unit(z[y == c].sum(0)) + 50 / (n + 50) * shared
            torch.testing.assert_close(model["beside.prototypes"][c], unit(mine))


def test_a_new_client_gets_what_everybody_has(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    report = play(task, quick())
    found = report.algorithm.welcome(report.server, make_cohort(task))
    assert all(torch.equal(found[name], leaf) for name, leaf in report.server.found.one.items())


@dataclass(frozen=True, kw_only=True)
class Watched(ABHS):
    """Remembers what its student is taught."""

    seen: ClassVar[dict[str, Tensor]] = {}

    def teaching_logits(self, found: Found, replies: Replies, x: Tensor) -> Tensor:
        self.seen.update(x=x, logits=super().teaching_logits(found, replies, x))
        return self.seen["logits"]


def test_a_student_learns_margins(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    # catches: averaged logits, by which a client with a single class decides everything.
    report = play(task, Watched(theta=2.0, epochs=2, base_epochs=2, student_epochs=1))
    models, x = report.server.found.models, Watched.seen["x"]
    told = margins(own_moments(make_cohort(task), models)) * SCALE
    features = torch.stack([features_of(task, models.client(k), x) for k in range(task.clients)])
    torch.testing.assert_close(Watched.seen["logits"], margin_logits(features, told), rtol=0, atol=1e-9)
    assert "moments" not in {m.field for m in play(task, quick(student_epochs=0)).ledger.messages()}


def test_a_student_of_itself_stays_where_samples_are_augmented(task: Task) -> None:
    # Clients that train nothing are the base that the student begins with.
    shaken = replace(task, augment=Shaken())
    report = play(shaken, quick(theta=2.0, epochs=0, student_epochs=5, student_lr=1.0, student_of="logits"))
    for name, leaf in report.server.model.items():
        torch.testing.assert_close(report.server.found.one[name], leaf, rtol=0, atol=1e-12)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_of_the_student_by_hand(task: Task, split: int, mask: Tensor | None) -> None:
    draw, blocks = generator(2, "wanted"), blocks_of(task.public_facts())
    x, y = task.x[:4], torch.tensor([0, 2, 1, 1])
    said = torch.from_numpy(draw.normal(size=(4, SIZE + CLASSES)))
    likely = torch.from_numpy(draw.dirichlet([1.0] * CLASSES, size=4))
    wanted = torch.cat([said, likely, F.one_hot(y, CLASSES).double()], 1)
    batch = Batch(x, wanted, mask, None, task.network.through(BlockFeatures), Variant())
    g, after, _ = student_gradient(blocks, split, 0.7, 0.3, task.network.initial, batch)
    module = task.network._original.requires_grad_(True)
    z, logits = module.features(x), module(x)
    each = TEMPERATURE**2 * F.kl_div((logits / TEMPERATURE).log_softmax(1), likely, reduction="none").sum(1)
    each = each + 0.3 * F.cross_entropy(logits, y, reduction="none")
    if split:
        each = each + 0.7 * (z - said[:, :SIZE]).square().sum(1) / said[:, :SIZE].square().sum(1)
    real = torch.ones(4).double() if mask is None else mask
    expected = torch.autograd.grad((each * real).sum() / real.sum(), list(module.parameters()))
    for mine, theirs in zip(g.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
    assert set(after) == set(task.network.initial)


def test_nothing_to_be_like_pulls_nowhere() -> None:
    assert relative(torch.ones(2, 3), torch.tensor([[0.0] * 3, [2.0] * 3])).tolist() == [0.0, 0.25]


def test_the_gradient_of_the_personal_part_by_hand(task: Task) -> None:
    # catches: a pull on features where only the head is trained, which would have no gradient at all.
    names, others = blocks_of(task.public_facts()).above(0), [task.network.initial * 1.1, task.network.initial * 0.7]
    batch = Batch(task.x[:5], task.y[:5], None, None, task.network, Variant())
    given = Pull(others, torch.tensor([0.25, 0.75]).double(), beta=0.4)
    g, _, loss = held_gradient(names, task.network.initial, batch, given)
    module = task.network._original.requires_grad_(True)
    wanted = 0.25 * features_of(task, others[0], batch.x) + 0.75 * features_of(task, others[1], batch.x)
    fit = F.cross_entropy(module(batch.x), batch.y)
    total = fit + 0.4 * F.mse_loss(module.features(batch.x), wanted)
    for mine, theirs in zip(g.values(), torch.autograd.grad(total, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(loss, fit.detach())
    above = blocks_of(task.public_facts()).above(1)
    assert set(held_gradient(above, task.network.initial, batch, given)[0]) == {
        "head.weight",
        "head.bias",
    }


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_public_samples_are_asked_for_before_anything_is_trained(task: Task) -> None:
    private = replace(task, public=None)
    for method in (ABHS(), ABHS(base="initial", student_epochs=1)):
        with pytest.raises(TaskError, match="ABHS with these options needs public data"):
            play(private, method)
    play(private, ABHS(base="initial", epochs=1, personal_epochs=1, student_epochs=0))


def test_fewer_features_than_corners_of_a_simplex_are_refused(make_task: Callable[..., Task]) -> None:
    task = make_task(lambda: MLP((4,), 5, hidden=(3,)), classes=5)
    with pytest.raises(ModelError, match="Got 5 classes and 3 dimensions"):
        ABHS(base="initial", student_epochs=0).start(task.public_facts())


def test_tasks_without_classes_and_networks_without_blocks_are_refused() -> None:
    with pytest.raises(TaskError, match="samples of one class each"):
        ABHS(base="initial", student_epochs=0).start(quadratics(torch.zeros(2, 3)).public_facts())

    class Knot(nn.Module):
        head_modules = ("head",)

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def features(self, x: Tensor) -> Tensor:
            return self.body(x) + x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    data = {"0": (torch.zeros(3, 4), torch.arange(3))}
    with default_generator(0):
        task = Task.of_clients(data, Knot(), classes=CLASSES, shares=(1.0, 0.0, 0.0))
    with pytest.raises(ModelError, match="an nn.Sequential, and a `head`. Got a Knot"):
        ABHS(base="initial", student_epochs=0).start(task.public_facts())


def test_clients_with_features_of_different_sizes_are_refused(task: Task) -> None:
    data = {str(k): own(task, k) for k in range(2)}
    with default_generator(0):
        models = [build(name, (4,), CLASSES).double() for name in ("mlp:6", "mlp:8")]
    mixed = Task.of_clients(data, models, classes=CLASSES, shares=(1.0, 0.0, 0.0))
    with pytest.raises(TaskError, match="architecture"):
        play(mixed, quick(base="initial", student_epochs=0))


def test_clients_with_one_class_or_one_sample_are_served(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, sizes=(1, 2, 9))
    y = task.y.clone()
    y[task.splits["train"].order[1:3]] = 0
    for personal in ("head", "prototypes", "none"):
        report = play(replace(task, y=y), quick(base="initial", student_epochs=0, personal=personal))
        assert all(torch.isfinite(leaf).all() for model in personal_models(report) for leaf in model.values())
