"""What can be added to FAFI: every part does something, terms by hand, pools and their bytes, and the server's part."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from samples import answers, own, with_public
from torch import Tensor, nn

from atoll import Batch, Cohort, Params, Task
from atoll.algorithms.answers.refined import refine
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_plus import FAFIPlus
from atoll.algorithms.trainings.pieces import Supplied
from atoll.kernel.errors import HyperparameterError, ModelError, TaskError
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Stack
from atoll.kernel.randomness import Keys, generator
from atoll.models import BodyAndHead
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play
from atoll.toolbox.objectives import alignment
from atoll.toolbox.objectives.contrastive import UNLABELLED, ContrastSet, supervised_contrast
from atoll.toolbox.objectives.margins import margin_logits, margins
from atoll.toolbox.objectives.negatives import filled_queue
from atoll.toolbox.objectives.prototypical import Seen
from atoll.toolbox.objectives.terms import Carry, Composed, Given
from atoll.toolbox.server.fusion import discernment
from atoll.toolbox.server.pools import class_means, redraw
from atoll.toolbox.server.triangles import triangle

WEIGHT = "head.weight"
Options = dict[str, Any]
EACH: list[Options] = [
    {"queue": 2}, {"queue": 2, "queue_same": "positives"}, {"queue": 8, "queue_same": "blind"},
    {"pool": "features"}, {"pool": "features", "masked": False}, {"pool": "features", "mass": 0.0},
    {"pool": "features", "pool_from": "untrained"}, {"pool": "features", "pool_from": "random"},
    {"pool": "images"}, {"pool": "images", "pool_from": "noise"}, {"pool": "anchored"}, {"pool": "means"},
    {"pool": "labelled"}, {"hardness": 1.0}, {"synthetic": True}, {"balanced": True}, {"prior": "balanced"},
    {"prior": "restricted"}, {"rarity": 1.0}, {"rarity": 1.0, "rarity_by": "draws"}, {"stages": "once"},
    {"stages": "recurring"},
    {"stages": "once", "pool": "features"}, {"stages": "recurring", "pool": "features"},
    {"anchors": "etf"}, {"anchors": "random"}, {"anchors": "etf", "anchor_loss": "mse"},
    {"anchors": "etf", "anchor_schedule": "cosine"}, {"anchors": "etf", "anchor_schedule": "constant"},
    {"anchors": "etf", "anchor_schedule": "auto"}, {"anchors": "etf", "anchor_moves": True},
    {"reference": "mmd"}, {"reference": "coral"}, {"reference": "sliced"},
    {"reference": "mmd", "reference_by": "class"}, {"conflict": "projected"},
    {"dynamic": True}, {"refine": 5}, {"refine": 5, "refine_labels": False},
]  # fmt: skip


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(sizes=(9, 3, 12), shares=(0.7, 0.3, 0.0), dtype=torch.float64, momentum=0.9))


def outcome(task: Task, **options: Any) -> list[Tensor]:
    server = play(task, FAFIPlus(epochs=6, **options)).server
    return [server.answer.models[WEIGHT], server.answer.prototypes]


def test_every_part_makes_a_difference_and_no_two_the_same(task: Task) -> None:
    # catches: an option that is read by nobody, as half of the published configuration is.
    found = [outcome(task), *(outcome(task, **options) for options in EACH)]
    for k, one in enumerate(found):
        assert all(torch.isfinite(leaf).all() for leaf in one)
        for j in range(k):
            assert any(not torch.equal(a, b) for a, b in zip(one, found[j], strict=True)), (k, j)


def test_rare_classes_are_drawn_as_often_as_others() -> None:
    y = torch.repeat_interleave(torch.arange(3), torch.tensor([400, 80, 20]))
    mask = torch.ones(500, dtype=torch.float64)
    mask[-2:] = 0  # padding
    keys = Keys(torch.tensor(5), torch.tensor(7))
    network = Network(nn.Linear(1, 3).double())
    batch = Batch(torch.arange(500.0).double()[:, None], y, mask, keys, network, Variant())
    given = Given(counts=torch.tensor([400.0, 80.0, 18.0, 0.0]).double())
    drawn = Composed(rarity=1.0, rarity_by="draws").samples(batch, given)
    assert torch.equal(y[drawn.x[:, 0].long()], drawn.y)
    assert drawn.x.max() < 498
    seen = torch.bincount(drawn.y, minlength=3)
    assert ((seen - 500 / 3).square() / (500 / 3)).sum() < 9.21  # chi-square: exceeded once in a hundred draws
    for other in (Composed(rarity=1.0), Composed(rarity_by="draws")):
        assert other.samples(batch, given) is batch


@pytest.mark.parametrize("rarity", [0.0, 1.0])
def test_balance_is_in_the_contrast_alone(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort], rarity: float
) -> None:
    # catches: a cross-entropy that is averaged by class as well.
    task = make_task(sizes=(9,), dtype=torch.float64, batch_size=9)
    assert len({int((own(task, 0)[1] == c).sum()) for c in range(3)}) > 1  # classes are not equally frequent
    logged = []
    for balanced in (False, True):
        cohort = make_cohort(task)
        FAFIPlus(epochs=1, balanced=balanced, rarity=rarity).training.train(task.network.initial, cohort)
        logged.append(cohort.notes)
    plain, balance = logged
    torch.testing.assert_close(balance["loss/classification"], plain["loss/classification"], rtol=0, atol=1e-12)
    assert not torch.allclose(balance["loss/contrast"], plain["loss/contrast"])


@pytest.mark.parametrize("form", ["mmd", "coral", "sliced"])
def test_a_reference_may_be_compared_class_by_class(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort], form: Any
) -> None:
    # The client has no sample of class 2. catches: a reference of all classes, to which it is drawn as a whole.
    task = make_task(sizes=(3,), dtype=torch.float64, batch_size=3)
    task = replace(task, y=torch.tensor([0, 0, 1]))
    draw = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(9, 6, dtype=torch.float64, generator=draw), torch.arange(9) % 3
    reference = Params.of(features=F.normalize(rows, dim=1), y=labels)
    method = FAFIPlus(epochs=1, reference=form, reference_by="class")

    def loss(rows: Tensor) -> Tensor:
        cohort = make_cohort(task)
        method.training.train(Supplied(task.network.initial, reference=reference | Params.of(features=rows)), cohort)
        return cohort.notes["loss/reference"]

    found, moved = loss(reference["features"]), (labels > 1)[:, None]
    assert torch.equal(loss(torch.where(moved, 7.0, reference["features"])), found)  # of a class that the client lacks
    assert not torch.equal(loss(torch.where(moved, reference["features"], 0.3)), found)
    if form == "mmd":  # two views of a sample are the same: the client has four rows of class 0, and two of class 1
        z = F.normalize(task.network._original.features(task.x), dim=1).repeat(2, 1)  # type: ignore[operator]
        own = torch.tensor([0, 0, 1]).repeat(2)
        each = [alignment.mmd(z[own == c], reference["features"][labels == c]) for c in (0, 1)]
        torch.testing.assert_close(found[0], torch.stack(each).mean())


def test_measuring_a_conflict_changes_nothing(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    cohort = make_cohort(task)
    measured = FAFIPlus(conflict="measured").training.train(task.network.initial, cohort)
    plain = FAFI().training.train(task.network.initial, make_cohort(task))
    for name, leaf in plain.items():
        assert torch.equal(measured[name], leaf)
    assert (cohort.notes["conflict"].abs() <= 1).all()
    assert (cohort.notes["conflict"] != 0).all()


def test_the_measured_conflict_is_the_cosine_of_two_gradients(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(sizes=(6,), dtype=torch.float64, batch_size=6)
    cohort = make_cohort(task)
    FAFIPlus(conflict="measured", epochs=1).training.train(task.network.initial, cohort)
    x, y = own(task, 0)
    module = task.network._original.requires_grad_(True)
    z, labels = F.normalize(module.features(torch.cat([x, x]))), torch.cat([y, y])  # type: ignore[operator]
    p, body = F.normalize(module.get_parameter(WEIGHT)), list(module.body.parameters())  # type: ignore[union-attr]
    terms = (F.cross_entropy(16 * z @ p.T, labels), supervised_contrast(z, labels, temperature=0.1).mean())
    a, b = (torch.cat([g.flatten() for g in torch.autograd.grad(one, body, retain_graph=True)]) for one in terms)
    torch.testing.assert_close(cohort.notes["conflict"][0], F.cosine_similarity(a, b, dim=0), rtol=0, atol=1e-9)
    places = [name.split(".")[0] for name, _ in module.body.named_parameters()]  # type: ignore[union-attr]
    for place in set(places):
        mine, theirs = (
            torch.cat([
                g.flatten() for at, g in zip(places, torch.autograd.grad(one, body, retain_graph=True), strict=True)
                if at == place
            ]) for one in terms
        )  # fmt: skip
        found = cohort.notes[f"conflict/body.{place}"][0]
        torch.testing.assert_close(found, F.cosine_similarity(mine, theirs, dim=0), rtol=0, atol=1e-9)
    assert len(set(places)) == len(cohort.notes.keys() & {f"conflict/body.{place}" for place in places}) > 0


# -- pools -------------------------------------------------------------------------------------------------------------


def sent(task: Task, **options: Any) -> Supplied:
    """What the server of a method sends."""
    report = play(task, FAFIPlus(epochs=0, **options))
    found: Supplied = report.algorithm.broadcast(report.server)
    return found


@pytest.mark.parametrize(
    ("form", "leaves"),
    [
        ("features", ["features", "y"]),
        ("images", ["x", "y"]),
        ("anchored", ["features", "x", "y"]),
        ("means", ["features"]),
    ],
)
def test_what_is_sent_of_public_samples(task: Task, form: str, leaves: list[str]) -> None:
    pool = sent(task, pool=form, pool_size=7).pool
    assert sorted(pool) == leaves
    assert task.public is not None
    if "x" in pool:
        assert len(pool["x"]) == 7
        assert all((task.public[0] == one).all(1).any() for one in pool["x"])
    if "features" in pool:
        lengths = pool["features"].norm(dim=1)  # 0 where a ReLU left nothing, or a class has no sample
        assert all(length == 0 or length == pytest.approx(1) for length in lengths.tolist())
        assert lengths.sum() > 1


def test_clients_begin_with_the_teacher_only_where_its_features_are_meant_for_them(task: Task) -> None:
    initial = task.network.initial["body.1.weight"]
    assert torch.equal(sent(task, pool="features").model["body.1.weight"], initial)
    taught = sent(task, pool="anchored")
    assert not torch.equal(taught.model["body.1.weight"], initial)
    assert torch.equal(taught.model[WEIGHT], task.network.initial[WEIGHT])  # prototypes are the clients' business
    batch = Batch(taught.pool["x"], taught.pool["y"], None, None, task.network, Variant(train=False))
    z = F.normalize(batch.features(taught.model), dim=1)
    torch.testing.assert_close(taught.pool["features"], z, rtol=0, atol=1e-12)


def test_controls_are_what_they_say(task: Task) -> None:
    random = sent(task, pool="features", pool_from="random").pool
    assert (random["y"] == UNLABELLED).all()
    assert (random["features"] < 0).any()  # features after a ReLU are not
    noise = sent(task, pool="images", pool_from="noise").pool
    assert (noise["y"] == UNLABELLED).all()
    untrained, trained = (sent(task, pool="features", pool_from=who).pool for who in ("untrained", "teacher"))
    assert not torch.allclose(untrained["features"], trained["features"])
    with pytest.raises(HyperparameterError, match="pool_from"):
        FAFIPlus(pool="means", pool_from="noise")


def test_a_bank_of_another_network_is_said_aloud(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    sent(task, pool="features")
    assert "another network" in caplog.text
    caplog.clear()
    sent(task, pool="images")
    assert "another network" not in caplog.text


def test_another_network_has_the_same_numbers_elsewhere(task: Task) -> None:
    report = play(task, FAFI(epochs=0))
    other = redraw(Workbench(report.population, report.engine, round=-1), task.network.initial)
    for name, leaf in task.network.initial.items():
        assert torch.equal(other[name].flatten().sort().values, leaf.flatten().sort().values)
    assert not torch.equal(other["body.1.weight"], task.network.initial["body.1.weight"])


def test_a_pool_needs_public_samples_and_is_counted(task: Task) -> None:
    with pytest.raises(TaskError, match="public=0.1"):
        play(replace(task, public=None), FAFIPlus(pool="images"))
    plain, more = (play(task, FAFIPlus(epochs=0, pool=pool)).ledger.bytes("down") for pool in ("none", "images"))
    numbers = 12 * 4 + 12
    assert numbers * 8 <= (more - plain) / task.clients < numbers * 8 + 400


def test_class_means_are_directions() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    found = class_means(z, torch.tensor([0, 0, 2]), 3)
    torch.testing.assert_close(found, torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 0.0], [0.6, 0.8]]))


# -- terms, of one step ------------------------------------------------------------------------------------------------


def step_of(task: Task, *, given: Any = None, carry: Any = None, progress: float = 0.5, epoch: float = 0.0) -> Seen:
    """Four samples of two classes in two views, as an objective sees them."""
    y = torch.tensor([0, 1, 1, 0] * 2)
    batch = Batch(torch.zeros(8, 4).double(), y, None, None, task.network, Variant())
    z = F.normalize(torch.from_numpy(generator(0, "step").normal(size=(8, 6))), dim=1)
    now = torch.tensor([epoch, progress], dtype=torch.float64)
    return Seen(batch, task.network.initial, z, carry, given, now[0], now[0] == 0, now[1])


def test_a_bank_is_masked_or_not(task: Task) -> None:
    bank = Params.of(
        features=torch.from_numpy(generator(1, "bank").normal(size=(5, 6))), y=torch.tensor([0, 1, 2, 2, 1])
    )
    seen = step_of(task, given=Given(pool=bank))
    z, y = seen.z, seen.batch.y
    blind = Composed(pool="features", masked=False, mass=0.0).terms(seen)["contrast"]
    more = F.normalize(bank["features"]) @ z.T / 0.1
    same = (y[:, None] == y) & ~torch.eye(8, dtype=torch.bool)
    inside = (z @ z.T / 0.1).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    total = torch.cat([inside, more.T], 1).logsumexp(1)
    expected = torch.stack([(total[i] - inside[i][same[i]]).mean() for i in range(8)]).mean()
    torch.testing.assert_close(blind, expected)
    masked = Composed(pool="features", mass=0.0).terms(seen)["contrast"]
    hidden = more.T.masked_fill(bank["y"] == y[:, None], -torch.inf)
    total = torch.cat([inside, hidden], 1).logsumexp(1)
    expected = torch.stack([(total[i] - inside[i][same[i]]).mean() for i in range(8)]).mean()
    torch.testing.assert_close(masked, expected)


def test_stages_switch_once_or_recur(task: Task) -> None:
    bank = Params.of(features=torch.ones(3, 6).double(), y=torch.tensor([2, 2, 2]))
    plain = Composed().terms(step_of(task))
    banked = Composed(pool="features").terms(step_of(task, given=Given(pool=bank)))
    for epoch, stage_one in ((0.0, True), (1.0, True), (2.0, False), (5.0, False)):
        seen = step_of(task, given=Given(pool=bank), epoch=epoch)
        found = Composed(pool="features", stages="once", stage_epochs=2).terms(seen)
        torch.testing.assert_close(found["contrast"], (banked if stage_one else plain)["contrast"])
        for name in ("classification", "separation"):
            torch.testing.assert_close(found[name], 0 * plain[name] if stage_one else plain[name])
    for epoch, stage_one in ((0.0, True), (1.0, False), (4.0, False), (5.0, True)):
        seen = step_of(task, given=Given(pool=bank), epoch=epoch)
        found = Composed(pool="features", stages="recurring").terms(seen)
        torch.testing.assert_close(found["contrast"], banked["contrast"])  # the bank stays
        assert (found["classification"] == 0).item() is stage_one
    first = [FAFIPlus(stages="once", epochs=epochs).training.objective.stage_epochs for epochs in (0, 1, 5, 36)]
    assert first == [0, 0, 1, 8]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_weight_of_anchors_over_all_steps(task: Task, schedule: Any) -> None:
    # catches: a schedule over the epochs of a round, which with one epoch per round never leaves its start.
    anchors = torch.from_numpy(generator(2, "anchors").normal(size=(3, 6)))
    p, shares = task.network.initial[WEIGHT], {"linear": 0.75, "cosine": 0.8535533905932737, "constant": 1.0}
    given = Given(torch.tensor([2.0, 2.0, 0.0]).double(), anchors=anchors, first=p)
    objective = Composed(anchor=3.0, anchor_schedule=schedule)
    seen = step_of(task, given=given, progress=0.25)
    rows = (
        1 - F.cosine_similarity(p, anchors)[:2].mean() + (1 - F.cosine_similarity(seen.z, anchors[seen.batch.y])).mean()
    )
    torch.testing.assert_close(objective.terms(seen)["anchor"], 3 * shares[schedule] * rows)
    assert objective.terms(step_of(task, given=given, progress=0.0))["anchor"] == pytest.approx(3 * rows.item())
    if schedule != "constant":
        assert objective.terms(step_of(task, given=given, progress=1.0))["anchor"].item() == pytest.approx(0, abs=1e-12)


def test_anchors_with_lengths_and_anchors_that_move(task: Task) -> None:
    anchors, p = torch.ones(3, 6).double(), task.network.initial[WEIGHT]
    given = Given(anchors=anchors, first=p)
    seen = step_of(task, given=given, progress=0.25)
    lengths = Composed(anchor=2.0, anchor_loss="mse", anchor_schedule="constant")
    torch.testing.assert_close(lengths.terms(seen)["anchor"], 2 * (p - anchors).square().mean())
    moving = replace(lengths, anchor_moves=True)
    torch.testing.assert_close(moving.terms(seen)["anchor"], 2 * (p - anchors).square().mean() / 16)


def test_an_automatic_weight_is_bounded_and_in_proportion(task: Task) -> None:
    anchors, p = torch.ones(3, 6).double(), task.network.initial[WEIGHT]
    given = Given(anchors=anchors, first=p)
    objective = Composed(anchor=1.0, anchor_loss="mse", anchor_schedule="auto")

    def weight(base: float, apart: float, progress: float = 0.0, seen: float = 0.1) -> float:
        pace = Params.of(base=base * seen, apart=apart * seen, seen=seen).map(lambda leaf: leaf.double())
        now = step_of(task, given=given, carry=Carry(pace=pace), progress=progress)
        return float(objective._anchor_weight(now))

    assert weight(4.0, 2.0) == pytest.approx(4 / 2.01)
    assert weight(4.0, 2.0, progress=0.5) == pytest.approx(2 / 2.01)
    assert weight(4.0, 0.0) == 50  # where the published one goes to infinity
    assert weight(4.0, 2.0, progress=1.0) == pytest.approx(0, abs=1e-12)
    start = Carry(pace=Params.of(base=0.0, apart=0.0, seen=0.0).map(lambda leaf: leaf.double()))
    seen = step_of(task, given=given, carry=start)
    terms = Params.of(**objective.terms(seen))
    after = objective.next(seen, terms).pace
    base = sum(terms[name] for name in ("classification", "contrast", "separation"))
    torch.testing.assert_close(after["base"] / after["seen"], base)
    torch.testing.assert_close(after["apart"] / after["seen"], (p - anchors).square().mean())


def test_a_blind_queue_is_made_anew_in_every_epoch(task: Task) -> None:
    rows = F.normalize(torch.from_numpy(generator(3, "rows").normal(size=(5, 6))), dim=1)
    objective = Composed(queue=5, queue_same="blind")
    old = filled_queue(rows.flip(0))
    begins = step_of(task, given=Given(rows=rows), carry=Carry(queue=old), epoch=0.0)
    later = replace(begins, begins=torch.tensor(False))
    z, y = begins.z, begins.batch.y
    for seen, bank in ((begins, rows), (later, old["features"])):
        expected = supervised_contrast(z, y, temperature=0.1, extra=[ContrastSet(bank, same="negatives")]).mean()
        torch.testing.assert_close(objective.terms(seen)["contrast"], expected)
        after = objective.next(seen, Params.of()).queue
        torch.testing.assert_close(after["features"][:4], z[:4])  # the first view
        torch.testing.assert_close(after["features"][4], bank[4])


def test_a_queue_has_room_for_a_quarter_of_the_samples(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    cohort = make_cohort(make_task(sizes=(1, 9, 200), dtype=torch.float64))
    assert Composed(queue=16).initial_carry(cohort).queue["room"].tolist() == [1, 2, 16]


def test_classes_must_fit_into_a_simplex(make_task: Callable[..., Task]) -> None:
    narrow = make_task(lambda: BodyAndHead(nn.Linear(4, 2), nn.Linear(2, 4)), classes=4)
    with pytest.raises(ModelError, match="4 classes and 2"):
        FAFIPlus(anchors="etf").start(narrow.public_facts())
    FAFIPlus(anchors="random").start(narrow.public_facts())


# -- the server --------------------------------------------------------------------------------------------------------


def features_of(task: Task, w: Params, x: Tensor) -> Tensor:
    return Batch(x, x[:, :0], None, None, task.network, Variant(train=False)).features(w)


def test_clients_answer_by_themselves_about_what_they_can_tell_apart(task: Task) -> None:
    report = play(task, FAFI(epochs=4))
    server, x = report.server, task.x
    shared = answers(task, FAFI().shared(server), x)
    votes, expected = discernment(server.answer.counts), torch.zeros_like(shared)
    for k in range(3):
        w = server.answer.models.client(k)
        z = features_of(task, w, x)
        expected += votes[k] * 16 * F.cosine_similarity(z[:, None], w[WEIGHT][None], dim=2)
    for own_share in (0.0, 0.25, 1.0):
        found = answers(task, FAFIPlus(own=own_share).shared(server), x)
        torch.testing.assert_close(found, torch.lerp(shared, expected, own_share), rtol=0, atol=1e-9)


@pytest.mark.parametrize("profile", ["clean", "faithful"])
def test_clients_answer_by_margins_if_asked(task: Task, profile: Literal["clean", "faithful"]) -> None:
    server = play(task, FAFIPlus(epochs=4, profile=profile, own=1.0, own_by="margins")).server
    sums = []
    for k in range(3):
        (x, y), w = own(task, k), server.answer.models.client(k)
        z, same = F.normalize(features_of(task, w, x), dim=1), F.one_hot(y, task.classes or 0).double()
        sums.append((same.sum(0), same.T @ z, triangle(z.T @ z)))
    count, total, square = (torch.stack(part) for part in zip(*sums, strict=True))
    told = margins(Stack.of(count=count, sum=total, square=square), 0.25)
    if profile == "clean":  # the other profile's features depend on the batch
        features = torch.stack([features_of(task, server.answer.models.client(k), task.x) for k in range(3)])
        shared = answers(task, FAFI(profile=profile).shared(server), task.x)
        for share in (0.25, 1.0):
            found = answers(task, FAFIPlus(own=share, own_by="margins").shared(server), task.x)
            torch.testing.assert_close(
                found, torch.lerp(shared, 16 * margin_logits(features, told), share), rtol=0, atol=1e-9
            )
    torch.testing.assert_close(server.answer.margins["weight"], 16 * told["weight"], rtol=0, atol=1e-9)


def test_margins_are_sent_only_if_they_have_a_say(task: Task) -> None:
    sent = [play(task, FAFIPlus(epochs=0, own=share, own_by="margins")).ledger.bytes("up") for share in (0.0, 0.5)]
    assert sent[0] == play(task, FAFI(epochs=0)).ledger.bytes("up") < sent[1]


def test_who_has_one_class_has_no_say_unless_nobody_else_has() -> None:
    # catches: an encoder that has seen one class finds it in everything, and wins every vote about it.
    counts = torch.tensor([[8.0, 8.0, 0.0, 0.0], [30.0, 0.0, 0.0, 0.0], [2.0, 0.0, 6.0, 0.0]]).double()
    found = discernment(counts)
    torch.testing.assert_close(found.sum(0), torch.ones(4).double())
    torch.testing.assert_close(found[:, 0], torch.tensor([4.0, 0.0, 1.5]).double().sqrt() / (2 + 1.5**0.5))
    assert found[:, 1].tolist() == [1, 0, 0]
    assert found[:, 2].tolist() == [0, 0, 1]
    torch.testing.assert_close(found[:, 3], torch.full((3,), 1 / 3).double())


def test_what_clients_know_weighs_their_prototypes(task: Task) -> None:
    report = play(task, FAFIPlus(dynamic=True, least=1))
    rows = report.server.answer.prototypes
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3).double())
    for label in range(3):
        owners = [k for k in range(3) if (own(task, k)[1] == label).any()]
        if len(owners) == 1:
            mine = F.normalize(report.server.answer.models[WEIGHT][owners[0], label], dim=0)
            torch.testing.assert_close(rows[label], mine)
    assert ("up", "statistic") in report.ledger.by_kind()
    more = report.ledger.bytes("up") - play(task, FAFI()).ledger.bytes("up")
    assert 3 * (6 + 3) * 8 <= more / task.clients < 3 * (6 + 3) * 8 + 500


def test_refined_prototypes_classify_better_and_stay_near() -> None:
    draw = generator(0, "refine")
    y = torch.arange(30) % 3
    truth = F.normalize(torch.from_numpy(draw.normal(size=(3, 6))), dim=1)
    z = F.normalize(truth[y] + 0.2 * torch.from_numpy(draw.normal(size=(30, 6))), dim=1)
    first = F.normalize(truth + 0.6 * torch.from_numpy(draw.normal(size=(3, 6))), dim=1)
    fit = [F.cross_entropy(16 * z @ F.normalize(p, dim=1).T, y) for p in (first, refine(z, y, first, 100))]
    assert fit[1] < 0.5 * fit[0]
    torch.testing.assert_close(refine(z, y, first, 0), first)
    unlabelled = refine(z, None, first, 100)
    before, after = ((16 * z @ F.normalize(p, dim=1).T).softmax(1) for p in (first, unlabelled))
    assert torch.special.entr(after).sum(1).mean() < torch.special.entr(before).sum(1).mean()
    assert (F.cosine_similarity(unlabelled, first) > 0.8).all()


def test_refining_needs_public_samples(task: Task) -> None:
    with pytest.raises(TaskError, match="public=0.1"):
        play(replace(task, public=None), FAFIPlus(refine=3))


def test_methods_that_add_to_the_server_only_share_the_training_of_fafi() -> None:
    for plus in (FAFIPlus(), FAFIPlus(dynamic=True), FAFIPlus(fusion="size", own=0.5)):
        assert plus.training == FAFI().training
    assert FAFIPlus(hardness=1.0).training != FAFI().training
