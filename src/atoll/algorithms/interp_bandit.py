"""Interpolation whose shares are learned by a bandit: every client tries one mixture per round and sees its reward.

    P_k = a_k v_k + (1 - a_k) w,        v_k trained alone, w by federated averaging
    r = exp(-F_k^val(P_k))              the reward of the share that was tried, in [0, 1]
    a_k <- argmax_a  R_a / N_a + c sqrt( 2 log(sum_b N_b) / N_a )         the share tried next

R_a are the rewards of a share and N_a their number, both faded by `fade` per round, because v_k and w move. Deployed is
the share with the best R_a / N_a. A round reads the validation data with one model, where `interp` reads them with 11.

Reference: no paper has this method. The bandit is that of Garivier, Moulines. "On Upper-Confidence Bound Policies for
Switching Bandit Problems." ALT 2011; the mixture that of Mansour, Mohri, Ro, Suresh. "Three Approaches for
Personalization with Applications to Federated Learning." 2020. https://arxiv.org/abs/2002.10619
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Epochs,
    Limits,
    NonNegative,
    Range,
    Search,
    Update,
    Weighting,
    WithEverybody,
)
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client import sgd
from atoll.toolbox.client.losses import losses_of

LEAST = 1e-12  # trials that a share counts as having before it was tried


@record
class Kept:
    """A client's model, and what it knows of every share."""

    v: Stack
    rewards: Each
    trials: Each


@dataclass(frozen=True, kw_only=True)
class InterpBandit(Algorithm):
    """A mixture of the local and the shared model, whose share a bandit learns."""

    arms: Count = 11  # shares that are tried, evenly from 1 to 0; with 1 it is the own model alone
    explore: Annotated[NonNegative, Search(0.01, 1, log=True)] = 0.1  # c: how much more a share is tried that is new
    fade: Annotated[float, Range(0, 1, open_low=True), Search(0.8, 1)] = 0.9  # what is left of a reward after a round
    epochs: Epochs = 1  # E: local epochs per round, on each of the two models
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    reads_validation: ClassVar[bool] = True  # rewards are from there
    limits: ClassVar[Limits] = {"local": WithEverybody(arms=1)}
    cites: ClassVar[str] = "mansour2020three"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models, try one mixture of them, and take in what it was worth."""
        kept = self._recall(cohort.initial, cohort)
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        v = sgd(cohort, start=kept.v, epochs=self.epochs)
        arm = self.bounds(kept).argmax(1)
        share = self.shares(cohort)[arm]
        reward = torch.exp(-losses_of([cohort.stacked(w).lerp(v, share)], cohort, "val")[:, 0])
        tried = torch.nn.functional.one_hot(arm, self.arms).to(share.dtype) * cohort.has_samples("val")[:, None]
        cohort.observe(share=share, reward=reward)
        keep = Kept(v, self.fade * kept.rewards + tried * reward[:, None], self.fade * kept.trials + tried)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=keep)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the best mixture so far; a client that could try none uses w, or its own model if that is all."""
        kept = self._recall(w, cohort)
        means = torch.where(kept.trials > 0, kept.rewards / kept.trials.clamp(min=LEAST), -1)
        best = self.shares(cohort)[means.argmax(1)]
        blind = (kept.trials == 0).all(1) if self.arms > 1 else torch.zeros_like(best, dtype=torch.bool)
        return cohort.stacked(w).lerp(kept.v, torch.where(blind, 0.0, best))

    def bounds(self, kept: Kept) -> Tensor:
        """Return the upper confidence bound of every share; a share that was never tried comes first."""
        trials = kept.trials.clamp(min=LEAST)
        total = kept.trials.sum(1, keepdim=True).clamp(min=1)
        bound = kept.rewards / trials + self.explore * (2 * total.log() / trials).sqrt()
        return torch.where(kept.trials > 0, bound, torch.inf)

    def shares(self, cohort: Cohort) -> Tensor:
        """Return the shares of the own model, from 1 to 0."""
        return torch.linspace(1, 0, self.arms, dtype=cohort.initial_dtype, device=cohort.device)

    def _recall(self, v: Params, cohort: Cohort) -> Kept:
        nothing = cohort.lr.new_zeros(len(cohort), self.arms)
        return cohort.recall(default=Kept(cohort.stacked(v), nothing, nothing))
