"""What a method declares holds: ranges of its hyperparameters, limits, the samples that it reads."""

from __future__ import annotations

import math
from typing import Any

from atoll import compose
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, WithEverybody, describe_values, hyperparameters
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.hyperparameters import Hyperparameter
from atoll.kernel.params import Params
from atoll.kernel.wrapper import title_of, with_values
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.methods import list_asked, remember
from atoll.testing.conformance.models import train_odd_model
from atoll.testing.conformance.playing import LONG, answer_tests, gather_outcome, personal_models, train
from atoll.testing.conformance.rehearsal import rehearse
from atoll.testing.conformance.tasks import alter, poison, task_for
from atoll.testing.conformance.trees import find_difference, require_same

LASTS = 6  # rounds in which a limit must hold
FEW = 2  # clients of a round in which not all are asked


def bad_hyperparameters_are_refused(method: Algorithm) -> str | None:
    """Check that each bad value raises an error that says what must be and what was given."""
    for one in hyperparameters(method):
        for value in list_bad_values(one):
            try:
                with_values(method, **{one.name: value})
            except HyperparameterError as error:
                if "must be" not in str(error) or "Got" not in str(error):
                    raise ConformanceError(
                        f"The error for {one.name}={value!r} must say what it must be and what it got. It says: {error}"
                    ) from error
            else:
                raise ConformanceError(
                    f"`{one.name}` of {title_of(method)} must be {one.expected}, but {value!r} was accepted.",
                    hint="give the field a range: Annotated[float, Range(low=0)]; call super().__post_init__().",
                )
    return None if hyperparameters(method) else "this method has no hyperparameters"


def list_bad_values(one: Hyperparameter) -> list[Any]:
    """List values that a hyperparameter must refuse."""
    bad: list[Any] = [[], *([] if one.optional else [None])]
    if one.choices:
        return [*bad, "no such choice", 0.5]
    if one.type in (int, float):
        bad += ["three", True, math.nan, math.inf]
    if one.type is int:
        bad.append(1.5)
    if one.type is bool:
        bad += ["yes", 2]
    if one.type is str:
        bad.append(3)
    if one.range is not None:
        low, high = one.range.low, one.range.high
        bad += [one.type(low - 1)] if math.isfinite(low) else []
        bad += [one.type(high + 1)] if math.isfinite(high) else []
        bad += [one.type(end) for end, out in ((low, one.range.open_low), (high, one.range.open_high)) if out]
    return bad


def declared_limits_hold(method: Algorithm) -> str | None:
    """Check that with the values of a declared limit, personal models equal those of the simpler method.

    They must also where few clients are asked in a round, unless the limit is declared for everybody only.
    """
    everybody = {None: "the same stream name and number of steps give the same batches."}
    some = {FEW: "begin with `cohort.initial`, or declare it `WithEverybody(...)`."}
    limits = {} if list_asked(method) else method.limits  # they are declared for the default values of all others
    for other, values in limits.items():
        limit, simple = with_values(method, **values), compose.create(other)
        for asked, hint in (everybody if isinstance(values, WithEverybody) else everybody | some).items():
            require_same(
                personal_models(train(limit, rounds=LASTS, cohort=asked)),
                train_simple(simple, asked),
                f"{title_of(method)} with {describe_values(values)} must equal {other}, as it declares"
                f"{'' if asked is None else f', also with {asked} clients a round'}.",
                hint,
            )
    return None if limits else "this method declares no limits"


@remember(32)
def train_simple(simple: Algorithm, asked: int | None) -> list[Params]:
    """Return the personal models of a method that is the limit of others."""
    return personal_models(train(simple, rounds=LASTS, cohort=asked))


def answers_need_no_labels(method: Algorithm) -> None:
    """Check that answers to test samples are the same whatever the labels of these are."""
    for report in reports_of(method):
        require_same(
            answer_tests(report),
            answer_tests(report, task=poison(report.task)),
            "Answers to test samples must not depend on their labels.",
            "an answer has the sample alone: labels are for whoever scores it.",
        )


def answers_stand_alone(method: Algorithm) -> str | None:
    """Check that the answer to a sample does not depend on the others of its batch, unless the method says so."""
    if method.transductive:
        return "it says that answers depend on the other samples of a batch"
    for report in reports_of(method):
        require_same(
            answer_tests(report),
            answer_tests(report, alone=True),
            "The answer to a sample must be the same whether it is asked for alone or with others.",
            "use no statistics of the batch, or declare it: transductive = True.",
            tolerance=1e-8,
        )
    return None


def reports_of(method: Algorithm) -> list[Report]:
    """Return a run on a plain network, and one on a network with BatchNorm and dropout."""
    plain = rehearse(method).report
    return [plain] if method.items_by else [plain, train_odd_model(method)]


def test_data_are_never_read(method: Algorithm) -> None:
    """Check that training is the same with other test labels, fewer test samples, and NaN in them."""
    if ignores_other_samples(method):
        return
    require_same(
        rehearse(method).outcome,
        gather_outcome(train(method, alter(task_for(method), "test"), rounds=LONG)),
        "Training must not depend on test samples, their labels or their number.",
        "select on the split `val`.",
    )


def validation_data_are_read_where_declared(method: Algorithm) -> str | None:
    """Check that training is the same with other validation samples, unless the method declares that it reads them."""
    if method.reads_validation:
        return "it says that it reads them"
    rehearse(method).require("validation-data-are-read-where-declared")
    if ignores_other_samples(method):
        return None
    require_same(
        rehearse(method).outcome,
        gather_outcome(train(method, alter(task_for(method), "val"), rounds=LONG)),
        "Training must not depend on validation samples, by which rounds are chosen.",
        "train on the split `train`, or declare it: reads_validation: ClassVar[bool] = True.",
    )
    return None


@remember(2)
def ignores_other_samples(method: Algorithm) -> bool:
    """Say whether a run ends the same with other test samples, and other validation samples where they are not read.

    All change at once: if that makes no difference, none of them does.
    """
    task = alter(task_for(method), "test")
    task = task if method.reads_validation else alter(task, "val")
    return find_difference(rehearse(method).outcome, gather_outcome(train(method, task, rounds=LONG))) is None
