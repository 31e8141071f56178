"""What clients' models answer to samples that everybody has: public ones, or generated ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.descent import Found
from atoll.toolbox.server.distillation import divergence

X, WANTED = "x", "wanted"


def answers_to(cohort: Cohort, models: Stack, samples: Params) -> Stack:
    """Return what each client's model answers to the samples `x`, in the leaf `outputs`."""
    cohort.task.network.prepare(Variant(train=False))  # this thread's copy: inside `vmap` it cannot be made
    answered: Stack = cohort.map(partial(_answer, cohort.task.network), models, samples)
    return answered


def imitating_gradient(w: Params, batch: Batch, lessons: Params) -> Found:
    """Return the gradient of KL(wanted || softmax of w's answers) on as many of the samples `x` as a batch has.

    They are drawn anew for every step. BatchNorm's running statistics stay those of the client's own samples.
    """
    place = (batch.uniform("places", len(batch.x)) * len(lessons[X])).long()
    lesson = replace(batch, x=lessons[X][place], y=lessons[WANTED][place], mask=None, augment=None, raw=None)

    def objective(trained: Params) -> tuple[Tensor, Tensor]:
        apart = divergence(lesson.outputs(w | trained), lesson.y).mean()
        return apart, apart

    g, apart = batch.differentiate(objective, w.trained)
    return g, w, apart


def _answer(network: Network, w: Params, samples: Params) -> Params:
    x = samples[X]
    return Params.of(outputs=Batch(x, x[:, :0], None, None, network, Variant(train=False)).outputs(w))
