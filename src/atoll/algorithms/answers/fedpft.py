"""FedPFT: clients send mixtures of Gaussians of their features; the server draws from these and trains a head.

    client:  for each class c, the mixture that makes its features phi(x) most likely, by EM:

                 p_kc(z) = sum_j weight_kcj N(z; mean_kcj, diag variance_kcj)

    server:  min_{W, b}  sum_kc sum_{z ~ p_kc, n_kc times} loss(W z + b, c)

phi is frozen. A class with few samples has fewer components, down to one Gaussian; variances are drawn to those within
all classes of the client.

Reference: Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang. "Parametric Feature Transfer: One-shot Federated
Learning with Foundation Models." 2024. https://arxiv.org/abs/2402.01862
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.algorithms.trainings.frozen import Frozen
from atoll.kernel.algorithm import Count, Epochs, NonNegative, Positive, Range, Replies, Steps, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.task import Training
from atoll.toolbox.client.datastore import datastore
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import FROZEN, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.frozen import Phi, expand
from atoll.toolbox.server.heads import train_head
from atoll.toolbox.server.mixtures import draw_from, fit


@dataclass(frozen=True, kw_only=True)
class Mixtures(ServerAnswer):
    """A head trained on features drawn from the clients' mixtures."""

    components: Count = 10  # Gaussians per client and class, at most
    iterations: Steps = 30  # number of EM iterations
    shrinkage: NonNegative = 1.0  # ν: samples' worth of the client's variance within classes, in each component's
    server_epochs: Epochs = 50  # passes over the drawn features
    server_batch: Count = 128  # features in a step of the server
    server_lr: Positive = 0.01  # its step size, on standardised features
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # momentum of its steps

    called: ClassVar[str] = "fedpft"
    needs: ClassVar[frozenset[str]] = frozenset({FROZEN})
    solved: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"mixtures": "statistic"}
    cites: ClassVar[str] = "beitollahi2024parametric"

    def upload(self, training: LocalTraining, phi: Phi, cohort: Cohort) -> Update:
        """Fit a mixture to the features of every class."""
        task = cohort.task
        assert task.classes is not None
        store = datastore(cohort, phi.w, feature_size(self, task), capacity=None)
        shape = (self.components, task.classes)
        start = [generator(task.seed, "mixtures", int(client)).random(shape) for client in cohort.clients]
        draws = Stack.of(draws=torch.from_numpy(np.stack(start)).to(cohort.device))
        summary = partial(summarise, classes=task.classes, iterations=self.iterations, nu=self.shrinkage)
        return Update(send={"mixtures": cohort.map(summary, store, phi, draws)})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Draw as many features as there are samples, and train a head on them."""
        assert isinstance(training, Frozen)
        bench = replies.workbench
        features, classes = draw_from(uploads(replies, "mixtures").map(Tensor.double), bench.generator("features"))
        weight, bias = self.train_head(features, classes, bench)
        return training.make_head(start, weight, bias, bench)

    def train_head(self, features: Tensor, classes: Tensor, bench: Workbench) -> tuple[Tensor, Tensor]:
        """Train a linear head; return weight and bias."""
        rule = Training(lr=self.server_lr, batch_size=self.server_batch, momentum=self.momentum)
        return train_head(features, classes, bench, rule, epochs=self.server_epochs)


def summarise(store: Params, phi: Phi, draws: Params, *, classes: int, iterations: int, nu: float) -> Params:
    """Return one client's mixtures in half precision, and its samples of each class."""
    same = F.one_hot(store["labels"], classes).double() * store["taken"][:, None]
    rows = expand(store["features"].double(), phi)
    found = fit(rows, same, draws["draws"], iterations=iterations, nu=nu)
    largest = torch.finfo(torch.float16).max
    return Params.of(count=same.sum(0).float()) | found.map(lambda leaf: leaf.clamp(-largest, largest).half())
