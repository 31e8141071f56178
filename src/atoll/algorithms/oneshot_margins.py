"""Margins: every client says how far a sample is on the way from its other classes to each class, and all are added.

    l_c(x) = s sum_k a_kc m_kc(x),     m_kc(x) = w_kc . (z_k(x) - r_kc) / w_kc . (mu_kc - r_kc),     w = S^-1 (mu - r)

Clients train alone by cross-entropy and send, with the model, sums of their features z_k and of their products, from
which the server makes Fisher's discriminant of every class and the client's other samples. m_kc is 1 on average for
samples of class c and 0 for others, for every client, so that the answers of clients who never saw the same samples are
on one scale; a_kc goes by how well a client can tell a class from others. `toolbox.objectives.margins` has more.

Reference: none; an ensemble (Guha et al., 2019) whose members answer by Fisher's discriminants.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Positive, Predictor, Range, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.predictor import ensemble, members_of
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.margins import SCALE, SHRINKAGE, margins, own_moments, said
from atoll.toolbox.oneshot import OneShot, Server, uploads
from atoll.toolbox.server.fusion import together


@dataclass(frozen=True, kw_only=True)
class OneShotMargins(OneShot):
    """All clients' models, whose answers are put on one scale."""

    shrinkage: Annotated[float, Range(0, 1, open_low=True)] = SHRINKAGE  # share of S that is its mean variance times I
    scale: Positive = SCALE  # s: a margin of 1 as logits

    sends: ClassVar[dict[str, str]] = {**OneShot.sends, "moments": "statistic"}
    deploys_a_model: ClassVar[bool] = False
    cites: ClassVar[str] = "guha2019one"

    def start(self, task: Facts) -> Server:
        """The initial model, which has features."""
        feature_size(self, task)
        return super().start(task)

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train alone; send the model, and the moments of its features."""
        update = super().local(w, cohort)
        return Update(send={**update.send, "moments": own_moments(cohort, update.send["model"])})

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Hold the models; make everybody's discriminants."""
        told = margins(uploads(replies, "moments"), self.shrinkage)
        return {**super().aggregate(server, replies), "margins": told * self.scale}

    def fused(self, server: Server) -> Predictor:
        """All models, and what is read from their features."""
        return ensemble(server["models"], server["margins"], answer)


def answer(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """The sum of all margins."""
    return said(together([batch.features(w) for w in members_of(beside)]), beside)
