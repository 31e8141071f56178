"""ABHS over rounds: FedPer whose cut is found by how alike clients are, for each client its own.

    before:  h_k, and mean and deviation of what every block of the initial model says about the samples of client k
             s_k = max { l : u_l(k) >= theta },        u_l(k) the mean likeness to all others, as in `abhs`
    client:  (w_1..w_s, v_s+1..v_L) by SGD on F_k from the shared blocks and the client's own above
    server:  w_l <- mean over those who share block l, by p_k

Blocks above s_k never leave client k: zeros travel in their place. A client's cut is found when it comes for the first
time, among all who came before or with it, and stays. With ``theta = 0`` this is FedAvg, above 1 every client trains
alone; with the cut below the head for everybody it is FedPer.

Reference: none published. The same plan of 2025 as `abhs` describes the idea; FedPer is Arivazhagan, Aggarwal, Singh,
Choudhary. "Federated Learning with Personalization Layers." 2019. https://arxiv.org/abs/1912.00818
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Epochs,
    Limits,
    NonNegative,
    Replies,
    Share,
    Update,
    Weighting,
    WithEverybody,
)  # fmt: skip
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, blocks_of, with_block_features
from atoll.toolbox.client.features import moments
from atoll.toolbox.client.labels import label_counts, require_classes
from atoll.toolbox.server import depth
from atoll.toolbox.server.mixing import mark_seen, write_rows


@record
class State:
    """The shared blocks, and what clients told of their data."""

    w: Params
    splits: Tensor  # how many blocks each client shares
    known: Tensor  # who has told what it is like
    labels: Stack | None = None
    blocks: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class ABHSRounds(Algorithm):
    """Shared blocks under a client's own, as many as it is alike to others."""

    theta: NonNegative = 0.6  # θ: the least similarity of blocks that are shared; above 1, none is
    weight: Share = 0.5  # w: of what the head says, beside labels; blocks below it have more
    epochs: Epochs = 1  # E: local epochs per round, on all blocks together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sends: ClassVar[dict[str, str]] = {
        "delta": "model", "counts": "statistic", "labels": "labels", "blocks": "statistic",
    }  # fmt: skip
    sums_suffice: ClassVar[bool] = False  # each block has a mean of its own, of those who share it
    limits: ClassVar[Limits] = {"fedavg": {"theta": 0.0}, "local": WithEverybody(theta=2.0)}
    cites: ClassVar[str] = "arivazhagan2019federated"

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:
        """Return the initial model; nobody shares anything yet."""
        require_classes(self, task)
        blocks_of(task)  # raises for a network without blocks
        splits = torch.zeros(task.clients, dtype=torch.int64, device=task.sample.device)
        return State(task.network.initial, splits, splits.bool())

    def broadcast(self, server: State) -> Params | None:
        """Send all blocks; nothing before anybody told what it is like, which needs the initial model alone."""
        return server.w if server.known.any() else None

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send each client its own split."""
        return Stack.of(split=server.splits[torch.from_numpy(ids).to(server.splits.device)])

    def absorb(self, server: State, replies: Replies) -> State:
        """Find the splits of clients that came for the first time."""
        clients, size = replies.clients, len(server.splits)
        labels, blocks = (
            write_rows(before, replies.stack(name), clients, size)
            for name, before in (("labels", server.labels), ("blocks", server.blocks))
        )
        known = mark_seen(server.known, clients)
        there = known.nonzero().flatten()
        u = depth.likeness(blocks_of(replies.workbench.task), labels.rows(there).value, blocks.rows(there), self.weight)
        found = server.splits.index_copy(0, there, depth.depth(u >= self.theta).to(server.splits))
        splits = torch.where(server.known, server.splits, found)
        return replace(server, splits=splits, known=known, labels=labels, blocks=blocks)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average every block over those who share it."""
        return replace(server, w=server.w + replies.mean("delta", weight="counts"))

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return the shared blocks and the splits, and nothing of what clients told."""
        return replace(server, labels=None, blocks=None)

    # -- the clients -------------------------------------------------------------------------------------------------
    def prepare(self, w: Params | None, cohort: Cohort) -> Update:
        """Tell label counts, and mean and deviation of what every block of the initial model says."""
        found = moments(with_block_features(cohort), cohort.initial)
        return Update(send={"labels": label_counts(cohort), "blocks": found})

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train everything; send the change of shared blocks, zeros for the others, and keep all."""
        split, weight = cohort.received["split"], cohort.weights(self.weighting)
        cohort.observe(split=split.to(cohort.initial_dtype))
        w_k = sgd(cohort, start=self.assemble(w, split, cohort), epochs=self.epochs)
        shares = {name: flags for name, flags in shared_leaves(blocks_of(cohort.task), split).items() if name in w_k}
        delta = Stack({name: leaf.where(wide(shares[name], leaf), 0) for name, leaf in (w_k - w).items()}, w_k.layout)
        counts = Stack({name: weight * flags for name, flags in shares.items()})
        return Update(send={"delta": delta, "counts": counts}, weight=weight, keep=w_k)

    def assemble(self, w: Params, split: Tensor, cohort: Cohort) -> Stack:
        """Return the shared blocks with each client's own above."""
        own, shares = cohort.recall(default=cohort.initial), shared_leaves(blocks_of(cohort.task), split)
        return Stack(
            {name: torch.where(wide(shares[name], leaf), w[name], leaf) for name, leaf in own.items()}, own.layout
        )

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the shared blocks with the client's own above; a client that never came has all that is shared."""
        known = server.known[cohort.ids]
        return self.assemble(server.w, server.splits[cohort.ids], cohort).where(known, cohort.stacked(server.w))

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Give a new client all blocks: those that nobody shares are the initial ones."""
        return cohort.stacked(server.w)


def shared_leaves(blocks: Blocks, split: Tensor) -> dict[str, Tensor]:
    """Return for every leaf which clients share it."""
    return {name: split > number for number, leaves in enumerate(blocks.leaves) for name in leaves}


def wide(flags: Tensor, leaf: Tensor) -> Tensor:
    """Return flags of clients with as many axes as a leaf."""
    return flags.reshape(-1, *[1] * (leaf.ndim - 1))
