"""Margins: every client says how far a sample is on the way from its other classes to each class, and all are added.

    l_c(x) = s sum_k a_kc m_kc(x),     m_kc(x) = w_kc . (z_k(x) - r_kc) / w_kc . (mu_kc - r_kc),     w = S^-1 (mu - r)

Clients send, with the model, sums of their features z_k and of their products, from which the server makes Fisher's
discriminant of every class and the client's other samples. m_kc is 1 on average for samples of class c and 0 for
others, for every client: the answers of clients who never saw the same samples are on one scale. a_kc goes by how well
a client can tell a class from others. `toolbox.objectives.margins` has more.

Reference: none; an ensemble (Guha et al., 2019) whose members answer by Fisher's discriminants.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Positive, Predictor, Range, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.client.private import release
from atoll.toolbox.objectives.margins import SCALE, SHRINKAGE, Voting, margin_logits, margins, own_moments
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import LocalTraining, Models, ServerAnswer, Start, keep_models
from atoll.toolbox.server.frozen import MOMENT_POWERS
from atoll.toolbox.server.fusion import stack_features


@record
class Discriminants(Models):
    """All models, and everybody's discriminants."""

    margins: Params


@dataclass(frozen=True, kw_only=True)
class Margins(ServerAnswer):
    """All clients' models, whose answers are put on one scale."""

    shrinkage: Annotated[float, Range(0, 1, open_low=True)] = SHRINKAGE  # share of S that is its mean variance times I
    scale: Positive = SCALE  # s: the logit of a margin of 1
    common: bool = True  # whether margins are on one scale, or what the discriminants themselves say is added
    voting: Voting = "discernment"  # a_kc: by what a client can tell apart, by its samples of the class, or alike

    called: ClassVar[str] = "margins"
    sends: ClassVar[dict[str, str]] = {**ServerAnswer.sends, "moments": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset({"labels", "moments"})
    cites: ClassVar[str] = "guha2019one"

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return False: there are as many as clients."""
        return False

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless the network has features."""
        feature_size(self, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and the moments of its features."""
        update = super().upload(training, w, cohort)
        moments = release(cohort, "moments", lambda some: own_moments(some, w), MOMENT_POWERS)
        return Update(send={**update.send, "moments": moments})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Discriminants:
        """Hold the models; make everybody's discriminants."""
        kept, seen = keep_models(replies), uploads(replies, "moments")
        found = margins(seen, self.shrinkage, common=self.common, voting=self.voting)
        return Discriminants(kept.models, kept.counts, found * self.scale)

    def deploy(self, training: LocalTraining, start: Start, answer: Discriminants) -> Predictor:
        """Return all models, and what is read from their features."""
        return ensemble(answer.models, answer.margins, sum_margins)


def sum_margins(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return the sum of all margins."""
    return margin_logits(stack_features([batch.features(w) for w in members_of(beside)]), beside)
