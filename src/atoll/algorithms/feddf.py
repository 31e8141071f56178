"""FedDF: the server averages the clients' models, then teaches the average what they answer together.

    w <- sum_k p_k w_k,   then   min_w  E_x KL( softmax(mean_k z_k(x)) || softmax(z(x; w)) )

over public samples x without labels, by Adam with an annealed step size; z_k(x) are the logits of w_k, which client k
trained from the last w. The survey distils from the mean of the probabilities, or from each teacher:

    avg_probs:    KL( mean_k softmax(z_k) || softmax(z) )
    per_teacher:  sum_k KL( softmax(z_k) || softmax(z) )  =  K * (that of avg_probs) + what w cannot change

Where clients have different architectures, there is a w for each: the average over its clients, which is then taught
what the clients of all architectures answer together.

With ``on = "generated"`` nobody has public samples: in every round the server makes up samples x, as DENSE does, on
which the clients' models agree and the average does not yet:

    min over G, e  E CE(z(x), y) + BN(x) - E 1[decisions differ] KL_3( z(x) || z(x; w) ),   x = G(e),  z = mean_k z_k

With ``server_epochs = 0`` this is FedAvg.

Reference: Lin, Kong, Stich, Jaggi. "Ensemble Distillation for Robust Model Fusion in Federated Learning."
NeurIPS 2020, Algorithms 1 and 3. https://arxiv.org/abs/2006.07242. The cost of generated samples: Zhang, Chen, Li, Lyu,
Wu, Ding, Shen, Wu. "DENSE: Data-Free One-Shot Federated Learning." NeurIPS 2022. https://arxiv.org/abs/2112.12371
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, Positive, Range, Replies, Steps, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import fact
from atoll.toolbox.client import sgd
from atoll.toolbox.server.distillation import best_of, last_of, students
from atoll.toolbox.server.synthesis import alike, imagine, teaching_cost

NOISE, WIDTH = 256, 64  # numbers that a sample is made of, and channels of its generator, as DENSE has them


@dataclass(frozen=True, kw_only=True)
class FedDF(Algorithm):
    """Federated averaging, and ensemble distillation on the server."""

    target: Literal["avg_logits", "avg_probs", "per_teacher"] = "avg_logits"  # what the student is taught
    on: Literal["public", "generated"] = "public"  # the samples: public ones, or such as the server makes up
    generated: Count = 256  # samples made up in a round
    generator_steps: Steps = 30  # steps of Adam on a generator and its noise, fresh in every round
    generator_lr: Positive = 1e-3  # their size
    epochs: Epochs = 1  # E: local epochs per round
    server_epochs: Epochs = 25  # passes over the public samples per round
    server_batch: Count = 128  # samples in a step of the server
    server_lr: Positive = 1e-3  # step size of Adam, annealed to 0 within a round
    validation: Annotated[float, Range(0, 1, open_high=True)] = 0.0  # labelled share of the public samples
    patience: Count = 3  # passes without a better score on that share, after which the server stops
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sums_suffice: ClassVar[bool] = False
    mixes_architectures: ClassVar[bool] = True
    limits: ClassVar[Limits] = {"fedavg": {"server_epochs": 0}}
    cites: ClassVar[str] = "lin2020ensemble"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on == "generated" and self.validation:
            raise HyperparameterError(
                f"`validation` of FedDF is a share of public samples, with their labels. Got {self.validation} with "
                "on='generated'.",
                hint="leave it out: nobody knows the labels of samples that were made up.",
            )

    @fact
    def needs_public_data(self) -> bool:
        """Whether samples are public ones."""
        return self.on == "public"

    def start(self, task: Facts) -> Params:
        """Return the initial model, of a task with classes; samples that are made up are numbers."""
        if task.classes is None:
            raise TaskError(f"FedDF distils probabilities of classes. {task.name} has no classes.")
        if self.on == "generated" and not (task.one_class_each and task.sample.is_floating_point()):
            raise TaskError(f"FedDF makes up samples of numbers, of one class each. {task.name} has others.")
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the shared model and send what changed."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Distil the clients' models into their average."""
        return self.fuse([w], replies)[0]

    def fuse(self, models: Sequence[Params], replies: Replies) -> list[Params]:
        """Fuse a model per architecture: distil what all clients answer into the average of each."""
        averages, teachers = list(models), list[tuple[Workbench, Stack, Params]]()
        for number, some in replies.by_architecture():
            averages[number] = models[number] + some.mean("delta")
            by_client = torch.from_numpy(some.clients.argsort(kind="stable"))  # the same sum, whoever came first
            trained = some.models(lambda w, _: w).rows(by_client)
            teachers.append((some.workbench, trained, averages[number]))
        if not self.server_epochs:
            return averages
        x, labelled = self.divide(replies.workbench) if self.on == "public" else (self.make_up(teachers), None)
        logits = [bench.answers(trained, x) for bench, trained, _ in teachers]
        wanted = self.targets(torch.cat(logits))
        return [
            self.teach(replies.workbench.of_architecture(number), average, x, wanted, labelled)
            for number, average in enumerate(averages)
        ]

    def teach(
        self, bench: Workbench, average: Params, x: Tensor, wanted: Tensor, labelled: tuple[Tensor, Tensor] | None
    ) -> Params:
        """Teach an average the wanted answers to samples x."""
        found = students(
            bench, average, x, wanted, epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr
        )
        if labelled is None:
            return last_of(found, average)
        return best_of(found, lambda student: bench.score(student, *labelled), self.patience) or average

    def make_up(self, teachers: Sequence[tuple[Workbench, Stack, Params]]) -> Tensor:
        """Return samples that the server makes up, as many with the models of every architecture."""
        cost = functools.partial(teaching_cost, statistics=1.0, adversarial=1.0)
        made = [
            imagine(
                bench, cost, alike(trained, average), turn=0, samples=-(-self.generated // len(teachers)),
                steps=self.generator_steps, lr=self.generator_lr, noise=NOISE, width=WIDTH,
            )
            for bench, trained, average in teachers
        ]  # fmt: skip
        return torch.cat([x for x, _ in made])

    def targets(self, logits: Tensor) -> Tensor:
        """Return what the student is taught to answer, from the logits of all teachers, [teacher, sample, class]."""
        if self.target == "avg_logits":
            return logits.mean(0).softmax(1)
        return logits.softmax(2).mean(0) if self.target == "avg_probs" else logits.softmax(2).sum(0)

    def divide(self, bench: Workbench) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the samples to distil on, and those whose labels are read: none, or the same in every round."""
        x, y = bench.public
        size = math.ceil(self.validation * len(x))
        if size == 0:
            return x, None
        if size == len(x):
            raise TaskError(f"FedDF must have samples to distil on. `validation` takes all {size} public ones.")
        order = torch.from_numpy(generator(bench.task.seed, "server validation").permutation(len(x))).to(x.device)
        return x[order[size:]], (x[order[:size]], y[order[:size]])
