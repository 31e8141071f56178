"""FCF: users' vectors in closed form on their devices, items' vectors by gradients that are only ever summed.

    min  sum_k sum_i c_ki (x_ki - p_k . q_i - b_i)^2 + lam (sum_k |p_k|^2 + sum_i |q_i|^2),     c_ki = 1 + alpha x_ki
    client:  p_k = (Q' C_k Q + lam I)^-1 Q' C_k (x_k - b)            exactly, with x_ki = 1 for items that k knows
             sends  c_ki (x_ki - p_k . q_i - b_i) (p_k, 1)           for all items i
    server:  (q_i, b_i) along the sum over clients - lam (q_i, 0)    by Adam, or by plain steps

All items count, so nothing is drawn; a client sends a whole table, so sums suffice and may be secure. The vector is
computed anew from the table each time: nothing is kept. The paper has no biases: ``bias = False``.

Reference: Ammad-ud-din, Ivannikova, Khan, Oyomno, Fu, Tan, Flanagan. "Federated Collaborative Filtering for
Privacy-Preserving Personalized Recommendation System." 2019. https://arxiv.org/abs/1901.09888
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, NonNegative, Positive, Replies, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import BIAS, VECTOR, count_items, drop_repeats, find_table, list_items
from atoll.toolbox.server.adam import Past, adam, no_past


@record
class State:
    """The table of items, and what Adam remembers."""

    table: Params
    past: Past


@dataclass(frozen=True, kw_only=True)
class FCF(Algorithm):
    """Alternating least squares for users, gradient steps for items; the server sees sums only."""

    alpha: Annotated[NonNegative, Search(1, 50, log=True)] = 10.0  # α: how much more a known item counts than others
    lam: Annotated[NonNegative, Search(0.1, 50, log=True)] = 1.0  # λ: pull of vectors towards 0
    rate: Annotated[Positive, Search(0.003, 0.3, log=True)] = 0.03  # step size of the server
    server: Literal["adam", "sgd"] = "adam"  # how the server steps along the sum
    bias: bool = True  # whether items have a bias, which ranks them for users without a vector

    items_by: ClassVar[str] = "item-factors"
    closed_form: ClassVar[bool] = True  # nothing is drawn and no batch is read in turn
    sends: ClassVar[dict[str, str]] = {"gradient": "model"}
    cites: ClassVar[str] = "ammad2019federated"

    @property
    def trains_by_sgd(self) -> bool:
        """Vectors are solved for, so pieces cannot change steps."""
        return False

    def start(self, task: Facts) -> State:
        """Return the table of items."""
        table = find_table(task, type(self).__name__)
        return State(table, no_past(table))

    def broadcast(self, server: State) -> Params:
        """Send the table."""
        return server.table

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Solve for the user's vector; send how the table would have to change for it."""
        known = Stack.of(item=self._list_known(cohort))
        sent = cohort.map(partial(describe_user, self.alpha, self.lam, self.bias), w, moments_of(w), known)
        cohort.observe(**{"loss/main": sent["loss"]})
        return Update(send={"gradient": sent.only(w)})

    def aggregate(self, server: State, replies: Replies) -> State:
        """Step along the sum of what clients sent."""
        g = replies.sum("gradient").moved(server.table.only([VECTOR]), -self.lam)
        if self.server == "sgd":
            return State(server.table.moved(g, self.rate), server.past)
        return State(*adam(server.table, -g, server.past, self.rate))

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the table with the vector that fits what the user knows; without labels, 0 and so items' biases."""
        w = server.table
        if not cohort.labelled:
            return cohort.stacked(cohort.initial.part("head").zeros()) | cohort.stacked(w)
        solve = partial(solve_user, self.alpha, self.lam)
        p = cohort.map(solve, w, moments_of(w), Stack.of(item=self._list_known(cohort)))
        return Stack(dict.fromkeys(cohort.initial.part("head"), p["p"]), w.layout) | cohort.stacked(w)

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack:
        """Leave a new user as it is: its vector fits already."""
        return model

    def _list_known(self, cohort: Cohort) -> Tensor:
        items = count_items(cohort)
        return drop_repeats(list_items(cohort)[0], items)


def moments_of(table: Params) -> Params:
    """Return Q'Q and Q'b, which are the same for all users."""
    q, b = table[VECTOR], table[BIAS]
    return Params.of(square=q.T @ q, shift=q.T @ b)


def solve_user(alpha: float, lam: float, table: Params, moments: Params, known: Params) -> Params:
    """Return p = (Q' C Q + lam I)^-1 Q' C (x - b); what fills up the list of known items counts as a row of zeros."""
    q = torch.nn.functional.pad(table[VECTOR], (0, 0, 0, 1))[known["item"]]
    b = torch.nn.functional.pad(table[BIAS], (0, 1))[known["item"]]
    eye = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    left = moments["square"] + alpha * (q[:, :, None] * q[:, None, :]).sum(0) + lam * eye
    right = (q * ((1 + alpha) * (1 - b) + b)[:, None]).sum(0) - moments["shift"]
    return Params({"p": torch.linalg.solve(left, right)})


def describe_user(alpha: float, lam: float, bias: bool, table: Params, moments: Params, known: Params) -> Params:
    """Return half the negative gradient of a user's loss at its own best vector, and that loss."""
    p = solve_user(alpha, lam, table, moments, known)["p"]
    here = table[BIAS].new_zeros(len(table[BIAS]) + 1)
    x = here.scatter(0, known["item"], 1.0)[:-1]
    error, c = x - (table[VECTOR] * p).sum(1) - table[BIAS], 1 + alpha * x
    loss = (c * error.square()).mean()
    return Params({VECTOR: (c * error)[:, None] * p, BIAS: c * error * float(bias), "loss": loss}, table.layout)
