"""PFedRec: the order of its two steps, its own rows over the table, and its limit."""

import numpy as np
import pytest
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fedmf import FedMF
from atoll.algorithms.pfedrec import PFedRec
from atoll.kernel.batch import Batch
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.toolbox.client.items import answer_with_own_rows


def test_own_rows_stand_over_the_table():
    task = make_ratings()
    network, items = task.network, task.classes
    model = network.initial | Params({"head.vector": torch.ones(16)}, network.layout)
    row = torch.tensor([2, 5, items])
    beside = Params.of(row=row, vector=torch.zeros(3, 16), bias=torch.tensor([7.0, -7.0, 99.0]))
    batch = Batch(task.x[:2], task.y[:2], None, None, network, Variant(train=False))
    scores, plain = answer_with_own_rows(model, beside, batch), batch.outputs(model)
    assert scores.shape == plain.shape
    assert scores[:, 2].tolist() == [7, 7]
    assert scores[:, 5].tolist() == [-7, -7]
    others = np.setdiff1d(np.arange(items), [2, 5])
    assert torch.equal(scores[:, others], plain[:, others])


def test_rows_move_at_the_new_function():
    """From p = 0, FedMF's rows do not move in the first round: their gradient is e p. PFedRec's p is new by then."""
    task = make_ratings()
    start = task.network.initial["body.vector"].double()
    plain, turns = (recommend(task, method, 1).server["body.vector"] for method in (FedMF(l2=0.0), PFedRec(l2=0.0)))
    assert torch.equal(plain, start)
    assert not torch.equal(turns, start)


def test_shared_rows_are_one_model():
    report = recommend(make_ratings(), PFedRec(rows="shared"), 2)
    assert PFedRec(rows="shared").deploys_a_model
    assert not PFedRec().deploys_a_model
    assert np.isfinite(report.scores()).all()
    assert {message.kind for message in report.ledger.messages() if message.direction == "up"} == {"rows"}


def test_other_networks_are_refused():
    with pytest.raises(ModelError, match="PFedRec shares a table of items and nothing else. NeuralItems shares"):
        recommend(make_ratings(model="neural-items"), PFedRec(), 1)
