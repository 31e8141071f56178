"""ABHS, local: every client decides by itself how much of the network it would share; the server decides in the end.

    s_k = how many of the first blocks have   |w_l - w_l^0| / |w_l^0| <= theta_d   and   tr(S_W) / tr(S_B) >= theta_r
    s   = min( median_k s_k,  how many of the first blocks have   mean_{k<j} CKA(X_kl, X_jl) >= theta_c )

w_k is client k's model after training alone, from w^0. S_W and S_B are the scatter within and between classes of what a
block says about held-out samples: a block that was made for the client's classes has little of the first. X_kl is what
block l of w_k says about probes: noise that the server draws, or public samples. The blocks up to s are averaged, and
carry the clients' own blocks above. What the server makes of that: `atoll.toolbox.server.splitting`. This is no pair of
a training and an answer, because clients train on after the single download.

Reference: none published. An unpublished plan of 2025 describes it in words, as its variant B, without any exchange
before training; the formulas are ours.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Limits, NonNegative, Replies, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, bench_with_block_features, blocks_of, drift, scatter
from atoll.toolbox.client.statistics import refresh_statistics
from atoll.toolbox.oneshot import average_models, require_public, uploads
from atoll.toolbox.server import depth
from atoll.toolbox.server.splitting import Splitting, State

PROBES = 256  # samples at most


@dataclass(frozen=True, kw_only=True)
class ABHSLocal(Splitting):
    """Adaptive base-head splitting without an exchange: the base is averaged as far as it is still the same."""

    theta_d: NonNegative = 0.3  # the largest drift of a block that a client would share
    theta_r: NonNegative = 1.0  # the least scatter within classes, by that between them
    theta_c: Share = 0.8  # the least alignment between clients of blocks that are averaged
    probes: Literal["noise", "public"] = "noise"  # what clients' blocks are compared on

    reads_validation: ClassVar[bool] = True  # how often a client is right there is its reliability
    sends: ClassVar[dict[str, str]] = {**Splitting.sends, "split": "statistic"}
    limits: ClassVar[Limits] = {"oneshot-avg": {"theta_d": 1e9, "theta_r": 0.0, "theta_c": 0.0, "personal": "none"}}

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
        blocks = blocks_of(cohort.task)
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        split = depth.depth((drift(blocks, w_k, w) <= self.theta_d) & (scatter(cohort, blocks, w_k) >= self.theta_r))
        cohort.observe(split=split.to(cohort.initial_dtype))
        return Update(send={"model": w_k, "split": Stack.of(split=split), **self.findings(cohort, w_k)})

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average the base, as deep as clients want it and as it is alike; keep what lies above."""
        bench, models = replies.workbench, uploads(replies, "model")
        blocks = blocks_of(bench.task)
        alike = self.alignment(blocks, models, bench)
        wanted = int(uploads(replies, "split").value.median())
        split = min(wanted, int(depth.depth(alike >= self.theta_c)))
        samples = uploads(replies, "evidence")["count"].sum(1)
        base = average_models(models, samples / samples.sum()).only(blocks.below(split))
        if self.probes == "public":
            base = refresh_statistics(bench.cohort(*bench.public), models.client(0) | base).client(0).only(base)
        server = replace(server, splits=torch.full_like(server.splits, split), alike=alike)
        return self.conclude(server, replies, models | base, split)

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
