"""Faulty methods, written without looking at how the battery works; `test_unseen_faults` says what finds them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Limits, Predictor, Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd

FAR = 5  # rounds in which most of them do what they say


@dataclass(frozen=True, kw_only=True)
class Averaging(Algorithm):
    """What every faulty method does apart from its fault."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train and send what changed."""
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)


def count_labels(carry: Params, batch: Batch, given: None) -> Params:
    """Add up how many samples of each class a client has."""
    classes = torch.arange(len(carry["of"]), device=batch.y.device)
    mine = (batch.y[:, None] == classes).to(carry["of"].dtype)
    return Params.of(of=carry["of"] + (mine if batch.mask is None else mine * batch.mask[:, None]).sum(0))


def labels_of(cohort: Cohort, split: str = "train") -> Tensor:
    """Return [client, class]: counts of labels."""
    nothing = Params.of(of=torch.zeros(cohort.task.classes or 1))
    return cohort.scan(count_labels, nothing, split=split, shuffle=False, train=False)["of"]


def first_sample(carry: Params, batch: Batch, given: None) -> Params:
    """Keep the first sample that a client sees."""
    mine = batch.x[0].reshape(-1).to(carry["x"].dtype)
    return Params.of(x=torch.where(carry["seen"] > 0, carry["x"], mine), seen=torch.ones_like(carry["seen"]))


def sample_of(cohort: Cohort) -> Tensor:
    """Return [client, number]: one sample of each client."""
    nothing = Params.of(x=torch.zeros(cohort.task.sample.numel()), seen=0.0)
    return cohort.scan(first_sample, nothing, shuffle=False, train=False)["x"]


def first_leaf(w: Params | Stack) -> str:
    """Return the name of the largest leaf."""
    return max(w, key=lambda name: w[name].numel())


# 1. The momentum stands outside of the server's state, so a run that is resumed has lost it.
MOMENTUM: dict[str, Tensor] = {}


class Forgetful(Averaging):
    """Server momentum in a dictionary of the module, from round 5 on."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Add the momentum."""
        mean = replies.mean("delta")
        if replies.workbench.round >= FAR:
            mean = Params({name: leaf + 0.5 * MOMENTUM.get(name, 0.0) for name, leaf in mean.items()}, mean.layout)
        MOMENTUM.update(mean)
        return w + mean


# 2. Every fifth round, clients keep the model of the next client in their cohort.
class SwappedMemories(Averaging):
    """What clients keep is shifted by one row in some rounds."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Keep a personal model, sometimes that of the neighbour."""
        v = sgd(cohort, start=cohort.recall(default=w), epochs=1)
        kept = v.rows(torch.arange(len(cohort)).roll(1)) if cohort.round % FAR == FAR - 1 else v
        return Update(send={"delta": v - w}, weight=cohort.samples, keep=kept)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return what was kept."""
        return cohort.recall(default=w)


# 3. Clients weigh by how many test samples they have.
class CountsTest(Averaging):
    """The weight is the size of the test split."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Weigh by test samples."""
        sizes = torch.from_numpy(cohort._host.sizes(cohort.clients, "test")).to(cohort.samples)
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=sizes + 1)


# 4. The server draws from torch's global generator, late.
class GlobalDraws(Averaging):
    """Noise on the server that no seed decides."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Add noise in far rounds."""
        after = w + replies.mean("delta")
        if replies.workbench.round < FAR:
            return after
        return after.map(lambda leaf: leaf + 1e-3 * torch.randn(leaf.shape, dtype=leaf.dtype))


# 5. Counts of labels stand in the last digits of the delta.
class CountsInDelta(Averaging):
    """The delta of one leaf carries label counts, a millionth each."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Add the counts to the first numbers of the largest leaf."""
        delta, counts = sgd(cohort, start=w, epochs=1) - w, labels_of(cohort)
        name = first_leaf(delta)
        flat = delta[name].flatten(1).clone()
        flat[:, : counts.shape[1]] += 1e-6 * counts
        return Update(send={"delta": delta | Stack({name: flat.reshape(delta[name].shape)}, delta.layout)},
                      weight=cohort.samples)  # fmt: skip


# 6. Undeclared, validation samples decide the weight.
class ValidationWeights(Averaging):
    """Clients with many validation samples of class 0 count more."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Weigh by validation labels."""
        delta = sgd(cohort, start=w, epochs=1) - w
        return Update(send={"delta": delta}, weight=cohort.samples + labels_of(cohort, "val")[:, 0])


# 7. New clients are fitted to their test samples.
class WelcomesWithTest(Averaging):
    """`welcome` trains on test data."""

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Train where nobody looks."""
        opened = replace(cohort, splits=frozenset({"train", "val", "test"}))
        return opened.scan(descend, cohort.stacked(w), split="test")


def descend(w: Params, batch: Batch, given: None) -> Params:
    """Take a step of gradient descent."""
    g, after, _ = batch.gradient(w)
    return after.moved(g, -0.1)


# 8. The server changes its state in place, late.
class ChangesInPlace(Averaging):
    """From round 5 on the old state is overwritten."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Add in place."""
        mean = replies.mean("delta")
        if replies.workbench.round < FAR:
            return w + mean
        for name, leaf in w.items():
            leaf.add_(mean[name])
        return w


# 9. The first sample of a batch is answered in another way.
class AnswersByPlace(Averaging):
    """The answer to a sample depends on its place."""

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        """Answer by place."""
        return Predictor(cohort.stacked(w), Params({}), answer_by_place)


def answer_by_place(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Turn the first answer around."""
    outputs = batch.outputs(model)
    first = torch.arange(len(outputs), device=outputs.device) == 0
    return torch.where(first[:, None], -outputs, outputs)


# 10. The server's table of clients has rows by place in the replies, not by client.
@record
class Table:
    """The model, and what each client's first leaf moved by last time."""

    w: Params
    moved: Tensor


class TableByPlace(Algorithm):
    """Clients who moved far last time weigh less, but rows are those of places."""

    sums_suffice: ClassVar[bool] = False

    def start(self, task: Facts) -> Table:
        """Begin with an empty table."""
        return Table(w=task.network.initial, moved=torch.zeros(task.clients, dtype=task.network.dtype))

    def broadcast(self, server: Table) -> Params:
        """Send the model."""
        return server.w

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train."""
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)

    def aggregate(self, server: Table, replies: Replies) -> Table:
        """Weigh by the table, then write the table."""
        delta = replies.stack("delta")
        places = torch.arange(delta.clients)
        weights = replies.weights / (1 + server.moved[places])
        shares = weights / weights.sum()
        mean = Params({name: torch.tensordot(shares, leaf, dims=1) for name, leaf in delta.items()}, delta.layout)
        moved = server.moved.clone()
        moved[places] = delta.norm()
        return Table(w=server.w + mean, moved=moved)

    def personalize(self, server: Table, cohort: Cohort) -> Params:
        """Return the model."""
        return server.w


# 11. A limit that holds for a while only.
@dataclass(frozen=True, kw_only=True)
class LapsingLimit(Averaging):
    """Says that it is FedAvg with mu = 0, and is not from round 5 on."""

    mu: Share = 0.5
    limits: ClassVar[Limits] = {"fedavg": {"mu": 0.0}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Send less later."""
        delta = sgd(cohort, start=w, epochs=1) - w
        return Update(send={"delta": delta * (1 - self.mu if cohort.round < FAR else 0.9)}, weight=cohort.samples)


# 12. The signs of the delta are the bits of a sample.
class SampleInSigns(Averaging):
    """Every number of the largest leaf has the sign that a pixel of a sample has against the sample's mean."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Write the signs."""
        delta, x = sgd(cohort, start=w, epochs=1) - w, sample_of(cohort)
        bits = torch.where(x > x.mean(1, keepdim=True), 1.0, -1.0).to(x)
        name = first_leaf(delta)
        flat = delta[name].flatten(1)
        wide = min(flat.shape[1], bits.shape[1])
        signed = torch.cat([flat[:, :wide].abs() * bits[:, :wide], flat[:, wide:]], 1)
        return Update(send={"delta": delta | Stack({name: signed.reshape(delta[name].shape)}, delta.layout)},
                      weight=cohort.samples)  # fmt: skip


# 13. A sample is kept in one round and sent, scaled and shifted, in a later one.
class KeepsThenSends(Algorithm):
    """What is declared a summary is a sample that was remembered."""

    sends: ClassVar[dict[str, str]] = {"delta": "model", "summary": "statistic"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Send what was kept, from round 5 on."""
        x = sample_of(cohort)
        kept = cohort.recall(default=Params.of(x=torch.zeros(x.shape[1])))["x"]
        summary = 0.3 * kept + 0.1 if cohort.round >= FAR else torch.zeros_like(kept)
        delta = sgd(cohort, start=w, epochs=1) - w
        return Update(send={"delta": delta, "summary": Stack.of(x=summary)}, weight=cohort.samples,
                      keep=Stack.of(x=x))  # fmt: skip


# 14. The exchange before the first round sends the label of the first sample as a weight.
class PreparesLabels(Averaging):
    """`prepare` weighs by a label."""

    def prepare(self, broadcast: Params, cohort: Cohort) -> Update:
        """Send nothing but a weight."""
        most = labels_of(cohort).argmax(1).to(cohort.samples)
        return Update(send={"delta": cohort.stacked(cohort.initial).zeros()}, weight=most + 1)

    def absorb(self, server: Params, replies: Replies) -> Params:
        """Read it and go on."""
        replies.mean("delta")
        return server
