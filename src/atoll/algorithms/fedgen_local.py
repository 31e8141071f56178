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
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.algorithm import Algorithm, Count, Epochs, Limits, Positive, Replies, Share, Update
from atoll.batch import Batch
from atoll.cohort import Cohort, Population
from atoll.data.task import Task
from atoll.errors import TaskError
from atoll.local import adam, sgd, unmoved
from atoll.local.descent import Found
from atoll.local.labels import label_counts
from atoll.models.vae import autoencoder, bound, decoder_of, sample
from atoll.params import Params, Stack
from atoll.randomness import number

Server = dict[str, Params]


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

    def start(self, task: Task) -> Server:
        """Nothing, or the model that is to become a classifier."""
        if task.classes is None or task.y.ndim != 1 or not task.x.is_floating_point():
            raise TaskError(f"FedGenLocal generates numbers for a class. {task.name} has none, or samples of no numbers.")
        return {} if self.use == "augment" else {"w": task.network.initial}

    def broadcast(self, server: Server) -> Params | None:
        """The samples of the last round, where clients learn from them."""
        return server.get("made")

    def local(self, made: Params | None, cohort: Cohort) -> Update:
        """Improve the generator and send it; to augment, train the own model as well."""
        kept, start = self.kept(cohort), self.autoencoder(cohort.population)
        given = {"lr": cohort.lr.new_tensor(self.generator_lr)}
        state = {"vae": kept["vae"], "past": unmoved(kept["vae"])}
        step = functools.partial(improve, latent=self.latent)
        vae = cohort.scan(step, state, given=given, epochs=self.generator_epochs, stream="generator", draws=True)["vae"]
        keep = {"vae": vae}
        if self.use == "augment":
            keep["v"] = self.trained(kept["v"], made, cohort)
        send = {"decoder": decoder_of(vae) - decoder_of(start), "labels": label_counts(cohort)}
        return Update(send=send, keep=keep)
