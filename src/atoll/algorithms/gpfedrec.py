"""GPFedRec: users whose item rows became alike are linked, and each is drawn to the rows of its neighbours.

    score of item i for user k:  p_k . q_i^k + b_i^k
    server:  A_kj = 1 / |N_k| for j in N_k = {j: cos(Q_k, Q_j) > threshold x the mean cosine},   else 0
             R = A Q,   Q <- sum_j h_j Q_j / sum_j h_j,   h_j = sum_k A_kj: the mean of all R_k
    client:  min  cross-entropy + reg mean (Q_k - R_k)^2      from Q, over the rows that it touches;  p_k never leaves

Q_k is the table that client k sent back. Of every row, means are over the clients that touched it, each by the number
of its pairs in which the row was: Q_i is sum_j h_j c_ji q_i^j / sum_j h_j c_ji, and in R_k A_kj stands for h_j. A
client that did not reply in the last round is drawn to Q itself. With ``graph = "all"`` everybody is linked to
everybody, and with ``reg = 0`` as well this is `fedmf`. ``graph = "official"`` links the least similar, as the released
code does.

Reference: Zhang, Long, Zhou, Zhang, Yan, Yang. "GPFedRec: Graph-Guided Personalization for Federated Recommendation."
KDD 2024. https://arxiv.org/abs/2305.07866
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Arrival, Deployed, Limits, NonNegative, Replies, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import BIAS, TABLE, VECTOR, RowRule, Touched, deploy_rows, send_rows, train_rows
from atoll.toolbox.recommending import Recommending
from atoll.toolbox.server.mixing import require_bytes

TINY = 1e-12
AT_A_TIME = 8192  # entries that are mixed together


@record
class State:
    """The table of items, and what came back in the last round."""

    table: Params
    clients: Tensor  # who replied
    near: Tensor  # who of them is linked to whom
    sent: Params | None  # every row that came back: whose it is, its number, and its values by how much they count
    reached: Stack | None = None  # where some clients are: what reaches each of them, in place of all that came back


@dataclass(frozen=True, kw_only=True)
class GPFedRec(Recommending):
    """A table of items under private vectors of users, in which users are drawn to those like them."""

    reg: Annotated[NonNegative, Search(0.01, 3, log=True)] = 1.0  # pull of a client's rows to those of its neighbours
    threshold: NonNegative = 1.0  # cosines above this times their mean are links
    graph: Literal["similar", "official", "all"] = "similar"  # who is linked: those alike, those unlike, or all
    rows: Literal["own", "shared"] = "own"  # which rows a client deploys

    needs_unicast: ClassVar[bool] = False  # a table for each client
    limits: ClassVar[Limits] = {"fedmf": {"reg": 0.0, "graph": "all", "rows": "shared"}}
    cites: ClassVar[str] = "zhang2024gpfedrec"

    @property
    def deploys_a_model(self) -> bool:
        """A client that has rows of its own deploys them beside the model."""
        return self.rows == "shared"

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:  # type: ignore[override]
        """Return the table of items; nobody is linked yet."""
        table = super().start(task)
        q = table[VECTOR]
        require_bytes(
            8 * task.clients**2, q.device, f"The server must compare every pair of {task.clients} clients",
            hint="take fewer clients, or `fedmf`.",
        )  # fmt: skip
        nobody = torch.zeros(0, dtype=torch.long, device=q.device)
        return State(table, nobody, torch.zeros(0, 0, dtype=torch.bool, device=q.device), sent=None)

    def broadcast(self, server: State) -> Params:
        """Send the table from which everybody begins."""
        return server.table

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send R_k: each row as the neighbours left it; the table's where none of them touched it."""
        place = {client: at for at, client in enumerate(server.clients.tolist())}
        if server.reached is not None:
            return server.reached.rows(torch.tensor([place[client] for client in ids.tolist()]))
        if server.sent is None or not self.reg:
            return spread(server.table, len(ids))
        links = server.near[[place.get(client, 0) for client in ids.tolist()]]
        links = links & torch.tensor([[client in place] for client in ids.tolist()], device=links.device)
        return mix_rows(server.table, links, server.sent)

    def aggregate(self, server: State, replies: Replies) -> State:  # type: ignore[override]
        """Find who is like whom; move the table by the mean of everybody's neighbours."""
        w = server.table
        clients, sent = replies.list_rows("rows", w)
        near = self.link(w, len(clients), sent)
        heard = (1 / near.sum(1).to(w[BIAS])) @ near.to(w[BIAS])  # how much a client counts in the mean of all means
        shares = dict(zip(clients.tolist(), (heard / heard.max()).tolist(), strict=True))
        table = w + replies.map(partial(weigh, shares)).mean_rows("rows", w, least=self.crowd)
        return State(table, clients, near, weigh_rows(w, sent))

    def link(self, table: Params, clients: int, sent: Params) -> Tensor:
        """Return who is linked to whom, from the cosines of all tables; who is like nobody has itself."""
        if self.graph == "all":
            return torch.ones(clients, clients, dtype=torch.bool, device=sent["owner"].device)
        cosines = compare_tables(table, clients, sent)
        scores = cosines if self.graph == "similar" else cosines.neg_().add_(1)
        near = scores > self.threshold * scores.mean()
        return near | (torch.eye(clients, dtype=torch.bool, device=near.device) & ~near.any(1, keepdim=True))

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return what reaches these clients, and nothing of which rows came from whom."""
        clients = torch.from_numpy(ids).to(server.clients.device)
        return State(server.table, clients, server.near[:0, :0], sent=None, reached=self.unicast(server, ids))

    # -- the clients -------------------------------------------------------------------------------------------------
    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the vector and the touched rows, which are drawn to the neighbours' rows; send how they changed."""
        touched = Touched(cohort, self.negatives, self.epochs)
        p, rows = self._tune(w, cohort.received, cohort, touched)
        return send_rows(touched, w, rows, keep=p)

    def personalize(self, server: State, cohort: Cohort) -> Deployed:
        """Return the table with the user's vector, and its own rows: tuned once more, and not sent."""
        return self._deploy(server.table, self.unicast(server, cohort.clients), cohort)

    def welcome(self, server: State, cohort: Cohort) -> Deployed:
        """Return what a new user has, who is like nobody yet."""
        if not cohort.labelled:
            return self.recall_vector(cohort) | cohort.stacked(server.table)
        return self._deploy(server.table, cohort.stacked(server.table), cohort)

    def _deploy(self, w: Params, R: Stack, cohort: Cohort) -> Deployed:
        if self.rows == "shared":
            return self.recall_vector(cohort) | cohort.stacked(w)
        touched = Touched(cohort, self.negatives, max(self.epochs, 1))
        p, rows = self._tune(w, R, cohort, touched)
        return deploy_rows(p | cohort.stacked(w), touched.ids, rows)

    def _tune(self, w: Params, R: Stack, cohort: Cohort, touched: Touched) -> tuple[Stack, Stack]:
        p = self.recall_vector(cohort)
        penalty = partial(draw_to_neighbours, self.reg) if self.reg else None
        rule = RowRule(self.rate, l2=self.l2, own=tuple(p), penalty=penalty)
        return train_rows(cohort, p, touched.rows(w), touched, rule, beside=touched.rows(R.only(TABLE)))


def draw_to_neighbours(reg: float, whole: Params, R: Params, places: Tensor, weight: Tensor) -> Tensor:
    """Return the mean squared distance to the neighbours' rows at these places, summed over pairs."""
    apart = (whole[VECTOR][places] - R[VECTOR][places]).square().sum(-1)
    apart = apart + (whole[BIAS][places] - R[BIAS][places]).square()
    return reg * (weight * apart).sum() / (whole[VECTOR].shape[-1] + 1)


def weigh(shares: Mapping[int, float], arrival: Arrival) -> Arrival:
    """Let the rows of a client count as much more as it has a share in all means."""
    rows = arrival.fields["rows"]
    each = rows["count"].new_tensor([shares[client] for client in arrival.clients.tolist()])
    counted = rows | Stack({"count": rows["count"] * each[:, None]}, rows.layout)
    return arrival._replace(fields={**arrival.fields, "rows": counted})


def compare_tables(table: Params, clients: int, sent: Params) -> Tensor:
    """Return the cosines of all pairs of tables, which are one table and some changes: only changes are multiplied.

    <Q + D_i, Q + D_j> = |Q|^2 + <Q, D_i> + <Q, D_j> + <D_i, D_j>
    """
    owner, row = sent["owner"], sent["row"]
    base, change = (torch.cat([one[VECTOR], one[BIAS][:, None]], 1) for one in (table, sent))
    along = base.new_zeros(clients).index_add(0, owner, (base[row] * change).sum(1))
    inner = (base.square().sum() + along)[:, None] + along
    for _, some in list_segments(row):
        who, what = owner[some], change[some]
        inner[who[:, None], who] += what @ what.T
    lengths = inner.diagonal().sqrt().clamp(min=TINY)
    return inner.div_(lengths[:, None]).div_(lengths)


def weigh_rows(table: Params, sent: Params) -> Params:
    """Return every row that came back as it is now, by how much it counts, and that as its last number."""
    count, row = sent["count"][:, None], sent["row"]
    now = [sent[VECTOR] + table[VECTOR][row], (sent[BIAS] + table[BIAS][row])[:, None], torch.ones_like(count)]
    return Params({"owner": sent["owner"], "row": row, "values": torch.cat(now, 1) * count})


def mix_rows(table: Params, links: Tensor, sent: Params) -> Stack:
    """Return for each client the mean of every row over its links; the table's where none of them sent it."""
    values = sent["values"]
    # The table counts as next to nothing, so it decides where nobody else does.
    few = torch.cat([table[VECTOR], table[BIAS][:, None], torch.ones_like(table[BIAS])[:, None]], 1) * TINY
    sums, listens = few[:, :, None].repeat(1, 1, len(links)), links.T.to(values)
    for rows, entries, real in list_batches(sent["row"]):
        what = (values[entries] * real[..., None]).transpose(1, 2)
        if values.dtype == torch.float64:  # client by client: the same bits however the cohort is cut into chunks
            each = [(what * one[sent["owner"][entries]][:, None]).sum(-1) for one in listens.T]
            sums[rows] += torch.stack(each, 2)
        else:
            sums[rows] += what @ listens[sent["owner"][entries]]
    means = sums[:, :-1].div_(sums[:, -1:]).permute(2, 0, 1)
    return Stack({VECTOR: means[..., :-1], BIAS: means[..., -1]}, table.layout)


def list_segments(rows: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each number that occurs among sorted ones, and where it stands there."""
    numbers, counts = torch.unique_consecutive(rows, return_counts=True)
    ends = counts.cumsum(0).tolist()
    for number, start, end in zip(numbers.tolist(), [0, *ends], ends, strict=False):
        yield number, slice(start, end)


def list_batches(rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield numbers of rows with equally many entries or nearly so, their entries [row, place] and which are real."""
    numbers, counts = torch.unique_consecutive(rows, return_counts=True)
    first, order = counts.cumsum(0) - counts, counts.argsort(descending=True)
    start = 0
    while start < len(order):
        most = int(counts[order[start]])
        some = order[start : start + max(AT_A_TIME // most, 1)]
        place = torch.arange(most, device=rows.device)
        real = place < counts[some, None]
        yield numbers[some], first[some, None] + place * real, real
        start += len(some)
