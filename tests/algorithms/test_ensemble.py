"""The ensemble, by hand: who counts how much, and what its answers do not depend on."""

from collections.abc import Callable

import pytest
import torch
from samples import answers
from torch import Tensor

from atoll import Params, Task
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.oneshot import ClassVotes, class_shares
from atoll.toolbox.server.voting import Of, combine_votes

WEIGHTINGS: tuple[ClassVotes, ...] = ("samples", "sqrt", "uniform", "classes")


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def counted(task: Task) -> Tensor:
    split = task.splits["train"]
    own = [task.y[split.order[split.offsets[k] : split.offsets[k + 1]]] for k in range(task.clients)]
    return torch.stack([torch.bincount(y, minlength=3) for y in own]).to(torch.float64)


@pytest.mark.parametrize("of", ["logits", "probs"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_answers_by_hand(task: Task, of: Of, weighting: ClassVotes) -> None:
    report = play(task, Ensemble(of=of, weighting=weighting, epochs=3))
    found = answers(task, report.algorithm.shared(report.server), task.x)
    counts = counted(task)
    samples = counts.sum(1)
    votes = {
        "samples": samples[:, None].expand(-1, 3), "sqrt": samples.sqrt()[:, None].expand(-1, 3),
        "uniform": torch.ones_like(counts), "classes": counts,
    }[weighting]  # fmt: skip
    outputs = [answers(task, one, task.x) for one in personal_models(play(task, Local(epochs=3)))]
    said = [one.softmax(1) if of == "probs" else one - one.mean(1, keepdim=True) for one in outputs]
    mean = sum(vote * one for vote, one in zip(votes, said, strict=True)) / votes.sum(0)
    expected = mean / mean.sum(1, keepdim=True) if of == "probs" else mean.softmax(1)
    torch.testing.assert_close(found.softmax(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("of", ["logits", "probs"])
def test_a_constant_in_the_logits_of_a_member_changes_nothing(of: Of) -> None:
    # catches: class-wise weights on logits as they are, whose sum then depends on a number that no model means.
    outputs = torch.tensor([[[1.0, 0.0, 3.0]], [[2.0, 2.0, -1.0]]], dtype=torch.float64)
    counts = torch.tensor([[3.0, 1.0, 0.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
    shares = class_shares(counts, "classes")
    moved = outputs + torch.tensor([5.0, -2.0], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(combine_votes(moved, shares, of), combine_votes(outputs, shares, of), rtol=0, atol=1e-12)


def test_probabilities_of_sure_members_stay_finite() -> None:
    outputs = torch.tensor([[[1e4, 0.0]], [[2e4, 0.0]]], dtype=torch.float64)
    shares = torch.full((2, 2), 0.5, dtype=torch.float64)
    assert combine_votes(outputs, shares, "probs").isfinite().all()


def test_nobody_is_heard_about_a_class_it_never_saw() -> None:
    # The second client alone has class 1, and only it decides on its logit.
    shares = class_shares(torch.tensor([[4.0, 0.0], [1.0, 5.0]]), "classes")
    outputs = torch.tensor([[[3.0, -3.0]], [[-1.0, 1.0]]])
    assert combine_votes(outputs, shares, "logits")[0, 1] == 1.0


def test_new_clients_and_old_ones_have_the_same_ensemble(task: Task) -> None:
    models = personal_models(play(task, Ensemble(epochs=1)))
    assert {"beside.shares", "beside.member.head.bias"} <= set(models[0])
    assert all(torch.equal(one[name], leaf) for one in models[1:] for name, leaf in models[0].items())
    assert isinstance(models[0], Params)
