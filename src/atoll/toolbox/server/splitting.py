"""One-shot methods with a common base under blocks of the clients' own, and what server and clients make of these.

Of what clients sent, their models w_k and, class by class, sums of unit features z (`evidence`):

    shared        b_l = sum_k p_kl w_kl,      p_kl ~ n_k for those who share block l;  the first s_k blocks of client k
    prototypes    p_c = unit((1 - rho_c) unit(sum_k omega_kc p_kc) + rho_c a_c),      omega_kc ~ n_kc^a r_k^b q_kc^g
    together      s cos(sum_k (n_k / n) z_k(x), p_c), or where clients do not agree on directions: sum_k a_kc l_kc(x)
    student       min_w  lf sum_l |h_l(x; w) - h_l(x)|^2 / |h_l(x)|^2
                         + T^2 KL(softmax(l(x) / T) || softmax(l(x; w) / T)) + lc CE,    from b, x public samples,
                  l_c(x) = sum_k a_kc l_kc(x),  a_kc ~ n_kc r_k,   h_l(x) = sum_k p_kl h_kl(x)
    personal      the blocks above the base, once the others' work came back:  CE + beta |f(x; v) - f(x)|^2 / d

r_k is a client's reliability, q_kc its confidence, a_c a corner of a simplex (`server.prototypes`); l_k are a client's
logits, h_kl what its block l says, f what enters the head: of the student, or of all models in the mean.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Deployed, Epochs, NonNegative, Positive, Predictor, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.blocks import Blocks, bench_with_block_features, blocks_of, train_above
from atoll.toolbox.client.descent import Found as Gradient
from atoll.toolbox.client.evidence import evidence
from atoll.toolbox.client.features import class_sums, feature_size, features_and_outputs
from atoll.toolbox.objectives.etf import simplex_etf
from atoll.toolbox.objectives.margins import margin_logits, margins, own_moments
from atoll.toolbox.oneshot import average_models, require_public, uploads
from atoll.toolbox.server import prototypes
from atoll.toolbox.server.distillation import lessons
from atoll.toolbox.server.fusion import fuse, stack_features
from atoll.toolbox.server.voting import of_logits

log = logging.getLogger("atoll.toolbox.server.splitting")

AGREED = 0.3  # the mean cosine between clients' directions of a class, below which their features are not mixed
SCALE = 16.0  # s: of cosines that are logits
TEMPERATURE = 4.0  # T


@record
class Found:
    """What the server made of the uploads."""

    clients: Tensor  # who replied, in the order of the rows of all that follows
    models: Stack
    evidence: Stack
    agreement: Tensor  # of clients on the directions of classes
    prototypes: Tensor  # p_c, [class, feature]
    one: Params | None = None  # of every block, what those have who share it; the student, if there is one
    whole: bool = False  # whether that is a model for everybody


@record
class State:
    """The server's state."""

    model: Params  # what clients begin with
    anchors: Tensor  # a_c
    splits: Tensor  # how many blocks each client shares
    alike: Tensor | None = None  # how alike clients are, block by block, once they have shown it
    found: Found | None = None  # None while nobody has uploaded


@record
class Back:
    """What clients are sent after their upload."""

    one: Params | None = None  # one model, or all of them:
    models: Stack | None = None
    shares: Tensor | None = None  # how much each of these counts
    prototypes: Params | None = None


@record
class Pull:
    """What holds a client's features: these models, as much as they count."""

    many: list[Params]
    shares: Tensor
    beta: float


@dataclass(frozen=True, kw_only=True)
class Splitting(Algorithm):
    """Base of such methods: a subclass says where the split is, and ends its `aggregate` with `conclude`."""

    epochs: Epochs = 10  # E: local epochs
    answer: Literal["auto", "prototypes", "outputs"] = "auto"  # how models answer together; auto: if they agree
    volume: NonNegative = 1.0  # a: exponent of the number of samples in the weight of a client's prototype
    reliability: NonNegative = 1.0  # b: exponent of its accuracy on held-out samples
    confidence: NonNegative = 1.0  # g: exponent of the concentration of the class's features
    shrinkage: NonNegative = 20.0  # m: how many samples the anchor of a class counts as
    robust: bool = False  # whether to take the geometric median of prototypes, not their mean
    student_epochs: Epochs = 0  # of the server on public samples, to make one model of all; 0: all are kept
    student_of: Literal["margins", "logits"] = "margins"  # what it is taught: what clients can tell apart, or
    # their logits weighted by class
    student_lr: Positive = 0.01  # step size of the student
    align: NonNegative = 1.0  # lf: weight of the match between the student's shared blocks and the clients'
    labels: NonNegative = 0.0  # lc: weight of the labels of public samples
    personal: Literal["head", "prototypes", "none"] = "head"  # what clients deploy: their own model, with its head or
    # with personal prototypes; or what everybody has
    personal_epochs: Epochs = 5  # epochs of clients, above the base, after the single download
    beta: NonNegative = 0.1  # β: pull of the client's features to those that came back

    one_shot: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"model": "model", "evidence": "statistic", "moments": "statistic"}

    # -- the clients -------------------------------------------------------------------------------------------------
    def findings(self, cohort: Cohort, w: Stack) -> dict[str, Stack]:
        """Return what clients send beside trained models: evidence of classes, and the moments that margins need."""
        found = {"evidence": evidence(cohort, w, feature_size(self, cohort.task))}
        taught = self.student_epochs > 0 and self.student_of == "margins"
        return found | ({"moments": own_moments(cohort, w)} if taught else {})

    @property
    def deploys_a_model(self) -> bool:
        """The client's own with its head, or a student; else prototypes or other models stand beside it."""
        return self.personal == "head" or (self.personal == "none" and self.student_epochs > 0)

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:
        """Return the initial model and the corners of a simplex; nobody shares anything yet."""
        size, model = feature_size(self, task), task.network.initial
        blocks_of(task)  # raises for a network without blocks
        if self.student_epochs:
            require_public(self, task)
        assert task.classes is not None
        anchors = simplex_etf(task.classes, size, generator(0, "anchors")).to(next(iter(model.floating.values())))
        splits = torch.zeros(task.clients, dtype=torch.int64, device=task.sample.device)
        return State(model, anchors, splits)

    def broadcast(self, server: State) -> Tree:
        """Return the model that all clients begin with."""
        return server.model

    def conclude(self, server: State, replies: Replies) -> State:
        """Return the state with all models, each on the blocks that it shares, their prototypes, and one for all.

        That is the student, or the average if everybody shares everything.
        """
        models, sent, task = uploads(replies, "model"), uploads(replies, "evidence"), replies.workbench.task
        agreement = prototypes.agreement(sent["sum"], sent["count"])
        log.info("directions of a class agree with cosine %.2f between clients", float(agreement))
        clients = torch.from_numpy(replies.clients).to(server.splits.device).sort().values
        found = Found(clients, models, sent, agreement, self.directions(sent, server.anchors))
        blocks, splits = blocks_of(task), server.splits[clients]
        one = self.merge(blocks, found, splits, replies.workbench)
        if self.student_epochs:
            one = self.distil(one, found, splits, replies)
        whole = self.student_epochs > 0 or bool((splits == len(blocks)).all())
        models = on_shared_blocks(blocks, models, one, splits)
        return replace(server, found=replace(found, models=models, one=one, whole=whole))

    def merge(self, blocks: Blocks, found: Found, splits: Tensor, bench: Workbench) -> Params:
        """Return one model: of every block the average over those who share it, or over all where nobody does."""
        parts = [
            average_models(found.models.only(leaves), share)
            for leaves, share in zip(blocks.leaves, sharers(blocks, found, splits), strict=True)
        ]
        merged = {name: leaf for part in parts for name, leaf in part.items()}
        return Params({name: merged[name] for name in found.models}, found.models.layout)

    def directions(self, sent: Stack, anchors: Tensor) -> Tensor:
        """Return the prototypes p_c, [classes, features], of what clients sent."""
        omega = prototypes.weights(
            sent["count"],
            prototypes.reliability(sent["correct"], sent["tested"]),
            prototypes.confidence(sent["sum"], sent["count"]),
            powers=(self.volume, self.reliability, self.confidence),
        )
        mean = prototypes.fuse(sent["sum"], omega, robust=self.robust)
        return prototypes.shrink(mean, anchors, sent["count"].sum(0), strength=self.shrinkage)

    def distil(self, w: Params, found: Found, splits: Tensor, replies: Replies) -> Params:
        """Teach one model to say, block by block, what those say who share it, and to answer what all answer."""
        bench, task = replies.workbench, replies.workbench.task
        (x, y), blocks, talkative = bench.public, blocks_of(task), bench_with_block_features(bench)
        said = blocks.split_by_block(talkative.answers(found.models, x, features=True))
        shares = sharers(blocks, found, splits)
        base = [torch.einsum("k,ksd->sd", share.to(one), one) for share, one in zip(shares, said, strict=True)]
        likely = (self.teaching_logits(found, replies, x) / TEMPERATURE).softmax(1)
        classes = F.one_hot(y, task.classes or 0).to(likely.dtype)
        cohort = lessons(bench, x, torch.cat([*base, likely, classes], 1), network=talkative.network)
        step = functools.partial(student_gradient, blocks, int(splits.max()), self.align, self.labels)
        lr = torch.full_like(cohort.lr, self.student_lr)
        return sgd(cohort, w, epochs=self.student_epochs, lr=lr, gradient=step).client(0)

    def teaching_logits(self, found: Found, replies: Replies, x: Tensor) -> Tensor:
        """Return what all models together answer to samples, as the student is taught it."""
        bench, models = replies.workbench, found.models
        if self.student_of == "logits":
            return torch.einsum("kc,ksc->sc", votes(found), bench.answers(models, x))
        scaled = margins(uploads(replies, "moments")) * SCALE
        return margin_logits(bench.answers(models, x, features=True), scaled)

    # -- what comes out ----------------------------------------------------------------------------------------------
    def shared(self, server: State) -> Params | Predictor:
        """Return what everybody deploys: the one model that there is, or all together; the first if nobody replied."""
        found = server.found
        if found is None:
            return server.model
        if found.one is not None and found.whole:
            return found.one
        if self.answer == "outputs" or (self.answer == "auto" and found.agreement < AGREED):
            return ensemble(found.models, Params.of(shares=votes(found)), of_logits)
        return ensemble(found.models, Params.of(shares=sizes(found), prototypes=found.prototypes), by_directions)

    def last_broadcast(self, server: State) -> Back | None:
        """Return what all others found: the one model or all, and prototypes to be near to."""
        found = server.found
        if self.personal == "none" or found is None:
            return None
        back = Back(found.one) if found.whole else Back(models=found.models, shares=sizes(found))
        near = Params.of(prototypes=found.prototypes) if self.personal == "prototypes" else None
        return replace(back, prototypes=near)

    def finish(self, server: State, cohort: Cohort) -> Stack | None:
        """Train what lies above the base of every client's own model, held to what all others found."""
        if self.personal == "none" or server.found is None:
            return None
        one, models, shares = server.found.one, server.found.models, sizes(server.found)
        w = self.own(server, server.found, cohort)
        if one is not None and server.found.whole:
            given = Pull([one], torch.ones_like(shares[:1]), self.beta)
        else:
            given = Pull([models.client(k) for k in range(models.clients)], shares, self.beta)

        def train(some: Cohort, start: Stack, names: frozenset[str]) -> Stack:
            step = functools.partial(held_gradient, names)
            return sgd(some, start, epochs=self.personal_epochs, only=names, gradient=step, given=given)

        return train_above(cohort, blocks_of(cohort.task), w, server.splits[cohort.ids], train)

    def own(self, server: State, found: Found, cohort: Cohort) -> Stack:
        """Return what each client sent, the first model for who sent nothing, on the blocks that it shares."""
        start, models = cohort.stacked(server.model), found.models
        same = found.clients == cohort.ids[:, None]
        there, row = same.any(1), same.long().argmax(1)
        own = models.rows(row).where(there, start)
        assert found.one is not None
        return on_shared_blocks(blocks_of(cohort.task), own, found.one, server.splits[cohort.ids])

    def personalize(self, server: State, cohort: Cohort) -> Deployed:
        """Return the client's own model, with its head or with prototypes near its own; or what everybody has."""
        if self.personal == "none" or server.found is None:
            return self.shared(server)
        v = cohort.recall(default=self.own(server, server.found, cohort))
        if self.personal == "head":
            return v
        everybody = server.found.prototypes
        mine = class_sums(cohort, v, everybody.shape[1], unit=True)
        near = prototypes.personal(mine["sum"], everybody, mine["count"])
        return Predictor(v, Stack.of(prototypes=near), by_own_directions)

    def welcome(self, server: State, cohort: Cohort) -> Deployed:
        """Give a new client what everybody deploys."""
        return self.shared(server)


# -- blocks that are shared --------------------------------------------------------------------------------------------
def sharers(blocks: Blocks, found: Found, splits: Tensor) -> Tensor:
    """Return how much each client counts in every block, [block, client]: by samples, among those who share it."""
    shares = (splits > torch.arange(len(blocks), device=splits.device)[:, None]) * sizes(found)
    nobody = ~shares.any(1, keepdim=True)
    shares = torch.where(nobody, sizes(found), shares)
    return shares / shares.sum(1, keepdim=True)


def on_shared_blocks(blocks: Blocks, models: Stack, one: Params, splits: Tensor) -> Stack:
    """Return every client's model with the blocks that it shares from one model."""
    merged = dict(models)
    for number, leaves in enumerate(blocks.leaves):
        shares = splits > number
        merged |= {
            name: torch.where(shares.reshape(-1, *[1] * one[name].ndim), one[name], models[name]) for name in leaves
        }
    return Stack(merged, models.layout)


# -- how much clients count --------------------------------------------------------------------------------------------
def sizes(found: Found) -> Tensor:
    """Return each client's share of samples, n_k / n."""
    samples: Tensor = found.evidence["count"].sum(1)
    return samples / samples.sum()


def votes(found: Found) -> Tensor:
    """Return a_kc ~ n_kc r_k: who has no sample of a class has no vote on it; where nobody has one, all count alike."""
    sent = found.evidence
    shares = prototypes.weights(sent["count"], prototypes.reliability(sent["correct"], sent["tested"]), least=1)
    return torch.where(shares.sum(0) > 0, shares, 1 / len(shares))


# -- rules of answering ------------------------------------------------------------------------------------------------
def by_directions(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return the cosines of the mean of all members' unit features with the prototypes."""
    features = stack_features([batch.features(member) for member in members_of(beside)])
    mean = fuse(features, "size", shares=beside["shares"], normalise=True)
    return SCALE * prototypes.unit(mean) @ beside["prototypes"].T


def by_own_directions(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Return the cosines of the model's features with the prototypes."""
    return SCALE * prototypes.unit(batch.features(model)) @ beside["prototypes"].T


# -- what is minimised -------------------------------------------------------------------------------------------------
def student_gradient(blocks: Blocks, split: int, align: float, labels: float, w: Params, batch: Batch) -> Gradient:
    """Return the gradient of the student's loss; targets are what blocks should say, probabilities, and classes."""
    widths = [*blocks.widths, blocks.widths[-1], blocks.widths[-1]]
    *wanted, _, likely, right = torch.split(batch.y, widths, dim=1)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        said, after = replace(batch, variant=replace(batch.variant, features=True)).forward(w | trained)
        *base, logits = blocks.split_by_block(said)
        apart = F.kl_div((logits / TEMPERATURE).log_softmax(1), likely, reduction="none").sum(1) * TEMPERATURE**2
        for here, there in zip(base[:split], wanted[:split], strict=True):
            apart = apart + align * relative(here, there)
        loss = batch.mean(apart - labels * (right * logits.log_softmax(1)).sum(1))
        return loss, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss


def relative(here: Tensor, there: Tensor) -> Tensor:
    """Return |here - there|^2 / |there|^2 of every row; 0 where there is nothing to be like."""
    length = there.square().sum(1)
    apart = (here - there).square().sum(1)
    return torch.where(length > 0, apart / torch.where(length > 0, length, 1), 0)


def held_gradient(names: frozenset[str], v: Params, batch: Batch, given: Pull) -> Gradient:
    """Return the gradient, for some leaves, of the loss plus the distance of features to the given models'."""
    each = stack_features([batch.deployed.features(one) for one in given.many])
    wanted = torch.einsum("k,ksd->sd", given.shares, each)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        features, outputs, after = features_and_outputs(batch, v | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        apart = batch.mean((features - wanted).square().mean(1))
        return loss + given.beta * apart, (loss, after.buffers.only(names))

    g, (loss, buffers) = batch.differentiate(objective, v.trained.only(names))
    return g, v | buffers, loss
