"""A generator of the client's own samples: a conditional variational autoencoder, of which the decoder leaves.

    max over encoder, D_k  E_{x,y} E_{e ~ q(x, y)} log N(x; D_k(y, e), sigma^2) - KL( q || N(center, I) )

All begin alike, as everybody can make from the seed: nothing is sent before. Whoever does not know `center` draws from
the wrong prior. Encoders never leave.

Reference: Heinbaugh, Luz-Ricca, Shao. "Data-Free One-Shot Federated Learning Under Very High Statistical
Heterogeneity." ICLR 2023.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.algorithms.fedgen_local import Improving, first_autoencoder, improve
from atoll.kernel.algorithm import Count, Epochs, Positive, Range
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError, name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.models.vae import decoder_of
from atoll.toolbox.client import no_past
from atoll.toolbox.pairs import DECODERS, LocalTraining, Start


@dataclass(frozen=True, kw_only=True)
class Autoencoder(LocalTraining):
    """A conditional autoencoder of the client's samples."""

    epochs: Epochs = 10  # E: local epochs
    latent: Count = 10  # numbers in e
    hidden: Count = 128  # width of encoder and decoder
    lr: Positive = 1e-3  # step size of Adam on autoencoders, decoder and classifier
    center: Annotated[float, Range()] = 0.0  # mean of the prior, a secret of the federation

    called: ClassVar[str] = "cvae"
    offers: ClassVar[frozenset[str]] = frozenset({DECODERS})
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "heinbaugh2023data"

    @property
    def deploys_a_model(self) -> bool:
        """Whether what an answer makes of decoders answers as its network does."""
        return True

    def start(self, task: Facts) -> Start:
        """Return the initial classifier, of a task whose samples can be generated."""
        if not task.sample.is_floating_point():
            raise TaskError(f"{name_in_messages(self)} generates samples of numbers. {task.name} has others.")
        return super().start(task)

    def broadcast(self, start: Start) -> None:
        """Send nothing: everybody can make the initial autoencoder from the seed."""

    def train(self, received: None, cohort: Cohort) -> Stack:
        """Return each client's decoder."""
        vae = self.first(cohort.task)
        step = functools.partial(improve, lr=self.lr, latent=self.latent, center=self.center)
        end = cohort.scan(step, Improving(vae, no_past(vae)), epochs=self.epochs, stream="vae", draws=True)
        decoder: Stack = decoder_of(end.maker)
        return decoder

    def first(self, task: Facts) -> Params:
        """Return the initial autoencoder."""
        return first_autoencoder(task, self.hidden, self.latent)
