"""All checks, and how they are run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.kernel.algorithm import Algorithm
from atoll.records.runs import quietly
from atoll.testing.conformance import declarations, determinism, messages, models, participation, sites
from atoll.testing.conformance.errors import ConformanceError, blame
from atoll.testing.conformance.methods import Method, shorten


@dataclass(frozen=True)
class Check:
    """One thing that must hold; `function` raises if it does not, and may return a remark."""

    name: str
    describe: str
    function: Callable[[Algorithm], str | None]
    shortens: bool = True  # whether a little of everything that lasts is enough

    def run(self, method: Method) -> str:
        """Raise ConformanceError unless it holds; returns a remark, such as why there was nothing to check."""
        with blame(method), quietly():  # lost clients and limits are provoked on purpose
            value = method() if isinstance(method, type) else method
            return self.function(shorten(value) if self.shortens else value) or ""


@dataclass(frozen=True)
class Result:
    """How a check went; `message` says what is wrong, or remarks on what was not checked."""

    name: str
    passed: bool
    message: str
    seconds: float


BATTERY = (
    determinism.same_seed_same_bits,
    determinism.strategies_agree,
    determinism.clients_are_isolated,
    sites.sites_agree,
    determinism.order_of_clients_does_not_matter,
    determinism.the_server_holds_no_samples,
    determinism.inputs_are_unchanged,
    messages.payload_survives_serialisation,
    messages.only_what_is_declared_leaves,
    determinism.stop_and_resume,
    participation.clients_may_drop_out,
    participation.late_replies_are_read,
    participation.odd_clients_are_served,
    models.batchnorm_and_dropout_work,
    participation.absent_clients_keep_their_memory,
    participation.newcomers_are_welcome,
    declarations.bad_hyperparameters_are_refused,
    declarations.declared_limits_hold,
    declarations.answers_need_no_labels,
    declarations.answers_stand_alone,
    declarations.test_data_are_never_read,
    declarations.validation_data_are_read_where_declared,
    messages.one_shot_methods_upload_once,
)

IN_FULL = {declarations.declared_limits_hold}  # a limit may name lengths


@functools.cache
def _name_checks() -> tuple[Check, ...]:
    """Name each check after its function, whose docstring describes it."""
    return tuple(Check(one.__name__.replace("_", "-"), one.__doc__ or "", one, one not in IN_FULL) for one in BATTERY)


def checks() -> list[Check]:
    """List all checks, in the order in which they are run."""
    return list(_name_checks())


def check(method: Method, on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all checks on a method; `on_result` is called after each."""
    results = []
    for one in checks():
        began, passed = time.perf_counter(), True
        try:
            message = one.run(method)
        except ConformanceError as error:
            passed, message = False, str(error)
        results.append(Result(one.name, passed, message, time.perf_counter() - began))
        if on_result is not None:
            on_result(results[-1])
    return results
