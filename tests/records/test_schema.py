import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from atoll.federation.config import AlgorithmSpec, RunConfig
from atoll.kernel.errors import UnknownName
from atoll.protect.ledger import Entry
from atoll.records.rounds import Evaluation, Figures, FoundClusters, Newcomers, Round
from atoll.records.schema import Record, SchemaError, parse


@dataclass(frozen=True, eq=False, kw_only=True)
class Inner(Record):
    numbers: list[float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Outer(Record):
    name: str
    inner: dict[str, Inner] = field(default_factory=dict)
    size: int | None = None
    kind: Literal["a", "b"] = "a"


FIGURES = {
    "macro": 0.5, "micro": 0.5, "worst": 0.0, "bottom10": 0.0, "std": 0.5, "loss": 1.0, "clients": [0.0, 1.0],
    "samples": [3, 4],
}  # fmt: skip
LINE = {"round": 1, "bytes": {"up": 4, "down": 8}, "seconds": {"round": 0.5}, "lost": {"not finite": 1}}


# -- writing and reading -----------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written():
    made = Outer(name="x", inner={"one": Inner(numbers=[1.0, math.inf])})
    text = json.dumps(made.as_json())
    assert text == '{"name": "x", "inner": {"one": {"numbers": [1.0, Infinity]}}, "kind": "a"}'  # no size
    again = Outer.of_json(json.loads(text))
    assert again == made
    assert again.inner["one"].numbers == again["inner"]["one"]["numbers"] == [1.0, math.inf]
    assert "size" not in again
    assert replace(again, size=3)["size"] == 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "it must be a dictionary. It is []"),
        ({}, "it must have 'name'"),
        ({"name": 1}, "name must be a text. It is 1"),
        ({"name": "x", "sise": 1}, "it must not have 'sise'"),
        ({"name": "x", "size": 1.5}, "size must be a whole number. It is 1.5"),
        ({"name": "x", "size": True}, "size must be a whole number. It is True"),
        ({"name": "x", "kind": "c"}, "kind must be one of 'a', 'b'. It is 'c'"),
        ({"name": "x", "inner": {"one": {"numbers": [1, "y"]}}}, "inner.one.numbers[1] must be a number. It is 'y'"),
        ({"name": "x", "inner": {"one": {"numbers": 3}}}, "inner.one.numbers must be a list. It is 3"),
        ({"name": "x" * 3, "inner": "z" * 99}, "inner must be a dictionary. It is 'zzzz"),
    ],
)
def test_what_is_no_record_is_refused_by_place_and_reason(value, said):
    with pytest.raises(SchemaError) as error:
        Outer.of_json(value)
    assert str(error.value).startswith(said)


def test_numbers_may_be_whole_where_others_are_expected_but_not_truths():
    assert parse(list[float], [1, 2.5]) == [1, 2.5]
    for hint in (list[float], list[int]):
        with pytest.raises(SchemaError, match=r"\[1\] must be a"):
            parse(hint, [1, True])
    assert parse(int | float | None, None) is None
    assert parse(Any, {"anything": [None]}) == {"anything": [None]}


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_a_line_has_its_evaluation_as_records():
    line = Round.of_json({**LINE, "evaluation": {"personal": {"test": FIGURES, "val": FIGURES}, "deployed": 40}})
    assert line.personal["test"].clients == line["evaluation"]["personal"]["test"]["clients"] == [0.0, 1.0]
    assert line.evaluation.deployed == 40
    assert line.evaluation.scored == 2
    assert Round.of_json(json.loads(json.dumps(line.as_json()))) == line
    assert Round.of_json(LINE).personal is None


@pytest.mark.parametrize(
    ("cls", "value", "said"),
    [
        (Figures, {**FIGURES, "samples": [3]}, "samples must have 2 entries. It has 1"),
        (Round, {**LINE, "round": 0}, "must not be negative"),
        (Round, {**LINE, "seconds": {"round": math.nan}}, "must not be negative"),
        (Round, {**LINE, "seconds": {}}, "seconds must have 'round'"),
        (Round, {**LINE, "evaluation": {"personal": {"val": FIGURES}}}, "scores must be there for the test split"),
        (Evaluation, {"mixing": [[1.0], [1.0]]}, "mixing must be square"),
        (Evaluation, {"personal": {"test": FIGURES}, "mixing": [[1.0]]}, "all 2 clients must be in mixing"),
        (FoundClusters, {"of_client": [0], "merges": [[1, 2]], "height": ""}, "every row of merges must have 4"),
        (Newcomers, {"labelled": {}, "unlabelled": {"way": "none"}}, "labelled must have '0'"),
        (Newcomers, {"labelled": {"0": FIGURES}, "unlabelled": {}}, "unlabelled must have a 'way'"),
        (Entry, {"direction": "sideways", "round": 0, "field": "w", "kind": "model", "bytes": 1, "clients": [0]},
         "direction must be one of 'down', 'up'"),
    ],
)  # fmt: skip
def test_lines_whose_parts_do_not_fit_are_refused(cls, value, said):
    with pytest.raises(SchemaError) as error:
        parse(cls, value)
    assert said in str(error.value)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_an_older_configuration_gets_the_form_of_today():
    older = {
        "task": {"name": "toy", "clients": 3, "source": "drawn"}, "settings": {"rounds": 2, "seed": 7},
        "algorithm": {"name": "ditto", "file": None, "lam": 0.5},
    }  # fmt: skip
    config = RunConfig.of_json(older)
    assert config.algorithm.values == {"lam": 0.5}
    assert config.algorithm.create().lam == 0.5
    assert (config.task.metric.name, config.settings.seed, config.settings.late) == ("accuracy", 7, 0.0)
    assert config["task"]["source"] == "drawn"  # what else a task says is kept
    assert config.computes is None


def test_a_method_with_hyperparameters_of_another_version_is_refused():
    with pytest.raises(UnknownName, match="Unknown hyperparameter of ditto 'lamb'"):
        AlgorithmSpec(name="ditto", file=None, values={"lamb": 1.0}).create()
