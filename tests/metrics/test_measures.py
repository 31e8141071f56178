"""Every measure against scikit-learn, per client, and what it is where it does not exist."""

import math
import threading
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torch.func import functional_call

from atoll import LocalEngine, compare, federate
from atoll.algorithms.ditto import Ditto
from atoll.data.recipe import Recipe
from atoll.data.task import Task, Training
from atoll.federation.config import RunConfig
from atoll.federation.report import Report
from atoll.kernel.errors import RunError, TaskError, UnknownName
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.params import Stack
from atoll.metrics import evaluation
from atoll.metrics.evaluation import evaluate
from atoll.metrics.measures import MEASURES, find_measure, jackknife, take_figure
from atoll.models import MLP

OF_CLASSES = ["accuracy", "balanced-accuracy", "f1", "auroc", "average-precision", "log-loss", "top-2"]
OF_NUMBERS = ["mae", "mse", "rmse", "r2"]


def expect_classes(name, outputs, y):
    """What scikit-learn says about logits; of classes that there are no samples of it is not asked."""
    outputs, y = outputs.double(), y.numpy()
    probability, said = outputs.softmax(1).numpy(), outputs.argmax(1).numpy()
    there, binary = np.unique(y), outputs.shape[1] == 2
    one_class = len(there) < 2
    against_rest = {"auroc": oracle.roc_auc_score, "average-precision": oracle.average_precision_score}
    if name in against_rest:
        classes = [1] if binary else there
        return math.nan if one_class else np.mean([against_rest[name](y == c, probability[:, c]) for c in classes])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are answered and not there
        return {
            "accuracy": lambda: oracle.accuracy_score(y, said),
            "balanced-accuracy": lambda: oracle.balanced_accuracy_score(y, said),
            "f1": lambda: oracle.f1_score(y, said, average="macro"),
            "log-loss": lambda: oracle.log_loss(y, probability, labels=range(outputs.shape[1])),
            "top-2": lambda: oracle.top_k_accuracy_score(y, probability, k=2, labels=range(outputs.shape[1])),
        }[name]()


def expect_numbers(name, outputs, y):
    return {
        "mae": oracle.mean_absolute_error, "mse": oracle.mean_squared_error,
        "rmse": oracle.root_mean_squared_error, "r2": oracle.r2_score,
    }[name](y.numpy(), outputs.double().reshape(y.shape).numpy())  # fmt: skip


def take(name, outputs, y):
    """The figure of one client by the measure alone."""
    measure = find_measure(name)
    if measure.per_sample is not None:
        return measure.per_sample(outputs, y).mean().item()
    kept = measure.keep(outputs, y.reshape(len(y), -1))
    return take_figure(measure.figure, kept.double().numpy(), y.reshape(len(y), -1).double().numpy())


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_scikit_learn_agrees_on_classes(name, classes, tied):
    if name == "top-2" and classes == 2:
        pytest.skip("everything is among the first two of two")
    draw = torch.Generator().manual_seed(3)
    for samples in (2, 9, 60):
        outputs = torch.randn(samples, classes, generator=draw, dtype=torch.float64)
        if tied:
            outputs = outputs[torch.randint(min(samples, 5), (samples,), generator=draw)]  # with equal odds
        y = torch.randint(classes, (samples,), generator=draw)
        y[:2] = torch.tensor([0, 1])
        assert take(name, outputs, y) == pytest.approx(expect_classes(name, outputs, y), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", OF_NUMBERS)
@pytest.mark.parametrize("targets", [(), (3,)])
def test_scikit_learn_agrees_on_numbers(name, targets):
    draw = torch.Generator().manual_seed(4)
    y = 1000 + torch.randn(30, *targets, generator=draw, dtype=torch.float64)
    outputs = (y + 0.5 * torch.randn(y.shape, generator=draw, dtype=torch.float64)).reshape(30, -1)
    assert take(name, outputs, y) == pytest.approx(expect_numbers(name, outputs, y), rel=1e-9)


@pytest.mark.parametrize("name", ["auroc", "average-precision"])
@pytest.mark.parametrize("label", [0, 1])
def test_with_one_class_there_is_no_area(name, label):
    outputs = torch.randn(5, 2, dtype=torch.float64)
    assert math.isnan(take(name, outputs, torch.full((5,), label)))
    assert math.isnan(take(name, torch.randn(5, 4, dtype=torch.float64), torch.full((5,), 2)))


def test_one_class_has_a_recall_and_an_f1():
    outputs, y = torch.eye(3, dtype=torch.float64)[[1, 1, 0]], torch.tensor([1, 1, 1])
    assert take("balanced-accuracy", outputs, y) == pytest.approx(2 / 3)
    assert take("f1", outputs, y) == pytest.approx(oracle.f1_score(y, [1, 1, 0], average="macro", zero_division=0))


@pytest.mark.parametrize("y", [[2.5], [2.5, 2.5, 2.5], [0.1, 0.1, 0.1]])
def test_equal_targets_have_no_r2(y):
    y = torch.tensor(y, dtype=torch.float64)
    assert math.isnan(take("r2", y + 1, y))
    assert take("rmse", y + 1, y) == pytest.approx(1)


def test_very_sure_answers_are_not_ties():
    outputs = torch.tensor([[0.0, 90.0], [0.0, 80.0], [0.0, 95.0], [0.0, 70.0]], dtype=torch.float64)
    assert len(outputs.softmax(1)[:, 1].unique()) == 1  # as probabilities they are
    assert take("auroc", outputs, torch.tensor([1, 0, 1, 0])) == 1


# -- how far single samples decide -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, one in MEASURES.items() if not one.mean])
def test_the_jackknife_leaves_out_one_sample_after_the_other(name):
    draw, measure = torch.Generator().manual_seed(5), MEASURES[name]
    outputs = torch.randn(25, 3 if name not in OF_NUMBERS else 1, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (25, 1), generator=draw)
    kept, y = measure.keep(outputs, y).numpy(), y.double().numpy()
    others = [np.delete(np.arange(25), k) for k in range(25)]
    left = np.array([take_figure(measure.figure, kept[some], y[some]) for some in others])
    expected = 25 * 24 / 25 * ((left - left.mean()) ** 2).sum()
    assert jackknife(measure.figure, kept, y) == pytest.approx(expected, rel=1e-9)


def test_the_jackknife_of_very_many_samples_tells_the_same_in_groups():
    draw = np.random.default_rng(0)
    y = draw.integers(2, size=(5000, 1)).astype(float)
    odds = y + 2 * draw.normal(size=y.shape)
    found = math.sqrt(jackknife(MEASURES["auroc"].figure, odds, y) / 5000)
    again = [
        take_figure(MEASURES["auroc"].figure, odds[i], y[i])
        for i in (draw.integers(5000, size=5000) for _ in range(60))
    ]
    assert found == pytest.approx(np.std(again), rel=0.25)


def test_a_figure_that_hangs_on_one_sample_has_a_variance_without_it():
    y, odds = np.array([[1.0], [0], [0], [0]]), np.array([[0.5], [0.9], [0.1], [0.2]])
    assert jackknife(MEASURES["auroc"].figure, odds, y) > 0  # left out, the only positive sample would leave nothing
    assert math.isnan(jackknife(MEASURES["auroc"].figure, odds[:1], y[:1]))


# -- clients -----------------------------------------------------------------------------------------------------------

SIZES = (31, 1, 12, 50, 7)


@pytest.fixture
def ran(make_task):
    task = make_task(sizes=SIZES, shares=(0.5, 0.1, 0.4), dtype=torch.float64, lr=0.5)
    return federate(task, Ditto(lam=0.01), rounds=6, engine=LocalEngine(dtype=torch.float64), evaluation="none")


def judge(ran, metric, strategy="whole", **more):
    engine = LocalEngine(strategy=strategy, dtype=torch.float64)
    return evaluate(engine, ran.population, ran.algorithm, ran.server, round=6, metric=metric, each=True, **more)


def answer(ran, client, split="test"):
    task = ran.population.task
    default = Stack({name: leaf[None] for name, leaf in ran.server.items()}, ran.server.layout)
    mine = ran.population.memory.recall(np.array([client]), default, before=99)
    rows = task.splits[split].order[task.splits[split].offsets[client] : task.splits[split].offsets[client + 1]]
    with torch.no_grad():
        module = MLP((4,), 3, hidden=(6,)).double()
        return functional_call(module, {name: mine[name][0] for name in mine}, (task.x[rows],)), task.y[rows]


@pytest.mark.parametrize("metric", OF_CLASSES)
@pytest.mark.parametrize("strategy", ["whole", "loop", "chunk:2"])
def test_every_client_is_judged_by_all_its_samples(ran, monkeypatch, metric, strategy):
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", 4)  # the samples of a client come in several batches
    for split, found in judge(ran, metric, strategy).items():
        answers = [answer(ran, client, split) for client in range(5)]
        expected = [expect_classes(metric, *one) if len(one[1]) else math.nan for one in answers]
        np.testing.assert_allclose(found.score, expected, rtol=1e-6)
        known = [value for value in expected if not math.isnan(value)]
        assert found.macro == pytest.approx(np.mean(known), rel=1e-6)
        together = [torch.cat(part) for part in zip(*answers, strict=True)]
        assert found.micro == pytest.approx(expect_classes(metric, *together), rel=1e-6)
        assert found.undefined == sum(
            bool(len(y)) and math.isnan(e) for (_, y), e in zip(answers, expected, strict=True)
        )


@pytest.mark.parametrize("metric", ["f1", "auroc"])
def test_a_sample_of_clients_is_judged_as_all_are(ran, metric):
    some = np.array([0, 3, 4])
    every, few = judge(ran, metric)["test"], judge(ran, metric, clients=some)["test"]
    np.testing.assert_array_equal(few.score, every.score[some])
    np.testing.assert_array_equal(few.variance, every.variance[some])
    assert few.drawn_from == 5


def test_single_answers_are_kept_beside_any_metric(ran):
    found = judge(ran, "auroc")["test"]
    answers = [answer(ran, client) for client in range(5)]
    assert found.answers.tolist() == torch.cat([outputs.argmax(1) for outputs, _ in answers]).tolist()
    assert found.labels.tolist() == torch.cat([y for _, y in answers]).tolist()
    np.testing.assert_array_equal(found.each, found.answers == found.labels)  # single samples are right or wrong
    assert judge(ran, "auroc")["val"].answers is None


def test_calibration_does_not_depend_on_the_metric(ran):
    np.testing.assert_array_equal(judge(ran, "log-loss")["test"].bins, judge(ran, "auto")["test"].bins)


def test_clients_with_one_class_have_no_area_and_are_counted():
    x = torch.randn(40, 4)
    data = {"mixed": (x, (x[:, 0] > 0).long()), "sick": (x, torch.ones(40).long()), "well": (x, torch.zeros(40).long())}
    task = Task.of_clients(data, MLP((4,), 2, hidden=(4,)), classes=2, training=Training(lr=0.1))
    found = federate(task, "fedavg", rounds=1, metric="auroc")
    assert np.isnan(found.scores()).tolist() == [False, True, True]
    figures = found.figures()
    assert figures.undefined == 2
    assert figures.macro == found.scores()[0] == figures.worst
    assert 0 < figures.micro < 1  # over all samples together there are two classes


@pytest.mark.parametrize("metric", OF_NUMBERS)
def test_numbers_are_judged_client_by_client(metric):
    draw = torch.Generator().manual_seed(0)
    data = {f"farm {k}": (torch.randn(20, 3, generator=draw), torch.randn(20, generator=draw) + k) for k in range(3)}
    net = torch.nn.Linear(3, 1)
    task = Task.of_clients(data, net, loss=squared_error, score=absolute_error, training=Training(lr=0.01))
    found = federate(task, "fedavg", rounds=1, metric=metric)
    for client in range(3):
        split = task.splits["test"]
        rows = split.order[split.offsets[client] : split.offsets[client + 1]]
        with torch.no_grad():
            outputs = functional_call(net, dict(found.server), (task.x[rows],))
        assert found.scores()[client] == pytest.approx(expect_numbers(metric, outputs, task.y[rows]), rel=1e-4)
    assert found.metric.higher_is_better == (metric == "r2")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_servers_test_set_and_newcomers_are_judged_by_the_metric():
    recipe = Recipe("digits", clients=8, central="0.1", unseen=0.25)
    found = {metric: federate(recipe.build(), "fedavg", rounds=1, metric=metric) for metric in ("auto", "f1")}
    f1, right = found["f1"], found["auto"]
    assert f1.central != right.central
    assert f1.newcomers.labelled["0"].macro != right.newcomers.labelled["0"].macro
    x, y = f1.task.central
    with torch.no_grad():
        said = functional_call(f1.task.network._original, dict(f1.server), (x,)).argmax(1)
    assert f1.central == pytest.approx(oracle.f1_score(y, said, average="macro"))


def test_selection_gains_and_harm_follow_the_metric(tmp_path):
    recipe = Recipe("digits", clients=4, partition="dirichlet:0.3", training=Training(lr=0.1))
    asked = {"seeds": 1, "rounds": 4, "eval_every": 1, "folder": tmp_path}
    found = compare(recipe, ["ditto"], metric="log-loss", select="best", **asked)
    assert found.metric.name == "log loss"
    local, ditto = found.scores("local"), found.scores("ditto")
    np.testing.assert_allclose(found.gains("ditto"), local - ditto)  # less is better
    one = found.outcomes["ditto"][0]
    assert one.select_round("best").round == min(one.curve(), key=lambda point: point[1])[0]
    assert found.best == min(found.results, key=lambda row: row["mean"])["method"]
    assert all(row["worst"] >= row["mean"] for row in found.results)
    again = Report.read(next(tmp_path.glob("ditto-*")))
    np.testing.assert_array_equal(again.scores(), one.scores())
    with pytest.raises(RunError, match=r"common.*metric: .*'accuracy' and 'log loss'|another settings"):
        compare(recipe, ["ditto"], **asked)


def test_a_figure_that_is_no_mean_has_no_wilson_bound_and_no_mcnemar():
    found = compare(Recipe("digits", clients=4), ["ditto"], seeds=1, rounds=1, metric="f1")
    assert found.results[0]["worst_wilson"] is None
    assert found.mcnemar("ditto") is None
    assert found.results[0]["micro"] == pytest.approx(found.outcomes["local"][0].figures().micro)
    assert np.isfinite(found.errors("ditto")).all()


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_an_unknown_metric_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match=r"auroc"):
        find_measure("aurok")
    assert find_measure("ROC_AUC") is find_measure("auroc")
    assert find_measure("top-5").name == "top-5 accuracy"
    with pytest.raises(UnknownName):
        find_measure("top-0")


def test_a_metric_must_fit_the_task():
    task = Recipe("digits", clients=2).build()
    with pytest.raises(
        TaskError, match=r"R2 is for tasks that predict numbers\. digits predicts classes\.\nhint: choose accuracy"
    ):
        federate(task, "fedavg", rounds=1, metric="r2")
    with pytest.raises(TaskError, match=r"top-10 accuracy must leave .* 10 classes"):
        federate(task, "fedavg", rounds=1, metric="top-10")


# -- confusion ---------------------------------------------------------------------------------------------------------


def test_confusion_is_counted_by_client_and_read_from_the_folder(tmp_path):
    recipe = Recipe("digits", clients=3, partition="dirichlet:0.1", samples=300)
    found = compare(recipe, ["ditto"], seeds=2, rounds=2, folder=tmp_path)
    one = Report.read(next(tmp_path.glob("ditto-seed0")))
    each = [one.confusion(client) for client in range(3)]
    assert [counts.sum() for counts in each] == one.samples().tolist()
    np.testing.assert_array_equal(sum(each), one.confusion())
    for counts, score in zip(each, one.scores(), strict=True):
        assert np.trace(counts) / counts.sum() == pytest.approx(score)
    y, said = one.outcomes["label"], one.outcomes["answer"]
    np.testing.assert_array_equal(one.confusion(), oracle.confusion_matrix(y, said, labels=range(10)))
    rows = [row for row in found.classes if row["method"] == "ditto"]
    y, said = (np.concatenate([of.outcomes[name] for of in found.outcomes["ditto"]]) for name in ("label", "answer"))
    precision, recall, f1, samples = oracle.precision_recall_fscore_support(
        y, said, labels=range(10), zero_division=np.nan
    )
    for name, values in {"precision": precision, "recall": recall, "f1": f1, "samples": samples}.items():
        np.testing.assert_allclose([row[name] for row in rows], values)
    with pytest.raises(RunError, match="7 is none of the 3"):
        one.confusion(7)


def test_an_unfinished_run_has_no_confusion():
    found = federate(Recipe("digits", clients=2).build(), "fedavg", rounds=1, evaluation="all")
    with pytest.raises(RunError, match="answer to every test sample"):
        replace(found, outcomes=None).confusion()


# -- whatever is deployed, however it is run ---------------------------------------------------------------------------


def f1_of_answers(report):
    """Each client's macro F1, from the answers that are kept."""
    ends = np.cumsum(report.samples())[:-1]
    label, said = (np.split(report.outcomes[name], ends) for name in ("label", "answer"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            oracle.f1_score(*both, average="macro") if len(both[0]) else math.nan
            for both in zip(label, said, strict=True)
        ]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedper+prox:mu=0.1", {"cohort": 3}),
        ("ditto@ifca:cluster_rounds=1", {}),
        ("knn-per", {"drop": 0.3}),
        ("ditto", {"late": 0.5, "delay": 1}),
        ("ce/ensemble:epochs=1", {"rounds": 1}),
        ("oneshot-proto:epochs=1", {"rounds": 1}),
    ],
)
def test_every_kind_of_method_is_judged_by_its_answers(method, more):
    task = Recipe("digits", clients=5, partition="dirichlet:0.2", samples=600).build()
    found = federate(task, method, **{"rounds": 3, "metric": "f1", **more})
    np.testing.assert_allclose(found.scores(), f1_of_answers(found), rtol=1e-6)


def test_a_model_with_batchnorm_is_judged_by_its_answers(make_task):
    def model():
        norm = torch.nn.BatchNorm1d(6)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), norm, torch.nn.ReLU(), torch.nn.Linear(6, 3))

    task = make_task(model, sizes=(20, 2, 31), shares=(0.5, 0.2, 0.3))
    found = federate(task, "fedbn", rounds=2, metric="f1")
    np.testing.assert_allclose(found.scores(), f1_of_answers(found), rtol=1e-6)


def test_a_resumed_run_is_judged_as_one_that_never_stopped(tmp_path):
    task = Recipe("digits", clients=4, samples=400).build()
    asked = {"rounds": 4, "metric": "auroc", "eval_every": 1}
    whole = federate(task, "ditto", folder=tmp_path / "whole", **asked)
    stop = threading.Event()

    def after(line):
        if line.round == 2:  # it ends after the next round
            stop.set()

    with pytest.raises(KeyboardInterrupt):
        federate(task, "ditto", folder=tmp_path / "cut", on_round=after, stop=stop, **asked)
    half = Report.read(tmp_path / "cut")
    assert (half.metric.name, half.done) == ("AUROC", 3)
    again = federate(task, "ditto", folder=tmp_path / "cut", resume=True, **asked)
    np.testing.assert_array_equal(again.scores(), whole.scores())
    np.testing.assert_array_equal(again.outcomes["answer"], whole.outcomes["answer"])
    with pytest.raises(RunError, match="must be resumed with what it was begun with"):
        federate(task, "ditto", folder=tmp_path / "cut", resume=True, **{**asked, "metric": "f1"})


def test_a_run_of_before_there_were_metrics_is_judged_by_its_tasks_score():
    found = federate(Recipe("digits", clients=2, samples=200).build(), "fedavg", rounds=1)
    old = found.config.as_json()
    old["settings"] = {name: value for name, value in asdict(found.settings).items() if name != "metric"}
    old["task"]["metric"] = {"name": "accuracy", "higher_is_better": True, "share": True}
    read = RunConfig.of_json(old)
    assert read.settings.metric == "auto"
    assert read.task.metric.mean
    assert read.as_json()["settings"] == found.config.as_json()["settings"]


@pytest.mark.parametrize(
    ("metric", "best", "target"), [("r2", 0.8, 0.76), ("r2", -0.5, -0.5 / 0.95), ("mae", 2.0, 2.0 / 0.95)]
)
def test_the_target_is_a_little_worse_than_the_best_of_fedavg(monkeypatch, metric, best, target):
    draw = torch.Generator().manual_seed(0)
    data = {f"farm {k}": (torch.randn(12, 2, generator=draw), torch.randn(12, generator=draw)) for k in range(2)}
    task = Task.of_clients(data, torch.nn.Linear(2, 1), loss=squared_error, score=absolute_error)
    found = compare(task, ["fedavg"], seeds=1, rounds=1, metric=metric)
    monkeypatch.setattr(Report, "curve", lambda *_: [(1, best)])
    assert found.target_of(0) == pytest.approx(target)
    assert found.example.sign * (target - best) < 0


def test_a_name_is_no_metric_of_a_task():
    data = {"a": (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))}
    with pytest.raises(
        TaskError, match=r"must be a function .* Got 'f1'\.\nhint: .*federate\(task, \.\.\., metric='f1'\)"
    ):
        Task.of_clients(data, torch.nn.Linear(2, 2), score="f1")


def test_odds_of_minus_infinity_are_equal() -> None:
    """Items that a user knows are no candidates: two of them tie, in either order."""
    kept = np.array([[-np.inf], [-np.inf], [1.0]])
    for targets in ([[0], [1], [1]], [[1], [0], [1]]):
        two = np.array(targets, dtype=np.float64)
        assert take_figure(MEASURES["auroc"].figure, kept, two) == 0.75
