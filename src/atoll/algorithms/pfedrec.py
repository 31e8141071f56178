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
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Deployed, Epochs, NonNegative, Positive, Replies, Search, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import Predictor
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import BIAS, VECTOR, RowRule, Touched, find_table, send_rows, train_rows


@dataclass(frozen=True, kw_only=True)
class PFedRec(Algorithm):
    """A private score function and item rows of its own for every user."""

    rate: Annotated[Positive, Search(0.1, 3, log=True)] = 1.0  # step size of score functions and rows
    negatives: Count = 4  # items that were not chosen, for each one that was
    l2: Annotated[NonNegative, Search(0.001, 0.1, log=True)] = 0.01  # pull of vectors towards 0
    epochs: Epochs = 1  # E: local epochs per round
    batch: Count = 256  # training items of a step
    rows: Literal["own", "shared"] = "own"  # which rows a client deploys

    items_by: ClassVar[str] = "item-factors"
    sums_suffice: ClassVar[bool] = False  # rows say whose they are
    sends: ClassVar[dict[str, str]] = {"rows": "rows"}
    cites: ClassVar[str] = "zhang2023dual"

    @property
    def trains_by_sgd(self) -> bool:
        """Rows are trained by a step of their own, so pieces cannot change it."""
        return False

    @property
    def deploys_a_model(self) -> bool:
        """A client that has rows of its own deploys them beside the model."""
        return self.rows == "shared"

    def start(self, task: Facts) -> Params:
        """Return the table of items, all that the server knows."""
        return find_table(task, type(self).__name__)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the score function and then the rows; send the rows, keep the function."""
        touched = Touched(cohort, self.negatives, self.epochs)
        own, rows = self._tune(w, cohort, touched)
        return send_rows(touched, w, rows, keep=own)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Move each row by the mean of those who touched it."""
        return w + replies.mean_rows("rows", w)

    def personalize(self, w: Params, cohort: Cohort) -> Deployed:
        """Return the table with the client's own function, and its own rows: tuned once more, and not sent."""
        own = cohort.recall(default=cohort.initial.part("head"))
        if self.rows == "shared":
            return own | cohort.stacked(w)
        touched = Touched(cohort, self.negatives, max(self.epochs, 1))
        own, rows = self._tune(w, cohort, touched)
        beside = Stack({"row": touched.ids, "vector": rows[VECTOR], "bias": rows[BIAS]})
        return Predictor(own | cohort.stacked(w), beside, answer_with_own_rows)

    def _tune(self, w: Params, cohort: Cohort, touched: Touched) -> tuple[Stack, Stack]:
        own = cohort.recall(default=cohort.initial.part("head"))
        rule = RowRule(self.rate, l2=self.l2, alternate=True, own=tuple(own))
        return train_rows(cohort, own, touched.rows(w), touched, rule, batch_size=self.batch)


def answer_with_own_rows(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Score all items by the table, and those that the client has rows of by these."""
    scores = batch.outputs(model)
    mine = batch.head(model, torch.cat([beside["vector"], beside["bias"][:, None]], -1)[None])
    wide = torch.nn.functional.pad(scores, (0, 1))  # what fills up a client's rows falls into the last place
    where = beside["row"].expand(len(scores), -1)
    return wide.scatter(1, where, mine.expand(where.shape))[:, :-1]
