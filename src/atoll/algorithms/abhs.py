"""ABHS: how much of the network is shared follows from how alike clients are, which they tell once, before training.

    u_l(k) = mean over j != k of  (1 - v_l) S^l_kj + v_l S^y_kj,   v_l = (1 - w) l / L,   made to fall with l
    s_k    = max { l : u_l(k) >= theta }

S^y compares label counts (Jensen-Shannon), S^l mean and deviation of what block l of the broadcast model says about the
clients' samples (Frechet). Labels count more the deeper a block lies: with one weight for all blocks they would decide
for all alike, and clients would share everything or nothing. Blocks up to s_k stay as they were broadcast, so they
are a base in common without any averaging; client k trains those above, and uploads once. What the server makes of
that: `atoll.toolbox.server.splitting`. This is no pair of a training and an answer, because what a client trains
depends on what all the others told before. Without a parameter, ``rule = "variance"`` shares the blocks whose mean over
all clients errs less than one's own:

    B_l <= V_l (1 / n_k - 1 / n),     B_l the variance between clients' means, V_l that within clients

The base is trained by the server on public samples.

Reference: none published. An unpublished plan of 2025 describes it in words, as its variant A; the formulas are ours.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Epochs, NonNegative, Replies, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, blocks_of, train_above, with_block_features
from atoll.toolbox.client.features import moments
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.oneshot import count_labels, require_public, uploads
from atoll.toolbox.server import depth
from atoll.toolbox.server.splitting import Splitting, State


@record
class Shared:
    """What clients must know to upload no more than is needed."""

    common: int  # blocks that all share, which are not sent back


@dataclass(frozen=True, kw_only=True)
class ABHS(Splitting):
    """Adaptive base-head splitting: one light exchange finds out how deep the common base reaches."""

    base: Literal["public", "initial"] = "public"  # trained on public samples, or the initial model as it is
    base_epochs: Epochs = 20  # of the server on public samples
    rule: Literal["similarity", "variance"] = "similarity"  # which blocks are shared
    theta: NonNegative = 0.6  # the least similarity of blocks that are shared; above 1, none is
    weight: Share = 0.5  # w: of what the head says, beside labels; blocks below it have more
    scope: Literal["client", "all"] = "client"  # every client has its own split, or all have the same

    reads_validation: ClassVar[bool] = True  # how often a client is right there is its reliability
    sends: ClassVar[dict[str, str]] = {**Splitting.sends, "labels": "statistic", "blocks": "statistic"}

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

    def broadcast(self, server: State) -> Shared | Params | None:
        """Send the base first, unless everybody has it; once the splits are known, how many blocks all share."""
        if server.alike is not None:
            return Shared(int(server.splits.min()))
        return server.model if self.base == "public" else None

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
        parts = [blocks.split_by_block(found[name].double()) for name in ("mean", "deviation")]
        each, labels = [*zip(*parts, strict=True)], depth.label_similarity(counts.double())
        u = depth.affinity([depth.feature_similarity(m, sd) for m, sd in each], labels, self.weight)
        if self.rule == "variance":
            good = torch.stack([depth.pays(m, sd, counts.double().sum(1)) for m, sd in each], 1)
            if self.scope == "all":
                good = (good.double().mean(0) > 0.5).expand_as(good)
            return good, u
        likeness = u.mean(0).expand_as(u) if self.scope == "all" else u
        return likeness >= self.theta, u

    def local(self, received: Shared, cohort: Cohort) -> Update:
        """Train what lies above the own split; send what lies above the smallest, and what was found about classes."""
        task = cohort.task
        blocks, split = blocks_of(task), cohort.received["split"]
        cohort.observe(split=split.to(cohort.initial_dtype))

        def train(some: Cohort, start: Stack, names: frozenset[str]) -> Stack:
            return sgd(some, start, epochs=self.epochs, only=names)

        w = train_above(cohort, blocks, cohort.recall(default=cohort.initial), split, train)
        return Update(send={"model": w.only(blocks.above(received.common)), **self.findings(cohort, w)})

    def aggregate(self, server: State, replies: Replies) -> State:
        """Hold all models, each on its base."""
        models = spread(server.model, len(replies.clients)) | uploads(replies, "model")
        return self.conclude(server, replies, models, int(server.splits.min()))
