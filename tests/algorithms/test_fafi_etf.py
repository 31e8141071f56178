"""FAFI with anchors: where prototypes end up, and what anchors with lengths do to them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import own

from atoll import Task
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_etf import FAFIETF
from atoll.kernel.randomness import generator
from atoll.testing.conformance import play
from atoll.toolbox.objectives.etf import simplex_etf
from atoll.toolbox.server.prototypes import agreement

WEIGHT = "head.weight"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=(16, 12, 14), dtype=torch.float64)


@pytest.mark.purpose("fafi-etf")
def test_prototypes_of_different_clients_agree_more(task: Task) -> None:
    rows = [
        play(task, algorithm).server.answer.models[WEIGHT]
        for algorithm in (FAFI(epochs=20), FAFIETF(epochs=20, anchor=3.0, anchor_schedule="constant"))
    ]
    counts = torch.stack([torch.bincount(own(task, k)[1], minlength=3) for k in range(3)]).double()
    plain, drawn = (agreement(one, counts, least=1) for one in rows)
    assert drawn > plain
    anchors = simplex_etf(3, 6, generator(0, "anchors"))
    plain, drawn = (F.cosine_similarity(one, anchors[None], dim=2).mean() for one in rows)
    assert drawn > plain + 0.3


@pytest.mark.closed_form("fafi-etf")
def test_anchors_with_lengths_shrink_prototypes_and_directions_do_not(task: Task) -> None:
    # Prototypes begin with lengths of about 2.4 here (22.6 with 512 features), and unit anchors pull them to 1.
    strong = {"anchor": 5.0, "anchor_schedule": "constant", "epochs": 30, "profile": "faithful", "drop_last": False}
    pulled, free = (
        play(task, FAFIETF(anchor_loss=loss, **strong)).server.answer.models[WEIGHT].norm(dim=2)  # type: ignore[arg-type]
        for loss in ("mse", "direction")
    )
    assert pulled.mean() < 0.6 * free.mean()


def test_nothing_more_is_sent(task: Task) -> None:
    plain, etf = (play(task, algorithm).ledger for algorithm in (FAFI(epochs=0), FAFIETF(epochs=0)))
    assert (plain.bytes("up"), plain.bytes("down")) == (etf.bytes("up"), etf.bytes("down"))
