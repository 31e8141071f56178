"""PFedRec: the order of its two steps, its own rows over the table, and its limit."""

import numpy as np
import pytest
import torch

from atoll import Task, federate
from atoll.algorithms.fedmf import FedMF
from atoll.algorithms.pfedrec import PFedRec
from atoll.kernel.batch import Batch
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.runtime.engines import LocalEngine
from atoll.toolbox.client.items import answer_with_own_rows


def make(model=None) -> Task:
    rows = [(user, (3 * user + step * (1 + user % 3)) % 11, step) for user in range(8) for step in range(5 + user % 3)]
    columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    return Task.ratings(columns, fewest=(4, 1), model=model)


def run(task, method, rounds, **more):
    engine = LocalEngine(strategy="whole eager", dtype=torch.float64)
    return federate(task, method, rounds=rounds, progress=False, engine=engine, **more)


def test_own_rows_stand_over_the_table():
    task = make()
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
    task = make()
    start = task.network.initial["body.vector"].double()
    plain, turns = (run(task, method, 1).server["body.vector"] for method in (FedMF(l2=0.0), PFedRec(l2=0.0)))
    assert torch.equal(plain, start)
    assert not torch.equal(turns, start)


def test_shared_rows_are_one_model():
    report = run(make(), PFedRec(rows="shared"), 2)
    assert PFedRec(rows="shared").deploys_a_model
    assert not PFedRec().deploys_a_model
    assert np.isfinite(report.scores()).all()
    assert {message.kind for message in report.ledger.messages() if message.direction == "up"} == {"rows"}


def test_other_networks_are_refused():
    with pytest.raises(ModelError, match="PFedRec shares a table of items and nothing else. NeuralItems shares"):
        run(make("neural-items"), PFedRec(), 1)
