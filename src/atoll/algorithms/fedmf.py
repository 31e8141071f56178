"""FedMF: a table of items for everybody, and a user's vector that never leaves its client.

    score of item i for user k:  p_k . q_i + b_i
    client:  p_k and the rows (q_i, b_i) that it touches, by SGD on binary cross-entropy with sampled negatives
    server:  row_i <- row_i + sum_{k in S_i} a_ki delta_ki / sum_{k in S_i} a_ki      (S_i: who touched i)

a_ki is how many of client k's pairs have item i. A row moves as far as the clients that touched it say, however few
they are; with ``average = "all"`` sums are divided by all clients that replied, as FedAvg does, and most rows hardly
move.

The vector is never sent, and yet not secret: after one step on a row, delta q_i / delta b_i is p_k itself.

Reference: Chai, Wang, Chen, Yang. "Secure Federated Matrix Factorization." IEEE Intelligent Systems 2021.
https://arxiv.org/abs/1906.05108
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.kernel.algorithm import Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.items import RowRule, Touched, send_rows, train_rows
from atoll.toolbox.recommending import Recommending


@dataclass(frozen=True, kw_only=True)
class FedMF(Recommending):
    """A shared table of items under private vectors of users."""

    average: Literal["touched", "all"] = "touched"  # whom a row's mean is over

    cites: ClassVar[str] = "chai2021secure"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the touched rows and the user's vector; send the rows, keep the vector."""
        touched = Touched(cohort, self.negatives, self.epochs)
        p = self.recall_vector(cohort)
        p, rows = train_rows(cohort, p, touched.rows(w), touched, RowRule(self.rate, l2=self.l2, own=tuple(p)))
        return send_rows(touched, w, rows, keep=p)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Move each row by the mean of those who touched it."""
        return w + replies.mean_rows("rows", w, over_all=self.average == "all", least=self.crowd)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the table with the user's own vector; a user that never took part has 0, and items' biases decide."""
        return self.recall_vector(cohort) | cohort.stacked(w)
