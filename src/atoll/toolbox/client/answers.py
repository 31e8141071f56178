"""What clients' models answer to samples that everybody has, public or generated ones, and learning from answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from atoll.kernel.batch import HIDDEN, Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.sgd import sgd
from atoll.toolbox.server.distillation import divergence

X, WANTED = "x", "wanted"


@record
class Lessons:
    """Samples `x` that everybody has, and the probabilities `wanted` there, for all clients alike or for each."""

    x: Params
    wanted: Params | Stack


def answers_to(cohort: Cohort, models: Stack, samples: Params) -> Stack:
    """Return what each client's model answers to the samples `x`, in the leaf `outputs`."""
    cohort.task.network.prepare(Variant(train=False))  # this thread's copy: inside `vmap` it cannot be made
    answered: Stack = cohort.map(partial(_answer, cohort.task.network), models, samples)
    return answered


def digest(cohort: Cohort, v: Params | Stack, lessons: Lessons, *, epochs: int) -> Stack:
    """Train models to answer as wanted, in as many steps as these epochs of the clients' own samples have."""
    return sgd(cohort, start=v, epochs=epochs, stream="digest", gradient=imitating_gradient, given=lessons, draws=True)


def imitating_gradient(w: Params, batch: Batch, lessons: Lessons) -> Found:
    """Return the gradient of KL(wanted || softmax of w's answers) on as many of the samples `x` as a batch has.

    They are drawn anew for every step. BatchNorm's running statistics stay those of the client's own samples.
    """
    x, wanted = lessons.x[X], lessons.wanted[WANTED]
    place = (batch.uniform("places", len(batch.x)) * len(x)).long()
    lesson = replace(batch, x=x[place], y=wanted[place], mask=None, augment=None, raw=None)

    def objective(trained: Params) -> tuple[Tensor, Tensor]:
        apart = divergence(lesson.outputs(w | trained), lesson.y).mean()
        return apart, apart

    g, apart = batch.differentiate(objective, w.trained)
    return g, w, apart


def _answer(network: Network, w: Params, samples: Params) -> Params:
    x = samples[X]
    return Params.of(outputs=Batch(x, HIDDEN, None, None, network, Variant(train=False)).outputs(w))
