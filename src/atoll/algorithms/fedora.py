"""FEDORA: clients propagate their models to those with similar data, and each takes only what helps it.

    before:  u_k = leading directions of the rows [x, one-hot(y)] of client k,       s_ij = |cos(u_i, u_j)|
             S = softmax(temperature s) over the topk highest of each row, j != i,   P = (1 - alpha) (I - alpha S)^-1
    server:  G = P V
    client:  lam_k = exp((l_k(v_k) - l_k(G_k)) / 2) if l_k(G_k) < l_k(v_k) else 0,   l_k on validation data
             v_k <- v_k - eta grad F_k(v_k) - eta lam_k (v_k - G_k)

A client that has not trained yet has G_k and begins there, as does a new one. With ``lam_max = 0`` or ``alpha = 0``
every client trains alone. ``gate = "official"`` is the released code's: it opens at equality, too. Similarity may also
be that of directions per class (``similarity = "labels"``), or be measured by how well each client's briefly trained
model does on the others' data (``similarity = "loss"``).

Reference: Wu, Bao, Ainsworth, He. "Personalized Federated Learning with Parameter Propagation." KDD 2023;
the authors' released code. https://doi.org/10.1145/3580305.3599464
"""

import logging
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, NonNegative, Range, Replies, Search, Update, among
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError, TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.losses import losses_of
from atoll.toolbox.client.own import own_or_sent
from atoll.toolbox.client.samples import rows_of
from atoll.toolbox.client.sgd import Pull
from atoll.toolbox.client.statistics import refresh_statistics
from atoll.toolbox.server.mixing import (
    identity_mixing,
    initial_models,
    mark_seen,
    mix_models,
    none_seen,
    rows_for,
    with_replies,
    write_rows,
)
from atoll.toolbox.server.similarity import alignment, among_known, bases, links, propagation

log = logging.getLogger("atoll.algorithms")


@record
class State:
    """Everybody's last model, and what is known of who is like whom."""

    v: Stack
    P: Tensor  # who learns from whom
    seen: Tensor  # who has sent a model
    known: Tensor  # who has told what it is like
    bases: Stack | None  # what clients say of their samples
    probes: Stack | None  # briefly trained models, to be compared on others' data
    scores: Tensor  # how alike any two are
    comparing: bool  # whether new clients are to try all probes


@dataclass(frozen=True, kw_only=True)
class Fedora(Algorithm):
    """Personal models, drawn to what reaches them from similar clients where validation data favour that."""

    similarity: Annotated[Literal["subspace", "labels", "loss"], Search()] = "subspace"  # published, by class, by loss
    features: Literal["pixels", "encoder"] = "pixels"  # x itself, or the input of the head of the initial model
    q: Count = 1  # directions per client, or per class of a client
    center: bool = False  # whether a client subtracts its mean first
    noise: NonNegative = 0.0  # σ: Gaussian noise for private directions; 0: none
    temperature: NonNegative = 10.0  # how much more weight similar clients get
    topk: Annotated[Count, among(1, 2, 4)] = 2  # how many others a client links to; all where there are fewer
    alpha: Annotated[float, Range(low=0, high=1, open_high=True), Search(0.3, 0.9)] = 0.8  # α: how far models travel
    gate: Literal["strict", "official"] = "strict"  # whether equal losses leave the gate shut or open it
    lam_max: NonNegative | None = None  # largest λ; None: 1/η, with which one step ends at G_k
    epochs: Epochs = 1  # E: local epochs per round
    probe_epochs: Count = 1  # local epochs before models are compared, if similarity is by loss

    sends: ClassVar[dict[str, str]] = {
        "delta": "model", "bases": "statistic", "probe": "model", "loss": "statistic",
    }  # fmt: skip
    reads_validation: ClassVar[bool] = True  # the gate compares losses there
    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"local": {"lam_max": 0.0}}
    cites: ClassVar[str] = "wu2023personalized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.center and self.noise:
            raise HyperparameterError(
                f"`noise` of Fedora must be 0 with center=True, because a mean of all samples is not private. Got "
                f"{self.noise!r} instead."
            )

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls v_k to G_k; by default by no more than all the way."""
        return {} if self.lam_max is None else {"lr * lam_max": lr * self.lam_max}

    @property
    def exchanges(self) -> int:
        """Models that are compared must have been sent before."""
        return 2 if self.similarity == "loss" else 1

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:
        """Begin with nobody known to be like anybody."""
        self._require(task)
        copies = 4 if self.similarity == "loss" else 3  # before and after a round, and what is sent
        v = initial_models(task, copies)
        P, nobody = identity_mixing(v), none_seen(v)
        scores = torch.zeros_like(P).double()
        return State(v, P, nobody, nobody, bases=None, probes=None, scores=scores, comparing=False)

    def broadcast(self, server: State) -> Stack | None:
        """Send everybody's briefly trained models to clients that are new; otherwise nothing is the same for all."""
        return server.probes if server.comparing else None

    def absorb(self, server: State, replies: Replies) -> State:
        """Find P from clients' data, or from losses of each other's models: at first, and when others arrive."""
        new = torch.from_numpy(replies.clients).to(server.known.device)
        if server.comparing:
            scores = server.scores.index_copy(0, new, torch.exp(-replies.stack("loss").value.double()))
            # Those who were there before have not tried a newcomer's model: what it says of theirs stands for both.
            tried = mark_seen(torch.zeros_like(server.known), replies.clients)
            scores = torch.where(server.known[:, None] & tried, scores.T, scores)
            server = replace(server, scores=scores, comparing=False)
        else:
            bases = write_rows(server.bases, replies.stack("bases"), replies.clients, len(server.known))
            server = replace(server, bases=bases)
            if self.similarity == "loss":
                probes = write_rows(server.probes, replies.stack("probe"), replies.clients, len(server.known))
                return replace(server, probes=probes, comparing=True)
            server = replace(server, scores=alignment(bases["basis"], bases["basis"]).double())
        known = mark_seen(server.known, replies.clients)
        return replace(server, known=known, P=self._propagation(server.scores, known, server.P))

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send G_k = sum_j P_kj v_j."""
        return mix_models(self.mixing(server)[torch.from_numpy(ids)], server.v)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Hold the last models of all clients, moved by those who replied."""
        v = with_replies(server.v, replies.clients, replies.stack("delta"))
        return replace(server, v=v, seen=mark_seen(server.seen, replies.clients))

    def mixing(self, server: State) -> Tensor:
        """Return P over the clients that sent something, each row divided by its sum."""
        return among_known(server.P, server.seen)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return G_k in the place of everybody's model; a client that never told what it is like needs them all."""
        if not bool(server.known[torch.from_numpy(ids)].all()):
            return server
        only = mark_seen(none_seen(server.v), ids)
        v, P = rows_for(server.v, ids, self.unicast(server, ids)), identity_mixing(server.v)
        return replace(
            server, v=v, P=P, seen=only, known=only, bases=None, probes=None, scores=torch.zeros_like(server.scores)
        )

    # -- the clients -------------------------------------------------------------------------------------------------
    def prepare(self, probes: Stack | None, cohort: Cohort) -> Update:
        """Tell the directions of the own samples, or how well everybody's models do on them."""
        if probes is not None:
            models = [cohort.initial + probes.client(row) for row in range(probes.clients)]
            return Update(send={"loss": Stack.of(loss=_losses(models, cohort))})
        bases = self._bases(cohort)
        if self.similarity != "loss":
            return Update(send={"bases": bases})
        probe = sgd(cohort, start=cohort.initial, epochs=self.probe_epochs, stream="probe") - cohort.initial
        return Update(send={"bases": bases.only(["plain"]), "probe": probe})

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train the own model, drawn to G_k as much as the gate allows; who has none yet begins at G_k."""
        before, G = cohort.recall(default=cohort.initial), cohort.received
        v = before if self.lam_max == 0 else before.where(cohort.has_kept, before | G)
        v_k, lam = self.train(v, G, cohort, epochs=self.epochs)
        cohort.observe(lam=lam)
        return Update(send={"delta": v_k.trained - before.trained}, keep=v_k)

    def train(self, v: Stack, G: Stack, cohort: Cohort, *, epochs: int, stream: str = "main") -> tuple[Stack, Tensor]:
        """Return v after some epochs, drawn to G as much as the gate allows, and lam_k."""
        lam = self.strength(v, G, cohort)
        return sgd(cohort, start=v, epochs=epochs, stream=stream, pull=Pull(lam, G)), lam

    def strength(self, v: Stack, G: Stack, cohort: Cohort) -> Tensor:
        """Return lam_k: 0 where G_k does not lower the validation loss."""
        own, received = losses_of([v, v | G], cohort, "val").unbind(1)
        opens = received < own if self.gate == "strict" else received <= own
        most = 1 / cohort.lr if self.lam_max is None else cohort.lr.new_tensor(self.lam_max)
        return torch.where(opens, torch.minimum(torch.exp((own - received) / 2), most), 0)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model; one that never trained has G_k, or the initial model if it takes nothing."""
        if self.lam_max == 0:
            return cohort.recall(default=cohort.initial)

        def receive() -> Stack:
            known, G = server.known[cohort.ids], self.unicast(server, cohort.clients)
            return G if known.all() else G.where(known, self.reach(server, cohort))

        return own_or_sent(cohort, receive)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Return what would reach a new client, with statistics of its samples."""
        return refresh_statistics(cohort, cohort.stacked(cohort.initial) | self.reach(server, cohort))

    def reach(self, server: State, cohort: Cohort) -> Stack:
        """Return what would reach clients that have told nothing: G = r P V, with r their links to those who have.

        Without labels, r is from samples alone.
        """
        if not bool(server.known.any()):  # nobody to be like
            return cohort.stacked(cohort.initial).trained
        if cohort.labelled and self.similarity == "loss":
            v = server.v
            scores = torch.exp(-_losses([cohort.initial | v.client(row) for row in range(v.clients)], cohort).double())
        else:
            assert server.bases is not None  # somebody is known
            kind = "basis" if cohort.labelled else "plain"
            scores = alignment(self._bases(cohort)[kind], server.bases[kind])
        r = links(scores, self.topk, self.temperature, among=server.known.expand(len(cohort), -1))
        matrix = self.mixing(server)
        reaching = torch.stack([row @ matrix for row in r.to(matrix.dtype)])  # in the same bits for any cohort
        return mix_models(reaching, server.v)

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack:
        """Train as in a round, with what reached the new client as its G."""
        return self.train(model, given.trained, cohort, epochs=epochs, stream=stream)[0]

    # -- parts -------------------------------------------------------------------------------------------------------
    def _bases(self, cohort: Cohort) -> Stack:
        """Describe each client's samples: `basis`, and `plain` without labels."""
        seed, rows = cohort.task.seed, rows_of(cohort, encoded=self.features == "encoder")
        by_class = self.similarity == "labels" and cohort.labelled
        each = [
            bases(
                x, y, self.q, by_class=by_class, center=self.center, noise=self.noise, rng=generator(seed, "basis", k)
            )
            for k, (x, y) in zip(cohort.clients.tolist(), rows, strict=True)
        ]
        basis, plain = (torch.stack(parts).to(cohort.initial_dtype) for parts in zip(*each, strict=True))
        return Stack.of(basis=basis, plain=plain)

    def _propagation(self, scores: Tensor, there: Tensor, like: Tensor) -> Tensor:
        """Return P from similarities; a client that did not answer has itself, and nobody links to it."""
        others = (there & there[:, None]).fill_diagonal_(False)
        if self.topk > int(others.sum(1).max()):
            log.warning("topk=%d: there are %d clients, who all link to each other", self.topk, int(there.sum()))
        S = links(scores, self.topk, self.temperature, among=others)
        return propagation(S + torch.diag((S.sum(1) == 0).double()), self.alpha).to(like.dtype)

    def _require(self, task: Facts) -> None:
        if self.features == "pixels" and not task.sample.is_floating_point():
            raise TaskError(
                f"Fedora compares samples of numbers. Those of {task.name} are {task.sample.dtype}.",
                hint="use fedora:features=encoder.",
            )
        if self.similarity == "labels" and (not task.one_class_each):
            raise TaskError(
                f"similarity='labels' needs one class per sample. {task.name} has none.",
                hint="use fedora:similarity=loss.",
            )
        if task.largest["val"] == 0 and self.gate == "strict":
            log.warning("no client has validation samples: the gate of Fedora stays shut, and all clients train alone")


def _losses(models: list[Params], cohort: Cohort) -> Tensor:
    """Return the losses of every model on validation data, on training data without any, [clients, models]."""
    held = cohort.has_samples("val")
    return torch.where(held[:, None], losses_of(models, cohort, "val"), losses_of(models, cohort))
