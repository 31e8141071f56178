"""Base of methods by which users learn a table of items together and keep what is their own.

`atoll.toolbox.client.items` has how rows are gathered, trained and sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.kernel.algorithm import Algorithm, Count, Epochs, NonNegative, Positive, Replies, Search
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import RowRule, Touched, find_table, fit_vector


@dataclass(frozen=True, kw_only=True)
class Recommending(Algorithm):
    """A method whose clients send rows of a table of items: a subclass says how they train and what they deploy."""

    rate: Annotated[Positive, Search(0.1, 3, log=True)] = 1.0  # step size of vectors and rows, instead of the task's
    negatives: Count = 4  # items that were not chosen, for each one that was
    l2: Annotated[NonNegative, Search(0.001, 0.1, log=True)] = 0.01  # pull of vectors towards 0
    epochs: Epochs = 1  # E: local epochs per round
    crowd: Count = 1  # rows that fewer clients touched in a round stay as they are

    items_by: ClassVar[str] = "item-factors"
    sums_suffice: ClassVar[bool] = False  # rows say whose they are
    sends: ClassVar[dict[str, str]] = {"rows": "rows"}

    @property
    def trains_by_sgd(self) -> bool:
        """Rows are trained by a step of their own, so pieces cannot change it."""
        return False

    def start(self, task: Facts) -> Params:
        """Return the table of items, all that the server knows."""
        return find_table(task, type(self).__name__)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Move each row by the mean of those who touched it."""
        return w + replies.mean_rows("rows", w, least=self.crowd)

    def recall_vector(self, cohort: Cohort) -> Stack:
        """Return the users' own vectors; 0 for users that never took part."""
        return cohort.recall(default=cohort.initial.part("head"))

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack:
        """Fit a new user's vector to its items; the table stays as it is."""
        return fit_vector(cohort, model, Touched(cohort, self.negatives, epochs), RowRule(self.rate, l2=self.l2))
