"""FEDIC's server step, in one shot: a few labelled samples calibrate the ensemble before it is distilled.

    l(x) = sum_k o_k(x) l_k(x),   o_k = a_k / sum_j a_j,   a_k = sigmoid(u . l_k(x) + b)             (client by client)
    l*(x) = g (s l(x) + t) + (1 - g) l_0(x),    g = sigmoid(v . mean_k f_k(x) + b')                    (class by class)

l_k and f_k are logits and features of client k's model, l_0 the logits of the average after it was trained on the
labelled public samples, which are as many of every class; u, b, s, t, v, b' are fitted there by cross-entropy, from
u, v = 0, s = 1: where the teacher l* is the mean of l_k and l_0. On the other public samples, without labels, a student
learns its answers,

    min_w  1/2 E KL( softmax(l* / T) || softmax(l(x; w) / T) )  +  1/2 E_labelled CE(l(x; w), y).

Reference: Shang, Lu, Cheung, Wang. "FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated
Distillation." ICME 2022. https://arxiv.org/abs/2205.00172
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Count, Epochs, Positive, Range, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort, Step
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.network import NO_NETWORK
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.toolbox.oneshot import average_models, count_labels, shares, uploads
from atoll.toolbox.pairs import OUTPUTS, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.adam import adam, annealed_share, no_past
from atoll.toolbox.server.distillation import Student, divergence, lessons

Samples = tuple[Tensor, Tensor]


@record
class Given:
    """What a step reads beside its batch: the step size, and what else there is to know."""

    lr: Tensor
    more: Any = None


@record
class Sizes:
    """What rows of the teacher's inputs are made of."""

    clients: int
    classes: int


@record
class Labelled:
    """What a student learns beside the teacher's answers."""

    known: Params  # samples `x` with labels `y`
    size: int  # of these in a step
    steps: int  # over which the step size is annealed
    temperature: float  # of the teacher's answers


@dataclass(frozen=True, kw_only=True)
class Calibrated(ServerAnswer):
    """A student of a calibrated ensemble."""

    labelled: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.2  # share of public samples with labels
    fit_epochs: Epochs = 20  # passes over these samples: of the averaged model, then of the calibration
    fit_batch: Count = 20  # how many of these samples are in a step
    student: Literal["fresh", "average"] = "fresh"  # where w begins: at the initial model, or at the average by samples
    server_epochs: Epochs = 60  # passes over the other public samples
    server_batch: Count = 128  # how many of these samples are in a step
    server_lr: Positive = 1e-3  # step size of Adam in all of this; annealed to 0 for the student
    temperature: Positive = 2.0  # T

    called: ClassVar[str] = "fedic"
    needs: ClassVar[frozenset[str]] = frozenset({OUTPUTS})  # with which logits are calibrated
    needs_public_data: ClassVar[bool] = True
    cites: ClassVar[str] = "shang2022fedic"

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Tune, calibrate, distil."""
        bench, models = replies.workbench, uploads(replies, "model")
        average = average_models(models, shares(count_labels(replies), "samples"))
        others, known = divide(bench, self.labelled)
        tuned = self.tune(bench, average, known)
        calibration = self.fit_calibration(bench, teacher_inputs(bench, models, tuned, known[0]), known[1])
        wanted = (teacher(calibration, teacher_inputs(bench, models, tuned, others)) / self.temperature).softmax(1)
        first = average if self.student == "average" else start.model
        return self.teach(bench, first, (others, wanted), known)

    def tune(self, bench: Workbench, w: Params, known: Samples) -> Params:
        """Train a model on the labelled samples."""
        return self.descend(bench.cohort(*known, batch_size=self.fit_batch), fit, w, epochs=self.fit_epochs)

    def fit_calibration(self, bench: Workbench, inputs: Params, y: Tensor) -> Params:
        """Find the calibration with which the teacher fits the labels of these samples best."""
        clients, _, classes = inputs["logits"].shape
        rows = torch.cat([inputs["logits"].transpose(0, 1).flatten(1), inputs["tuned"], inputs["features"]], 1)
        cohort = bench.cohort(rows, y, network=NO_NETWORK, batch_size=self.fit_batch)
        sizes = Sizes(clients, classes)
        return self.descend(cohort, calibrate, initial_calibration(inputs), sizes, epochs=self.fit_epochs)

    def teach(self, bench: Workbench, w: Params, unlabelled: Samples, known: Samples) -> Params:
        """Teach the student the wanted answers to some samples, and the labels of others."""
        steps = self.server_epochs * -(-len(unlabelled[0]) // self.server_batch)
        size = min(self.fit_batch, len(known[0]))
        labelled = Labelled(Params.of(x=known[0], y=known[1]), size, steps, self.temperature)
        cohort = lessons(bench, *unlabelled, batch_size=self.server_batch)
        return self.descend(cohort, learn, w, labelled, epochs=self.server_epochs)

    def descend(self, cohort: Cohort, step: Step, w: Params, more: Any = None, *, epochs: int) -> Params:
        """Take a step of Adam on w, again and again."""
        given = Given(torch.full_like(cohort.lr, self.server_lr), more)
        stream = f"server, {step.__name__}"
        end = cohort.scan(step, Student(w, no_past(w)), given=given, epochs=epochs, stream=stream, draws=True)
        found: Params = end.w.client(0)
        return found


def divide(bench: Workbench, share: float) -> tuple[Tensor, Samples]:
    """Divide the public samples: some without labels, and a share with labels, as many of every class as there are."""
    x, y = bench.public
    size = math.ceil(share * len(x))
    if size == len(x):
        raise TaskError(
            f"FEDIC must have samples to distil on without labels. `labelled` takes all {size} public ones."
        )
    order = torch.from_numpy(generator(bench.task.seed, "server labels").permutation(len(x))).to(x.device)
    order = order[turns_within_class(y[order]).argsort(stable=True)]
    return x[order[size:]], (x[order[:size]], y[order[:size]])


def turns_within_class(y: Tensor) -> Tensor:
    """Count the samples of its class before each: 0 for the first of every class, then 1 for the second of each."""
    by_class, size = y.argsort(stable=True), y.bincount()
    place = torch.arange(len(y), device=y.device)
    return torch.empty_like(y).scatter(0, by_class, place - (size.cumsum(0) - size)[y[by_class]])


def teacher_inputs(bench: Workbench, models: Stack, tuned: Params, x: Tensor) -> Params:
    """Return what the teacher reads: the `logits` of all models, the `tuned` one's, and their mean `features`."""
    features = bench.answers(models, x, features=True).mean(0).flatten(1)
    return Params.of(logits=bench.answers(models, x), tuned=bench.answers(tuned, x), features=features)


def initial_calibration(inputs: Params) -> Params:
    """Return the calibration before it is fitted: all clients count the same, and as much as the tuned model."""
    one, features = torch.ones_like(inputs["tuned"][0]), torch.zeros_like(inputs["features"][0])
    zero = one.new_zeros(())
    return Params.of(u=0 * one, b=zero, s=one, t=0 * one, v=features, gate=zero)


def teacher(c: Params, inputs: Params) -> Tensor:
    """Return the logits l* of a calibrated ensemble, [sample, class]."""
    trust = (inputs["logits"] @ c["u"] + c["b"]).sigmoid()
    together = torch.einsum("kn,knc->nc", trust / trust.sum(0), inputs["logits"])
    gate = (inputs["features"] @ c["v"] + c["gate"]).sigmoid()[:, None]
    return gate * (c["s"] * together + c["t"]) + (1 - gate) * inputs["tuned"]


def fit(state: Student, batch: Batch, given: Given) -> Student:
    """Take one step of the averaged model on labelled samples."""
    g, w, _ = batch.gradient(state.w)
    return Student(*adam(w, g, state.past, given.lr, weight_decay=2e-4))


def calibrate(state: Student, batch: Batch, given: Given) -> Student:
    """Take one step of the calibration, on the teacher's inputs of labelled samples."""
    clients, classes = given.more.clients, given.more.classes
    logits = batch.x[:, : (clients + 1) * classes].reshape(-1, clients + 1, classes).transpose(0, 1)
    inputs = Params.of(logits=logits[:-1], tuned=logits[-1], features=batch.x[:, (clients + 1) * classes :])

    def objective(c: Params) -> tuple[Tensor, None]:
        return batch.mean(F.cross_entropy(teacher(c, inputs), batch.y, reduction="none")), None

    g, _ = batch.differentiate(objective, state.w)
    return Student(*adam(state.w, g, state.past, given.lr))


def learn(state: Student, batch: Batch, given: Given) -> Student:
    """Take one step of the student, on samples with wanted answers and some with labels, in one pass."""
    known, size, temperature = given.more.known, given.more.size, given.more.temperature
    rows = (batch.uniform("labelled", size) * len(known["y"])).long()
    x, y = known["x"][rows], known["y"][rows]
    mask = None if batch.mask is None else torch.cat([batch.mask, batch.mask.new_ones(size)])
    both = replace(batch, x=torch.cat([batch.x, x]), mask=mask, augment=None, raw=None)

    def objective(trained: Params) -> tuple[Tensor, Params]:
        outputs, after = both.forward(state.w | trained)
        apart = batch.mean(divergence(outputs[:-size] / temperature, batch.y))
        return 0.5 * apart + 0.5 * F.cross_entropy(outputs[-size:], y), after.buffers

    g, buffers = batch.differentiate(objective, state.w.trained)
    lr = given.lr * annealed_share(state.past.steps, given.more.steps)
    return Student(*adam(state.w | buffers, g, state.past, lr))
