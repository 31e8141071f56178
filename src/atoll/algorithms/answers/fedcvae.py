"""FedCVAE: every client sends a generator of its samples, the server trains a classifier on what they make together.

    client:  max over encoder, D_k  E_{x,y} E_{e ~ q(x, y)} log N(x; D_k(y, e), sigma^2) - KL( q || N(center, I) )
    server:  (k, y) ~ share of samples with class y at client k,    e ~ N(center, I) cut at reach,    x = D_k(y, e)
             min_w  E_{x,y} CE(w; x, y)

D_k are decoders of conditional variational autoencoders, which all begin alike. ``variant = "ens"`` is FedCVAE-Ens, as
above. In FedCVAE-KD one decoder D learns what all of them make, min_D E |D(y, e) - x|^2, and makes the classifier's
samples, of all known classes alike. Whoever does not know `center` draws from the wrong prior. Encoders never leave.

Reference: Heinbaugh, Luz-Ricca, Shao. "Data-Free One-Shot Federated Learning Under Very High Statistical
Heterogeneity." ICLR 2023.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.algorithms.trainings.cvae import Autoencoder
from atoll.kernel.algorithm import Count, Epochs, Positive, Range, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.network import NO_NETWORK
from atoll.kernel.params import Params, Stack
from atoll.models.vae import decode, decoder_of
from atoll.toolbox.client import adam, no_past
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.oneshot import count_labels, uploads
from atoll.toolbox.pairs import DECODERS, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.distillation import Student


@dataclass(frozen=True, kw_only=True)
class Generated(ServerAnswer):
    """One classifier, trained on samples from all clients' decoders."""

    variant: Literal["ens", "kd"] = "ens"  # samples of all decoders, or of one that learned from them
    latent: Count = 10  # numbers in e
    lr: Positive = 1e-3  # step size of Adam on autoencoders, decoder and classifier
    center: Annotated[float, Range()] = 0.0  # mean of the prior, a secret of the federation
    reach: Positive = 3.0  # the largest distance of e from the center, in every component
    samples: Count = 1000  # samples that the classifier is trained on; equally many teach the decoder of "kd"
    server_batch: Count = 32  # samples in a step of the server
    server_epochs: Epochs = 5  # passes of the classifier over its samples
    decoder_epochs: Epochs = 5  # passes of the decoder of "kd"

    called: ClassVar[str] = "fedcvae"
    needs: ClassVar[frozenset[str]] = frozenset({DECODERS})
    sends: ClassVar[dict[str, str]] = {"decoder": "model", "labels": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset()  # what it trains by is no `sgd`
    cites: ClassVar[str] = "heinbaugh2023data"

    def upload(self, training: LocalTraining, decoder: Stack, cohort: Cohort) -> Update:
        """Send the decoder, and how many samples of each class there are."""
        return Update(send={"decoder": decoder, "labels": label_counts(cohort)})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Train the initial model on generated samples."""
        assert isinstance(training, Autoencoder)
        bench, decoders, counts = replies.workbench, uploads(replies, "decoder"), count_labels(replies)
        made = self.make_samples(bench, decoders, counts)
        if self.variant == "kd":
            first = decoder_of(training.first(bench.task))
            made = self.make_samples_by_one(bench, self.distil(bench, first, made), counts.sum(0))
        return self.train_classifier(bench, start.model, made)

    # -- what is generated -----------------------------------------------------------------------------------------
    def make_samples(self, bench: Workbench, decoders: Stack, counts: Tensor) -> Params:
        """Make samples by all decoders: a client and a class are as likely as they are in the data."""
        shares = counts.double().cpu().numpy()
        draw = bench.generator("decoders")
        chosen = np.sort(draw.choice(shares.size, self.samples, p=(shares / shares.sum()).ravel()))
        who, classes = np.divmod(chosen, shares.shape[1])
        y, e = torch.from_numpy(classes).to(counts.device), self.draw_prior(bench, draw)
        parts = [
            decode(decoders.client(int(k)), y[mine], e[mine])
            for k in np.unique(who)
            for mine in [torch.from_numpy(who == k).to(counts.device)]
        ]
        return Params.of(x=torch.cat(parts), y=y, e=e)

    def make_samples_by_one(self, bench: Workbench, decoder: Params, counts: Tensor) -> Params:
        """Make samples by one decoder, of every class that somebody has."""
        draw = bench.generator("one decoder")
        y = torch.from_numpy(draw.choice(np.flatnonzero(counts.cpu().numpy()), self.samples)).to(counts.device)
        e = self.draw_prior(bench, draw)
        return Params.of(x=decode(decoder, y, e), y=y, e=e)

    def draw_prior(self, bench: Workbench, draw: np.random.Generator) -> Tensor:
        """Draw e, normal around the center and cut off at the reach, by the inverse of the distribution."""
        low, high = torch.special.ndtr(torch.tensor([-self.reach, self.reach], dtype=torch.float64))
        drawn = torch.from_numpy(draw.uniform(low.item(), high.item(), (self.samples, self.latent)))
        e: Tensor = self.center + torch.special.ndtri(drawn)
        return e.to(bench.task.sample)

    # -- what is learned from it -----------------------------------------------------------------------------------
    def distil(self, bench: Workbench, start: Params, made: Params) -> Params:
        """Return a decoder that learned what all of them made, of the same numbers."""
        cohort = bench.cohort(
            torch.cat([made["e"], made["x"]], 1), made["y"], network=NO_NETWORK, batch_size=self.server_batch
        )
        step = functools.partial(imitate, lr=self.lr, latent=self.latent)
        student = Student(start, no_past(start))
        end = cohort.scan(step, student, epochs=self.decoder_epochs, stream="decoder", train=False)
        one: Params = end.w.client(0)
        return one

    def train_classifier(self, bench: Workbench, start: Params, made: Params) -> Params:
        """Train a model by passes over what was generated."""
        shape = bench.task.sample.shape
        cohort = bench.cohort(made["x"].reshape(-1, *shape), made["y"], batch_size=self.server_batch)
        step = functools.partial(classify, lr=self.lr)
        end = cohort.scan(step, Student(start, no_past(start)), epochs=self.server_epochs, stream="classifier")
        model: Params = end.w.client(0)
        return model


def imitate(student: Student, batch: Batch, given: None, *, lr: float, latent: int) -> Student:  # noqa: ARG001
    """Take one step of Adam on the decoder that learns from the others; a sample is e, and what they made of it."""
    e, wanted = batch.x[:, :latent], batch.x[:, latent:]

    def objective(decoder: Params) -> tuple[Tensor, None]:
        return batch.mean((decode(decoder, batch.y, e) - wanted).square().sum(1)), None

    g, _ = batch.differentiate(objective, student.w)
    return Student(*adam(student.w, g, student.past, lr))


def classify(student: Student, batch: Batch, given: None, *, lr: float) -> Student:  # noqa: ARG001
    """Take one step of Adam on the classifier."""
    g, w, _ = batch.gradient(student.w)
    return Student(*adam(w, g, student.past, lr))
