"""What a server without samples makes up, and what it learns from that: data-free distillation of several models.

    min over G, z   cost(G(z), y)          y drawn evenly, G fresh each time: a batch of samples
    min over w      lesson(w; x, y)        over all batches so far, by SGD with momentum

The two take turns. What samples should be like (`cost`) and what is learned from them (`lesson`) is the method's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from atoll.kernel.algorithm import Count, Epochs, NonNegative, Positive, Steps
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError, name_in_messages
from atoll.kernel.network import Network
from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params, Stack
from atoll.kernel.portable import MaskedBatchNorm
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts, Training
from atoll.models.synthesis import draw_values, generator_of
from atoll.toolbox.client.descent import descend, zero_velocity
from atoll.toolbox.pairs import OUTPUTS, LocalTraining, ServerAnswer
from atoll.toolbox.server.adam import Past, adam, annealed_share, no_past
from atoll.toolbox.server.distillation import disagreement

LONGEST = 10.0  # norm of a gradient, of generator and learner alike
RULE = Training(momentum=0.9, weight_decay=1e-4, clip=LONGEST)  # how a learner takes its steps
ADVERSARIAL = 3.0  # temperature at which samples are made hard for a rival
FIRST_DECAY = 0.5  # beta_1 of Adam on a generator


@record
class Teachers:
    """What samples and learners are judged by."""

    models: Params  # of all clients, a row each
    votes: Tensor  # how much each of these counts in the ensemble
    learner: Params  # as it is now


@record
class Given:
    """What a learner's step reads beside its batch."""

    teachers: Teachers
    lr: Tensor


@record
class Learner:
    """A learner on its way."""

    w: Each
    velocity: Each


@record
class Imagined:
    """A generator with its noise on their way, and the best that they made."""

    at: Each
    past: Past
    best: Each  # samples `x`, and their `cost`


Cost = Callable[[Batch, Teachers], Tensor]  # of samples
Lesson = Callable[[Params, Batch, Teachers], tuple[Tensor, Params]]  # a learner's loss; it, with the pass's buffers


# -- making samples ----------------------------------------------------------------------------------------------------


def imagine(
    bench: Workbench,
    cost: Cost,
    given: Teachers,
    *,
    turn: int,
    samples: int,
    steps: int,
    lr: float,
    noise: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Make samples with classes by a fresh generator, when their cost was least; its noise is trained with it."""
    task = bench.task
    assert task.classes is not None, "the task has no classes"
    generator, draw = generator_of(task.sample, noise, width), bench.generator(f"imagined {turn}")
    y = torch.from_numpy(draw.integers(task.classes, size=samples)).to(task.sample.device)
    z = torch.from_numpy(draw.normal(size=(samples, noise))).to(task.sample)
    at = Params({**draw_values(generator, draw), "z": z})
    best = Params.of(cost=math.inf, x=task.sample.new_zeros(samples, *task.sample.shape))
    step = functools.partial(_imagine_step, cost=cost, network=bench.network, lr=lr)
    server = bench.cohort(z, y, network=generator, batch_size=samples)
    end = server.scan(step, Imagined(at, no_past(at), best), given=given, epochs=steps, shuffle=False)
    return end.best.client(0)["x"], y


def _imagine_step(
    state: Imagined, batch: Batch, given: Teachers, *, cost: Cost, network: Network, lr: float
) -> Imagined:
    """Take one step of Adam on generator and noise."""

    def objective(at: Params) -> tuple[Tensor, Params]:
        x = replace(batch, x=at["z"]).outputs(at.without(["z"]))
        value = cost(replace(batch, x=x, network=network).deployed, given)
        return value, Params.of(cost=value, x=x)

    g, now = batch.differentiate(objective, state.at)
    g = g * (LONGEST / (g.norm() + 1e-12)).clamp(max=1.0)
    at, past = adam(state.at, g, state.past, lr, decay=FIRST_DECAY)
    better = now["cost"] < state.best["cost"]
    best = Params({name: torch.where(better, leaf, state.best[name]) for name, leaf in now.items()})
    return Imagined(at, past, best)


class Pool:
    """All that was imagined, batch by batch, in tensors as large as they will ever be."""

    def __init__(self, bench: Workbench, batches: int, batch_size: int) -> None:
        self.bench, self.batch_size, self.size = bench, batch_size, 0
        like = bench.task.sample
        self.x = like.new_zeros(batches * batch_size, *like.shape)
        self.y = torch.zeros(batches * batch_size, dtype=torch.int64, device=like.device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add one more batch."""
        place = slice(self.size, self.size + len(x))
        self.x[place], self.y[place] = x, y
        self.size += len(x)

    def cohort(self) -> Cohort:
        """Return the server as a client who holds what is there so far."""
        return self.bench.cohort(self.x, self.y, batch_size=self.batch_size, first=self.size)


# -- learning from them ------------------------------------------------------------------------------------------------


def learn(learner: Learner, batch: Batch, given: Given, *, lesson: Lesson) -> Learner:
    """Take one step of a learner w."""
    w: Params = learner.w

    def objective(trained: Params) -> tuple[Tensor, Params]:
        loss, after = lesson(w | trained, batch, given.teachers)
        return loss, after.buffers

    g, buffers = batch.differentiate(objective, w.trained)
    return Learner(*descend(RULE, w | buffers, g, learner.velocity, given.lr))


def answers(models: Params, batch: Batch) -> Tensor:
    """Return what each of the models in the rows of `models` answers, [model, sample, class]."""
    each = Stack(models, models.layout)
    return torch.stack([batch.outputs(each.client(k)) for k in range(each.clients)])


def diversify(batch: Batch, ask: Callable[[Batch], Tensor], step: float, temperature: float) -> Batch:
    """Move the samples one step along the sign of the gradient of a random mixture of what is answered to them.

    Output diversified sampling: Tashiro, Song, Ermon, NeurIPS 2020.
    """

    def mixture(at: Params) -> tuple[Tensor, None]:
        said = (ask(replace(batch, x=at["x"])) / temperature).softmax(1)
        return ((2 * batch.uniform("direction", *said.shape) - 1) * said).sum(), None

    g, _ = batch.differentiate(mixture, Params.of(x=batch.x))
    return replace(batch, x=batch.x + step * g["x"].sign())


# -- what BatchNorm remembers ------------------------------------------------------------------------------------------


def answers_and_distance(models: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what each model answers, and how far the samples are from those that the models' BatchNorm layers saw.

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
    distance = torch.stack(seen).sum() / len(outputs) if seen else outputs.new_zeros(())
    return outputs, distance


# -- answers that are learned so ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromMadeUp(ServerAnswer):
    """Base of answers that are learned on samples that the server makes up.

    A subclass says the `cost` of samples, the `lesson` of the learner and, if need be, the clients' `votes`.
    """

    server_epochs: Epochs = 10  # batches made up, and passes over them; published: 200
    server_batch: Count = 128  # samples made up per epoch, and in a step of the student
    server_lr: Positive = 0.01  # step size of the student, annealed to 0
    temperature: Positive = 4.0  # of the distillation
    generator_steps: Steps = 10  # steps of Adam on a generator; published: 30
    generator_lr: Positive = 1e-3  # their size
    noise: Count = 256  # numbers that a sample is made of
    width: Count = 64  # channels of the generator
    statistics: NonNegative = 1.0  # weight of BN(x)
    adversarial: NonNegative = 1.0  # weight of disagreement with the student

    needs: ClassVar[frozenset[str]] = frozenset({OUTPUTS})

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless samples can be made up."""
        if not task.sample.is_floating_point():
            raise TaskError(f"{name_in_messages(self)} makes up samples of numbers. {task.name} has others.")

    def learn(self, bench: Workbench, learner: Params, models: Stack) -> Params:
        """Return the learner after the last epoch: there are no data to choose an earlier one by."""
        given = alike(models, learner)
        state = Learner(learner, zero_velocity(RULE, learner))
        pool = Pool(bench, self.server_epochs, self.server_batch)
        for epoch in range(self.server_epochs):
            x, y = imagine(
                bench, self.cost, given, turn=epoch, samples=self.server_batch, steps=self.generator_steps,
                lr=self.generator_lr, noise=self.noise, width=self.width,
            )  # fmt: skip
            given = replace(given, votes=self.votes(pool, given, epoch))
            pool.add(x, y)
            state = self.pass_over(state, given, pool.cohort(), epoch)
            learner = state.w.client(0)
            given = replace(given, learner=learner)
        return learner

    def pass_over(self, learner: Learner, given: Teachers, cohort: Cohort, epoch: int) -> Learner:
        """Return a learner and its velocity after a pass over the server's samples."""
        lr = cohort.lr.new_tensor(self.server_lr) * annealed_share(cohort.lr.new_tensor(epoch), self.server_epochs)
        step = functools.partial(learn, lesson=self.lesson)
        after: Learner = cohort.scan(step, learner, given=Given(given, lr), stream=f"epoch {epoch}", draws=True)
        return after

    def votes(self, pool: Pool, given: Teachers, epoch: int) -> Tensor:
        """Return how much each client counts in the ensemble: as much as before."""
        return given.votes

    @property
    def cost(self) -> Cost:
        """What samples should have little of."""
        raise NotImplementedError(f"{type(self).__name__} must define cost.")

    @property
    def lesson(self) -> Lesson:
        """What a learner should have little of."""
        raise NotImplementedError(f"{type(self).__name__} must define lesson.")


def alike(models: Stack, learner: Params) -> Teachers:
    """Return teachers that all count the same."""
    like = next(iter(models.floating.values()))
    return Teachers(Params(models, models.layout), like.new_full((models.clients,), 1 / models.clients), learner)


def combine_logits(logits: Tensor, votes: Tensor) -> Tensor:
    """Return what the ensemble answers, from the logits of every model, [model, sample, class]."""
    return torch.einsum("k,ksc->sc", votes / votes.sum().clamp(min=1e-12), logits)


def objections(wanted: Tensor, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far teachers are from the classes, and a rival from the teachers where it decides otherwise."""
    differ = (wanted.argmax(1) != outputs.argmax(1)).to(outputs.dtype)
    return cross_entropy(wanted, y).mean(), (disagreement(outputs, wanted, ADVERSARIAL) * differ).mean()


def teaching_cost(batch: Batch, given: Teachers, *, statistics: float, adversarial: float) -> Tensor:
    """Return a cost, low for samples of their class, like the clients' own, and hard for the learner (DENSE)."""
    logits, distance = answers_and_distance(given.models, batch)
    label, apart = objections(combine_logits(logits, given.votes), batch.outputs(given.learner), batch.y)
    return label + statistics * distance - adversarial * apart
