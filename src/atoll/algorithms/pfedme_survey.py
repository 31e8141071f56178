"""pFedMe as a survey has it: clients train near the shared model, deploy what they find, and the server averages it.

    theta_k = about argmin of F_k(theta) + (lam / 2) ||theta - w||^2, from w,        w <- sum_k p_k theta_k

This is pFedMe with eta lam = 1, beta = 1 and one proximal problem per round, over all of a client's data. It trains as
FedProx does, and deploys theta_k and not w.

Reference: no paper has this form. A survey describes it under the name of Dinh, Tran, Nguyen. "Personalized Federated
Learning with Moreau Envelopes." NeurIPS 2020, whose method is `pfedme`. https://arxiv.org/abs/2006.08848
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import proximal, sgd


@dataclass(frozen=True, kw_only=True)
class PFedMeSurvey(Algorithm):
    """A personal model per client: where it went in its last round."""

    lam: NonNegative = 15.0  # λ: pull of the personal model towards w
    epochs: Epochs = 1  # passes over the data per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    cites: ClassVar[str] = "dinh2020personalized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls a client's model to w."""
        return {"lr * lam": lr * self.lam}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Find the proximal point; send it and keep it."""
        theta = self.welcome(w, cohort)
        return Update(send={"delta": theta - w}, weight=cohort.weights(self.weighting), keep=theta)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's theta; a client that never took part uses w."""
        return cohort.recall(default=w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Find the proximal point of a new client around w: a round of its own, of which nothing is sent."""
        return sgd(cohort, start=w, epochs=self.epochs, penalty=proximal(self.lam, center=w))
