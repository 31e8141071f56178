"""Training with unit features and one prototype per class: FAFI's local objective, and the one step that follows it.

z are the unit features of two views of every sample in a batch; the rows p_c of the head's weight are the prototypes.

    classification   CE(l, y),    l_ic = z_i . p_c,  or with a scale s and prototypes of unit length s z_i . p_c / |p_c|
    contrast         supervised contrast of z (`atoll.toolbox.objectives.contrastive`)
    separation       CE(p p^T, (0, 1, ..., C - 1)),   with a scale: CE(s cos(p, p), ...)

An `Objective` is these three; what a method adds to them it says in a subclass: other terms, what they carry from step
to step, and what they were given. Whatever the terms are, they are added up in one forward pass and one gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError, name_in_messages
from atoll.kernel.params import Layout, Params, Stack, Tree, flatten, unflatten
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client.descent import descend, zero_velocity
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.contrastive import supervised_contrast

log = logging.getLogger("atoll.toolbox.client")

Terms = dict[str, Tensor]
Conflict = Literal["ignored", "measured", "projected"]
LEAST = 2  # samples of an incomplete batch: one alone has nobody to be told apart from, and no variance


def prototype_leaf(layout: Layout | None) -> str:
    """Return the name of the head's weight, whose rows are the prototypes."""
    assert layout is not None, "this is no model"
    return min(name for name in layout.head if name.endswith("weight"))


def require_prototypes(method: object, task: Facts) -> None:
    """Raise unless the head of the task's network is one linear layer, a row of its weight for each class."""
    size, head = feature_size(method, task), task.network.initial.part("head")
    shapes = [tuple(leaf.shape) for leaf in head.values()]
    wanted = [(task.classes, size), (task.classes,)]
    if not shapes or sorted(shapes, reverse=True) not in (wanted, wanted[:1]):
        given = ", ".join(map(str, shapes)) or "no leaves"
        raise ModelError(
            f"{name_in_messages(method)} takes the rows of the head's weight for prototypes: the head must be one "
            f"linear layer of {size} features and {task.classes} classes. Got {given}.",
            hint="end the network in one nn.Linear, and let `features(x)` return what enters it.",
        )


@dataclass(frozen=True)
class Seen:
    """What an objective sees of one step."""

    batch: Batch  # two views of every sample, one after the other
    w: Params
    z: Tensor  # unit features of the views
    carry: Any  # what the objective carries from step to step
    given: Any  # what it was given
    epoch: Tensor | None  # how many are over, if the objective asks for it
    begins: Tensor | None  # whether this is the first step of an epoch
    progress: Tensor | None  # the share of all steps that is done, if the objective asks for it

    @property
    def prototypes(self) -> Tensor:
        """One row per class."""
        return self.w[prototype_leaf(self.w.layout)]


@dataclass(frozen=True)
class Objective:
    """What a client minimises; the numbers before terms are their weights."""

    classification: float = 1.0
    contrast: float = 1.0
    separation: float = 1.0
    temperature: float = 0.1  # of the contrast
    scale: float = 16.0  # s; 0: prototypes are as long as they are

    @property
    def names(self) -> tuple[str, ...]:
        """Of all terms."""
        return ("classification", "contrast", "separation")

    @property
    def by_epoch(self) -> bool:
        """Whether a step must know its epoch."""
        return False

    @property
    def scheduled(self) -> bool:
        """Whether a step must know how many there will be."""
        return False

    @property
    def draws(self) -> bool:
        """Whether a step draws."""
        return False

    @property
    def counts(self) -> bool:
        """Whether a step must know how many samples of each class the client has."""
        return False

    def initial_carry(self, cohort: Cohort) -> Any:
        """Return what is carried from step to step, before the first one."""
        return None

    def next(self, seen: Seen, terms: Params) -> Any:
        """Return what is carried on from a step with these terms."""
        return seen.carry

    def samples(self, batch: Batch, given: Any) -> Batch:
        """Return what a step sees of a batch."""
        return batch

    def terms(self, seen: Seen) -> Terms:
        """Return all terms, weighted."""
        return {
            "classification": self.classification * seen.batch.mean(self.misfit(seen)),
            "contrast": self.contrast * seen.batch.mean(self.contrast_losses(seen)),
            "separation": self.separation * self.crowding(seen.prototypes),
        }

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """Return one row per feature vector, a column per prototype."""
        return self.scale * z @ F.normalize(prototypes, dim=1).T if self.scale else z @ prototypes.T

    def misfit(self, seen: Seen) -> Tensor:
        """Return the cross-entropy of every view."""
        return F.cross_entropy(self.logits(seen.z, seen.prototypes), seen.batch.y, reduction="none")

    def contrast_losses(self, seen: Seen) -> Tensor:
        """Return the contrast of every view with all others."""
        return supervised_contrast(seen.z, seen.batch.y, seen.batch.mask, temperature=self.temperature)

    def crowding(self, prototypes: Tensor) -> Tensor:
        """Return how far prototypes are from being nearest to themselves only."""
        rows = F.normalize(prototypes, dim=1) if self.scale else prototypes
        return F.cross_entropy(self.logits(rows, rows), torch.arange(len(rows), device=rows.device))


@record
class Carry:
    """What a client carries from step to step."""

    w: Each
    velocity: Each
    own: Any  # of the objective
    seen: Each  # sums of all terms over the steps that were taken, and how many these are
    time: Each  # batches that passed


@record
class Given:
    """What a step reads beside its batch."""

    lr: Tensor
    epoch: Each  # steps in an epoch, if the step must know its epoch
    total: Each  # steps of the whole training, if it must know how many there will be
    own: Any  # of the objective


@dataclass(frozen=True)
class Step:
    """One step of a client, on two views of a batch."""

    objective: Objective
    rule: Training
    afresh: bool = False  # momentum is forgotten at the end of every epoch
    drop_last: bool = False  # an incomplete batch is no step; else it is one from `LEAST` samples on
    conflict: Conflict = "ignored"
    falling: bool = False  # the step size falls to 0 over the whole training, by half a cosine

    @property
    def least(self) -> int:
        """How many samples make a step."""
        return self.rule.batch_size if self.drop_last else min(LEAST, self.rule.batch_size)

    def start(self, cohort: Cohort, w: Params | Stack) -> Carry:
        """Return what is carried before the first step."""
        sums = dict.fromkeys((*self.objective.names, *(cosine_names(w) if self.conflict != "ignored" else [])), 0.0)
        own = self.objective.initial_carry(cohort)
        return Carry(w, zero_velocity(self.rule, w), own, Params.of(steps=0.0, **sums), cohort.each(0.0))

    def __call__(self, carry: Carry, batch: Batch, given: Given) -> Carry:
        """Return the carry after a batch; of a batch that is too small, only time passes."""
        w, velocity, time = carry.w, carry.velocity, carry.time
        epoch = begins = progress = None
        if given.epoch is not None:
            epoch, begins = time // given.epoch, time % given.epoch == 0
        if given.total is not None:
            progress = time / given.total
        if self.afresh:
            assert begins is not None
            velocity = velocity * (~begins).to(time.dtype)
        views = self.objective.samples(batch, given.own).views(2)
        seen = Seen(views, w, torch.empty(0), carry.own, given.own, epoch, begins, progress)
        g, passed = self.gradient(seen)
        cosine: dict[str, Tensor] = {}
        if self.conflict != "ignored":
            contrast, _ = self.gradient(seen, only=("contrast",))
            cosine = {name: cosine_of(g, contrast, layers) for name, layers in cosine_names(w).items()}
            if self.conflict == "projected":
                g = without_conflict(g, contrast)
        lr = given.lr
        if self.falling:
            assert progress is not None
            lr = lr * 0.5 * (1 + torch.cos(math.pi * progress))
        moved, velocity = descend(self.rule, w | passed["buffers"], g, velocity, lr)
        own = self.objective.next(replace(seen, z=passed["z"]), passed["terms"])
        sums = carry.seen + (passed["terms"] | Params.of(steps=torch.ones_like(time), **cosine))
        after = Carry(moved, velocity, own, sums, time)
        if batch.mask is not None:
            after = choose(batch.count >= self.least, after, carry)
        return replace(after, time=time + 1)

    def gradient(self, seen: Seen, only: Iterable[str] | None = None) -> tuple[Params, dict[str, Any]]:
        """Return the gradient of the sum of all terms, or of those named; and what the pass left."""
        batch, w = seen.batch, seen.w

        def total(trained: Params) -> tuple[Tensor, dict[str, Any]]:
            whole = w | trained
            features, after = replace(batch, variant=replace(batch.variant, features=True)).forward(whole)
            z = F.normalize(features, dim=1)
            terms = self.objective.terms(replace(seen, w=whole, z=z))
            loss = torch.stack([terms[name] for name in only or terms]).sum()
            return loss, {"buffers": after.buffers, "z": z, "terms": Params.of(**terms)}

        return batch.differentiate(total, w.trained)


def train(cohort: Cohort, start: Params | Stack, step: Step, *, epochs: int, given: Any = None) -> Stack:
    """Train every client's model for so many epochs from `start`; record terms as losses, each by its name."""
    objective, per_epoch = step.objective, cohort.steps(1)
    _say_who_takes_no_step(cohort, step)
    by_epoch = per_epoch if step.afresh or objective.by_epoch else None
    # Only where it matters: without it, training for more epochs goes on from where one for fewer ended.
    total = per_epoch * epochs if objective.scheduled or step.falling else None
    reads = Given(cohort.lr, by_epoch, total, given)
    end = cohort.scan(step, step.start(cohort, start), given=reads, epochs=epochs, draws=objective.draws)
    taken = end.seen["steps"].clamp(min=1)
    cohort.observe(**{f"loss/{name}": end.seen[name] / taken for name in objective.names})
    if step.conflict != "ignored":
        cohort.observe(**{name: end.seen[name] / taken for name in cosine_names(end.w)})
    trained: Stack = end.w
    return trained


def cosine_names(w: Params | Stack) -> dict[str, tuple[str, ...]]:
    """Return how the cosines of two gradients are called: of the whole body, and of each of its blocks.

    A block is what stands in one place of the body: `conflict/body.3` is of the leaves `body.3.residual.0.weight`, ...
    """
    body = [*w.trained.without_part("head")]
    blocks: dict[str, tuple[str, ...]] = {"conflict": tuple(body)}
    for name in body:
        block = f"conflict/{'.'.join(name.split('.')[:2])}"
        blocks[block] = (*blocks.get(block, ()), name)
    return blocks


def cosine_of(g: Params, contrast: Params, names: Iterable[str]) -> Tensor:
    """Return the cosine of the contrast and the rest, of which g is the sum, in some leaves."""
    one = contrast.only(names)
    rest = g.only(names) - one
    product, lengths = one.dot(rest), (one.dot(one), rest.dot(rest))
    return product / (lengths[0].sqrt() * lengths[1].sqrt()).clamp(min=torch.finfo(product.dtype).tiny)


def without_conflict(g: Params, contrast: Params) -> Params:
    """Return g = contrast + rest after each lost what of it points against the other in the body, which they share.

    As in PCGrad (Yu et al., NeurIPS 2020): nothing where the cosine is positive.
    """
    one = contrast.only(g.without_part("head"))
    rest = g.only(one) - one
    against, tiny = one.dot(rest).clamp(max=0), torch.finfo(one.dot(rest).dtype).tiny
    apart = one.moved(rest, -against / rest.dot(rest).clamp(min=tiny))
    return g | (apart + rest.moved(one, -against / one.dot(one).clamp(min=tiny)))


def choose(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """Choose one of two trees that are made alike."""
    (mine, structure), (others, _) = flatten(yes), flatten(no)
    return unflatten(structure, [torch.where(condition, a, b) for a, b in zip(mine, others, strict=True)])


def _say_who_takes_no_step(cohort: Cohort, step: Step) -> None:
    small = int((cohort.samples < step.least).sum())
    if small:
        cohort.warn(
            f"{small} of {len(cohort)} clients have fewer than {step.least} training samples and take no step: they "
            "send the model they received"
        )
