"""FedNCF: a table of items and a network for everybody, and a user's vector that never leaves its client.

    score of item i for user k:  MLP([p_k; q_i]) + b_i
    row_i <- row_i + the mean change over the clients that touched item i
    MLP   <- MLP + the mean change over all clients that replied, by their training items

Rows and the network are averaged apart: every client trains the network, few of them any given row.

Reference: Perifanis, Efraimidis. "Federated Neural Collaborative Filtering." Knowledge-Based Systems 2022.
https://arxiv.org/abs/2106.04405
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import TABLE, RowRule, Touched, send_rows, train_rows
from atoll.toolbox.recommending import Recommending


@dataclass(frozen=True, kw_only=True)
class FedNCF(Recommending):
    """A shared table of items and a shared network under private vectors of users."""

    items_by: ClassVar[str] = "neural-items"
    sends: ClassVar[dict[str, str]] = {"rows": "rows", "delta": "model"}
    cites: ClassVar[str] = "perifanis2022federated"

    def start(self, task: Facts) -> Params:
        """Return the table of items and the network, without the user's vector."""
        w = task.network.initial.without_part("head")
        if not w.without(TABLE):
            raise ModelError(
                f"FedNCF shares a network beside the table of items. {task.network.name} has none.",
                hint="choose the model `neural-items`; without such a network it is `fedmf`.",
            )
        return w

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the touched rows, the network and the user's vector; send the former two, keep the vector."""
        touched = Touched(cohort, self.negatives, self.epochs)
        own = self.recall_vector(cohort)
        table, network = w.only(TABLE), w.without(TABLE)
        rule = RowRule(self.rate, l2=self.l2, own=tuple(own))
        leaves, rows = train_rows(cohort, own | cohort.stacked(network), touched.rows(table), touched, rule)
        return send_rows(
            touched, table, rows, keep=leaves.only(own), dense=leaves.only(network) - network, weight=cohort.samples
        )

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Move each row by the mean of those who touched it, the network by the mean over all."""
        return w + replies.mean_rows("rows", w.only(TABLE), least=self.crowd) + replies.mean("delta")

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the table and the network with the user's own vector; 0 for a user that never took part."""
        return self.recall_vector(cohort) | cohort.stacked(w)
