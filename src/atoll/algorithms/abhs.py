"""ABHS: adaptive base-head splitting. How deep clients share follows from how alike they are, which they tell once.

    u_l(k) = mean over j != k of  (1 - v_l) S^l_kj + v_l S^y_kj,   v_l = (1 - w) l / L,   made to fall with l
    s_k    = max { l : u_l(k) >= theta }
    w_k    = about argmin of F_k(w) + hold sum_{l <= s_k} E|h_l(x; w) - h_l(x; w_0)|^2 / E|h_l(x; w_0)|^2,  from w_0
    b_l    = mean of the blocks w_kl over all k with s_k >= l, by samples, then taught by all on public samples

S^y compares label counts (Jensen-Shannon), S^l mean and deviation of what block l of the broadcast model w_0 says about
the clients' samples (Frechet). Labels count more the deeper a block lies: with one weight for all blocks they would
decide for all alike, and clients would share everything or nothing. Clients train all blocks, with what shared ones say
held near w_0's, and upload once. Client k deploys b_1 ... b_s, on which its own blocks train on after the download.
What the server makes of uploads: `atoll.toolbox.server.splitting`. This is no pair of a training and an answer, because
how a client trains depends on what all the others told before. Without a parameter, ``rule = "variance"`` shares the
blocks whose mean over all clients errs less than one's own:

    B_l <= V_l (1 / n_k - 1 / n),     B_l the variance between clients' means, V_l that within clients

w_0 is trained by the server on public samples.

Reference: none published. An unpublished plan of 2025 describes it in words, as its variant A; the formulas are ours.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Epochs, Limits, NonNegative, Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, blocks_of, with_block_features
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import moments
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.oneshot import count_labels, require_public, uploads
from atoll.toolbox.server import depth
from atoll.toolbox.server.splitting import Splitting, State


@record
class Given:
    """What does not change while a client trains."""

    base: Each  # the model that all began with
    split: Each
    hold: float


@dataclass(frozen=True, kw_only=True)
class ABHS(Splitting):
    """Adaptive base-head splitting: one light exchange finds out how deep the common base reaches."""

    base: Literal["public", "initial"] = "public"  # trained on public samples, or the initial model as it is
    base_epochs: Epochs = 20  # epochs of the server on public samples, with their labels
    rule: Literal["similarity", "variance"] = "similarity"  # which blocks are shared
    theta: NonNegative = 0.6  # θ: the least similarity of blocks that are shared; above 1, none is
    weight: Share = 0.5  # w: of what the head says, beside labels; blocks below it have more
    hold: NonNegative = 0.3  # pull of what shared blocks say to what w_0 says, while clients train
    student_epochs: Epochs = 20  # of the server on public samples, to teach shared blocks; 0: they are averages
    scope: Literal["client", "all"] = "client"  # every client has its own split, or all have the same

    reads_validation: ClassVar[bool] = True  # how often a client is right there is its reliability
    limits: ClassVar[Limits] = {
        "oneshot-avg": {"theta": 0.0, "base": "initial", "hold": 0.0, "student_epochs": 0, "personal": "none"}
    }
    sends: ClassVar[dict[str, str]] = {**Splitting.sends, "labels": "labels", "blocks": "statistic"}

    def start(self, task: Facts) -> State:
        """Return the initial model."""
        if self.base == "public":
            require_public(self, task)
        return super().start(task)

    def equip(self, server: State, workbench: Workbench) -> State:
        """Train the base on public samples."""
        if self.base == "initial":
            return server
        trained = sgd(workbench.cohort(*workbench.public), start=server.model, epochs=self.base_epochs)
        return replace(server, model=trained.client(0))

    def broadcast(self, server: State) -> Params | None:
        """Send the base, unless everybody has it; with the splits, nothing more."""
        return server.model if self.base == "public" and server.alike is None else None

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send each client its own split."""
        return Stack.of(split=server.splits[torch.from_numpy(ids).to(server.splits.device)])

    def prepare(self, w: Params | None, cohort: Cohort) -> Update:
        """Tell label counts, and mean and deviation of what every block of the model says about the samples."""
        w = cohort.initial if w is None else w
        found = moments(with_block_features(cohort), w)
        return Update(send={"labels": label_counts(cohort), "blocks": found}, keep=cohort.stacked(w))

    def absorb(self, server: State, replies: Replies) -> State:
        """Find the splits; a client that told nothing shares nothing."""
        blocks = blocks_of(replies.workbench.task)
        good, likeness = self.shareable(blocks, count_labels(replies), uploads(replies, "blocks"))
        rows = torch.from_numpy(np.sort(replies.clients)).to(good.device)
        splits = depth.depth(good).to(server.splits.device)
        return replace(server, splits=server.splits.index_copy(0, rows, splits), alike=likeness)

    def shareable(self, blocks: Blocks, counts: Tensor, found: Stack) -> tuple[Tensor, Tensor]:
        """Find which blocks each client shares, [clients, blocks], and how alike they are."""
        u = depth.likeness(blocks, counts, found, self.weight)
        if self.rule == "variance":
            parts = [blocks.split_by_block(found[name].double()) for name in ("mean", "deviation")]
            each = zip(*parts, strict=True)
            good = torch.stack([depth.pays(m, sd, counts.double().sum(1)) for m, sd in each], 1)
            if self.scope == "all":
                good = (good.double().mean(0) > 0.5).expand_as(good)
            return good, u
        likeness = u.mean(0).expand_as(u) if self.scope == "all" else u
        return likeness >= self.theta, u

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train all blocks, those that are shared near what everybody began with; send them once."""
        blocks, base, split = blocks_of(cohort.task), cohort.recall(default=cohort.initial), cohort.received["split"]
        cohort.observe(split=split.to(cohort.initial_dtype))
        if self.hold:
            some = with_block_features(cohort)
            step = functools.partial(aligned_gradient, blocks)
            w = sgd(some, base, epochs=self.epochs, gradient=step, given=Given(base, split, self.hold))
        else:
            w = sgd(cohort, base, epochs=self.epochs)
        return Update(send={"model": w, **self.findings(cohort, w)})

    def aggregate(self, server: State, replies: Replies) -> State:
        """Put every model on the blocks that its client shares."""
        return self.conclude(server, replies)


def aligned_gradient(blocks: Blocks, w: Params, batch: Batch, given: Given) -> Found:
    """Return the gradient of the loss plus, in the blocks that are shared, how far they are from what the base says."""
    wanted = blocks.split_by_block(batch.deployed.features(given.base))

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        said, after = replace(batch, variant=replace(batch.variant, features=True)).forward(w | trained)
        *body, outputs = blocks.split_by_block(said)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        apart = [
            torch.where(given.split > number, mean_relative(batch, here, there), 0)
            for number, (here, there) in enumerate(zip(body, wanted, strict=False))
        ]
        return loss + given.hold * torch.stack(apart).sum(), (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def mean_relative(batch: Batch, here: Tensor, there: Tensor) -> Tensor:
    """Return the mean of |here - there|^2 over that of |there|^2; 0 where there is nothing to be like."""
    length = batch.mean(there.square().sum(1))
    return batch.mean((here - there).square().sum(1)) / torch.where(length > 0, length, torch.inf)
