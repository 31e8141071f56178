"""The average: the server averages models once.

    w = sum_k p_k w_k

The further clients train, the less their average is a model at all: it is the reference that other answers are measured
by. Statistics of BatchNorm are those of all clients' samples together, from means and E[x^2]:

    m = sum_k p_k m_k,   v = sum_k p_k (v_k + m_k^2) - m^2

or plain means of both, or they are found anew in the averaged model, on public samples without labels.

Reference: McMahan et al., AISTATS 2017, Algorithm 1 with a single round. https://arxiv.org/abs/1602.05629
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from atoll.kernel.algorithm import Replies
from atoll.kernel.params import Params
from atoll.kernel.task import Facts
from atoll.toolbox.client.statistics import refresh_statistics
from atoll.toolbox.oneshot import Votes, average_models, count_labels, require_public, shares, uploads
from atoll.toolbox.pairs import LocalTraining, ServerAnswer, Start


@dataclass(frozen=True, kw_only=True)
class Average(ServerAnswer):
    """The average of models that were trained apart."""

    weighting: Votes = "samples"  # p_k: by training samples, by their square root, or the same for all
    batchnorm: Literal["pooled", "mean", "public"] = "pooled"  # its statistics: of all samples together, plain means,
    # or found on public samples

    called: ClassVar[str] = "average"
    cites: ClassVar[str] = "guha2019one"

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise where statistics are to be found on public samples and there are none."""
        if self.batchnorm == "public":
            require_public(self, task)

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Average everything that was sent."""
        share = shares(count_labels(replies), self.weighting)
        w = average_models(uploads(replies, "model"), share, "mean" if self.batchnorm == "mean" else "pooled")
        if self.batchnorm == "public":
            w = refresh_statistics(replies.workbench.cohort(*replies.workbench.public), w).client(0)
        return w
