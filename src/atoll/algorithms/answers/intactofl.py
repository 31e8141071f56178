"""IntactOFL: all clients' models are kept as experts; a gate that the server trained decides whom to listen to.

    answer:  z(x) = mean_k g_k(x) z_k(x),        g(x) = K softmax(A x + b)
    gate:    min_{A, b}  E CE(z(x'), y) + balance std g(x') + E KL_4( mean_k z_k(x') || z(x') )

over samples that are made up as in DENSE, with the gated experts as teachers and the plain ensemble as their rival, and
moved to x' as in Co-Boosting; or over public samples as they are. With ``gate = "linear"`` it is that of the released
code, g(x) = A x + b. Both begin at g = 1, as the plain ensemble of all K models, and stay there without epochs.

Reference: Zeng, Xu, Zhou, Wu, Kang, Cai, Niyato. "One-shot-but-not-degraded Federated Learning." ACM Multimedia 2024.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import NonNegative, Predictor, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.engine import Workbench
from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.toolbox.client import zero_velocity
from atoll.toolbox.pairs import LocalTraining, Models, Start, keep_models
from atoll.toolbox.server.distillation import disagreement
from atoll.toolbox.server.synthesis import (
    RULE,
    Cost,
    FromMadeUp,
    Learner,
    Lesson,
    Teachers,
    alike,
    answers,
    answers_and_distance,
    diversify,
    objections,
)

Gate = Literal["softmax", "linear"]


@record
class Experts(Models):
    """All models, and the gate before them."""

    gate: Params


@dataclass(frozen=True, kw_only=True)
class Gated(FromMadeUp):
    """A mixture of the clients' models as experts."""

    data: Literal["generated", "public"] = "generated"  # what the gate is trained on
    gate: Gate = "softmax"  # whether its values for the experts are positive and sum to K
    balance: NonNegative = 0.01  # weight of the penalty for using experts unevenly
    diversity: NonNegative = 8 / 255  # how far generated samples are moved before the gate sees them

    called: ClassVar[str] = "intactofl"
    cites: ClassVar[str] = "zeng2024one"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Experts:
        """Hold the experts, and train the gate."""
        kept, bench = keep_models(replies), replies.workbench
        train = self.learn if self.data == "generated" else self.learn_in_public
        gate = train(bench, self.uniform_gate(bench, kept.models.clients), kept.models)
        return Experts(kept.models, kept.counts, gate)

    def learn_in_public(self, bench: Workbench, gate: Params, models: Stack) -> Params:
        """Train the gate by passes over public samples."""
        state, given = Learner(gate, zero_velocity(RULE, gate)), alike(models, gate)
        cohort = bench.cohort(*bench.public, batch_size=self.server_batch)
        for epoch in range(self.server_epochs):
            state = self.pass_over(state, given, cohort, epoch)
            gate = state.w.client(0)
        return gate

    def uniform_gate(self, bench: Workbench, experts: int) -> Params:
        """Return a gate that lets all experts count alike."""
        sample = bench.task.sample
        bias = 1.0 if self.gate == "linear" else 0.0
        return Params.of(weight=sample.new_zeros(experts, sample.numel()), bias=sample.new_full((experts,), bias))

    @property
    def cost(self) -> Cost:
        """Samples should be hard for the plain ensemble, as DENSE's are for the student."""
        return functools.partial(cost, rule=self.gate, statistics=self.statistics, adversarial=self.adversarial)

    @property
    def lesson(self) -> Lesson:
        """What a gate should have little of."""
        moved = self.diversity if self.data == "generated" else 0.0
        return functools.partial(
            lesson, rule=self.gate, temperature=self.temperature, balance=self.balance, diversity=moved
        )

    def deploy(self, training: LocalTraining, start: Start, answer: Experts) -> Predictor:
        """Return the experts behind their gate."""
        return ensemble(answer.models, answer.gate, functools.partial(answer_behind, rule=self.gate))


def open_gate(gate: Params, x: Tensor, rule: Gate) -> Tensor:
    """Return how much each expert counts for each sample, [sample, expert]; by softmax, 1 on average."""
    logits = F.linear(x.flatten(1), gate["weight"], gate["bias"])
    return logits.softmax(1) * logits.shape[1] if rule == "softmax" else logits


def gate_logits(logits: Tensor, use: Tensor) -> Tensor:
    """Return what the experts answer together, from the logits of each, [expert, sample, class]."""
    return torch.einsum("sk,ksc->sc", use, logits) / len(logits)


def answer_behind(model: Params, beside: Params, batch: Batch, *, rule: Gate) -> Tensor:  # noqa: ARG001
    """Return what the experts answer to samples behind their gate."""
    logits = torch.stack([batch.outputs(member) for member in members_of(beside)])
    return gate_logits(logits, open_gate(beside, batch.x, rule))


def cost(batch: Batch, given: Teachers, *, rule: Gate, statistics: float, adversarial: float) -> Tensor:
    """Return a cost, low for samples of their class behind the gate, like the clients' own, hard for the ensemble."""
    logits, distance = answers_and_distance(given.models, batch)
    wanted = gate_logits(logits, open_gate(given.learner, batch.x, rule))
    label, apart = objections(wanted, logits.mean(0), batch.y)
    return label + statistics * distance - adversarial * apart


def lesson(
    gate: Params, batch: Batch, given: Teachers, *, rule: Gate, temperature: float, balance: float, diversity: float
) -> tuple[Tensor, Params]:
    """Return how far the gated experts are from the class, from the plain ensemble, and from being used alike."""

    def plain(shown: Batch) -> Tensor:
        return answers(given.models, shown.deployed).mean(0)

    shown = diversify(batch, plain, diversity, temperature) if diversity else batch
    logits, use = answers(given.models, shown.deployed), open_gate(gate, shown.x, rule)
    together = gate_logits(logits, use)
    apart = disagreement(together, logits.mean(0), temperature)
    return batch.mean(cross_entropy(together, batch.y) + apart) + balance * spread(use, batch), gate


def spread(use: Tensor, batch: Batch) -> Tensor:
    """Return the standard deviation over samples and experts; it has no gradient where all are used alike."""
    variance = batch.mean((use - batch.mean(use.mean(1))).square().mean(1))
    return variance.clamp(min=1e-24).sqrt()
