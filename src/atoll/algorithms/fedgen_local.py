"""FedGen as the survey has it: every client trains a generator of its own, the server mixes them.

    client:  max over encoder, D_k  E_{x,y} E_{e ~ q(x, y)} log N(x; D_k(y, e), sigma^2) - KL( q || N(0, I) )
    server:  (k, y) ~ share of samples with class y at client k,    e ~ N(0, I),    x ~ N(D_k(y, e), sigma_k^2)

Generators D_k are decoders of conditional variational autoencoders, or with ``by = "gan"`` adversaries of a critic C_k:

    critic:  min  -E log C_k(real | x, y) - E log C_k(made | D_k(y, e), y),   D_k:  min  -E log C_k(real | D_k(y, e), y)

With ``mix = "average"`` there is one D = sum_k p_k D_k, from which all clients begin the next round. The mixture, or D,
gives `samples` samples per round:

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
from atoll.models.gan import adversaries, critic_loss, critic_of, generator_loss
from atoll.models.vae import autoencoder, decoder_of, negative_bound, sample
from atoll.toolbox.client import adam, no_past, sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.oneshot import count_labels
from atoll.toolbox.server.adam import Past

FIRST_DECAY = 0.5  # beta_1 of Adam on a generator and its critic


@record
class State:
    """What the samples of the last round are for: themselves, or the classifier."""

    made: Params | None = None  # samples x and y, to augment
    w: Params | None = None  # the classifier
    decoder: Params | None = None  # the averaged generator


@record
class Kept:
    """A client's autoencoder, or generator and critic, and to augment its model."""

    maker: Stack
    v: Stack | None


@record
class Improving:
    """What makes samples, on its way."""

    maker: Each
    past: Past


@dataclass(frozen=True, kw_only=True)
class FedGenLocal(Algorithm):
    """Generators of all clients, mixed to augment personal training or to train one classifier."""

    use: Literal["augment", "classifier"] = "augment"  # what the samples are for
    by: Literal["vae", "gan"] = "vae"  # what generators are: decoders of autoencoders, or adversaries of a critic
    mix: Literal["mixture", "average"] = "mixture"  # what the server makes of them: all side by side, or their average
    share: Share = 0.5  # weight of generated samples relative to the client's own, to augment
    epochs: Epochs = 1  # local epochs per round on v_k, to augment
    server_epochs: Epochs = 5  # passes over the generated samples per round, for the classifier
    samples: Count = 500  # samples drawn from the mixture in every round
    generator_epochs: Epochs = 5  # local epochs per round on the generator
    generator_lr: Positive = 1e-3  # step size of Adam on the generator
    latent: Count = 8  # numbers in e
    hidden: Count = 128  # width of generator, encoder and critic

    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[Mapping[str, str]] = {"decoder": "state", "labels": "labels"}
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
        """Send what the last round generated, where clients learn from it, and the averaged generator."""
        return None if server.made is None and server.decoder is None else replace(server, w=None)

    def local(self, received: State | None, cohort: Cohort) -> Update:
        """Improve the generator and send what changed; to augment, train the own model as well."""
        kept = self.recall(cohort)
        maker = kept.maker if received is None or received.decoder is None else kept.maker | received.decoder
        step = functools.partial(improve if self.by == "vae" else contend, lr=self.generator_lr, latent=self.latent)
        start = Improving(maker, no_past(maker))
        maker = cohort.scan(step, start, epochs=self.generator_epochs, stream="generator", draws=True).maker
        v = None if kept.v is None else self.train(kept.v, received, cohort)
        moved = decoder_of(maker) - decoder_of(self.first_maker(cohort.task))
        send = {"decoder": moved, "labels": label_counts(cohort)}
        weight = cohort.samples if self.mix == "average" else None
        return Update(send=send, weight=weight, keep=Kept(maker, v))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Draw from the mixture or the average; for the classifier, train it on what was drawn."""
        decoder = self.average(replies) if self.mix == "average" else None
        made = self.draw_samples(replies, decoder)
        if server.w is None:
            return State(made=made, decoder=decoder)
        cohort = replies.workbench.cohort(made["x"], made["y"])
        w = sgd(cohort, start=server.w, epochs=self.server_epochs).client(0)
        return State(w=w, decoder=decoder)

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

    def first_maker(self, task: Facts) -> Params:
        """Return the initial generator with what trains it, which everybody can make from the seed."""
        first = first_autoencoder if self.by == "vae" else first_adversaries
        return first(task, self.hidden, self.latent)

    def recall(self, cohort: Cohort) -> Kept:
        """Return what these clients keep."""
        v = cohort.stacked(cohort.initial) if self.use == "augment" else None
        return cohort.recall(default=Kept(cohort.stacked(self.first_maker(cohort.task)), v))

    def train(self, v: Params | Stack, received: State | None, cohort: Cohort) -> Stack:
        """Train the clients' models for local epochs, with generated samples if there are any."""
        if received is None or received.made is None:
            return sgd(cohort, start=v, epochs=self.epochs)
        gradient = functools.partial(augmented_gradient, share=self.share)
        return sgd(cohort, start=v, epochs=self.epochs, gradient=gradient, given=received.made, draws=True)

    def average(self, replies: Replies) -> Params:
        """Return the generator whose parameters are the means of all clients'."""
        return decoder_of(self.first_maker(replies.workbench.task)) + replies.mean("decoder")

    def draw_samples(self, replies: Replies, averaged: Params | None = None) -> Params:
        """Draw samples of all generators, or of one: a client and a class are as likely as they are in the data."""
        bench, order = replies.workbench, np.argsort(replies.clients)  # whoever came first
        decoders = decoder_of(self.first_maker(bench.task)) + replies.stack("decoder")
        counts = count_labels(replies).double().cpu().numpy()
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
            decoder = decoders.client(int(order[k])) if averaged is None else averaged
            pieces.append(sample(decoder, y[mine], latent, noise))
        return Params.of(x=torch.cat(pieces).reshape(-1, *shape), y=y)


def first_autoencoder(task: Facts, hidden: int, latent: int) -> Params:
    """Return an autoencoder for the samples of a task, drawn from its seed."""
    assert task.classes is not None, "the task has no classes"
    draw, one = generator(task.seed, "autoencoder"), task.sample.flatten()
    return autoencoder(len(one), task.classes, hidden, latent, draw=draw, like=one[0])


def first_adversaries(task: Facts, hidden: int, latent: int) -> Params:
    """Return a generator and a critic for the samples of a task, drawn from its seed."""
    assert task.classes is not None, "the task has no classes"
    draw, one = generator(task.seed, "adversaries"), task.sample.flatten()
    return adversaries(len(one), task.classes, hidden, latent, draw=draw, like=one[0])


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

    g, _ = batch.differentiate(objective, state.maker)
    return Improving(*adam(state.maker, g, state.past, lr))


def contend(state: Improving, batch: Batch, given: None, *, lr: float, latent: int) -> Improving:  # noqa: ARG001
    """Take one step of Adam on a client's generator and critic, both along their gradients before the step."""
    e = batch.normal("latent", 2, len(batch.x), latent)

    def of_critic(critic: Params) -> tuple[Tensor, None]:
        return batch.mean(critic_loss(state.maker | critic, batch.x.flatten(1), batch.y, e[0])), None

    def of_generator(generator: Params) -> tuple[Tensor, None]:
        return batch.mean(generator_loss(state.maker | generator, batch.y, e[1])), None

    g, _ = batch.differentiate(of_critic, critic_of(state.maker))
    more, _ = batch.differentiate(of_generator, decoder_of(state.maker))
    return Improving(*adam(state.maker, g | more, state.past, lr, decay=FIRST_DECAY))


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
