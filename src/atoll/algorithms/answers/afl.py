"""AFL: the head of a frozen network by least squares, exactly as if all samples were in one place.

    min_W  sum_i |W^T f_i - e_{y_i}|^2 + gamma |W|^2,        f = (phi(x), 1)

    client:  G_k = sum_i f_i f_i^T,   Q_k = sum_i f_i e_{y_i}^T
    server:  W = (sum_k G_k + gamma I)^-1  sum_k Q_k

Nothing is trained, and sums are all that is needed: however samples are dealt to clients, W is the same.

Reference: He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang. "AFL: A Single-Round Analytic Approach for Federated Learning
with Pre-trained Models." CVPR 2025. https://arxiv.org/abs/2405.16240
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.algorithms.trainings.frozen import Frozen
from atoll.kernel.algorithm import Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client.private import release
from atoll.toolbox.pairs import FROZEN, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.frozen import MOMENT_POWERS, Phi, moments
from atoll.toolbox.server.triangles import symmetric


@dataclass(frozen=True, kw_only=True)
class Ridge(ServerAnswer):
    """Ridge regression on the features of all clients, from sums."""

    gamma: Positive = 1.0  # γ: ridge, added to the sum over all samples

    called: ClassVar[str] = "afl"
    needs: ClassVar[frozenset[str]] = frozenset({FROZEN})
    sums_suffice: ClassVar[bool] = True
    solved: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"moments": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset({"moments"})
    closed_form: ClassVar[bool] = True
    cites: ClassVar[str] = "he2025afl"

    def upload(self, training: LocalTraining, phi: Phi, cohort: Cohort) -> Update:
        """Add up G_k and Q_k, as they follow from counts, class sums and squares."""
        sums = release(cohort, "moments", lambda some: moments(some, phi), MOMENT_POWERS)
        return Update(send={"moments": sums})

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Solve for the head."""
        assert isinstance(training, Frozen)
        weight, bias = regression(replies.mean("moments") * replies.total, self.gamma)
        return training.make_head(start, weight, bias, replies.workbench)


def regression(sums: Params, gamma: float) -> tuple[Tensor, Tensor]:
    """Return weight [class, feature] and bias [class] of the ridge regression of one-hot classes on features."""
    count, total, square = sums["count"], sums["sum"], symmetric(sums["square"])
    first = total.sum(0)
    gram = torch.cat([torch.cat([square, first[:, None]], 1), torch.cat([first, count.sum()[None]])[None]])
    wanted = torch.cat([total.T, count[None]])
    solution = torch.linalg.solve(gram + gamma * torch.eye(len(gram)).to(gram), wanted)
    return solution[:-1].T, solution[-1]
