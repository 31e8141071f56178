"""What a server without samples makes up, and what it learns from that: data-free distillation of several models.

    min over G, z   cost(G(z), y)          y drawn evenly, G fresh each time: a batch of samples
    min over w      lesson(w; x, y)        over all batches so far, by SGD with momentum

The two take turns. What samples should be like (`cost`) and what is learned from them (`lesson`) is the method's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack
from atoll.kernel.portable import MaskedBatchNorm
from atoll.kernel.task import Training
from atoll.models.synthesis import fresh, generator_of
from atoll.toolbox.client.descent import descend
from atoll.toolbox.server.adam import adam, unmoved

State = dict[str, Any]
Cost = Callable[[Batch, State], Tensor]  # of samples, and what is given
Lesson = Callable[[Params, Batch, State], tuple[Tensor, Params]]  # the loss of a learner; it, with the pass's buffers

LONGEST = 10.0  # norm of a gradient, of generator and learner alike
RULE = Training(momentum=0.9, weight_decay=1e-4, clip=LONGEST)  # how a learner takes its steps
FIRST_DECAY = 0.5  # beta_1 of Adam on a generator


# -- making samples ----------------------------------------------------------------------------------------------------


def imagined(
    bench: Workbench,
    cost: Cost,
    given: State,
    *,
    turn: int,
    samples: int,
    steps: int,
    lr: float,
    noise: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Samples with classes, as a fresh generator made them when their cost was least; its noise is trained with it."""
    task = bench.task
    assert task.classes is not None, "the task has no classes"
    generator, draw = generator_of(task.sample, noise, width), bench.generator(f"imagined {turn}")
    y = torch.from_numpy(draw.integers(task.classes, size=samples)).to(task.sample.device)
    z = torch.from_numpy(draw.normal(size=(samples, noise))).to(task.sample)
    at = Params({**fresh(generator, draw), "z": z})
    best = Params.of(cost=math.inf, x=task.sample.new_zeros(samples, *task.sample.shape))
    step = functools.partial(_imagine, cost=cost, network=bench.network, lr=lr)
    state = {"at": at, "past": unmoved(at), "best": best}
    server = bench.cohort(z, y, network=generator, batch_size=samples)
    end = server.scan(step, state, given=given, epochs=steps, shuffle=False)
    return end["best"].client(0)["x"], y


def _imagine(state: State, batch: Batch, given: State, *, cost: Cost, network: Network, lr: float) -> State:
    """One step of Adam on generator and noise."""

    def objective(at: Params) -> tuple[Tensor, Params]:
        x = replace(batch, x=at["z"]).outputs(at.without(["z"]))
        value = cost(replace(batch, x=x, network=network).deployed, given)
        return value, Params.of(cost=value, x=x)

    g, now = batch.differentiate(objective, state["at"])
    g = g * (LONGEST / (g.norm() + 1e-12)).clamp(max=1.0)
    at, past = adam(state["at"], g, state["past"], lr, decay=FIRST_DECAY)
    better = now["cost"] < state["best"]["cost"]
    best = Params({name: torch.where(better, leaf, state["best"][name]) for name, leaf in now.items()})
    return {"at": at, "past": past, "best": best}


class Pool:
    """All that was imagined, batch by batch, in tensors as large as they will ever be."""

    def __init__(self, bench: Workbench, batches: int, batch_size: int) -> None:
        self.bench, self.batch_size, self.size = bench, batch_size, 0
        like = bench.task.sample
        self.x = like.new_zeros(batches * batch_size, *like.shape)
        self.y = torch.zeros(batches * batch_size, dtype=torch.int64, device=like.device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """One more batch."""
        place = slice(self.size, self.size + len(x))
        self.x[place], self.y[place] = x, y
        self.size += len(x)

    def cohort(self) -> Cohort:
        """The server as a client who holds what is there so far."""
        return self.bench.cohort(self.x, self.y, batch_size=self.batch_size, first=self.size)


# -- learning from them ------------------------------------------------------------------------------------------------


def learn(state: State, batch: Batch, given: State, *, lesson: Lesson) -> State:
    """One step of a learner w, given its step size `lr`."""
    w: Params = state["w"]

    def objective(trained: Params) -> tuple[Tensor, Params]:
        loss, after = lesson(w | trained, batch, given)
        return loss, after.buffers

    g, buffers = batch.differentiate(objective, w.trained)
    w, velocity = descend(RULE, w | buffers, g, state["velocity"], given["lr"])
    return {"w": w, "velocity": velocity}


def answers(models: Params, batch: Batch) -> Tensor:
    """What each of the models in the rows of `models` answers, [model, sample, class]."""
    each = Stack(models, models.layout)
    return torch.stack([batch.outputs(each.client(k)) for k in range(each.clients)])


def diversified(batch: Batch, ask: Callable[[Batch], Tensor], step: float, temperature: float) -> Batch:
    """The samples, one step along the sign of the gradient of a random mixture of what is answered to them.

    Output diversified sampling: Tashiro, Song, Ermon, NeurIPS 2020.
    """

    def mixture(at: Params) -> tuple[Tensor, None]:
        said = (ask(replace(batch, x=at["x"])) / temperature).softmax(1)
        return ((2 * batch.uniform("direction", *said.shape) - 1) * said).sum(), None

    g, _ = batch.differentiate(mixture, Params.of(x=batch.x))
    return replace(batch, x=batch.x + step * g["x"].sign())


# -- what BatchNorm remembers ------------------------------------------------------------------------------------------


def answers_and_distance(models: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """What each model answers, and how far the samples are from those that the models' BatchNorm layers saw.

    Per layer ||mean - running mean|| + ||variance - running variance||, summed over layers, averaged over models; 0 for
    models without such layers.
    """
    seen: list[Tensor] = []

    def compare(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, variance = layer.running_mean, layer.running_var
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            x = inputs[0].transpose(0, 1).flatten(1)  # a row per channel
            seen.append((x.mean(1) - mean).norm() + (x.var(1, correction=0) - variance).norm())

    layers = [
        part for part in batch.network.module(batch.variant).module.modules() if isinstance(part, MaskedBatchNorm)
    ]
    hooks = [layer.register_forward_pre_hook(compare) for layer in layers]
    try:
        outputs = answers(models, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, torch.stack(seen).sum() / len(outputs) if seen else outputs.new_zeros(())
