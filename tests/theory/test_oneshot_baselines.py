"""What one-shot fusions must come to where the answer is known: one client, identical clients, permuted networks."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samples import answers, with_public
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from atoll import Algorithm, Batch, Params, Task, Training
from atoll.algorithms.answers import fedic
from atoll.algorithms.answers.fedic import initial_calibration, teacher
from atoll.algorithms.answers.otfusion import matching, reorder
from atoll.algorithms.ce_supcon import CESupCon
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedetf import FedETF
from atoll.algorithms.fedov import FedOV
from atoll.algorithms.local import Local
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.algorithms.oneshot_df import OneShotDF
from atoll.algorithms.oneshot_margins import OneShotMargins
from atoll.algorithms.oneshot_proto import OneShotProto
from atoll.algorithms.otfusion import OTFusion
from atoll.algorithms.rga import RGA
from atoll.algorithms.trainings.etf import Given, frame_gradient
from atoll.kernel.network import Variant
from atoll.kernel.params import Stack, stack
from atoll.kernel.randomness import Keys, default_generator, generator
from atoll.models import MLP, BodyAndHead, Linear
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.objectives.margins import margin_logits, margins
from atoll.toolbox.objectives.openset import BIAS, WEIGHT, open_logits, open_votes, placeholder_losses, with_unknown
from atoll.toolbox.oneshot import average_models
from atoll.toolbox.server.adam import no_past
from atoll.toolbox.server.distillation import Student
from atoll.toolbox.server.fusion import discernment
from atoll.toolbox.server.triangles import shrink, triangle
from atoll.toolbox.server.voting import Of, combine_votes

CLASSES, FEATURES, SAMPLES = 3, 4, 12
ROUNDING = {"rtol": 0.0, "atol": 1e-12}
STABLE = 1e-8  # Adam divides a gradient of rounding error by 1e-8: with this step size it stays where it should


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    with default_generator(seed):
        return torch.randn(samples, FEATURES, dtype=torch.float64), torch.arange(samples) % CLASSES


def normed() -> nn.Module:
    body = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU())
    return BodyAndHead(body, nn.Linear(6, CLASSES))


def plain() -> nn.Module:
    return MLP((FEATURES,), CLASSES, hidden=(6,))


def alike(clients: int, model: Callable[[], nn.Module] = plain) -> Task:
    """Clients that all have the same samples, in one batch: they do the same."""
    data = {str(k): drawn(SAMPLES, seed=0) for k in range(clients)}
    with default_generator(0):
        network = model().double()
    training = Training(lr=0.2, batch_size=SAMPLES)
    return with_public(Task.of_clients(data, network, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0)))


def made(task: Task, algorithm: Algorithm) -> Tensor:
    """Probabilities that everybody would deploy, for the samples of the task."""
    report = play(task, algorithm)
    shared = algorithm.shared(report.server)
    assert shared is not None
    return answers(task, shared, task.x[:SAMPLES]).softmax(1)


FUSIONS = [
    OneShotAvg(epochs=4),
    OneShotAvg(epochs=4, batchnorm="mean", weighting="sqrt"),
    *(Ensemble(epochs=4, of=of, weighting=votes) for of in ("logits", "probs") for votes in ("uniform", "classes")),
    OneShotDF(epochs=4, server_epochs=0),
    OneShotDF(epochs=4, server_epochs=0, student="best"),
    OTFusion(epochs=4),
]
OWN_RULES = [
    CESupCon(epochs=4),
    FedETF(epochs=4),
    FedETF(epochs=4, answer="average"),
    OneShotProto(epochs=4),
    OneShotProto(epochs=4, encoder="average"),
    OneShotMargins(epochs=4),
    RGA(epochs=4),
    RGA(epochs=4, prototypes="means"),
]


@pytest.mark.limit("ensemble", "oneshot-avg", "oneshot-df", "otfusion")
@pytest.mark.parametrize("algorithm", FUSIONS, ids=str)
@pytest.mark.parametrize("model", [plain, normed])
def test_a_fusion_of_one_client_is_its_model(algorithm: Algorithm, model: Callable[[], nn.Module]) -> None:
    task = alike(1, model)
    (own,) = personal_models(play(task, Local(epochs=4)))
    torch.testing.assert_close(made(task, algorithm), answers(task, own, task.x).softmax(1), **ROUNDING)


@pytest.mark.limit(
    "ce-supcon",
    "ensemble",
    "fedetf",
    "oneshot-avg",
    "oneshot-df",
    "oneshot-margins",
    "oneshot-proto",
    "otfusion",
    "rga",
)
@pytest.mark.parametrize("algorithm", FUSIONS + OWN_RULES, ids=str)
def test_identical_clients_together_answer_as_one_of_them(algorithm: Algorithm) -> None:
    torch.testing.assert_close(made(alike(3), algorithm), made(alike(1), algorithm), rtol=0, atol=1e-9)


@pytest.mark.limit("oneshot-avg")
def test_the_average_of_identical_models_is_the_model_with_its_buffers() -> None:
    task = alike(3, normed)
    found, own = play(task, OneShotAvg(epochs=4)).server.answer, personal_models(play(task, Local(epochs=4)))[0]
    assert set(found) == set(own)
    for name, leaf in own.items():
        torch.testing.assert_close(found[name], leaf, **ROUNDING)
    assert found["body.1.num_batches_tracked"] == 4


@pytest.mark.limit("oneshot-avg")
def test_one_shot_fedavg_is_fedavg_with_one_round() -> None:
    task = Task.of_clients(
        {str(n): drawn(n, seed=n) for n in (3, 7, 12)}, plain().double(), classes=CLASSES, training=Training(lr=0.2)
    )
    mine, theirs = play(task, OneShotAvg(epochs=5)).server.answer, play(task, FedAvg(epochs=5)).server
    for name, leaf in theirs.items():
        torch.testing.assert_close(mine[name], leaf, **ROUNDING)


@pytest.mark.closed_form("ensemble", "oneshot-avg")
def test_linear_models_answer_together_as_their_average() -> None:
    with default_generator(0):
        network = Linear((FEATURES,), CLASSES).double()
    data = {str(n): drawn(n, seed=n) for n in (3, 7, 12)}
    task = Task.of_clients(data, network, classes=CLASSES, training=Training(lr=0.5), shares=(1.0, 0.0, 0.0))
    together = made(task, Ensemble(epochs=5, weighting="samples"))
    torch.testing.assert_close(together, made(task, OneShotAvg(epochs=5)), **ROUNDING)
    assert (together - made(task, Ensemble(epochs=5, of="probs", weighting="samples"))).abs().max() > 1e-3


@pytest.mark.closed_form("otfusion")
def test_a_network_and_permuted_copies_of_it_fuse_to_the_network() -> None:
    with default_generator(3):
        network = MLP((FEATURES,), CLASSES, hidden=(7, 5)).double()
    task = Task.of_clients({"0": drawn(SAMPLES, seed=0)}, network, classes=CLASSES)
    w, draw = task.network.initial, generator(0, "orders")
    copies = [reorder(w, lambda _, rows: torch.from_numpy(draw.permutation(len(rows)))) for _ in range(3)]
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    apart = answers(task, average_models(stack(copies), third), task.x)
    fused = average_models(stack([matching(copy, copies[0]) for copy in copies]), third)
    wanted = answers(task, w, task.x)
    torch.testing.assert_close(answers(task, fused, task.x), wanted, **ROUNDING)
    assert (apart - wanted).abs().max() > 1e-2  # their plain average is another network


@pytest.mark.closed_form("oneshot-df")
@pytest.mark.parametrize("of", ["logits", "probs"])
def test_a_student_that_answers_as_its_teachers_stays(of: Of) -> None:
    task = alike(3)
    found = play(task, OneShotDF(epochs=4, of=of, server_epochs=3, server_lr=STABLE)).server.answer
    own = personal_models(play(task, Local(epochs=4)))[0]
    for name, leaf in own.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-10)


@pytest.mark.closed_form("fedic")
def test_fedics_teacher_begins_as_the_mean_of_the_ensemble_and_the_tuned_model() -> None:
    with default_generator(0):
        said = Params.of(
            logits=torch.randn(4, 6, CLASSES, dtype=torch.float64),
            tuned=torch.randn(6, CLASSES, dtype=torch.float64),
            features=torch.randn(6, 2, dtype=torch.float64),
        )
        v = torch.randn(2, dtype=torch.float64)
    c = initial_calibration(said)
    torch.testing.assert_close(teacher(c, said), (said["logits"].mean(0) + said["tuned"]) / 2, **ROUNDING)
    # With any gate g it is g mean_k l_k + (1 - g) l_0.
    g = (said["features"] @ v).sigmoid()[:, None]
    expected = g * said["logits"].mean(0) + (1 - g) * said["tuned"]
    torch.testing.assert_close(teacher(c | Params.of(v=v), said), expected, **ROUNDING)


@pytest.mark.closed_form("fedic")
def test_shares_of_fedics_clients_sum_to_one_whatever_they_are_trusted_by() -> None:
    # Clients that say the same, with whatever calibration of clients, together say just that.
    with default_generator(0):
        one, tuned = torch.randn(2, 6, CLASSES, dtype=torch.float64)
        u = torch.randn(CLASSES, dtype=torch.float64)
    said = Params.of(logits=one.expand(3, -1, -1), tuned=tuned, features=torch.zeros(6, 1, dtype=torch.float64))
    c = initial_calibration(said) | Params.of(u=u, b=torch.tensor(-2.0, dtype=torch.float64))
    torch.testing.assert_close(teacher(c, said), (one + tuned) / 2, **ROUNDING)


@pytest.mark.closed_form("fedic")
def test_what_a_student_knows_already_leaves_it_to_the_labels() -> None:
    # The distillation has gradient 0 where the student answers as wanted: the step is that of the labels alone.
    task = alike(1)
    w, x = task.network.initial, task.x[:5]
    keys = Keys(torch.tensor(1), torch.tensor(2))
    known = Params.of(x=task.x[5:6].repeat(2, 1), y=torch.tensor([1, 1]))
    given = fedic.Given(torch.tensor(0.01), fedic.Labelled(known, size=2, steps=9, temperature=3.0))
    wanted = (answers(task, w, x) / 3).softmax(1)
    batch = Batch(x, wanted, None, keys, task.network, Variant())
    moved = fedic.learn(Student(w, no_past(w)), batch, given).w
    g, _, _ = Batch(known["x"], known["y"], None, None, task.network, Variant()).gradient(w)
    for name, leaf in g.items():
        expected = w[name] - 0.01 * (leaf / 2) / ((leaf / 2).abs() + 1e-8)
        torch.testing.assert_close(moved[name], expected, rtol=0, atol=1e-8)


@pytest.mark.closed_form("fedetf")
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_the_least_loss_in_a_frame_is_known_and_a_rest_point(scale: float) -> None:
    # On unit features no loss is below log(1 + (C - 1) exp(-s C / (C - 1))); 1.377 for ten classes and s = 1.
    classes = 10

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u = nn.Parameter(2.5 * FedETF(scale=1.0).training.directions(torch.zeros(1).double(), classes)[4])

        def forward(self, x: Tensor) -> Tensor:
            return self.u.expand(len(x), -1)

    x, y = torch.zeros(2, 1, dtype=torch.float64), torch.full((2,), 4)
    task = Task.of_clients({"0": (x, y)}, Point(), classes=classes, shares=(1.0, 0.0, 0.0))
    batch = Batch(x, y, None, None, task.network, Variant())
    given = Given(FedETF(scale=scale).training.directions(x, classes), counts=None)
    g, _, loss = frame_gradient(task.network.initial, batch, given)
    least = math.log1p((classes - 1) * math.exp(-scale * classes / (classes - 1)))
    assert float(loss) == pytest.approx(least, abs=1e-12)
    if scale == 1.0:
        assert float(loss) == pytest.approx(1.377, abs=1e-3)
    torch.testing.assert_close(g["u"], torch.zeros_like(g["u"]), **ROUNDING)


@pytest.mark.closed_form("rga")
def test_rga_of_one_client_is_the_nearest_direction_to_its_standardised_features() -> None:
    task = alike(1)
    report = play(task, RGA(epochs=4))
    w = report.server.answer.models.client(0)
    u = answers(task, w, task.x)
    z = (u - u.mean(0)) / u.std(0, correction=0)
    frame = FedETF().training.directions(task.x, CLASSES)
    found = answers(task, report.algorithm.shared(report.server), task.x)
    torch.testing.assert_close(found, 16 * F.cosine_similarity(z[:, None], frame, dim=2), **ROUNDING)


@pytest.mark.closed_form("rga")
def test_how_long_a_clients_features_are_does_not_matter_to_rga() -> None:
    # One client's last layer is made 50 times as large, and with it all it says of its features.
    data = {str(n): drawn(n, seed=n) for n in (9, 12, 15)}
    with default_generator(0):
        network = plain().double()
    task = Task.of_clients(data, network, classes=CLASSES, training=Training(lr=0.2), shares=(1.0, 0.0, 0.0))
    report = play(task, RGA(epochs=4, prototypes="means"))
    longer = torch.tensor([1.0, 50.0, 1.0], dtype=torch.float64)
    models, features = report.server.answer.models, report.server.answer.features
    large = models | models.only(["body.1.weight", "body.1.bias"]) * longer
    changed = replace(report.server, answer=replace(report.server.answer, models=large, features=features * longer))
    mine, theirs = (answers(task, report.algorithm.shared(one), task.x) for one in (report.server, changed))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    proto = play(task, OneShotProto(epochs=4))
    other = replace(proto.server, answer=replace(proto.server.answer, models=large))
    before, after = (answers(task, proto.algorithm.shared(one), task.x) for one in (proto.server, other))
    assert (before - after).abs().max() > 1  # where features are taken as they are, it does


@pytest.mark.purpose("ensemble")
def test_clients_with_classes_of_their_own_know_all_of_them_together() -> None:
    # Three clients have one class each: alone each is right on a third; heard about their own classes, they know all.
    with default_generator(0):
        centers = 4 * torch.eye(CLASSES, FEATURES, dtype=torch.float64)
        x = torch.randn(60, FEATURES, dtype=torch.float64) / 2
        network = plain().double()
    y = torch.arange(60) % CLASSES
    x = x + centers[y]
    data = {str(k): (x[y == k], y[y == k]) for k in range(CLASSES)}
    task = Task.of_clients(data, network, classes=CLASSES, training=Training(lr=0.1), shares=(1.0, 0.0, 0.0))

    def right(found: Tensor) -> float:
        return float((found.argmax(1) == y).double().mean())

    models = personal_models(play(task, Local(epochs=3)))
    assert max(right(answers(task, one, x)) for one in models) < 0.5
    report = play(replace(task, public=None), Ensemble(epochs=3))
    assert right(answers(task, report.algorithm.shared(report.server), x)) > 0.9


@pytest.mark.closed_form("oneshot-margins")
@pytest.mark.parametrize("shrinkage", [0.01, 0.25, 1.0])
def test_the_margins_of_one_client_are_1_in_a_class_and_0_elsewhere_on_average(shrinkage: float) -> None:
    task = alike(1)
    report = play(task, OneShotMargins(epochs=4, shrinkage=shrinkage, scale=3.0))
    found, y = answers(task, report.algorithm.shared(report.server), task.x), task.y
    for label in range(CLASSES):
        assert float(found[y == label, label].mean()) == pytest.approx(3, abs=1e-8)
        assert float(found[y != label, label].mean()) == pytest.approx(0, abs=1e-8)


# -- open sets ---------------------------------------------------------------------------------------------------------


def open_outputs(clients: int = 3, samples: int = 7, seed: int = 0) -> Tensor:
    """Outputs of some clients for some samples, the last of which is for unknown ones."""
    with default_generator(seed):
        return 2 * torch.randn(clients, samples, CLASSES + 1, dtype=torch.float64)


@pytest.mark.limit("ensemble", "fedov")
def test_votes_of_clients_to_whom_nothing_is_unknown_are_the_ensemble_of_probabilities() -> None:
    outputs = open_outputs()
    shares = torch.full((3, CLASSES), 1 / 3, dtype=torch.float64)
    wanted = combine_votes(outputs[..., :-1], shares, "probs")
    for never in (-torch.inf, -1e4):
        outputs[..., -1] = never
        torch.testing.assert_close(open_votes(outputs), wanted, **ROUNDING)


@pytest.mark.limit("fedov")
def test_who_is_sure_that_a_sample_is_unknown_has_no_vote_about_it() -> None:
    outputs = open_outputs()
    outputs[1, :4, -1] = 1e4
    found = open_votes(outputs)
    torch.testing.assert_close(found[:4], open_votes(outputs[[0, 2], :4]), **ROUNDING)
    assert (found[4:] - open_votes(outputs[[0, 2], 4:])).abs().max() > 1e-3
    outputs[..., -1] = 1e4  # nobody knows: the answer exists, and it is that of who is least sure of not knowing
    assert torch.isfinite(open_votes(outputs)).all()


@pytest.mark.closed_form("fedov")
def test_a_vote_is_the_probability_among_classes_times_that_of_knowing_the_sample() -> None:
    outputs = open_outputs()
    unknown = outputs.softmax(2)[..., -1:]
    votes = ((1 - unknown) * outputs[..., :-1].softmax(2)).sum(0)
    torch.testing.assert_close(open_votes(outputs).softmax(1), votes / votes.sum(1, keepdim=True), **ROUNDING)


@pytest.mark.limit("fedov")
def test_of_all_clients_only_those_are_heard_to_whom_a_sample_is_least_unknown() -> None:
    outputs = open_outputs(clients=5)
    order = outputs.softmax(2)[..., -1].argsort(0)
    for heard in (1, 3):
        chosen = [open_votes(outputs[order[:heard, n], n][:, None])[0] for n in range(outputs.shape[1])]
        torch.testing.assert_close(open_votes(outputs, heard), torch.stack(chosen), **ROUNDING)
    for everybody in (0, 5, 9):
        torch.testing.assert_close(open_votes(outputs, everybody), open_votes(outputs), **ROUNDING)


@pytest.mark.closed_form("fedov")
def test_unknown_as_the_second_answer_costs_the_log_of_its_share_without_the_own_class() -> None:
    outputs, y = open_outputs()[0], torch.arange(7) % CLASSES
    p = outputs.softmax(1)
    share = p[:, -1] / (1 - p[torch.arange(7), y])
    torch.testing.assert_close(placeholder_losses(outputs, y), -share.log(), **ROUNDING)


@pytest.mark.purpose("fedov")
def test_clients_with_one_class_each_know_all_classes_by_what_is_unknown_to_them() -> None:
    # Nobody ever saw a sample of another class; destroyed ones of the own class stand for all of them.
    with default_generator(0):
        centers = 4 * torch.eye(CLASSES, FEATURES, dtype=torch.float64)
        x = torch.randn(120, FEATURES, dtype=torch.float64) / 2
        network = MLP((FEATURES,), CLASSES, hidden=(16,)).double()
    y = torch.arange(120) % CLASSES
    x = x + centers[y]
    data = {str(k): (x[y == k], y[y == k]) for k in range(CLASSES)}
    task = Task.of_clients(data, network, classes=CLASSES, training=Training(lr=0.1), shares=(1.0, 0.0, 0.0))

    report = play(task, FedOV(epochs=20))
    answer = report.server.answer
    assert float((answers(task, report.algorithm.shared(report.server), x).argmax(1) == y).double().mean()) > 0.95
    for k in range(CLASSES):
        w = with_unknown(answer.models.client(k), 16) | Params(
            {WEIGHT: answer.unknown["weight"][k], BIAS: answer.unknown["bias"][k]}
        )
        unknown = open_logits(Batch(x, y, None, None, task.network, Variant(train=False)), w)[0].softmax(1)[:, -1]
        assert float(unknown[y != k].mean()) > 0.9
        assert float(unknown[y == k].mean()) < 0.6  # what is hardly destroyed looks like a sample


# -- where margins come from -------------------------------------------------------------------------------------------


def moments_of(z: Tensor, y: Tensor) -> Stack:
    """What a client with these features would send."""
    same = F.one_hot(y, CLASSES).double()
    return Stack.of(count=same.sum(0)[None], sum=(same.T @ z)[None], square=triangle(z.T @ z)[None])


def features_of_two_classes(samples: int = 60) -> tuple[Tensor, Tensor]:
    with default_generator(5):
        y = (torch.rand(samples) < 0.3).long()
        z = torch.randn(samples, FEATURES, dtype=torch.float64) @ torch.randn(FEATURES, FEATURES, dtype=torch.float64)
    return F.normalize(z + 2 * y[:, None] * torch.eye(FEATURES, dtype=torch.float64)[0], dim=1), y


@pytest.mark.closed_form("oneshot-margins")
@pytest.mark.parametrize("shrinkage", [0.01, 0.25, 1.0])
def test_a_margin_is_the_log_likelihood_ratio_of_two_gaussians_with_one_covariance_on_a_scale_of_0_to_1(
    shrinkage: float,
) -> None:
    z, y = features_of_two_classes()
    means = torch.stack([z[y == label].mean(0) for label in (0, 1)])
    s = shrink((z - means[y]).T @ (z - means[y]) / len(z), shrinkage)
    one, other = (MultivariateNormal(mean, s).log_prob(z) for mean in means)
    apart = means[0] - means[1]
    distance = apart @ torch.linalg.solve(s, apart)  # Mahalanobis, squared: the ratio is ± half of it on average
    found = margin_logits(z[None], margins(moments_of(z, y), shrinkage))
    torch.testing.assert_close(found[:, 0], (one - other) / distance + 0.5, rtol=0, atol=1e-8)
    torch.testing.assert_close(found[:, 0] + found[:, 1], torch.ones(len(z)).double(), rtol=0, atol=1e-8)
    bare = margin_logits(z[None], margins(moments_of(z, y), shrinkage, common=False))
    torch.testing.assert_close(bare[:, 0], one - other + distance / 2, rtol=0, atol=1e-8)


@pytest.mark.closed_form("oneshot-margins")
def test_margins_vary_within_classes_by_the_inverse_of_the_distance() -> None:
    # Almost without shrinkage; three classes, so the covariance is that of all of them together.
    z, y = F.normalize(drawn(90, seed=3)[0], dim=1), drawn(90, seed=3)[1]
    found = margin_logits(z[None], margins(moments_of(z, y), 1e-9))
    means = torch.stack([z[y == label].mean(0) for label in range(CLASSES)])
    s = (z - means[y]).T @ (z - means[y]) / len(z)
    for label in range(CLASSES):
        apart = means[label] - z[y != label].mean(0)
        distance = float(apart @ torch.linalg.solve(s, apart))
        within = torch.cat([found[y == k, label] - found[y == k, label].mean() for k in range(CLASSES)])
        assert float(within.square().mean()) == pytest.approx(1 / distance, rel=1e-5)


@pytest.mark.closed_form("oneshot-margins")
def test_votes_go_by_the_inverse_of_the_standard_error_of_a_difference_of_means() -> None:
    counts = torch.tensor([[5.0, 20.0, 1.0], [40.0, 2.0, 0.0], [7.0, 0.0, 0.0]], dtype=torch.float64)
    others = counts.sum(1, keepdim=True) - counts
    error = (1 / counts + 1 / others).sqrt()  # of mean - rest, where single samples have a standard deviation of 1
    expected = torch.where(error.isinf(), 0, 1 / error)
    torch.testing.assert_close(discernment(counts), expected / expected.sum(0), **ROUNDING)


@pytest.mark.limit("oneshot-margins")
def test_how_long_a_clients_discriminants_are_does_not_matter_on_the_common_scale() -> None:
    # Features of the second client hardly vary within classes: its discriminants are a hundred times as long.
    y = torch.arange(30) % CLASSES
    with default_generator(2):
        centers, noise = torch.randn(CLASSES, FEATURES).double(), torch.randn(30, FEATURES).double()
    clients = [F.normalize(centers[y] + size * noise, dim=1) for size in (0.5, 0.05)]
    seen = [moments_of(z, y) for z in clients]
    both = Stack({name: torch.cat([one[name] for one in seen]) for name in seen[0]})
    asked = torch.stack(clients)
    found, bare = (margin_logits(asked, margins(both, common=common)) for common in (True, False))
    alone = [margin_logits(z[None], margins(one)) for z, one in zip(clients, seen, strict=True)]
    torch.testing.assert_close(found, (alone[0] + alone[1]) / 2, rtol=0, atol=1e-8)
    second = margin_logits(clients[1][None], margins(seen[1], common=False)) / 2
    assert float((bare - second).abs().mean()) < 0.1 * float(second.abs().mean())  # without it, it decides alone
