"""Teaching a model what others answer to unlabelled samples.

Teachers answer for what the student sees. Where the task augments samples, each of `VIEWS` passes shows them another
way, and teachers are asked about that; then the same views come again. Fresh views in every pass would let K teachers
take more time than the student, whose step is worth three answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.batch import Batch
from atoll.cohort import Cohort, Step
from atoll.local.adam import adam, annealed, unmoved
from atoll.models.network import Network
from atoll.params import Params
from atoll.workbench import Workbench

VIEWS = 8  # ways in which a student sees every sample


@dataclass(frozen=True)
class Lessons:
    """Unlabelled samples, and what teachers answer to them as the student sees them, pass by pass."""

    x: Tensor
    answer: Callable[[Tensor], Tensor]  # what a student should say about samples, one row each
    known: dict[int, Tensor] = field(default_factory=dict)  # answers to the views that were shown

    def cohort(
        self, bench: Workbench, number: int, *, network: Network | None = None, batch_size: int | None = None
    ) -> Cohort:
        """The server in pass `number`: a cohort of one whose targets are the teachers' answers to its samples."""
        view = 0 if bench.population.task.augment is None else number % VIEWS
        x = bench.view(self.x, view)
        if view not in self.known:
            self.known[view] = self.answer(x)
        return bench.cohort(x, self.known[view], network=network, batch_size=batch_size, augmented=False)


def students(
    bench: Workbench,
    start: Params,
    lessons: Lessons,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    step: Step | None = None,
    given: Mapping[str, Any] | None = None,
) -> Iterator[Params]:
    """Yield the student after every pass over the lessons, whose answers are probabilities.

    By Adam, annealed over all passes. The next pass is made when it is asked for. A `step` of the caller's own finds
    `lr` and `steps`, the number of all, beside what it is `given`, and may draw.
    """
    network, steps = bench.network.with_loss(divergence), epochs * -(-len(lessons.x) // batch_size)
    state = {"w": start, "past": unmoved(start)}
    for epoch in range(epochs):
        server = lessons.cohort(bench, epoch, network=network, batch_size=batch_size)
        told = {"lr": torch.full_like(server.lr, lr), "steps": steps, **(given or {})}
        state = server.scan(step or _step, state, given=told, stream=f"distil {epoch}", draws=step is not None)
        yield state["w"].client(0)


def last_of(models: Iterable[Params], start: Params) -> Params:
    """The last of the models, or the start if there are none."""
    return deque(chain([start], models), maxlen=1).pop()


def best_of(models: Iterable[Params], score: Callable[[Params], float], patience: int) -> Params | None:
    """The best of the models, if there are any; no more are asked for once `patience` in a row were not better."""
    best, best_score, since = None, -math.inf, 0
    for model in models:
        found = score(model)
        best, best_score, since = (model, found, 0) if found > best_score else (best, best_score, since + 1)
        if since == patience:
            break
    return best


def divergence(outputs: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || softmax of the outputs) of every sample; axes beyond the class axis (tokens) are averaged."""
    apart = F.kl_div(outputs.log_softmax(1), wanted, reduction="none").sum(1)
    return apart if apart.ndim == 1 else apart.flatten(1).mean(1)


def disagreement(outputs: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(wanted / T) || softmax(outputs / T)) of every sample, both being logits."""
    return divergence(outputs / temperature, (wanted / temperature).softmax(1)) * temperature**2


def _step(state: dict[str, Any], batch: Batch, given: dict[str, Any]) -> dict[str, Any]:
    g, w, _ = batch.gradient(state["w"])
    lr = given["lr"] * annealed(state["past"]["steps"]["steps"], given["steps"])
    w, past = adam(w, g, state["past"], lr)
    return {"w": w, "past": past}
