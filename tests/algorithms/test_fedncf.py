"""FedNCF: the network is averaged over all, rows over those who touched them, and p never leaves."""

import pytest
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fedncf import FedNCF
from atoll.kernel.errors import ModelError


def test_the_network_is_the_mean_over_all_by_samples():
    updates = []

    class Watched(FedNCF):
        def local(self, w, cohort):
            update = super().local(w, cohort)
            updates.append((w, update))
            return update

    report = recommend(make_ratings(model="neural-items"), Watched(), 1)
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
    report = recommend(make_ratings(model="neural-items"), FedNCF(), 2)
    assert "head.user.vector" not in report.server
    fields = {message.field for message in report.ledger.messages() if message.direction == "up"}
    assert fields == {"rows", "delta", "weight"}


def test_it_needs_a_network_beside_the_table():
    with pytest.raises(ModelError, match="FedNCF shares a network beside the table of items. ItemFactors has none"):
        recommend(make_ratings(model="item-factors"), FedNCF(), 1)
