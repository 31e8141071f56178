"""Membership inference on runs, and on scores whose answer is known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import Report, Task, federate
from atoll.data import datasets, partition
from atoll.experiments.audit import audit
from atoll.experiments.audit.findings import count_steps
from atoll.experiments.audit.membership import Seen, score_calibrated, score_lira, score_loss, score_rmia
from atoll.experiments.audit.subject import Subject, answer
from atoll.kernel.errors import HyperparameterError, RunError, TaskError, UnknownName
from atoll.kernel.randomness import generator


@pytest.fixture(scope="module")
def task() -> Task:
    whole = Task.build(
        datasets.load("digits"), partition.parse("iid"), clients=4, shares=(0.08, 0.1, 0.82), model="mlp"
    )
    y = torch.from_numpy(generator(0, "labels").integers(0, 10, len(whole.y)))  # nothing can be learnt, only kept
    return replace(whole, y=y)


@pytest.fixture(scope="module")
def learnt_by_heart(task: Task) -> Report:
    return federate(
        task.with_training(lr=0.2), "ditto:personal_epochs=5,lam=0", rounds=15, evaluation="none", progress=False
    )


def test_who_learns_by_heart_gives_its_members_away(learnt_by_heart: Report) -> None:
    found = {
        (one.model, one.attack): one for one in audit(learnt_by_heart, attacks=["membership"], references=0).membership
    }
    assert found["personal", "loss"].auc.value > 0.9
    assert found["personal", "rmia"].auc.value > 0.9
    assert found["personal", "rmia"].tpr.value > 0.2
    assert set(found["personal", "loss"].each) == set("0123")


def test_an_untrained_model_gives_nobody_away(task: Task) -> None:
    report = federate(task.with_training(lr=1e-9), "ditto", rounds=1, evaluation="none", progress=False)
    for one in audit(report, attacks=["membership"], references=0).membership:
        assert one.auc.value == pytest.approx(0.5, abs=3 * np.sqrt(1 / (6 * one.members)))


def test_shadow_federations(task: Task) -> None:
    report = federate(task, "fedavg", rounds=1, evaluation="none", progress=False)
    subject = Subject.open(report, trust=False)
    (models, first), (_, second) = subject.shadow(0), subject.shadow(1)
    assert models.shared is not None
    for client, (members, others) in subject.sides.items():
        pool = np.concatenate([members, others])
        assert (first[pool] ^ second[pool]).all()  # what is in one is out of the other
        assert 0.3 < first[pool].mean() < 0.7
        assert sorted(subject.labels(members)) == sorted(subject.labels(others))
        assert set(members) <= set(subject.rows("train", client))
        assert set(others) <= set(subject.rows("test", client))


def test_all_four_attacks_with_four_references(learnt_by_heart: Report) -> None:
    said: list[str] = []
    found = audit(learnt_by_heart, attacks=["membership"], references=4, on_step=said.append)
    personal = {one.attack: one.auc.value for one in found.membership if one.model == "personal"}
    assert set(personal) == {"rmia", "calibrated", "loss", "lira"}
    assert min(personal.values()) > 0.8
    assert len(said) == 5
    assert len(found.sentences) == 8
    assert found.sentences[0].startswith("On the shared model RMIA tells members apart: AUC ")


def test_an_upload_gives_more_away_than_the_shared_model(task: Task) -> None:
    """Clients learn random labels by heart in long rounds; the mean of four of them remembers less than each."""
    report = federate(task.with_training(lr=0.2), "fedavg:epochs=30", rounds=2, evaluation="none", progress=False)
    said: list[str] = []
    found = audit(report, attacks=["membership", "uploads"], references=2, on_step=said.append)
    auc = {one.model: one.auc.value for one in found.membership if one.attack == "loss"}
    assert auc["uploaded"] > 0.95
    assert auc["uploaded"] > auc["shared"] + 0.05
    assert len(said) == count_steps(["membership", "uploads"], 2, 0) == 4
    assert any("rebuilds from each client's last message" in one for one in found.sentences)
    borrowed = audit(report, attacks=["uploads"], references=0)
    assert {one.model for one in borrowed.membership} == {"uploaded"}
    assert {one.attack for one in borrowed.membership} == {"loss", "calibrated", "rmia"}


def test_an_upload_is_the_model_that_the_client_sent(task: Task) -> None:
    report = federate(task, "fedavg", rounds=1, evaluation="none", progress=False, cohort=1)
    subject = Subject.open(report, trust=False)
    ((model, _),) = subject.with_uploads.uploaded.values()
    assert (model.model - report.server).norm() < 1e-6  # one client's upload is the mean


def test_an_upload_of_another_network_answers_by_that_network(task: Task) -> None:
    report = federate(task, "fml:meme=linear", rounds=1, evaluation="none", progress=False, cohort=1)
    subject = Subject.open(report, trust=False)
    ((model, network),) = subject.with_uploads.uploaded.values()
    assert (model.model - report.server).norm() < 1e-6
    assert answer((model, network), task.x[:3]).shape == (3, task.classes)


def test_messages_without_a_whole_model_are_not_attacked(task: Task) -> None:
    for method, settings, words in (
        ("fedper", {}, "does not hold a whole model"), ("local", {}, "does not hold a whole model"),
        ("fedavg", {"secure": "sums"}, "nobody has single messages"),
    ):  # fmt: skip
        report = federate(task, method, rounds=1, evaluation="none", progress=False, **settings)
        found = audit(report, attacks=["uploads"], references=0)
        assert not found.membership
        assert words in found.notes[0]


def test_scores_of_one_sample() -> None:
    phi, references = np.array([2.0]), np.array([[1.0], [-1.0], [0.5], [-0.5]])
    seen = Seen(phi, references, np.array([[True], [False], [True], [False]]))
    p, q = 1 / (1 + np.exp(-phi)), 1 / (1 + np.exp(-references))
    out = q[[1, 3]].mean()
    assert score_loss(seen) == pytest.approx(np.log(p))
    assert score_calibrated(seen) == pytest.approx(np.log(p) - np.log(q[[1, 3]]).mean())
    assert score_rmia(seen) == pytest.approx(p / (0.65 * out + 0.35))
    # medians 0.75 and -0.75, spreads 0.25 each
    assert score_lira(seen) == pytest.approx((-((2 - 0.75) ** 2) + (2 + 0.75) ** 2) / (2 * 0.25**2))


def test_a_folder_and_a_report_give_the_same(task: Task, tmp_path: Path) -> None:
    built = Task.build(datasets.load("digits"), partition.parse("iid"), clients=3)
    report = federate(built, "fedavg", rounds=2, folder=tmp_path / "run", progress=False)
    there = Report.read(tmp_path / "run").reopen(built)
    first, second = (audit(one, attacks=["membership"], references=2) for one in (report, there))
    assert first.figures() == second.figures()
    assert any("deploy the shared model" in one for one in first.notes)
    paths = first.save(tmp_path / "audit")
    assert "<h1>Audit of fedavg on digits</h1>" in paths["page"].read_text()


def test_a_method_without_a_shared_model(task: Task) -> None:
    found = audit(
        federate(task, "local", rounds=1, evaluation="none", progress=False), attacks=["membership"], references=0
    )
    assert {one.model for one in found.membership} == {"personal"}
    assert "local has no shared model, so only personal ones were attacked." in found.notes


def test_what_cannot_be_audited(task: Task, tmp_path: Path) -> None:
    report = federate(task, "local", rounds=1, evaluation="none", progress=False)
    with pytest.raises(HyperparameterError, match="must be an even number"):
        audit(report, references=3)
    with pytest.raises(UnknownName, match="membrship"):
        audit(report, attacks=["membrship"])
    with pytest.raises(UnknownName, match="A client must be given"):
        audit(report, clients=["nobody"])
    with pytest.raises(RunError, match="what its folder holds"):
        Report.task.fget(report.without_live())  # type: ignore[attr-defined]
    regression = Task.own(
        {name: {"x": np.arange(20.0) + k, "y": np.arange(20.0)} for k, name in enumerate("ab")}, target="y"
    )
    numbers = federate(regression, "fedavg", rounds=1, progress=False)
    with pytest.raises(TaskError, match="one class each"):
        audit(numbers)
