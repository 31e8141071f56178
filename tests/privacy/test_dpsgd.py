"""Sample-level privacy: clipped sums by hand and by Opacus, the noise, the neutral value, and what is refused."""

import pytest
import torch
from torch import nn

from atoll import LocalEngine, create, federate
from atoll.kernel.batch import Batch
from atoll.kernel.errors import HyperparameterError, PrivacyError
from atoll.kernel.network import Variant
from atoll.toolbox.client.private import Private

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)


def batch_of(task, x, y, **more):
    return Batch(x, y, None, None, task.network, Variant(train=True), **more)


def test_the_clipped_sum_is_what_it_is_by_hand(make_task):
    """Y = w.x + b, half the squared error; protect.md 8.4."""
    from atoll.data.task import Task, Training

    x = torch.tensor([[1.0, 0], [0, 2], [3, 1]], dtype=torch.float64)
    y = torch.tensor([[0.0], [0], [1]], dtype=torch.float64)
    model = nn.Linear(2, 1).double()
    model.weight.data, model.bias.data = torch.tensor([[1.0, -1]]).double(), torch.tensor([0.5]).double()
    task = Task.of_clients(
        {"a": (x, y)}, model, classes=None, training=Training(batch_size=3), shares=(1.0, 0.0, 0.0),
        loss=lambda out, target: (out - target).square().flatten(1).sum(1) / 2,
    ).to(torch.device("cpu"), torch.float64)  # fmt: skip
    w = task.network.initial
    g, _, _ = Private(clip=2.0, noise=0.0).gradient(w, batch_of(task, x, y), frozenset(w), size=1)
    assert torch.cat([g["weight"].flatten(), g["bias"]]).tolist() == pytest.approx(
        [3.2232816298, -1.1858316928, 1.1228090605], abs=1e-9
    )


@pytest.mark.filterwarnings("ignore")  # those of Opacus are its own
def test_the_clipped_sum_is_that_of_opacus(make_task):
    opacus = pytest.importorskip("opacus")
    task = make_task(sizes=(7,), dtype=torch.float64)
    split = task.splits["train"].order
    x, y = task.x[split], task.y[split]
    w = task.network.initial
    ours, _, loss = Private(clip=0.3, noise=0.0).gradient(w, batch_of(task, x, y), frozenset(w), size=1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    net.load_state_dict(dict(zip(net.state_dict(), w.values(), strict=True)))
    wrapped = opacus.GradSampleModule(net, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
    rows = [one.grad_sample.flatten(1) for one in net.parameters()]
    norms = torch.cat(rows, dim=1).norm(dim=1)
    share = (0.3 / (norms + 1e-6)).clamp(max=1.0)
    for mine, theirs in zip(ours.values(), rows, strict=True):
        assert torch.allclose(mine.flatten(), share @ theirs, atol=2e-6)
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(net(x), y).item())


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "scaffold", "fedavg-ft"])
def test_without_noise_and_with_everything_let_through_it_is_the_method(make_task, method):
    task = make_task(sizes=(8, 8, 8), dtype=torch.float64)
    plain, neutral, wide = (
        federate(task, words, rounds=2, evaluation="none", engine=ENGINE).server
        for words in (method, f"{method}+dpsgd:sample_clip=0,noise=0", f"{method}+dpsgd:sample_clip=1e9,noise=0")
    )
    one, two, three = (getattr(state, "w", state) for state in (plain, neutral, wide))
    assert (one - two).norm() == 0
    assert (one - three).norm() < 1e-12  # the same sum of samples, in another order


def test_padding_has_no_gradient(make_task):
    task = make_task(sizes=(6,), dtype=torch.float64)
    order = task.splits["train"].order
    x, y, w = task.x[order], task.y[order], task.network.initial
    rule = Private(clip=0.1, noise=0.0)
    part, _, _ = rule.gradient(w, batch_of(task, x[:4], y[:4]), frozenset(w), size=4)
    padded = Batch(x, y, torch.tensor([1.0, 1, 1, 1, 0, 0]).double(), None, task.network, Variant(train=True))
    masked, _, _ = rule.gradient(w, padded, frozenset(w), size=4)
    assert (part - masked).norm() < 1e-14


@pytest.mark.parametrize("strategy", ["whole", "loop", "chunk:2"])
def test_noise_does_not_depend_on_the_grouping_and_is_another_in_every_step(make_task, strategy):
    task = make_task(sizes=(8, 5, 9), dtype=torch.float64)
    engine = LocalEngine(device="cpu", strategy=strategy, dtype=torch.float64)
    more = {"rounds": 2, "evaluation": "none"}
    method = create("fedavg+dpsgd:sample_clip=0.5,noise=1")
    assert (
        federate(task, method, engine=ENGINE, **more).server - federate(task, method, engine=engine, **more).server
    ).norm() == 0


def test_the_noise_has_the_size_it_says(make_task):
    """Samples without a gradient to speak of: a step is z C N(0, 1) / B."""
    task = make_task(lambda: nn.Linear(40, 3), sizes=(4,) * 30, shape=(40,), lr=1.0)
    more = {"rounds": 1, "evaluation": "none"}
    moved = federate(task, "fedavg+dpsgd:sample_clip=1e-4,noise=1000", **more).server - task.network.initial
    numbers = torch.cat([leaf.flatten() for leaf in moved.values()])
    assert numbers.std().item() == pytest.approx(1e-4 * 1000 / 4 / 30**0.5, rel=0.25)  # the mean of 30 clients
    weight, bias = moved["weight"].flatten(), moved["bias"]
    assert (weight[: len(bias)] - bias).abs().max() > 1e-3  # what one leaf shows of its noise says nothing of another's


def test_the_report_says_what_samples_cost(make_task):
    report = federate(make_task(sizes=(8, 5, 9)), "ditto+dpsgd:noise=2", rounds=5, evaluation="none")
    (sentence,) = report.privacy
    assert "10 passes" in sentence  # w and v, five rounds
    assert "epsilon 7.5" in sentence
    assert "not covered" in sentence


class Normed(nn.Sequential):
    """A network with BatchNorm."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("method", "model", "text"),
    [
        ("fedavg+dpsgd", Normed, "BatchNorm"),
        ("fedavg+sam+dpsgd", None, "a second one beside it"),
        ("apfl+dpsgd", None, "gradient of its own|must train by `sgd`"),
    ],
)
def test_what_cannot_be_covered_is_refused(make_task, method, model, text):
    with pytest.raises((PrivacyError, HyperparameterError), match=text):
        federate(make_task(model, sizes=(8, 5)), method, rounds=1, evaluation="none")


def test_batchnorm_is_refused_before_a_run_begins(make_task, tmp_path):
    with pytest.raises(PrivacyError, match="BatchNorm"):
        federate(make_task(Normed, sizes=(8, 5)), "ditto+dpsgd", rounds=1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    federate(make_task(Normed, sizes=(8, 5)), "ditto+dpsgd:sample_clip=0,noise=0", rounds=1, evaluation="none")


def test_a_method_with_noise_of_its_own_is_told_what_to_do_instead():
    from atoll.compose import create

    with pytest.raises(HyperparameterError, match="fafi has a `noise` of its own"):
        create("fafi+dpsgd")


def test_noise_needs_a_norm():
    with pytest.raises(HyperparameterError, match="must be above 0"):
        create("fedavg+dpsgd:sample_clip=0,noise=1")
