"""FedNCF: the network is averaged over all, rows over those who touched them, and p never leaves."""

import pytest
import torch

from atoll import Task, federate
from atoll.algorithms.fedncf import FedNCF
from atoll.kernel.errors import ModelError
from atoll.runtime.engines import LocalEngine


def make(model="neural-items") -> Task:
    rows = [(user, (3 * user + step * (1 + user % 3)) % 11, step) for user in range(8) for step in range(5 + user % 3)]
    columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    return Task.ratings(columns, fewest=(4, 1), model=model)


def run(task, method, rounds):
    engine = LocalEngine(strategy="whole eager", dtype=torch.float64)
    return federate(task, method, rounds=rounds, progress=False, engine=engine)


def test_the_network_is_the_mean_over_all_by_samples():
    updates = []

    class Watched(FedNCF):
        def local(self, w, cohort):
            update = super().local(w, cohort)
            updates.append((w, update))
            return update

    report = run(make(), Watched(), 1)
    name = "head.network.0.weight"
    weight = torch.cat([update.weight for _, update in updates])
    delta = torch.cat([update.send["delta"][name] for _, update in updates])
    mean = (delta * weight[:, None, None]).sum(0) / weight.sum()
    assert delta.abs().max() > 0
    torch.testing.assert_close(report.server[name], updates[0][0][name] + mean)
    touched = torch.cat([update.send["rows"]["row"].flatten() for _, update in updates]).unique()
    still = torch.ones(len(report.server["body.bias"]) + 1, dtype=torch.bool)
    still[touched.long()] = False
    assert torch.equal(report.server["body.bias"][still[:-1]], updates[0][0]["body.bias"][still[:-1]])


def test_the_vector_never_leaves():
    report = run(make(), FedNCF(), 2)
    assert "head.user.vector" not in report.server
    fields = {message.field for message in report.ledger.messages() if message.direction == "up"}
    assert fields == {"rows", "delta", "weight"}


def test_it_needs_a_network_beside_the_table():
    with pytest.raises(ModelError, match="FedNCF shares a network beside the table of items. ItemFactors has none"):
        run(make("item-factors"), FedNCF(), 1)
