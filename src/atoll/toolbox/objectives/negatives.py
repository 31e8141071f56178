"""What a client contrasts its batches with beyond the batch, as sets for `supervised_contrast`.

**A queue** of the client's own earlier features, first in, first out. It is a `Params` that a step carries on::

    carry = {"w": start, "queue": queues(cohort, d), ...}
    losses = supervised_contrast(z, y, mask, extra=[queue_set(carry["queue"])])    # in the step's objective
    queue = enqueue(carry["queue"], z, y, mask)       # after it, with the features of the first view, as they were

As specified it is label-aware: items of the anchor's label are ignored (or `same="positives"`), the others fade by
`decay` per step, and together they weigh as much as the batch. A label-blind queue, for reproduction, begins full of
random rows (anew every epoch) and pushes away from everything in it::

    carry = {"w": start, "queue": filled_queue(random_directions(4096, d, rng)), ...}
    extra = [queue_set(carry["queue"], decay=1.0, same="negatives", mass=None)]

**Synthetic negatives**: mixtures of the hardest negatives of each anchor, `mix_negatives`, from draws of the step
(`batch.uniform("mix", anchors, MIXING)`).

**A fixed public pool**, sent once, in `given`::

    P0  features of a foreign network       ContrastSet(bank, same="negatives")
        with a label mask                   ContrastSet(bank, labels, mass=1.0)
    P1  images, encoded by the client       here = drawn(batch.uniform("pool", len(x)), 256)
                                            z = replace(batch, x=x[here], mask=None).features(w)
                                            ContrastSet(z, y[here], mass=1.0)
    P2  features of the teacher that        as P0 with labels; the loss gets 2 * off_direction(z, the teacher's z) on
        all clients start from              pool images, fading: see `atoll.toolbox.objectives.alignment`
    P3  class means, for absent classes     absent_classes(means, counts)

Reference: He, Fan, Wu, Xie, Girshick. "Momentum Contrast for Unsupervised Visual Representation Learning." CVPR 2020
(queue). Kalantidis et al. "Hard Negative Mixing for Contrastive Learning." NeurIPS 2020 (synthetic negatives).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.objectives.contrastive import UNLABELLED, ContrastSet, SameLabel

UNUSED = -1.0  # the age of a slot that holds nothing yet
HARDEST = 64  # negatives per anchor that mixtures are made of
PAIRS, WITH_ANCHOR = 16, 8  # mixtures per anchor: of two negatives, and of a negative with the anchor
MIXING = 3 * PAIRS + 2 * WITH_ANCHOR  # draws per anchor


# -- queue ---------------------------------------------------------------------------------------------------------
def empty_queue(capacity: int, size: int) -> Params:
    """Return a queue with room for `capacity` rows of features."""
    return Params.of(
        features=torch.zeros(capacity, size),
        labels=torch.full((capacity,), UNLABELLED),
        age=torch.full((capacity,), UNUSED),
        next=torch.zeros((), dtype=torch.int64),
        room=torch.tensor(capacity),
    )


def queues(cohort: Cohort, size: int, *, capacity: int = 4096, share: float = 0.25) -> Stack:
    """Return an empty queue for every client, of at most `capacity` rows and this share of its training samples."""
    room = (share * cohort.samples).long().clamp(1, capacity)
    return cohort.stacked(empty_queue(capacity, size)) | Stack.of(room=room)


def filled_queue(features: Tensor) -> Params:
    """Return a queue that is full of unlabelled rows, to be overwritten from the first on."""
    full = Params.of(features=features, age=torch.zeros_like(features[:, 0]))
    return empty_queue(*features.shape) | full


def enqueue(queue: Params, z: Tensor, y: Tensor, mask: Tensor | None = None) -> Params:
    """Return the queue with the rows of z that are not padding in place of the oldest; no gradient flows in.

    If there are more rows than room, the last stay.
    """
    rows, room = len(z), queue["room"]
    there = torch.ones_like(y, dtype=torch.bool) if mask is None else mask > 0
    count = there.sum()
    in_order = torch.where(there, 0, 1).argsort(stable=True)  # padding last
    slots = torch.arange(len(queue["age"]), device=z.device)
    offset = (slots - queue["next"]) % room
    written = (offset < count) & (slots < room)
    newest = offset + (count - 1 - offset).div(room, rounding_mode="floor").clamp(min=0) * room
    row = in_order[newest.clamp(max=rows - 1)]
    older = torch.where(queue["age"] < 0, queue["age"], queue["age"] + 1)
    return Params.of(
        features=torch.where(written[:, None], F.normalize(z.detach(), dim=1)[row], queue["features"]),
        labels=torch.where(written, y[row], queue["labels"]),
        age=torch.where(written, 0, older),
        next=(queue["next"] + count) % room,
        room=room,
    )


def queue_set(
    queue: Params,
    *,
    decay: float = 0.99,
    filling: Literal["unused", "scaled"] = "unused",
    same: SameLabel = "ignored",
    mass: float | None = 1.0,
) -> ContrastSet:
    """Return the rows in a queue, each with weight decay^age; until it is full, none, or scaled by its filling."""
    used = queue["age"] >= 0
    count, room = used.to(queue["age"].dtype).sum(), queue["room"]
    full = count / room if filling == "scaled" else (count >= room).to(count.dtype)
    weight = torch.where(used, decay ** queue["age"], 0) * full
    return ContrastSet(queue["features"], queue["labels"], weight, same, mass)


# -- synthetic negatives -------------------------------------------------------------------------------------------
def mix_negatives(
    z: Tensor,
    y: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    *,
    extra: Sequence[ContrastSet] = (),
    share: float | Tensor = 1.0,
) -> ContrastSet:
    """Mix each anchor's hardest negatives, with weight `share`; `draws` are uniform, [anchors, MIXING].

    With negatives n_a, n_b among the hardest: the directions of u n_a + (1 - u) n_b, u ~ U(0, 1), and of
    v z_i + (1 - v) n_a, v ~ U(0, 1/2). No gradient flows through them; an anchor without negatives gets weight 0.
    """
    z = F.normalize(z.detach(), dim=1)
    features, s = _negatives(z, y, mask, extra)
    hardest = s.topk(min(HARDEST, len(features)), dim=1).indices
    count = (s > -torch.inf).sum(1, keepdim=True).clamp(max=hardest.shape[1])

    def among(draw: Tensor) -> Tensor:
        """Return each draw's negative, [anchors, draws, d]."""
        place = (draw * count).long().clamp(max=hardest.shape[1] - 1)
        return features[hardest.gather(1, place)]

    first, second, u, other, v = torch.split_with_sizes(draws, [PAIRS, PAIRS, PAIRS, WITH_ANCHOR, WITH_ANCHOR], 1)
    pairs = torch.lerp(among(second), among(first), u[:, :, None])
    with_anchor = torch.lerp(among(other), z[:, None], v[:, :, None] / 2)
    weight = (count > 0).to(z.dtype) * share
    return ContrastSet(torch.cat([pairs, with_anchor], 1), weight=weight.expand(-1, PAIRS + WITH_ANCHOR))


def _negatives(z: Tensor, y: Tensor, mask: Tensor | None, extra: Sequence[ContrastSet]) -> tuple[Tensor, Tensor]:
    """Return all rows, of the batch and the sets, and their cosines with the anchors: -inf if no negative."""
    features, cosines = [], []
    for one in (ContrastSet(z, y, 1.0 if mask is None else mask), *extra):
        rows = F.normalize(one.features.detach(), dim=1)
        s = z @ rows.T
        negative = (one.labels_like(y) != y[:, None]) & (one.weight_like(s) > 0)
        features.append(rows)
        cosines.append(torch.where(negative, s, -torch.inf))
    return torch.cat(features), torch.cat(cosines, 1)


# -- fixed pools ---------------------------------------------------------------------------------------------------
def draw_rows(uniform: Tensor, count: int) -> Tensor:
    """Draw the places of `count` rows of a pool, none twice; `uniform` has one draw for every row of it."""
    return uniform.argsort()[:count]


def absent_classes(means: Tensor, counts: Tensor, *, mass: float | None = None) -> ContrastSet:
    """Return one row per class, [classes, d], of which those count that the client has no samples of."""
    return ContrastSet(means, torch.arange(len(means), device=means.device), (counts == 0).to(means.dtype), mass=mass)
