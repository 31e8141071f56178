"""What a site gets at the end: enough for its own clients' models, and nothing of the others'."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll import Report, federate
from atoll.algorithms import list_methods
from atoll.compose import create
from atoll.deploy.demands import list_demands
from atoll.kernel.params import flatten
from atoll.metrics.evaluation import evaluate
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.conformance.methods import shorten
from atoll.testing.conformance.tasks import build_task

PLAN = {"strategy": "loop eager", "device": "cpu", "dtype": torch.float64}
METHODS = [name for name in list_methods() if create(name).defines("state_for")]


def play(name: str, cohort: int | None) -> Report:
    method = shorten(create(name))
    rounds = max(2, method.least_rounds)
    return federate(
        build_task(items_by=method.items_by), method, rounds=rounds, cohort=cohort, engine=LocalEngine(**PLAN)
    )


def losses(report: Report, server: object, clients: NDArray[np.int64]) -> NDArray[np.float64]:
    found = evaluate(
        LocalEngine(**PLAN), report.population, report.algorithm, server, round=report.rounds, clients=clients
    )
    return found["test"].loss


@pytest.mark.parametrize("cohort", [None, 2])  # with two clients a round, some never train
@pytest.mark.parametrize("name", [*METHODS, "ditto@ifca:cluster_rounds=1", "fedavg@flhc:cluster_rounds=2"])
def test_a_site_needs_no_more_for_the_same_models(name: str, cohort: int | None) -> None:
    report = play(name, cohort)
    for ids in (np.array([0]), np.array([1, 4])):
        whole = losses(report, report.server, ids)
        assert np.array_equal(
            losses(report, report.algorithm.state_for(report.server, ids), ids), whole, equal_nan=True
        )


def test_methods_whose_server_has_a_row_for_each_client_leave_others_out() -> None:
    assert {"fedamp", "fedfomo", "fedora", "fedora-items", "fedpac", "gpfedrec", "mocha", "pfedhn"} <= {*METHODS}


@pytest.mark.parametrize("name", ["fedamp", "fedora", "fedora-items", "fedpac", "mocha", "pfedhn"])
def test_what_others_sent_is_not_in_it(name: str) -> None:
    report, ids = play(name, None), np.array([1])
    others = {tuple(row.tolist()) for row in find_rows(report.server, report.task.clients, without=1)}
    mine = {tuple(row.tolist()) for row in find_rows(report.algorithm.state_for(report.server, ids), 0, without=-1)}
    assert others
    assert not others & mine


def find_rows(server: object, clients: int, *, without: int) -> list[torch.Tensor]:
    """Return rows of tables of numbers, of so many clients if given, but for one client and rows of zeros."""
    found = []
    for leaf in flatten(server)[0]:
        if leaf.is_floating_point() and leaf.ndim > 1 and (len(leaf) == clients or not clients):
            found += [row.flatten() for number, row in enumerate(leaf) if number != without and bool(row.any())]
    return found


def test_the_user_is_told_what_sites_get() -> None:
    task = build_task()
    assert "part of the server's state" in " ".join(list_demands(create("fedamp"), task))
    assert "the models of all" in " ".join(list_demands(create("ensemble"), task))
