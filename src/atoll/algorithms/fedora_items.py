"""FEDORA for recommenders: users' vectors travel along links between users who know the same items.

    before:  z_k = R x_k / |x_k|,  s_kj = z_k . z_j      (x_k: 1 for items that k knows; R: random signs / sqrt(m))
             S = softmax(temperature s) over the topk highest of each row, j != k,   V = (1 - alpha) (I - alpha S)^-1
    server:  G = V P,  and the table of items as in `fedmf`
    client:  lam_k = exp((l_k(p_k) - l_k(G_k)) / 2) if l_k(G_k) < l_k(p_k) else 0,   l_k on held-back training items
             p_k <- p_k - rate grad F_k(p_k) - rate lam_k (p_k - G_k)

One validation item decides nothing, so the gate asks the last training items, which do not train: each is ranked among
random others, by the cross-entropy of a softmax. A new user with items begins at what reaches it from those like it, a
user without any has the vector 0, so the items' biases decide. Vectors are sent to the server here, which `fedmf` never
does. With ``hold = 0`` the gate stays shut, and this is `fedmf`.

Reference: Wu, Bao, Ainsworth, He. "Personalized Federated Learning with Parameter Propagation." KDD 2023, here for
vectors of users. https://doi.org/10.1145/3580305.3599464
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Count, Limits, NonNegative, Range, Replies, Search, Share, Update, among
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.items import (
    BIAS,
    TABLE,
    VECTOR,
    RowRule,
    Touched,
    count_items,
    draw_negatives,
    drop_repeats,
    gather_rows,
    list_items,
    send_rows,
    train_rows,
)  # fmt: skip
from atoll.toolbox.recommending import Recommending
from atoll.toolbox.server.mixing import identity_mixing, mark_seen, mix_models, none_seen, rows_for, with_replies
from atoll.toolbox.server.similarity import among_known, links, propagation

ASKED = 99  # items that a held-back one is ranked among


@record
class State:
    """The table of items, everybody's last vector, and who is like whom."""

    table: Params
    p: Stack
    P: Tensor  # who learns from whom
    seen: Tensor  # who has sent a vector
    known: Tensor  # who has told what it is like
    sketch: Tensor  # what clients say of the items they know


@dataclass(frozen=True, kw_only=True)
class FedoraItems(Recommending):
    """A shared table of items; users' vectors, drawn to what reaches them from users with the same items."""

    sketch: Count = 1024  # m: numbers in which a user tells what items it knows
    noise: NonNegative = 0.0  # σ: Gaussian noise on each of them
    temperature: NonNegative = 10.0  # how much more similar users count
    topk: Annotated[Count, among(20, 50, 200)] = 200  # how many others a user links to; all where there are fewer
    alpha: Annotated[float, Range(low=0, high=1, open_high=True), Search(0.3, 0.9)] = 0.8  # α: how far vectors travel
    hold: Share = 0.1  # the last of a user's training items, which decide and do not train
    lam_max: NonNegative | None = None  # largest λ; None: 1/rate, with which one step ends at G_k

    sends: ClassVar[dict[str, str]] = {"rows": "rows", "vector": "state", "sketch": "statistic"}
    limits: ClassVar[Limits] = {"fedmf": {"hold": 0.0, "lam_max": 0.0}}
    cites: ClassVar[str] = "wu2023personalized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls p_k to G_k; by default by no more than all the way."""
        return {} if self.lam_max is None else {"rate * lam_max": self.rate * self.lam_max}

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:  # type: ignore[override]
        """Begin with nobody known to be like anybody."""
        table = super().start(task)
        p = spread(task.network.initial.part("head"), task.clients)
        nobody, sketch = none_seen(p), table[BIAS].new_zeros(task.clients, self.sketch)
        return State(table, p, identity_mixing(p), nobody, nobody, sketch)

    def broadcast(self, server: State) -> Params:
        """Send the table."""
        return server.table

    def absorb(self, server: State, replies: Replies) -> State:
        """Find who is like whom: at first, and when others arrive."""
        new = torch.from_numpy(replies.clients).to(server.known.device)
        sketch = server.sketch.index_copy(0, new, replies.stack("sketch")["z"])
        known = mark_seen(server.known, replies.clients)
        scores = sketch.double() @ sketch.double().T
        others = (known & known[:, None]).fill_diagonal_(False)
        S = links(scores, self.topk, self.temperature, among=others)
        P = propagation(S + torch.diag((S.sum(1) == 0).double()), self.alpha).to(server.P.dtype)
        return replace(server, sketch=sketch, known=known, P=P)

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send G_k = sum_j P_kj p_j."""
        return mix_models(among_known(server.P, server.seen, torch.from_numpy(ids).to(server.P.device)), server.p)

    def aggregate(self, server: State, replies: Replies) -> State:  # type: ignore[override]
        """Move each row by the mean of those who touched it; hold the last vectors of all."""
        table = server.table + replies.mean_rows("rows", server.table, least=self.crowd)
        p = with_replies(server.p, replies.clients, replies.stack("vector"))
        return replace(server, table=table, p=p, seen=mark_seen(server.seen, replies.clients))

    def mixing(self, server: State) -> Tensor:
        """Return P over the clients that sent something, each row divided by its sum."""
        return among_known(server.P, server.seen)

    # -- the clients -------------------------------------------------------------------------------------------------
    def prepare(self, table: Params, cohort: Cohort) -> Update:
        """Tell what items the user knows, in random signs."""
        return Update(send={"sketch": Stack.of(z=self.describe(cohort))})

    def describe(self, cohort: Cohort) -> Tensor:
        """Return z_k = R x_k / |x_k|, with noise if there is any."""
        seed, items = cohort.task.seed, count_items(cohort)
        known = drop_repeats(list_items(cohort)[0], items)
        signs = draw_signs(seed, items, self.sketch).to(cohort.device, cohort.initial_dtype)
        rows = torch.cat([signs, torch.zeros_like(signs[:1])])
        sums = torch.stack([rows[mine].sum(0) for mine in known])  # one after another: the same bits in any cohort
        z = sums / ((known < items).sum(1, keepdim=True).to(sums) * self.sketch).sqrt().clamp(min=1)
        if not self.noise:
            return z
        noises = [generator(seed, "sketch noise", k).normal(scale=self.noise, size=self.sketch) for k in cohort.clients]
        return z + torch.from_numpy(np.stack(noises)).to(z)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train as `fedmf` does, the vector drawn to G_k as much as the gate allows; who has none yet begins at G_k."""
        touched = Touched(cohort, self.negatives, self.epochs, hold=self.hold)
        before, G = self.recall_vector(cohort), cohort.received
        p = before if self.lam_max == 0 else before.where(cohort.has_kept, G)
        lam = self.strength(p, G, w, cohort, touched)
        cohort.observe(lam=lam)
        rule = RowRule(self.rate, l2=self.l2, own=tuple(p), penalty=partial(draw_to, tuple(p)))
        beside = G | Stack({"lam": lam})
        p_k, rows = train_rows(cohort, p, touched.rows(w), touched, rule, beside=beside)
        update = send_rows(touched, w, rows, keep=p_k)
        return replace(update, send={**update.send, "vector": p_k - before})

    def strength(self, p: Stack, G: Stack, w: Params, cohort: Cohort, touched: Touched) -> Tensor:
        """Return lam_k: 0 where G_k does not rank the held-back items better."""
        places = touched.held.shape[1]
        others = draw_negatives(cohort, touched.known, ASKED, 0, places=places, purpose="gate")
        ids = torch.cat([touched.held[..., None], others], 2)
        rows = gather_rows(w.only(TABLE), ids)
        q, b, real = rows[VECTOR], rows[BIAS], touched.held < touched.items

        def loss(vector: Stack) -> Tensor:
            scores = (q * vector.value[:, None, None]).sum(-1) + b
            losses = -torch.log_softmax(scores, 2)[..., 0]
            return torch.where(real, losses, 0).sum(1) / real.sum(1).clamp(min=1)

        own, received = loss(p), loss(G)
        most = 1 / self.rate if self.lam_max is None else self.lam_max
        return torch.where(received < own, torch.exp((own - received) / 2).clamp(max=most), 0)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return the table alone; users that never sent a vector have none, and need those of all others."""
        rows = torch.from_numpy(ids)
        if not bool(server.seen[rows].all()):
            return server
        p = rows_for(server.p, ids, server.p.rows(rows))
        return replace(server, p=p, P=torch.zeros_like(server.P), sketch=torch.zeros_like(server.sketch))

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the table with the user's own vector; one that never trained has G_k."""
        own, table = self.recall_vector(cohort), cohort.stacked(server.table)
        if self.lam_max == 0 or bool(cohort.has_kept.all()):
            return own | table
        return own.where(cohort.has_kept, self.reach(server, cohort)) | table

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Return the table with what reaches a new user; 0 where it knows nothing."""
        return self.reach(server, cohort) | cohort.stacked(server.table)

    def reach(self, server: State, cohort: Cohort) -> Stack:
        """Return what would reach users that have told nothing: G = r V P, with r their links to those who have."""
        if not cohort.labelled or not bool(server.known.any()):
            return cohort.stacked(cohort.initial.part("head"))
        scores = torch.stack([server.sketch.double() @ one for one in self.describe(cohort).double()])
        r = links(scores, self.topk, self.temperature, among=server.known.expand(len(cohort), -1))
        matrix = self.mixing(server)
        return mix_models(torch.stack([row @ matrix for row in r.to(matrix.dtype)]), server.p)


def draw_signs(seed: int, items: int, m: int) -> Tensor:
    """Draw m random signs for each item, the same for all clients."""
    return torch.from_numpy(1.0 - 2.0 * generator(seed, "sketch").integers(2, size=(items, m)))


def draw_to(own: tuple[str, ...], whole: Params, beside: Params, places: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG001
    """Return lam / 2 |p - G|^2, summed over pairs."""
    apart = torch.stack([(whole[name] - beside[name]).square().sum() for name in own]).sum()
    return weight.sum() * beside["lam"] / 2 * apart
