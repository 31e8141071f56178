"""PFedRec: every user has a score function and item rows of its own, tuned from the table for everybody.

    score of item i for user k:  w_k . q_i^k + b_i^k
    client:  w_k by SGD, then the rows at the new w_k, batch by batch; deploys the tuned rows
    server:  row_i <- row_i + the mean change over the clients that touched item i

The score function w_k is what `fedmf` calls the user's vector. With ``rows = "shared"`` a client deploys the rows of
the server; with one batch it then differs from `fedmf` in the order of the two steps only.

Reference: Zhang, Long, Zhou, Yan, Zhang, Zhang, Yang. "Dual Personalization on Federated Recommendation." IJCAI 2023.
https://arxiv.org/abs/2301.08143
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.kernel.algorithm import Count, Deployed, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.items import RowRule, Touched, deploy_rows, send_rows, train_rows
from atoll.toolbox.recommending import Recommending


@dataclass(frozen=True, kw_only=True)
class PFedRec(Recommending):
    """A private score function and item rows of its own for every user."""

    batch: Count = 256  # training items of a step
    rows: Literal["own", "shared"] = "own"  # which rows a client deploys

    cites: ClassVar[str] = "zhang2023dual"

    @property
    def deploys_a_model(self) -> bool:
        """A client that has rows of its own deploys them beside the model."""
        return self.rows == "shared"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the score function and then the rows; send the rows, keep the function."""
        touched = Touched(cohort, self.negatives, self.epochs)
        own, rows = self._tune(w, cohort, touched)
        return send_rows(touched, w, rows, keep=own)

    def personalize(self, w: Params, cohort: Cohort) -> Deployed:
        """Return the table with the client's own function, and its own rows: tuned once more, and not sent."""
        if self.rows == "shared":
            return self.recall_vector(cohort) | cohort.stacked(w)
        touched = Touched(cohort, self.negatives, max(self.epochs, 1))
        own, rows = self._tune(w, cohort, touched)
        return deploy_rows(own | cohort.stacked(w), touched.ids, rows)

    def _tune(self, w: Params, cohort: Cohort, touched: Touched) -> tuple[Stack, Stack]:
        own = self.recall_vector(cohort)
        rule = RowRule(self.rate, l2=self.l2, alternate=True, own=tuple(own))
        return train_rows(cohort, own, touched.rows(w), touched, rule, batch_size=self.batch)
