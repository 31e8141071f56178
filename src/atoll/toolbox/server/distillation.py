"""Teaching a model what others answer to unlabelled samples.

Teachers and student see the same: the samples as they are, also where the task augments those of its clients. A student
that sees an augmented sample is not to be told what teachers answer to another one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.record import Each, record
from atoll.toolbox.server.adam import Past, adam, annealed_share, no_past


@record
class Student:
    """A model on its way."""

    w: Each
    past: Past


@record
class Schedule:
    """The first step size, and over how many steps it is annealed."""

    lr: Tensor
    steps: int


def draw_public(bench: Workbench, most: int) -> Params:
    """Draw at most so many public samples, as the leaf `x`; the same in all rounds."""
    x, _ = bench.public
    order = generator(bench.task.seed, "public samples").permutation(len(x))[:most]
    return Params.of(x=x[torch.from_numpy(order).to(x.device)])


def lessons(
    bench: Workbench, x: Tensor, wanted: Tensor, *, network: Network | None = None, batch_size: int | None = None
) -> Cohort:
    """Return the server as a cohort of one that sees samples x as its teachers did; targets are what they answered."""
    return bench.cohort(x, wanted, network=network, batch_size=batch_size, augmented=False)


def students(
    bench: Workbench, start: Params, x: Tensor, wanted: Tensor, *, epochs: int, batch_size: int, lr: float
) -> Iterator[Params]:
    """Yield the student after every pass over x with the `wanted` probabilities, by Adam, annealed over all passes.

    The next pass is made when it is asked for.
    """
    server = lessons(bench, x, wanted, network=bench.network.with_loss(divergence), batch_size=batch_size)
    given = Schedule(torch.full_like(server.lr, lr), epochs * -(-len(x) // batch_size))
    state = Student(start, no_past(start))
    for epoch in range(epochs):
        state = server.scan(_step, state, given=given, stream=f"distil {epoch}")
        yield state.w.client(0)


def last_of(models: Iterable[Params], start: Params) -> Params:
    """Return the last of the models, or the start if there are none."""
    return deque(chain([start], models), maxlen=1).pop()


def best_of(models: Iterable[Params], score: Callable[[Params], float], patience: int) -> Params | None:
    """Return the best of the models, if there are any; stop asking once `patience` in a row were not better."""
    best, best_score, since = None, -math.inf, 0
    for model in models:
        found = score(model)
        best, best_score, since = (model, found, 0) if found > best_score else (best, best_score, since + 1)
        if since == patience:
            break
    return best


def divergence(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return KL(wanted || softmax of the outputs) of every sample; axes beyond the class axis (tokens) are averaged."""
    apart = F.kl_div(outputs.log_softmax(1), wanted, reduction="none").sum(1)
    return apart if apart.ndim == 1 else apart.flatten(1).mean(1)


def disagreement(outputs: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(softmax(wanted / T) || softmax(outputs / T)) of every sample, both being logits."""
    return divergence(outputs / temperature, (wanted / temperature).softmax(1)) * temperature**2


def _step(state: Student, batch: Batch, given: Schedule) -> Student:
    g, w, _ = batch.gradient(state.w)
    return Student(*adam(w, g, state.past, given.lr * annealed_share(state.past.steps, given.steps)))
