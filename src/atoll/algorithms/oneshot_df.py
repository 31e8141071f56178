"""FedDF in one shot: what the clients' models answer together is distilled into one model, on public samples.

    min_w  E_x KL( softmax(z(x)) || softmax(z(x; w)) ),        z(x) = sum_k a_kc z_kc(x)

z is the answer of the ensemble (`ensemble`, with its options, or `oneshot-margins`), x are public samples without
labels, and w begins at the average of the models, at the one that answers most like the ensemble, or at the initial
model. One model is deployed where the ensemble has K.

With ``server_epochs = 0`` this is one-shot FedAvg.

Reference: Lin, Kong, Stich, Jaggi. "Ensemble Distillation for Robust Model Fusion in Federated Learning."
NeurIPS 2020, Algorithm 1 with a single round. https://arxiv.org/abs/2006.07242
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from atoll.kernel.algorithm import Count, Epochs, Limits, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.margins import SCALE, margins, own_moments, said
from atoll.toolbox.oneshot import ClassVotes, OneShot, Server, averaged, class_shares, shares, uploads
from atoll.toolbox.server.distillation import divergence, last_of, students
from atoll.toolbox.server.voting import together


@dataclass(frozen=True, kw_only=True)
class OneShotDF(OneShot):
    """One model that was taught the ensemble's answers."""

    of: Literal["logits", "probs", "margins"] = "logits"  # what is averaged over teachers; margins by their own weights
    weighting: ClassVotes = "uniform"  # a_kc: alike, by samples, by their square root, or by samples of the class
    student: Literal["average", "best", "fresh"] = "average"  # where w begins: at the average by samples, at the client
    # that answers most like the ensemble, or at the initial model
    server_epochs: Epochs = 40  # passes over the public samples
    server_batch: Count = 128  # samples in a step of the server
    server_lr: Positive = 1e-3  # step size of Adam, annealed to 0

    sends: ClassVar[dict[str, str]] = {**OneShot.sends, "moments": "statistic"}
    needs_public_data: ClassVar[bool] = True
    limits: ClassVar[Limits] = {"oneshot-avg": {"server_epochs": 0}}
    cites: ClassVar[str] = "lin2020ensemble"

    def start(self, task: Facts) -> Server:
        """The initial model, which has features where margins are made of them."""
        if self.of == "margins":
            feature_size(self, task)
        return super().start(task)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train alone; send the model, and the moments of its features where margins are made of them."""
        update = super().local(w, cohort)
        more = {"moments": own_moments(cohort, update.send["model"])} if self.of == "margins" else {}
        return Update(send={**update.send, **more})

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Distil the clients' models."""
        bench, models, labels = replies.workbench, uploads(replies, "model"), uploads(replies, "labels")
        x, _ = bench.public
        if self.of == "margins":
            told = margins(uploads(replies, "moments")) * SCALE
            wanted = said(bench.answers(models, x, features=True), told).softmax(1)
        else:
            wanted = together(bench.answers(models, x), class_shares(labels, self.weighting), self.of).softmax(1)
        if self.student == "average":
            start = averaged(models, shares(labels, "samples"))
        else:
            start = server["model"] if self.student == "fresh" else nearest(models, bench.answers(models, x), wanted)
        taught = students(
            bench, start, x, wanted, epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr
        )
        return {"model": last_of(taught, start)}


def nearest(models: Stack, outputs: Tensor, wanted: Tensor) -> Params:
    """The model whose outputs, [model, sample, class], are nearest to the wanted probabilities."""
    apart = [float(divergence(one, wanted).mean()) for one in outputs]
    return models.client(apart.index(min(apart)))
