"""FAFI's local objective with all that was proposed to be added to it; each part is off by default.

    contrast          + a queue of earlier features, + a public pool, + mixtures of negatives; hardness, balance
    classification    + log(n_c + 1) on logits
    samples           weigh n_c^-q, or are drawn so from their batch
    anchor            1 - cos(p_c, a_c) and 1 - cos(z_i, a_y), or |p - a|^2 / (C d): everybody knows a_c, lambda(t)
    anchored          |z_k(x) - z_T(x)|^2 over pool images x: features stay near the teacher's, fading
    reference         the distance of features to the teacher's, weighted as the client's classes are or class by
                      class, fading
    labelled          the classification of pool images
    stages            contrast alone, once, in the first epochs, after which the pool is off; or in every fifth epoch

The parts themselves are in `atoll.toolbox.objectives.contrastive`, `negatives`, `balance`, `alignment` and `pools`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client.features import membership
from atoll.toolbox.objectives import alignment
from atoll.toolbox.objectives.balance import balanced_softmax, class_mean, class_weights, resample
from atoll.toolbox.objectives.contrastive import ContrastSet, prototypes_of, supervised_contrast
from atoll.toolbox.objectives.negatives import (
    MIXING,
    absent_classes,
    draw_rows,
    empty_queue,
    enqueue,
    filled_queue,
    mix_negatives,
    queue_set,
)
from atoll.toolbox.objectives.prototypical import Objective, Seen, Terms, prototype_leaf
from atoll.toolbox.server.adam import annealed_share
from atoll.toolbox.server.pools import Pool

QueueSame = Literal["ignored", "positives", "blind"]
Stages = Literal["never", "once", "recurring"]
Schedule = Literal["linear", "cosine", "constant", "auto"]
Prior = Literal["none", "balanced", "restricted"]
RarityBy = Literal["weights", "draws"]
Reference = Literal["none", "mmd", "coral", "sliced"]
ReferenceBy = Literal["prior", "class"]
PERIOD = 5  # epochs, of which the first is one of contrast alone, if stages recur
SMALLEST_SHARE = 4  # a queue holds at most a quarter of the client's samples
SYNTHETIC_FROM = 0.1  # of all steps: before, all features look alike
SLICES = 64  # directions of a sliced distance
PACE = 0.9  # of the running means that set an automatic weight
LARGEST, SOFTENED = 50.0, 1e-2  # the largest automatic weight, and what keeps it finite


@record
class Given:
    """What the terms read beside the batch; None where none of them does."""

    counts: Each = None  # samples of each class that the client has
    pool: Params | None = None  # what was sent of public samples
    reference: Params | None = None  # a teacher's `features` of public samples, and their classes `y`
    anchors: Tensor | None = None  # directions of classes
    first: Tensor | None = None  # prototypes before training
    rows: Tensor | None = None  # what a queue is full of at first, if it is


@record
class Carry:
    """What is carried from step to step; None where nothing is."""

    queue: Each = None
    slow: Each = None  # the body that encodes what is queued, where it follows the client's own
    steps: Each = None  # that it has followed
    pace: Each = None  # running means, of the terms and of the distance to anchors


@dataclass(frozen=True)
class Composed(Objective):
    """FAFI's objective and what is added to it."""

    queue: int = 0  # places; 0: no queue
    queue_same: QueueSame = "ignored"
    decay: float = 0.99
    queue_mass: float = 1.0  # 0: every item counts as one
    queue_momentum: float = 0.0  # of the encoder of what is queued; 0: it is the client's own
    pool: Pool = "none"
    masked: bool = True
    pool_draw: int = 256
    mass: float = 1.0  # 0: every item counts as one
    hardness: float = 0.0
    synthetic: bool = False
    balanced: bool = False
    prior: Prior = "none"
    rarity: float = 0.0
    rarity_by: RarityBy = "weights"
    stages: Stages = "never"
    stage_epochs: int = 0
    contrast_after: float | None = None  # the weight of the contrast outside of stages of contrast alone
    anchor: float = 0.0
    anchor_loss: Literal["direction", "mse"] = "direction"
    anchor_schedule: Schedule = "linear"
    anchor_moves: bool = False
    reference: Reference = "none"
    reference_weight: float = 1.0
    reference_by: ReferenceBy = "prior"

    # -- what a step needs ---------------------------------------------------------------------------------------
    @property
    def names(self) -> tuple[str, ...]:
        """Of all terms that are on."""
        more = {
            "anchor": self.anchor > 0,
            "anchored": self.pool == "anchored",
            "reference": self.reference != "none",
            "labelled": self.pool == "labelled",
        }
        return (*super().names, *(name for name, on in more.items() if on))

    @property
    def by_epoch(self) -> bool:
        """For stages, and a queue that is emptied."""
        return self.stages != "never" or self._blind

    @property
    def scheduled(self) -> bool:
        """For weights that fade, and what starts late."""
        fading = self.anchor > 0 and (self.anchor_schedule != "constant" or self.anchor_moves)
        return fading or self.synthetic or self.pool == "anchored" or self.reference != "none"

    @property
    def draws(self) -> bool:
        """For mixtures, for samples of a pool or a reference, and to prefer rare ones."""
        asked = self.pool in ("images", "anchored", "labelled") or self.reference != "none"
        return asked or self.synthetic or self._redraws

    @property
    def counts(self) -> bool:
        """Whether a step must know how many samples of each class the client has."""
        weighted = self.prior != "none" or self.rarity > 0 or self.pool == "means" or self.reference != "none"
        return weighted or (self.anchor > 0 and self.anchor_loss == "direction")

    @property
    def _blind(self) -> bool:
        return self.queue > 0 and self.queue_same == "blind"

    @property
    def _redraws(self) -> bool:
        return self.rarity > 0 and self.rarity_by == "draws"

    # -- what is carried -----------------------------------------------------------------------------------------
    def initial_carry(self, cohort: Cohort) -> Carry:
        """Return an empty queue, a second encoder, and running means."""
        queue = slow = steps = pace = None
        if self.queue:
            size = cohort.initial[prototype_leaf(cohort.initial.layout)].shape[1]
            queue = cohort.stacked(empty_queue(self.queue, size))
            if not self._blind:
                room = (cohort.samples // SMALLEST_SHARE).clamp(1, self.queue).long()
                queue = queue | Stack.of(room=room)
            if self.queue_momentum:
                slow, steps = cohort.initial.without_part("head"), 0.0
        if self.anchor_schedule == "auto" and self.anchor:
            pace = Params.of(base=0.0, apart=0.0, seen=0.0)
        return Carry(queue, slow, steps, pace)

    def next(self, seen: Seen, terms: Params) -> Carry:
        """Return the queue with the first view of the batch, and running means with this step's terms."""
        carry: Carry = seen.carry
        if self.queue:
            first, _ = seen.batch.split(2)  # the first view
            z = seen.z[: len(first.y)]
            if carry.slow is not None:
                slow = follow(carry.slow, seen.w, self.queue_momentum, carry.steps)
                z = F.normalize(first.features(seen.w | slow), dim=1)
                carry = replace(carry, slow=slow, steps=carry.steps + 1)
            carry = replace(carry, queue=enqueue(self._queue(seen), z, first.y, first.mask))
        if carry.pace is not None:
            base = torch.stack([terms[name] for name in super().names]).sum()
            now = Params.of(base=base, apart=self._off_anchor(seen), seen=torch.ones_like(base))
            carry = replace(carry, pace=carry.pace.lerp(now, 1 - PACE))
        return carry

    def _queue(self, seen: Seen) -> Params:
        queue: Params = seen.carry.queue
        if not self._blind:
            return queue
        assert seen.begins is not None
        fresh = filled_queue(seen.given.rows)  # made anew in every epoch, as published
        return Params({name: torch.where(seen.begins, leaf, queue[name]) for name, leaf in fresh.items()})

    def samples(self, batch: Batch, given: Given) -> Batch:
        """Return the samples of the batch, or as many drawn from it, rare classes first."""
        if not self._redraws:
            return batch
        likely = class_weights(given.counts, self.rarity)[batch.y]
        return batch.rows(resample(batch.uniform("rows", len(batch.y)), likely, batch.mask))

    # -- terms -----------------------------------------------------------------------------------------------------
    def terms(self, seen: Seen) -> Terms:
        """Return all terms that are on."""
        contrast_only = self._contrast_only(seen)
        whole = 1.0 if contrast_only is None else 1 - contrast_only
        pooled = self._encode_pool(seen) if self.pool in ("images", "anchored", "labelled") else None
        fit = {
            "classification": self.classification * seen.batch.mean(self._weigh(seen, self.misfit(seen))),
            "separation": self.separation * self.crowding(seen.prototypes),
        }
        found: Terms = {name: whole * term for name, term in fit.items()}
        found["contrast"] = self._contrast_weight(contrast_only) * self._contrast_mean(
            seen, self._contrast_losses(seen, pooled, contrast_only)
        )
        if self.anchor:
            found["anchor"] = self._anchor_weight(seen) * self._off_anchor(seen)
        if pooled is not None and self.pool == "anchored":
            found["anchored"] = (
                self._fading_share(seen) * 2 * alignment.off_direction(pooled["z"], pooled["features"]).mean()
            )
        if pooled is not None and self.pool == "labelled":
            logits = self.logits(pooled["z"], seen.prototypes)
            found["labelled"] = whole * F.cross_entropy(logits, pooled["y"])
        if self.reference != "none":
            found["reference"] = self._fading_share(seen) * self.reference_weight * self._off_reference(seen)
        return {name: found[name] for name in self.names}

    def misfit(self, seen: Seen) -> Tensor:
        """Return the cross-entropy of every view, with the client's prior if asked."""
        if self.prior == "none":
            return super().misfit(seen)
        logits, counts = self.logits(seen.z, seen.prototypes), seen.given.counts
        return balanced_softmax(logits, seen.batch.y, counts, restricted=self.prior == "restricted")

    def _weigh(self, seen: Seen, losses: Tensor) -> Tensor:
        """Weigh losses of samples, those of rare classes more if asked."""
        if not self.rarity or self._redraws:
            return losses
        return losses * class_weights(seen.given.counts, self.rarity)[seen.batch.y]

    def _contrast_mean(self, seen: Seen, losses: Tensor) -> Tensor:
        """Return the mean over samples or, if it is balanced, over classes."""
        losses = self._weigh(seen, losses)
        if self.balanced:
            return class_mean(losses, seen.batch.y, seen.batch.mask, len(seen.prototypes))
        return seen.batch.mean(losses)

    def _contrast_only(self, seen: Seen) -> Tensor | None:
        """Return 1 in a stage of contrast alone."""
        if self.stages == "never":
            return None
        assert seen.epoch is not None
        inside = seen.epoch < self.stage_epochs if self.stages == "once" else seen.epoch % PERIOD < 1
        return inside.to(seen.z.dtype)

    def _contrast_weight(self, contrast_only: Tensor | None) -> Tensor | float:
        """Return the weight of the contrast, which may be another one after a stage of contrast alone."""
        if contrast_only is None or self.contrast_after is None:
            return self.contrast
        return contrast_only * self.contrast + (1 - contrast_only) * self.contrast_after

    def _contrast_losses(self, seen: Seen, pooled: Params | None, contrast_only: Tensor | None) -> Tensor:
        """Return the contrast of every view with all others and with the sets that are on."""
        batch, sets = seen.batch, list[ContrastSet]()
        if self._blind:
            sets.append(queue_set(self._queue(seen), decay=1.0, same="negatives", mass=None))
        elif self.queue:
            same: Any = self.queue_same
            sets.append(queue_set(self._queue(seen), decay=self.decay, same=same, mass=self.queue_mass or None))
        if self.pool not in ("none", "labelled"):
            on = contrast_only if self.stages == "once" and contrast_only is not None else 1.0
            sets.append(self._pool_set(seen, pooled, on))
        if self.synthetic:
            assert seen.progress is not None
            share = (seen.progress >= SYNTHETIC_FROM).to(seen.z.dtype)
            uniform = batch.uniform("mixtures", len(seen.z), MIXING)
            sets.append(mix_negatives(seen.z, batch.y, batch.mask, uniform, extra=sets, share=share))
        classes = None
        if self.balanced:
            classes, sets = len(seen.prototypes), [*sets, prototypes_of(seen.prototypes)]
        return supervised_contrast(
            seen.z,
            batch.y,
            batch.mask,
            temperature=self.temperature,
            extra=sets,
            hardness=self.hardness,
            classes=classes,
        )

    # -- the pool ----------------------------------------------------------------------------------------------------
    def _encode_pool(self, seen: Seen) -> Params:
        """Encode some samples of the pool by the client's network as it is now, in the mode in which it trains."""
        pool, batch = seen.given.pool, seen.batch
        here = draw_rows(batch.uniform("pool", len(pool["y"])), self.pool_draw)
        some = pool.map(lambda leaf: leaf[here])
        features = replace(batch, x=some["x"], y=some["y"], mask=None).features(seen.w)
        encoded: Params = some | Params.of(z=F.normalize(features, dim=1))
        return encoded

    def _pool_set(self, seen: Seen, pooled: Params | None, on: Tensor | float) -> ContrastSet:
        pool: Params = seen.given.pool
        if self.pool == "means":
            means = absent_classes(pool["features"], seen.given.counts, mass=self.mass or None)
            return replace(means, weight=means.weight * on)
        if self.pool == "images":
            assert pooled is not None
            features, labels = pooled["z"].detach(), pooled["y"]
        else:
            features, labels = pool["features"], pool["y"]
        weight = torch.ones_like(features[:, 0]) * on
        same: Any = "ignored" if self.masked else "negatives"
        return ContrastSet(features, labels if self.masked else None, weight, same, self.mass or None)

    # -- fixed references ----------------------------------------------------------------------------------------------
    def _fading_share(self, seen: Seen) -> Tensor:
        """Return what is left of a weight that fades over all steps."""
        assert seen.progress is not None
        return 1 - seen.progress

    def _off_anchor(self, seen: Seen) -> Tensor:
        anchors, p = seen.given.anchors, seen.prototypes
        if self.anchor_moves:
            assert seen.progress is not None
            anchors = torch.lerp(seen.given.first, anchors, seen.progress)
        if self.anchor_loss == "mse":
            return F.mse_loss(p, anchors)
        counts = seen.given.counts
        return alignment.direction_loss(seen.z, seen.batch.y, seen.batch.mask, p, anchors, counts)

    def _anchor_weight(self, seen: Seen) -> Tensor | float:
        """Return lambda: constant, fading, or such that the term is worth as much as all others, fading.

        min(50, s L / (L_a + 0.01)) with running means of the other terms, L, and of the anchor term, L_a: what learning
        lambda by homoscedastic uncertainty comes to at its optimum, without its parameters and its explosion.
        """
        if self.anchor_schedule == "constant":
            return self.anchor
        assert seen.progress is not None
        if self.anchor_schedule == "linear":
            return self.anchor * (1 - seen.progress)
        fading = annealed_share(seen.progress, 1)
        if self.anchor_schedule == "cosine":
            return self.anchor * fading
        pace, tiny = seen.carry.pace, torch.finfo(seen.z.dtype).tiny
        base, apart = (pace[name] / pace["seen"].clamp(min=tiny) for name in ("base", "apart"))
        automatic: Tensor = self.anchor * (fading * base / (apart + SOFTENED)).clamp(max=LARGEST)
        return automatic

    def _off_reference(self, seen: Seen) -> Tensor:
        batch, reference = seen.batch, seen.given.reference
        here = draw_rows(batch.uniform("reference", len(reference["y"])), self.pool_draw)
        rows, labels = reference["features"][here], reference["y"][here]
        slices = batch.normal("slices", SLICES, rows.shape[1]) if self.reference == "sliced" else None

        def distance(x: Tensor, r: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
            if self.reference == "mmd":
                return alignment.mmd(x, r, a, b)
            if slices is None:
                return alignment.coral(alignment.moments(x, a), alignment.moments(r, b))
            return alignment.sliced_distance(x, r, slices, a, b)

        if self.reference_by == "class":
            classes = len(seen.prototypes)
            theirs = (labels[:, None] == torch.arange(classes, device=labels.device)).to(rows.dtype)
            return alignment.by_class(distance, seen.z, rows, membership(batch, classes), theirs)
        share = alignment.weigh_as_client(labels, seen.given.counts)
        return distance(seen.z, rows, batch.mask, share)


def follow(slow: Params, w: Params, momentum: float, steps: Tensor) -> Params:
    """Return an encoder that follows w, slow <- m slow + (1 - m) w, and begins there; statistics are those of w."""
    body = w.only(slow)
    moved = slow | body.trained.lerp(slow.trained, momentum) | body.buffers
    return Params({name: torch.where(steps == 0, body[name], leaf) for name, leaf in moved.items()}, w.layout)
