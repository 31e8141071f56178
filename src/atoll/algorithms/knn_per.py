"""kNN-Per: a shared model, and beside it each client's own training samples, of which the nearest have a say.

    p_k(y | x) = (1 - lam_k) softmax(f(x; w))_y + lam_k sum_{i in N_k(x)} [y_i = y] e_i / sum_{i in N_k(x)} e_i

    e_i = exp(-|z(x; w) - z(x_i; w)|^2 / (scale d)),        w by federated averaging

z is what enters the head, d its size, N_k(x) the nearest of client k's training samples. lam_k is given, or the best of
0, 0.01, ..., 1 on the client's validation data. With ``lam = 0`` this is FedAvg.

Reference: Marfoq, Neglia, Kameni, Vidal. "Personalized Federated Learning through Local Memorization." ICML 2022,
Algorithm 1. https://arxiv.org/abs/2111.09360
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Deployed,
    Epochs,
    Limits,
    Positive,
    Predictor,
    Search,
    Share,
    Update,
    Weighting,
    among,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.datastore import datastore, say_neighbours
from atoll.toolbox.client.features import feature_size, features_and_outputs

SHARES = tuple(hundredths / 100 for hundredths in range(101))
UNDECIDED = 0.5  # lam of a client without validation samples


@record
class Given:
    """What shares are tried on."""

    w: Params
    store: Each
    shares: Tensor


@dataclass(frozen=True, kw_only=True)
class KNNPer(Algorithm):
    """A shared model whose answers are mixed with those of a client's nearest samples."""

    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all
    lam: Share | None = None  # λ: share of the neighbours; None: the best one on each client's validation data
    neighbours: Annotated[Count, among(5, 10, 20)] = 10  # k: how many stored samples vote
    scale: Annotated[Positive, Search(0.1, 10, log=True)] = 1.0  # width of the kernel, in numbers of features
    capacity: Count | None = None  # how many samples a client stores; None: all of its training samples

    reads_validation: ClassVar[bool] = True  # lam is the best there
    limits: ClassVar[Limits] = {"fedavg": {"lam": 0.0}}
    cites: ClassVar[str] = "marfoq2022personalized"

    @property
    def deploys_a_model(self) -> bool:
        """Stored samples stand beside it, if neighbours have a share."""
        return self.lam == 0

    def start(self, task: Facts) -> Params:
        """Return the shared model."""
        feature_size(self, task)
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train and send as FedAvg."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))

    def personalize(self, w: Params, cohort: Cohort) -> Deployed:
        """Store the training samples as the newest w sees them; clients that never took part do so, too."""
        if self.lam == 0:
            return w
        task = cohort.task
        store = datastore(cohort, w, feature_size(self, task), self.capacity)
        share = self._best_share(w, store, cohort) if self.lam is None else torch.full_like(cohort.samples, self.lam)
        share = torch.where(store["taken"].any(1), share, 0)
        return Predictor(w, store | Stack.of(share=share), self.answer)

    def answer(self, w: Params, store: Params, batch: Batch) -> Tensor:
        """Return the logarithms of the mixed probabilities."""
        own, near = self._both(w, store, batch)
        return _log((1 - store["share"]) * own + store["share"] * near)

    def _both(self, w: Params, store: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the classes by the model and by the neighbours."""
        features, outputs, _ = features_and_outputs(batch, w)
        near = say_neighbours(store, features, count=self.neighbours, scale=self.scale, classes=outputs.shape[1])
        return outputs.softmax(1), near

    def _best_share(self, w: Params, store: Stack, cohort: Cohort) -> Tensor:
        """Return the share with the smallest validation loss; the smallest of several equally good ones."""
        shares = cohort.lr.new_tensor(SHARES)
        start = Params.of(loss=torch.zeros_like(shares), samples=0.0)
        seen = cohort.scan(
            self._probe, start, given=Given(w, store, shares), split="val", shuffle=False, train=False, exact=True
        )
        return torch.where(seen["samples"] > 0, shares[seen["loss"].argmin(1)], UNDECIDED)

    def _probe(self, seen: Params, batch: Batch, given: Given) -> Params:
        """Add up one client's validation loss at every share."""
        own, near = (p.gather(1, batch.y[:, None]) for p in self._both(given.w, given.store, batch))
        losses = -_log((1 - given.shares) * own + given.shares * near)
        real = losses if batch.mask is None else losses * batch.mask[:, None]
        return Params.of(loss=seen["loss"] + real.sum(0), samples=seen["samples"] + batch.count)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
