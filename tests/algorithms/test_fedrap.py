"""FedRAP: own vectors never leave, its penalties by hand, and what a client deploys is the sum."""

import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fedmf import FedMF
from atoll.algorithms.fedrap import FedRAP, keep_apart
from atoll.kernel.params import Params


def test_the_penalty_by_hand():
    whole = Params({"body.vector": torch.tensor([[1.0, -3.0], [2.0, 2.0]]), "own.vector": torch.zeros(2, 2)})
    places, weight = torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.5]])
    found = keep_apart(0.1, 0.01, whole, Params({}), places, weight)
    by_hand = 1.0 * (0.01 * 2.0 - 0.1 * 5.0) + 0.5 * (0.01 * 2.0 - 0.1 * 4.0)
    torch.testing.assert_close(found, torch.tensor(by_hand))


def test_own_vectors_stay_and_are_deployed():
    kept, deployed, sent = {}, {}, []

    class Watched(FedRAP):
        def local(self, w, cohort):
            update = super().local(w, cohort)
            kept.update(zip(cohort.clients.tolist(), update.keep["own.vector"], strict=True))
            return update

        def personalize(self, w, cohort):
            model = super().personalize(w, cohort)
            deployed.update(zip(cohort.clients.tolist(), model["body.vector"], strict=True))
            return model

    report = recommend(make_ratings(), Watched(), 3, on_reply=lambda _, arrival: sent.append(arrival))
    assert all(own.abs().max() > 0 for own in kept.values())
    assert {leaf for arrival in sent for leaf in arrival.fields["rows"]} == {"body.vector", "body.bias", "row", "count"}
    for client, own in kept.items():
        torch.testing.assert_close(deployed[client], report.server["body.vector"] + own)


def test_without_own_vectors_it_is_fedmf():
    task, values = make_ratings(), {"rate": 0.7, "l2": 0.02}
    plain, own = (
        recommend(task, FedMF(**values), 3),
        recommend(task, FedRAP(own_rate=0.0, lam=0.0, mu=0.0, **values), 3),
    )
    for leaf, value in plain.server.items():
        assert torch.equal(own.server[leaf], value)
    different = recommend(task, FedRAP(lam=0.0, mu=0.0, **values), 3)
    assert not torch.equal(different.server["body.vector"], plain.server["body.vector"])
