"""The loss of several models on each client's training data."""

from collections.abc import Callable

import pytest
import torch

from atoll import Cohort, Task
from atoll.kernel.errors import LabelsNeeded
from atoll.kernel.params import stack
from atoll.testing.conformance import quadratics
from atoll.toolbox.client.features import moments
from atoll.toolbox.client.losses import entropies, losses


def test_losses_are_means_over_the_training_samples(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)  # clients of 5, 1, 12 and 7 samples, batches of 4
    w = task.network.initial
    found = losses(stack([w, w * 0.0]), make_cohort(task))
    assert found.shape == (4, 2)
    torch.testing.assert_close(found[:, 1], torch.full((4,), 3.0, dtype=torch.float64).log())  # three classes
    first, last = task.splits["train"].offsets[2:4]
    mine = task.splits["train"].order[first:last]
    hidden = torch.relu(task.x[mine] @ w["body.1.weight"].T + w["body.1.bias"])
    logits = hidden @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(found[2, 0], torch.nn.functional.cross_entropy(logits, task.y[mine]))


def test_entropies_of_answers_need_no_labels(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    w = task.network.initial
    cohort = make_cohort(task).without("labels")
    with pytest.raises(LabelsNeeded):
        losses(stack([w]), cohort)
    found = entropies(stack([w, w * 0.0]), cohort)
    torch.testing.assert_close(found[:, 1], torch.full((4,), 3.0, dtype=torch.float64).log())  # three classes alike
    first, last = task.splits["train"].offsets[2:4]
    hidden = torch.relu(task.x[task.splits["train"].order[first:last]] @ w["body.1.weight"].T + w["body.1.bias"])
    answers = torch.distributions.Categorical(logits=hidden @ w["head.weight"].T + w["head.bias"])
    torch.testing.assert_close(found[2, 0], answers.entropy().mean())


def test_answers_that_are_no_classes_have_no_entropy(make_cohort: Callable[..., Cohort]) -> None:
    task = quadratics(torch.ones(2, 1, dtype=torch.float64))
    with pytest.raises(LabelsNeeded, match="do not answer with classes"):
        entropies(stack([task.network.initial]), make_cohort(task).without("labels"))


def test_moments_are_those_of_what_enters_the_head(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    w = task.network.initial
    found = moments(make_cohort(task).without("labels"), w)
    for client in range(task.clients):
        first, last = task.splits["train"].offsets[client : client + 2]
        x = task.x[task.splits["train"].order[first:last]]
        hidden = torch.relu(x @ w["body.1.weight"].T + w["body.1.bias"])
        torch.testing.assert_close(found["mean"][client], hidden.mean(0))
        torch.testing.assert_close(found["deviation"][client], hidden.std(0, correction=0), rtol=0, atol=1e-7)
