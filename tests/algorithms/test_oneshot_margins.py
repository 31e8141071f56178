"""Margins in one shot: what is sent, what is answered, and whose training is shared."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from samples import answers, own
from torch import nn

from atoll import Batch, Cohort, Task, federate
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.local import Local
from atoll.algorithms.oneshot_margins import OneShotMargins
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params, Stack, spread
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.objectives.margins import margin_logits, margins, own_moments
from atoll.toolbox.server.triangles import triangle

EXACT = {"rtol": 0.0, "atol": 1e-9}


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def features_of(task: Task, w: Params, x: torch.Tensor) -> torch.Tensor:
    return Batch(x, x[:, :0], None, None, task.network, Variant(train=False)).features(w)


@pytest.mark.parametrize("strategy", ["whole", "loop"])
def test_answers_by_hand(task: Task, strategy: str) -> None:
    report = play(task, OneShotMargins(epochs=3, shrinkage=0.5, scale=4.0), strategy=strategy)
    models, rows = personal_models(play(task, Local(epochs=3))), []
    for k, w in enumerate(models):
        x, y = own(task, k)
        z, same = F.normalize(features_of(task, w, x), dim=1), F.one_hot(y, 3).double()
        rows.append((same.sum(0), same.T @ z, triangle(z.T @ z)))
    count, total, square = (torch.stack(part) for part in zip(*rows, strict=True))
    told = margins(Stack.of(count=count, sum=total, square=square), 0.5)
    expected = 4 * margin_logits(torch.stack([features_of(task, w, task.x) for w in models]), told)
    torch.testing.assert_close(answers(task, report.algorithm.shared(report.server), task.x), expected, **EXACT)


def test_what_is_sent(task: Task) -> None:
    """Beside an ensemble's upload, 3 counts, 3 x 6 sums and 21 products of features, in float64."""
    plain, more = (play(task, method).ledger for method in (Ensemble(epochs=1), OneShotMargins(epochs=1)))
    assert more.bytes("down") == plain.bytes("down")
    extra = (more.bytes("up") - plain.bytes("up")) / task.clients
    assert 8 * (3 + 18 + 21) <= extra <= 8 * (3 + 18 + 21) + 400  # names and shapes


def test_a_class_with_one_sample_gives_the_features_of_that_sample_away(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    """What the page says of it: the sum of one is that one, in double precision."""
    x, y = own(task, 1)
    assert len(y) == 1
    w = task.network.initial
    sent = own_moments(make_cohort(task), spread(w, task.clients))
    z = F.normalize(features_of(task, w, x), dim=1)[0]
    assert sent["count"][1].tolist() == F.one_hot(y[0], 3).tolist()
    torch.testing.assert_close(sent["sum"][1, y[0]], z, **EXACT)


def test_training_is_that_of_an_ensemble(task: Task, tmp_path: Path) -> None:
    federate(task, Ensemble(epochs=2), rounds=1, evaluation="none", trained=tmp_path)
    report = federate(task, OneShotMargins(epochs=2), rounds=1, evaluation="none", trained=tmp_path)
    assert report.history[0]["seconds"]["found"] > 0
    federate(task, OneShotMargins(epochs=2), rounds=1, evaluation="none", trained=tmp_path)


def test_a_network_without_features_is_refused(make_task: Callable[..., Task]) -> None:
    task = make_task(lambda: nn.Linear(4, 3))
    with pytest.raises(ModelError, match="features"):
        play(task, OneShotMargins())
