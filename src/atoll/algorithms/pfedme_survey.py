"""pFedMe as a survey has it: clients train near the shared model, deploy what they find, and the server averages it.

    v_k <- v_k + follow (w - v_k)                                                            the client's shadow of w
    theta_k = about argmin of F_k(theta) + (lam / 2) ||theta - v_k||^2, from w,              v_k <- theta_k
    w <- mean_k v_k

The shadow is what the client sent last, held near w by a second regulariser: with `follow` 1/2 it minimises
||v - v_k||^2 + ||v - w||^2. With ``follow = 1`` it is w itself: this is then pFedMe with eta lam = 1, beta = 1 and one
proximal problem per round, over all of a client's data, which trains as FedProx does, and deploys theta_k and not w.

Reference: no paper has this form. A survey describes it under the name of Dinh, Tran, Nguyen. "Personalized Federated
Learning with Moreau Envelopes." NeurIPS 2020, whose method is `pfedme`. https://arxiv.org/abs/2006.08848
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Share, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import proximal, sgd


@dataclass(frozen=True, kw_only=True)
class PFedMeSurvey(Algorithm):
    """A personal model per client: where it went in its last round."""

    lam: NonNegative = 15.0  # λ: pull of the personal model towards its shadow
    follow: Share = 0.5  # how far the shadow follows w before a round; 1: to w itself, 0: it is what was sent last
    epochs: Epochs = 1  # passes over the data per round
    weighting: Weighting = "uniform"  # how much a client counts in w: all the same, or by training samples

    cites: ClassVar[str] = "dinh2020personalized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls a client's model to its shadow."""
        return {"lr * lam": lr * self.lam}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Find the proximal point; send it and keep it."""
        theta = self.approach(w, self.shadow(w, cohort), cohort)
        return Update(send={"delta": theta - w}, weight=cohort.weights(self.weighting), keep=theta)

    def shadow(self, w: Params, cohort: Cohort) -> Params | Stack:
        """Return v_k: what each client sent last, drawn to w."""
        if self.follow == 1:
            return w
        last = cohort.recall(default=w)
        return last + self.follow * (w - last)

    def approach(self, w: Params, v: Params | Stack, cohort: Cohort) -> Stack:
        """Find the proximal points around shadows, from w."""
        return sgd(cohort, start=w, epochs=self.epochs, penalty=proximal(self.lam, center=v))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's theta; a client that never took part uses w."""
        return cohort.recall(default=w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Find the proximal point of a new client around w: a round of its own, of which nothing is sent."""
        return self.approach(w, w, cohort)
