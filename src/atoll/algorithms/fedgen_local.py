"""FedGen as the survey has it: every client trains a generator of its own, the server mixes them.

    client:  max over encoder, D_k  E_{x,y} E_{e ~ q(x, y)} log N(x; D_k(y, e), sigma^2) - KL( q || N(0, I) )
    server:  (k, y) ~ share of samples with class y at client k,    e ~ N(0, I),    x ~ N(D_k(y, e), sigma_k^2)

The mixture of the generators D_k (decoders of conditional variational autoencoders) gives `samples` samples per round:

    augment:     min_{v_k}  (1 - share) F_k(v_k) + share E_{(x,y) ~ mixture} loss(v_k; x, y)   personal, on the clients
    classifier:  min_w      E_{(x,y) ~ mixture} loss(w; x, y)                                  shared, on the server

Models do not travel, only generators and samples drawn from them. With ``share = 0`` every client trains alone.

Reference: no paper has this form under this name; nearest is the classifier on the mixture in Heinbaugh, Luz-Ricca,
Shao. "Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity." ICLR 2023 (FedCVAE-Ens).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, Positive, Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.models.vae import autoencoder, decoder_of, negative_bound, sample
from atoll.toolbox.client import adam, no_past, sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.server.adam import Past


@record
class State:
    """What the samples of the last round are for: themselves, or the classifier."""

    made: Params | None = None  # samples x and y, to augment
    w: Params | None = None  # the classifier


@record
class Kept:
    """A client's autoencoder and, to augment, its model."""

    vae: Stack
    v: Stack | None


@record
class Improving:
    """An autoencoder on its way."""

    vae: Each
    past: Past


@dataclass(frozen=True, kw_only=True)
class FedGenLocal(Algorithm):
    """Generators of all clients, mixed to augment personal training or to train one classifier."""

    use: Literal["augment", "classifier"] = "augment"  # what the samples are for
    share: Share = 0.5  # weight of generated samples beside the client's own, to augment
    epochs: Epochs = 1  # local epochs per round on v_k, to augment
    server_epochs: Epochs = 5  # passes over the generated samples per round, for the classifier
    samples: Count = 500  # drawn from the mixture in every round
    generator_epochs: Epochs = 5  # local epochs per round on the generator
    generator_lr: Positive = 1e-3  # step size of Adam on the generator
    latent: Count = 8  # numbers in e
    hidden: Count = 128  # width of encoder and decoder

    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[Mapping[str, str]] = {"decoder": "model", "labels": "labels"}
    limits: ClassVar[Limits] = {"local": {"share": 0.0}}
    cites: ClassVar[str] = "heinbaugh2023data"

    @property
    def trains_by_sgd(self) -> bool:
        """Clients that only make samples for the server's classifier train a generator, and no model."""
        return self.use == "augment"

    def start(self, task: Facts) -> State:
        """Return nothing, or the model that is to become a classifier."""
        if not task.one_class_each or not task.sample.is_floating_point():
            raise TaskError(f"FedGenLocal needs samples of numbers, of one class each. {task.name} has others.")
        return State() if self.use == "augment" else State(w=task.network.initial)

    def broadcast(self, server: State) -> State | None:
        """Send what the last round generated, where clients learn from it."""
        return None if server.made is None else server

    def local(self, received: State | None, cohort: Cohort) -> Update:
        """Improve the generator and send what changed; to augment, train the own model as well."""
        kept = self.recall(cohort)
        start = Improving(kept.vae, no_past(kept.vae))
        step = functools.partial(improve, lr=self.generator_lr, latent=self.latent)
        vae = cohort.scan(step, start, epochs=self.generator_epochs, stream="generator", draws=True).vae
        v = None if kept.v is None else self.train(kept.v, received, cohort)
        moved = decoder_of(vae) - decoder_of(self.autoencoder(cohort.task))
        return Update(send={"decoder": moved, "labels": label_counts(cohort)}, keep=Kept(vae, v))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Draw from the mixture; for the classifier, train it on what was drawn."""
        made = self.draw_samples(replies)
        if server.w is None:
            return State(made=made)
        cohort = replies.workbench.cohort(made["x"], made["y"])
        return State(w=sgd(cohort, start=server.w, epochs=self.server_epochs).client(0))

    def personalize(self, server: State, cohort: Cohort) -> Params | Stack:
        """Return the own model, the initial one if the client never took part; or the classifier."""
        own = self.recall(cohort).v
        deployed = server.w if own is None else own
        assert deployed is not None
        return deployed

    def shared(self, server: State) -> Params | None:
        """Return the classifier, if that is what is made."""
        return server.w

    def welcome(self, server: State, cohort: Cohort) -> Params | Stack:
        """Train a new client on its samples and generated ones; or give it the classifier."""
        return self.train(cohort.initial, self.broadcast(server), cohort) if server.w is None else server.w

    def autoencoder(self, task: Facts) -> Params:
        """Return the initial generator, which everybody can make from the seed."""
        return first_autoencoder(task, self.hidden, self.latent)

    def recall(self, cohort: Cohort) -> Kept:
        """Return what these clients keep."""
        v = cohort.stacked(cohort.initial) if self.use == "augment" else None
        return cohort.recall(default=Kept(cohort.stacked(self.autoencoder(cohort.task)), v))

    def train(self, v: Params | Stack, received: State | None, cohort: Cohort) -> Stack:
        """Train the clients' models for local epochs, with generated samples if there are any."""
        if received is None:
            return sgd(cohort, start=v, epochs=self.epochs)
        gradient = functools.partial(augmented_gradient, share=self.share)
        return sgd(cohort, start=v, epochs=self.epochs, gradient=gradient, given=received.made, draws=True)

    def draw_samples(self, replies: Replies) -> Params:
        """Draw samples of all generators together: a client and a class are as likely as they are in the data."""
        bench, order = replies.workbench, np.argsort(replies.clients)  # whoever came first
        decoders = decoder_of(self.autoencoder(bench.task)) + replies.stack("decoder")
        counts = replies.stack("labels").value.double().cpu().numpy()[order]
        draw = bench.generator("samples")
        chosen = np.sort(draw.choice(counts.size, self.samples, p=(counts / counts.sum()).ravel()))
        who, classes = np.divmod(chosen, counts.shape[1])
        like, shape = bench.task.sample, bench.task.sample.shape
        y = torch.from_numpy(classes).to(like.device)
        numbers = torch.from_numpy(draw.normal(size=(self.samples, self.latent + shape.numel()))).to(like)
        pieces = []
        for k in np.unique(who):
            mine = torch.from_numpy(who == k).to(like.device)
            latent, noise = numbers[mine, : self.latent], numbers[mine, self.latent :]
            pieces.append(sample(decoders.client(int(order[k])), y[mine], latent, noise))
        return Params.of(x=torch.cat(pieces).reshape(-1, *shape), y=y)


def first_autoencoder(task: Facts, hidden: int, latent: int) -> Params:
    """Return an autoencoder for the samples of a task, drawn from its seed."""
    assert task.classes is not None, "the task has no classes"
    draw, one = generator(task.seed, "autoencoder"), task.sample.flatten()
    return autoencoder(len(one), task.classes, hidden, latent, draw=draw, like=one[0])


def improve(
    state: Improving,
    batch: Batch,
    given: None,  # noqa: ARG001
    *,
    lr: float,
    latent: int,
    center: float = 0.0,
) -> Improving:
    """Take one step of Adam on a client's autoencoder, whose prior is around the center."""
    noise = batch.normal("latent", len(batch.x), latent)

    def objective(vae: Params) -> tuple[Tensor, None]:
        return batch.mean(negative_bound(vae, batch.x.flatten(1), batch.y, noise, center)), None

    g, _ = batch.differentiate(objective, state.vae)
    return Improving(*adam(state.vae, g, state.past, lr))


def augmented_gradient(w: Params, batch: Batch, made: Params, *, share: float) -> Found:
    """Return the gradient on a batch and as many generated samples; BatchNorm's statistics are the batch's."""
    place = (batch.uniform("places", len(batch.x)) * len(made["y"])).long()
    other = replace(batch, x=made["x"][place], y=made["y"][place], mask=None, keys=batch.keys and batch.keys.fold(1))

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        return (1 - share) * loss + share * other.loss(w | trained), (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss
