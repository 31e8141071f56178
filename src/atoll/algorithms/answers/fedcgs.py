"""FedCGS: the head of a frozen network from Gaussians, one per class with a covariance in common.

    client:  n_kc,   sum of phi(x) over its samples of class c,   sum of phi(x) phi(x)^T over all its samples
    server:  W_c = S^-1 mu_c,   b_c = log(n_c / n) - mu_c^T S^-1 mu_c / 2

mu_c is the mean of class c and S a covariance: within classes, which is Bayes' rule for these Gaussians (linear
discriminant analysis), or total, as the authors' code has it. S is shrunk to a multiple of I. Nothing is trained, and
sums are all that is needed: however samples are dealt to clients, the head is the same.

Reference: Guan, Zhou, Gu. "Capture Global Feature Statistics for One-Shot Federated Learning." AAAI 2025.
https://arxiv.org/abs/2503.06962
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.algorithms.trainings.frozen import Frozen
from atoll.kernel.algorithm import Range, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client.private import release
from atoll.toolbox.pairs import FROZEN, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.frozen import MOMENT_POWERS, Phi, moments
from atoll.toolbox.server.triangles import shrink, symmetric

Covariance = Literal["within", "total"]


@dataclass(frozen=True, kw_only=True)
class Gaussian(ServerAnswer):
    """A Gaussian head on the features of all clients, from sums."""

    covariance: Covariance = "within"  # S: within classes, or of all samples together
    shrinkage: Annotated[float, Range(0, 1, open_low=True)] = 0.01  # share of S that is its mean variance times I

    called: ClassVar[str] = "fedcgs"
    needs: ClassVar[frozenset[str]] = frozenset({FROZEN})
    sums_suffice: ClassVar[bool] = True
    solved: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"moments": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset({"moments"})
    closed_form: ClassVar[bool] = True
    cites: ClassVar[str] = "guan2025capture"

    def upload(self, training: LocalTraining, phi: Phi, cohort: Cohort) -> Update:
        """Add up counts, class sums and squares."""
        sums = release(cohort, "moments", lambda some: moments(some, phi), MOMENT_POWERS)
        return Update(send={"moments": sums})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Make the head of the Gaussians of all samples."""
        assert isinstance(training, Frozen)
        weight, bias = gaussian(replies.mean("moments") * replies.total, self.covariance, self.shrinkage)
        return training.make_head(start, weight, bias, replies.workbench)


def gaussian(sums: Params, covariance: Covariance, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return weight [class, feature] and bias [class] by Bayes' rule.

    A class that nobody has stands at the mean of all samples, with a share so small that it is never the answer.
    """
    count, total, square = sums["count"], sums["sum"], symmetric(sums["square"])
    n, center = count.sum(), total.sum(0) / count.sum()
    mean = torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], center)
    between = mean.T @ (count[:, None] * mean) if covariance == "within" else n * torch.outer(center, center)
    s = shrink((square - between) / n, shrinkage)
    weight = torch.linalg.solve(s, mean.T).T
    share = (count / n).clamp(min=torch.finfo(torch.float32).tiny)
    return weight, share.log() - (weight * mean).sum(1) / 2
