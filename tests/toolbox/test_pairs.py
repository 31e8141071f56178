"""Pairs of a training and an answer: which make sense, their hyperparameters, and what they share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from samples import answers

from atoll import Params, Task, federate
from atoll.algorithms import list_methods, list_pairs, list_parts, name_of
from atoll.algorithms.answers.margins import Margins
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.fafi_bank import FAFIBank
from atoll.algorithms.trainings.bank import Bank
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.queue import Queue
from atoll.compose import create, read
from atoll.compose.names import from_record, to_record
from atoll.kernel.algorithm import NonNegative, hyperparameters
from atoll.kernel.errors import HyperparameterError, UnknownName
from atoll.kernel.randomness import generator
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.conformance import play
from atoll.toolbox.pairs import AnswerPiece, LocalTraining, Pair, ServerAnswer, TrainingPiece

PAIRS = list_pairs()
SHORT = {
    "epochs": 1, "server_epochs": 1, "generator_steps": 1, "fit_epochs": 1, "samples": 20, "noise": 4, "width": 4,
    "server_batch": 6, "labelled": 0.5,
}  # fmt: skip


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    draw = generator(0, "public")
    public = torch.from_numpy(draw.normal(size=(12, 4))), torch.from_numpy(np.arange(12) % 3)
    return replace(make_task(dtype=torch.float64), public=public)


def short(pair: type[Pair], **values: object) -> Pair:
    """A pair that takes as little time as it can."""
    known = {one.name for one in hyperparameters(pair)}
    return pair(**{name: value for name, value in SHORT.items() if name in known}, **values)


# -- which there are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_every_sensible_pair_runs_and_uploads_once(task: Task, name: str) -> None:
    report = play(task, short(PAIRS[name]))
    found = answers(task, report.algorithm.shared(report.server), task.x)
    assert found.shape == (len(task.x), 3)
    assert torch.isfinite(found).all()
    assert report.algorithm.deploys_a_model == isinstance(report.algorithm.shared(report.server), Params)
    up = [message.client for message in report.ledger.messages() if message.direction == "up"]
    assert sorted(set(up)) == [0, 1, 2, 3]


@pytest.mark.parametrize("piece", list_parts(TrainingPiece))
def test_every_piece_changes_the_training(task: Task, piece: str) -> None:
    plain, more = (play(task, create(f"{name}/ensemble:epochs=2")) for name in ("fafi", f"fafi+{piece}"))
    assert not torch.equal(*(report.server.answer.models["body.1.weight"] for report in (plain, more)))


def test_a_piece_of_an_answer_stands_after_it_and_leaves_the_training_alone(task: Task) -> None:
    plain, more, plus = (
        play(task, create(f"{name}epochs=2")) for name in ("fafi:", "fafi/features+refined:", "fafi-plus:own=0.5,")
    )
    assert name_of(more.algorithm) == "fafi/features+refined"
    assert from_record(to_record(more.algorithm)) == more.algorithm
    assert more.algorithm.training == plain.algorithm.training
    found = [answers(task, one.algorithm.shared(one.server), task.x) for one in (plain, more, plus)]
    assert not torch.allclose(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_a_piece_of_another_answer_is_refused() -> None:
    with pytest.raises(HyperparameterError, match=r"must be added to the answer `features`\. Got `margins`\."):
        create("fafi/margins+refined")


def test_a_pair_with_a_file_is_that_method() -> None:
    assert read("ce/ensemble").kind is Ensemble
    assert read("fafi+bank/features").kind is FAFIBank
    assert create("ce/ensemble+prox") == create("ensemble+prox")
    assert read("etf/ensemble").kind is not read("fedetf").kind  # which has an option of its own
    assert read("fafi/margins").kind is read("fafi/margins").kind


@pytest.mark.parametrize("name", ["ce/features", "ce+bank/ensemble", "etf+queue/margins"])
def test_what_makes_no_sense_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(HyperparameterError, match="clients must train prototypes. The training") as raised:
        create(name)
    assert "hint: take another training" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fafy/margins", "Unknown training 'fafy'. Did you mean: fafi?"),
        ("fafi/margin", "Unknown answer 'margin'. Did you mean: margins?"),
        ("fafi+bonk/margins", "Unknown piece 'bonk'. Did you mean: bank?"),
        ("fafi+refined/features", "Unknown piece 'refined'."),
        ("fafi/features+refine", "Unknown piece 'refine'. Did you mean: refined?"),
        ("features+refined", "Unknown algorithm 'features'."),
    ],
)
def test_names_are_suggested(name: str, said: str) -> None:
    with pytest.raises(UnknownName) as raised:
        create(name)
    assert said in str(raised.value)


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def test_the_hyperparameters_of_a_pair_are_those_of_its_parts() -> None:
    names = [one.name for one in hyperparameters(read("fafi+bank+queue/margins").kind)]
    assert names == [
        *(one.name for one in hyperparameters(PrototypeContrast)),
        *(one.name for one in hyperparameters(Bank)),
        *("queue", "queue_same", "decay", "queue_momentum", "queue_mass"),  # the bank has another mass
        *("shrinkage", "margins_scale", "common", "voting"),  # the clients have another scale
    ]
    method = create("fafi+bank+queue/margins:mass=2,queue_mass=3,scale=4,margins_scale=5")
    assert isinstance(method, Pair)
    assert (method.training.objective.mass, method.training.objective.queue_mass) == (2.0, 3.0)
    assert (method.training.plain.value_of("scale"), method.answering.scale) == (4.0, 5.0)


def test_a_name_of_the_same_type_and_default_is_one_value() -> None:
    method = create("fafi:profile=faithful,scale=2")
    assert isinstance(method, Pair)
    assert method.training.profile == method.answering.profile == "faithful"
    assert method.training.scale == method.answering.scale == 2.0


@dataclass(frozen=True, kw_only=True)
class Fixed(Pair, training=(PrototypeContrast, Bank, Queue), answering=Margins, fixed={"scale": 8.0}):
    """A pair with a value of its own, and some that cannot be chosen."""

    mass: NonNegative = 0.5

    cites: ClassVar[str] = "zeng2025does"


def test_a_class_may_have_a_value_for_all_parts_and_fix_others() -> None:
    names = [one.name for one in hyperparameters(Fixed)]
    assert "scale" not in names
    assert "queue_mass" not in names
    method = Fixed()
    assert method.training.objective.mass == method.training.objective.queue_mass == 0.5
    assert method.training.objective.scale == method.answering.scale == 8.0
    with pytest.raises(UnknownName, match="scale"):
        Fixed(scale=1.0)


def test_bad_values_raise_when_a_pair_is_made() -> None:
    with pytest.raises(HyperparameterError, match="`shrinkage` of fafi/margins must be a float in"):
        create("fafi/margins:shrinkage=0")
    with pytest.raises(HyperparameterError, match="`pool_from` of a pool of 'means'"):
        create("fafi+bank/margins:pool=means,pool_from=noise")
    with pytest.raises(HyperparameterError, match="`epochs` must be at least 2 where stages recur"):
        create("fafi+stages/margins:stages=recurring,epochs=1")
    with pytest.raises(HyperparameterError, match="`shrinkage` of margins"):
        Margins(shrinkage=0.0)


def test_a_pair_is_written_down_and_made_again() -> None:
    method = create("fafi+bank/margins:margins_scale=4,pool=images")
    record = to_record(method)
    assert (record["name"], record["file"]) == ("fafi+bank/margins", None)
    assert from_record(record) == method
    older = {"name": "fafi-plus", **to_record(create("fafi-plus:own=0.5,queue=16"))["values"]}
    assert from_record(older) == create("fafi-plus:own=0.5,queue=16")


def test_no_one_shot_method_is_a_kind_of_another() -> None:
    methods = {method for method in list_methods().values() if method.one_shot}
    assert len(methods) > 20
    assert not [method for method in methods if methods & {*method.__mro__[1:]}]


def test_parts_have_names_and_a_sentence() -> None:
    for kind in (LocalTraining, TrainingPiece, ServerAnswer, AnswerPiece):
        parts = list_parts(kind)
        assert parts
        for name, part in parts.items():
            assert part.__module__.rpartition(".")[2].replace("_", "-") == name
            assert part.__doc__
            part()


# -- what they share ---------------------------------------------------------------------------------------------------


def test_pieces_that_add_nothing_leave_the_training_as_it_is() -> None:
    plain = create("fafi/margins")
    off = create("fafi+bank+queue+frame/margins:pool=none,queue=0,anchors=none")
    assert isinstance(plain, Pair)
    assert isinstance(off, Pair)
    assert off.training == plain.training
    assert create("fafi+bank/margins").training != plain.training  # type: ignore[attr-defined]


def test_trained_clients_are_found_by_every_answer(
    task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll.engine")
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    for training, others in {"ce": ["ensemble", "margins", "feddf"], "fafi": ["features", "margins", "rga"]}.items():
        caplog.clear()
        names = [
            f"{training}/{'ensemble' if training == 'ce' else 'features'}",
            *(f"{training}/{one}" for one in others),
        ]
        for number, name in enumerate(names):
            method = create(f"{name}:epochs=2")
            federate(task, method, rounds=1, engine=engine, evaluation="none", trained=tmp_path)
            assert caplog.text.count("2 of 2 epochs of local training were done before") == number


def test_margins_of_fafi_are_what_fafi_plus_makes_of_them(task: Task) -> None:
    pair, plus = (
        play(task, create(name)) for name in ("fafi/margins:epochs=3", "fafi-plus:epochs=3,own=1,own_by=margins")
    )
    found = [answers(task, report.algorithm.shared(report.server), task.x) for report in (pair, plus)]
    assert torch.equal(*found)


def test_one_model_of_a_frame_answers_in_the_frame(task: Task) -> None:
    pair, named = (play(task, create(name)) for name in ("etf/average:epochs=3", "fedetf:epochs=3,answer=average"))
    found = [answers(task, report.algorithm.shared(report.server), task.x) for report in (pair, named)]
    assert torch.equal(*found)
    raw = answers(task, pair.server.answer, task.x)
    assert not torch.allclose(found[0], raw)


def test_one_client_of_fafi_answers_by_its_prototypes_alone_or_in_an_ensemble(make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(9,), dtype=torch.float64)
    found = [
        answers(task, report.algorithm.shared(report.server), task.x)
        for report in (play(task, create(f"fafi/{answer}:epochs=3")) for answer in ("average", "ensemble", "features"))
    ]
    torch.testing.assert_close(found[0] - found[0].mean(1, keepdim=True), found[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-9)


def test_nobody_replied(task: Task) -> None:
    for name in ("fafi/margins", "etf/average", "ce/rga"):
        report = play(task, create(f"{name}:epochs=1"), faults=lambda round, clients: clients >= 0)
        assert report.algorithm.shared(report.server) is report.server.start.model
        assert name_of(type(report.algorithm)) == name
