"""Sub-FedAvg: every client finds a sparse network of its own in the shared one.

    w_k = w * m_k  after E local epochs on the weights that m_k keeps
    m_k <- m_k without the `prune` share of every layer's smallest |w_k|,     if w_k is good enough and m_k still dense
    w <- w + sum_k p_k m_k (w_k - w) / sum_k p_k m_k                           entry by entry, over those who keep it

Deployed is w * m_k. Only weights of layers are pruned; biases and norm layers are everybody's. With ``prune = 0`` this
is FedAvg.

Reference: Vahidian, Morafah, Lin. "Personalized Federated Learning by Structured and Unstructured Pruning under Data
Heterogeneity." ICDCS Workshops 2021, Algorithm 1 (unstructured). https://arxiv.org/abs/2105.00562
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Range, Replies, Search, Share, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.losses import scores_of
from atoll.toolbox.client.pruning import Decision, layer_weights, masked, prune_least, pruned_share


@dataclass(frozen=True, kw_only=True)
class SubFedAvg(Algorithm):
    """Federated averaging of sparse networks, one mask per client."""

    prune: Annotated[float, Range(0, 1, open_high=True), Search(0.05, 0.3)] = 0.1  # share of a layer pruned in a round
    target: Annotated[Share, Search(0.3, 0.7)] = 0.5  # share of all weights beyond which a client prunes no more
    least: Share = 0.5  # accuracy on validation samples below which a client does not prune
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    reads_validation: ClassVar[bool] = True  # the score there decides whether to prune
    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "mask": "mask"}
    sent_and_kept: ClassVar[frozenset[str]] = frozenset({"mask"})
    limits: ClassVar[Limits] = {"fedavg": {"prune": 0.0}}
    cites: ClassVar[str] = "vahidian2021personalized"

    def start(self, task: Facts) -> Params:
        """Return the initial model, of a task with classes."""
        if task.classes is None:
            raise TaskError(f"Clients of SubFedAvg prune by their accuracy. {task.name} has no classes.")
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train what the mask keeps; prune if that went well; send what is left, and what that is."""
        mask = self._recall(cohort)
        w_k = sgd(cohort, start=masked(cohort.stacked(w), mask), epochs=self.epochs, gradient=kept_gradient, given=mask)
        if self.prune:
            good = scores_of(w_k, cohort, "val") >= self.least  # never, for a client without validation samples
            decision = Decision(good & (pruned_share(mask) < self.target))
            if decision.ready.any():  # sorting takes longer than an epoch of a small client
                sizes = w_k.only(mask).map(torch.abs)
                mask = cohort.map(partial(prune_least, share=self.prune), mask, sizes, decision)
        cohort.observe(pruned=pruned_share(mask))
        return Update(
            send={"delta": masked(w_k - w, mask), "mask": mask}, weight=cohort.weights(self.weighting), keep=mask
        )

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Average every weight over the clients that keep it; one that nobody keeps stays as it is."""
        delta, kept = replies.mean("delta"), replies.mean("mask")
        mean = {name: torch.where(share > 0, delta[name] / share.clamp(min=1e-12), 0) for name, share in kept.items()}
        return w + (delta | Params(mean, w.layout))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's part of the shared model; a client that never took part uses all of it."""
        return masked(cohort.stacked(w), self._recall(cohort))

    def _recall(self, cohort: Cohort) -> Stack:
        return cohort.recall(default=layer_weights(cohort.initial).map(torch.ones_like))


def kept_gradient(w: Params, batch: Batch, mask: Params) -> Found:
    """Return the gradient of the loss for what the mask keeps."""
    g, w, loss = batch.gradient(w)
    return masked(g, mask), w, loss
