"""FedDF: what the clients' models answer together is distilled into one model, on public samples.

    min_w  E_x KL( softmax(z(x)) || softmax(z(x; w)) ),        z(x) = sum_k a_kc z_kc(x)

z is the answer of the ensemble (`ensemble`, with its options, or `margins`), x are public samples without labels, and w
begins at the average of the models, at the one that answers most like the ensemble, or at the initial model. One model
is deployed where the ensemble has K; it answers by its own outputs, however the clients' models do.

Reference: Lin, Kong, Stich, Jaggi. "Ensemble Distillation for Robust Model Fusion in Federated Learning."
NeurIPS 2020, Algorithm 1 with a single round. https://arxiv.org/abs/2006.07242
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from atoll.kernel.algorithm import Count, Epochs, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.margins import SCALE, margin_logits, margins, own_moments
from atoll.toolbox.oneshot import ClassVotes, average_models, class_shares, count_labels, shares, uploads
from atoll.toolbox.pairs import LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.distillation import divergence, last_of, students
from atoll.toolbox.server.voting import combine_votes


@dataclass(frozen=True, kw_only=True)
class Distilled(ServerAnswer):
    """One model that was taught the ensemble's answers."""

    of: Literal["logits", "probs", "margins"] = "logits"  # what is averaged over teachers; margins by their own weights
    weighting: ClassVotes = "uniform"  # a_kc: by samples, by their square root, uniform, or by samples of the class
    student: Literal["average", "best", "fresh"] = "average"  # where w begins: at the average by samples, at the client
    # that answers most like the ensemble, or at the initial model
    server_epochs: Epochs = 40  # passes over the public samples
    server_batch: Count = 128  # samples in a step of the server
    server_lr: Positive = 1e-3  # step size of Adam, annealed to 0

    called: ClassVar[str] = "feddf"
    sends: ClassVar[dict[str, str]] = {**ServerAnswer.sends, "moments": "statistic"}
    needs_public_data: ClassVar[bool] = True
    cites: ClassVar[str] = "lin2020ensemble"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return True: the student."""
        return True

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless the network has features where margins are made of them."""
        if self.of == "margins":
            feature_size(self, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and the moments of its features where margins are made of them."""
        update = super().upload(training, w, cohort)
        more = {"moments": own_moments(cohort, w)} if self.of == "margins" else {}
        return Update(send={**update.send, **more})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Distil the clients' models."""
        bench, models, counts = replies.workbench, uploads(replies, "model"), count_labels(replies)
        x, _ = bench.public
        if self.of == "margins":
            discriminants = margins(uploads(replies, "moments")) * SCALE
            wanted = margin_logits(bench.answers(models, x, features=True), discriminants).softmax(1)
        else:
            each = training.outputs(bench, start, models, x)
            wanted = combine_votes(each, class_shares(counts, self.weighting), self.of).softmax(1)
        if self.student == "average":
            w = average_models(models, shares(counts, "samples"))
        else:
            w = start.model if self.student == "fresh" else nearest(models, bench.answers(models, x), wanted)
        taught = students(
            bench, w, x, wanted, epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr
        )
        return last_of(taught, w)

    def deploy(self, training: LocalTraining, start: Start, answer: Params) -> Params:
        """Return the student, which answers by its own outputs."""
        return answer


def nearest(models: Stack, outputs: Tensor, wanted: Tensor) -> Params:
    """Return the model whose outputs, [model, sample, class], are nearest to the wanted probabilities."""
    apart = [float(divergence(one, wanted).mean()) for one in outputs]
    return models.client(apart.index(min(apart)))
