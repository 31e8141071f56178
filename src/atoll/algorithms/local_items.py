"""Local for recommenders: every user remembers one number for each item by itself, and sends nothing.

    min_{b_k}  cross-entropy of b_ki over the items that user k knows, against others drawn at random

Vectors of items only say what users have in common, so a user alone has none: what is left is a number for each item.
Whoever draws negatives as it should cannot find an unknown item in this way: all of them are pushed down alike. If the
items for validation and testing are spared, they are what is left standing. So this is the honest lower reference, and
the pure memoriser that shows a leak.

Reference: the lower baseline of recommendation without collaboration; the leak as noted by users of PFedRec's code,
https://github.com/Zhangcx19/IJCAI-23-PFedRec (issue 3), 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Positive, Replies, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import BIAS, VECTOR, RowRule, Touched, find_table, gather_rows, train_rows, write_rows


@dataclass(frozen=True, kw_only=True)
class LocalItems(Algorithm):
    """A number for each item that a user alone remembers; no communication at all."""

    rate: Annotated[Positive, Search(0.1, 3, log=True)] = 1.0  # step size of the numbers
    negatives: Count = 4  # items that were not chosen, for each one that was
    epochs: Epochs = 1  # E: local epochs per round

    items_by: ClassVar[str] = "item-factors"
    sends: ClassVar[Mapping[str, str]] = {}

    @property
    def trains_by_sgd(self) -> bool:
        """Numbers are trained by a step of their own, so pieces cannot change it."""
        return False

    def start(self, task: Facts) -> None:
        """Return nothing: the server has nothing to do."""
        find_table(task, type(self).__name__)  # raises for a network that has more than a table

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Push the numbers of known items up and those of drawn ones down."""
        touched, b, zero = Touched(cohort, self.negatives, self.epochs), self._recall(cohort), cohort.initial.zeros()
        rows = touched.rows(zero.only([VECTOR])) | gather_rows(b, touched.ids)
        p = cohort.stacked(zero.part("head"))
        _, rows = train_rows(cohort, Stack({}), rows, touched, RowRule(self.rate), still=p)
        return Update(keep=write_rows(b, touched.ids, rows.only([BIAS])))

    def aggregate(self, nothing: None, replies: Replies) -> None:
        """Return nothing: nobody replied."""

    def personalize(self, nothing: None, cohort: Cohort) -> Stack:
        """Return a table of the user's own numbers, without vectors."""
        return cohort.stacked(cohort.initial.zeros()) | self._recall(cohort)

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack:
        """Leave a new user as it is: alone, it cannot learn anything about items that it does not know."""
        return model

    def _recall(self, cohort: Cohort) -> Stack:
        return cohort.recall(default=Params({BIAS: torch.zeros_like(cohort.initial[BIAS])}, cohort.initial.layout))
