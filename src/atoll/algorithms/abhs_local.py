"""ABHS, local: every client decides by itself how much of the network it would share; the server decides in the end.

    s_k = min( max { l : 1 - (1 - e_k) l / L >= theta },  max { l : mean_{i<j} CKA(X_il, X_jl) >= theta_c } )

e_k is how even the classes of client k are: the entropy of their shares over ln C. A client that has few classes cannot
be like most others, and the deeper a block lies, the more it is about classes. X_il is what block l of client i's model
says about probes, after training alone: noise that the server draws, or public samples. Blocks that clients share are
averaged, and carry their own blocks above. What the server makes of that: `atoll.toolbox.server.splitting`. This is no
pair of a training and an answer, because clients train on after the single download.

Reference: none published. An unpublished plan of 2025 describes it in words, as its variant B, without any exchange
before training; the formulas are ours.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Limits, NonNegative, Replies, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, bench_with_block_features, blocks_of
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.client.statistics import refresh_statistics
from atoll.toolbox.oneshot import require_public, uploads
from atoll.toolbox.server import depth
from atoll.toolbox.server.splitting import Found, Splitting, State

PROBES = 256  # samples at most


@dataclass(frozen=True, kw_only=True)
class ABHSLocal(Splitting):
    """Adaptive base-head splitting without an exchange: the base is averaged as far as it is still the same."""

    theta: NonNegative = 0.9  # θ: how even classes must be; above 1, no block is shared
    theta_c: Share = 0.5  # θ_c: the least alignment between clients of blocks that are averaged
    probes: Literal["noise", "public"] = "noise"  # what clients' blocks are compared on

    reads_validation: ClassVar[bool] = True  # how often a client is right there is its reliability
    sends: ClassVar[dict[str, str]] = {**Splitting.sends, "split": "statistic"}
    limits: ClassVar[Limits] = {"oneshot-avg": {"theta": 0.0, "theta_c": 0.0, "personal": "none"}}

    def start(self, task: Facts) -> State:
        """Return the initial model."""
        if self.probes == "public":
            require_public(self, task)
        elif not task.sample.is_floating_point():
            raise TaskError(
                f"Noise must be like the samples, which must be numbers. Those of {task.name} are {task.sample.dtype}.",
                hint="use abhs-local:probes=public.",
            )
        return super().start(task)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train everything alone; send it with the own split, and what was found about classes."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        evenness = depth.evenness(label_counts(cohort).value)
        split = depth.depth(depth.wanted(evenness, len(blocks_of(cohort.task))) >= self.theta)
        cohort.observe(split=split.to(cohort.initial_dtype))
        return Update(send={"model": w_k, "split": Stack.of(split=split), **self.findings(cohort, w_k)})

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average blocks, as deep as each client wants it and as they are alike."""
        bench = replies.workbench
        alike = self.alignment(blocks_of(bench.task), uploads(replies, "model"), bench)
        deepest = int(depth.depth(alike >= self.theta_c))
        rows = torch.from_numpy(np.sort(replies.clients)).to(server.splits.device)
        wanted = uploads(replies, "split").value.to(server.splits).clamp(max=deepest)
        splits = torch.full_like(server.splits, deepest).index_copy(0, rows, wanted)
        return self.conclude(replace(server, splits=splits, alike=alike), replies)

    def merge(self, blocks: Blocks, found: Found, splits: Tensor, bench: Workbench) -> Params:
        """Average blocks; with public samples, find statistics of the base anew."""
        one = super().merge(blocks, found, splits, bench)
        if self.probes == "noise":
            return one
        base = refresh_statistics(bench.cohort(*bench.public), one).client(0).only(blocks.below(int(splits.max())))
        return one | base

    def alignment(self, blocks: Blocks, models: Stack, bench: Workbench) -> Tensor:
        """Return how alike the outputs of each block are on the probes, in the mean over pairs of clients."""
        task = bench.task
        if self.probes == "public":
            x = bench.public[0][:PROBES]
        else:
            noise = bench.generator("probes").normal(size=(PROBES, *task.sample.shape))
            x = torch.from_numpy(noise).to(task.sample)
        outputs = bench_with_block_features(bench).answers(models, x, features=True).double()
        return torch.stack([depth.mean_of_pairs(depth.cka(one)) for one in blocks.split_by_block(outputs)])
