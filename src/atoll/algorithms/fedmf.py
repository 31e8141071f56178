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
from typing import Annotated, ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Count, Epochs, NonNegative, Positive, Replies, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import RowRule, Touched, find_table, send_rows, train_rows


@dataclass(frozen=True, kw_only=True)
class FedMF(Algorithm):
    """A shared table of items under private vectors of users."""

    rate: Annotated[Positive, Search(0.1, 3, log=True)] = 1.0  # step size of vectors and rows, instead of the task's
    negatives: Count = 4  # items that were not chosen, for each one that was
    l2: Annotated[NonNegative, Search(0.001, 0.1, log=True)] = 0.01  # pull of vectors towards 0
    epochs: Epochs = 1  # E: local epochs per round, one step on everything each
    average: Literal["touched", "all"] = "touched"  # whom a row's mean is over

    items_by: ClassVar[str] = "item-factors"
    sums_suffice: ClassVar[bool] = False  # rows say whose they are
    sends: ClassVar[dict[str, str]] = {"rows": "rows"}
    cites: ClassVar[str] = "chai2021secure"

    @property
    def trains_by_sgd(self) -> bool:
        """Rows are trained by a step of their own, so pieces cannot change it."""
        return False

    def start(self, task: Facts) -> Params:
        """Return the table of items, all that the server knows."""
        return find_table(task, type(self).__name__)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the touched rows and the user's vector; send the rows, keep the vector."""
        touched = Touched(cohort, self.negatives, self.epochs)
        own = cohort.recall(default=cohort.initial.part("head"))
        p, rows = train_rows(cohort, own, touched.rows(w), touched, RowRule(self.rate, l2=self.l2, own=tuple(own)))
        return send_rows(touched, w, rows, keep=p)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Move each row by the mean of those who touched it."""
        return w + replies.mean_rows("rows", w, over_all=self.average == "all")

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the table with the user's own vector; a user that never took part has 0, and items' biases decide."""
        return cohort.recall(default=cohort.initial.part("head")) | cohort.stacked(w)
