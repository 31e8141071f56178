"""MTL-Reg: some leaves are private, and held near a shared copy of themselves.

    min_{r, q, q_1..q_N}  sum_k p_k [ F_k(r, q_k) + lam ||q_k - q||^2 ],        q by federated averaging of F_k(r, q)

r are the leaves that all clients share, q_k the private ones, q their shared copy, with which q_k begins. The penalty
has no factor 1/2. With ``lam = 0`` this is FedPer, if all clients take part from the first round on: there q_k begins
with the initial model. With everything private it is Ditto with twice this lam; with nothing private, FedAvg.

Reference: a survey describes it as multi-task federated learning (MTFL), "shared and private parameters with a
regulariser"; the idea goes back to Evgeniou, Pontil. "Regularized Multi-Task Learning." KDD 2004.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Update, Weighting, WithEverybody
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.toolbox.client import proximal, sgd


@dataclass(frozen=True, kw_only=True)
class MTLReg(Algorithm):
    """Private leaves, regularised towards a shared copy of them."""

    private: Part = "head"  # the leaves that every client has its own copy of
    lam: NonNegative = 0.1  # λ: pull of a private copy towards the shared one
    epochs: Epochs = 1  # E: local epochs per round, on (r, q_k), and again on q
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {
        "fedper": WithEverybody(lam=0.0, private="head"),
        "ditto": {"lam": 0.5, "private": "all"},  # Ditto's own default is 1
        "local": WithEverybody(lam=0.0, private="all"),
        "fedavg": {"private": "none"},
    }
    cites: ClassVar[str] = "evgeniou2004regularized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls q_k to q; without a factor 1/2, twice as hard."""
        return {"2 * lr * lam": 2 * lr * self.lam}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train r with the own copy q_k, and the shared copy q under the received r."""
        q = w.part(self.private)
        own = sgd(cohort, self.personalize(w, cohort), epochs=self.epochs, penalty=proximal(2 * self.lam, center=q))
        shared = sgd(cohort, start=w, epochs=self.epochs, only=q)
        w_k = own | shared.only(q)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=own.only(q))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the shared leaves with the own copies; a client that never took part uses the shared copies."""
        return cohort.stacked(w) | cohort.recall(default=w.part(self.private))
