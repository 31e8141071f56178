"""DENSE: the server makes up samples that the clients' models agree on and a student does not yet, and distils on them.

    generator:  min_G  E CE(z(x), y) + BN(x) - E 1[decisions differ] KL_3( z(x) || s(x) ),      x = G(noise)
    student:    min_w  E KL_4( z(x) || s(x; w) )         over everything made up so far

z(x) is the mean of the clients' logits, s(x) are the student's; KL_T is that of softmaxes at temperature T, times T^2.
BN(x) is the distance of a batch's statistics from those that BatchNorm layers of the clients' models remember. In every
epoch a fresh generator makes one batch, and the student passes over all batches. The last student is deployed.

Reference: Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. "DENSE: Data-Free One-Shot Federated Learning." NeurIPS 2022.
https://arxiv.org/abs/2112.12371
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Count, Epochs, NonNegative, Positive, Replies, Steps
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import annealed, at_rest
from atoll.toolbox.oneshot import OneShot, Server, uploads
from atoll.toolbox.server.distillation import disagreement
from atoll.toolbox.server.synthesis import (
    RULE,
    Cost,
    Lesson,
    Pool,
    State,
    answers,
    answers_and_distance,
    imagined,
    learn,
)

ADVERSARIAL = 3.0  # temperature at which samples are made hard for the student


@dataclass(frozen=True, kw_only=True)
class Dense(OneShot):
    """Data-free distillation of the clients' ensemble into one student."""

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

    cites: ClassVar[str] = "zhang2022dense"

    def start(self, task: Facts) -> Server:
        """The initial model, of a task whose samples can be made up."""
        if not task.sample.is_floating_point():
            raise TaskError(f"{type(self).__name__} makes up samples of numbers. {task.name} has others.")
        return super().start(task)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Teach a student, who begins as all clients did, what they know together."""
        return {"model": self.learned(replies.workbench, server["model"], uploads(replies, "model"))}

    def learned(self, bench: Workbench, learner: Params, models: Stack) -> Params:
        """The learner after the last epoch: there are no data to choose an earlier one by."""
        evenly = bench.task.sample.new_full((models.clients,), 1 / models.clients)
        given: State = {"models": Params(models, models.layout), "votes": Params.of(votes=evenly), "learner": learner}
        state: State = {"w": learner, "velocity": at_rest(RULE, learner)}
        pool = Pool(bench, self.server_epochs, self.server_batch)
        for epoch in range(self.server_epochs):
            x, y = imagined(
                bench, self.cost, given, turn=epoch, samples=self.server_batch, steps=self.generator_steps,
                lr=self.generator_lr, noise=self.noise, width=self.width,
            )  # fmt: skip
            given["votes"] = self.votes(pool, given, epoch)
            pool.add(x, y)
            state = self.passed(state, given, pool.cohort(), epoch)
            given["learner"] = learner = state["w"].client(0)
        return learner

    def passed(self, state: State, given: State, cohort: Cohort, epoch: int) -> State:
        """A learner and its velocity after a pass over the server's samples."""
        lr = cohort.lr.new_tensor(self.server_lr) * annealed(cohort.lr.new_tensor(epoch), self.server_epochs)
        step = functools.partial(learn, lesson=self.lesson)
        after: State = cohort.scan(step, state, given={**given, "lr": lr}, stream=f"epoch {epoch}", draws=True)
        return after

    def votes(self, pool: Pool, given: State, epoch: int) -> Params:
        """How much each client counts in the ensemble: all alike."""
        votes: Params = given["votes"]
        return votes

    @property
    def cost(self) -> Cost:
        """What samples should have little of."""
        return functools.partial(cost, statistics=self.statistics, adversarial=self.adversarial)

    @property
    def lesson(self) -> Lesson:
        """What a student should have little of."""
        return functools.partial(lesson, temperature=self.temperature)


def together(logits: Tensor, given: State) -> Tensor:
    """What the ensemble answers, from the logits of every model, [model, sample, class]."""
    votes = given["votes"]["votes"]
    return torch.einsum("k,ksc->sc", votes / votes.sum().clamp(min=1e-12), logits)


def cost(batch: Batch, given: State, *, statistics: float, adversarial: float) -> Tensor:
    """Samples should be of their class, like the clients' own, and hard for the student."""
    logits, distance = answers_and_distance(given["models"], batch)
    label, apart = objections(together(logits, given), batch.outputs(given["learner"]), batch.y)
    return label + statistics * distance - adversarial * apart


def objections(wanted: Tensor, said: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """How far teachers are from the classes, and a rival from the teachers where it decides otherwise than they."""
    differ = (wanted.argmax(1) != said.argmax(1)).to(said.dtype)
    return cross_entropy(wanted, y).mean(), (disagreement(said, wanted, ADVERSARIAL) * differ).mean()


def lesson(w: Params, batch: Batch, given: State, *, temperature: float) -> tuple[Tensor, Params]:
    """The student should answer as the ensemble."""
    wanted = together(answers(given["models"], batch.deployed), given)
    said, after = batch.forward(w)
    return batch.mean(disagreement(said, wanted, temperature)), after
