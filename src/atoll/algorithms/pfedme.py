"""pFedMe: the shared model descends on the Moreau envelopes of the clients' losses; each deploys its proximal point.

    min_w  sum_k p_k min_theta F_k(theta) + (lam / 2) ||theta - w||^2

    theta <- about argmin of f(theta) + (lam / 2) ||theta - w_k||^2 on one batch, by `inner_steps` gradient steps
    w_k   <- w_k - eta lam (w_k - theta),    for every batch;        w <- (1 - beta) w + beta sum_k p_k w_k

What a survey describes under this name, one proximal problem per round, is another method, `pfedme-survey`.

Reference: Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020, Algorithm 1.
https://arxiv.org/abs/2006.08848
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Replies, Search, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Training
from atoll.toolbox.client import descend, proximal, zero_velocity
from atoll.toolbox.client.descent import MeanLoss


@record
class Carry:
    """Both models on their way."""

    w: Each
    theta: Each
    velocity: Each  # of theta
    loss: MeanLoss


@dataclass(frozen=True, kw_only=True)
class PFedMe(Algorithm):
    """A personal model per client: the proximal point of its loss around the shared one."""

    lam: Annotated[NonNegative, Search(1, 30, log=True)] = 15.0  # λ: pull of the personal model towards w_k
    inner_steps: Epochs = 5  # K: gradient steps on θ per batch
    eta: Annotated[NonNegative, Search(0.005, 0.1, log=True)] = 0.005  # η: the step of w_k towards θ is ηλ
    beta: NonNegative = 1.0  # β: step of the server towards the mean of w_k
    epochs: Epochs = 1  # passes over the data per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "dinh2020personalized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls theta and w_k to each other."""
        return {"lr * lam": lr * self.lam, "eta * lam": self.eta * self.lam}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Find the proximal points; send where w_k went and keep the last theta."""
        end = self._envelope(w, cohort)
        return Update(send={"delta": end.w - w}, weight=cohort.weights(self.weighting), keep=end.theta)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Go the share β of the way to the mean, further than it if β is above 1; statistics are averaged."""
        return w.step(replies.mean("delta"), self.beta)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's theta; a client that never took part uses w."""
        return cohort.recall(default=w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Find the proximal point of a new client around w: a round of its own, of which nothing is sent."""
        theta: Stack = self._envelope(w, cohort).theta
        return theta

    def _envelope(self, w: Params, cohort: Cohort) -> Carry:
        """Return w_k and theta after a round from w."""
        carry = Carry(w, w, zero_velocity(cohort.training, w), MeanLoss())
        end: Carry = cohort.scan(partial(self._step, cohort.training), carry, given=cohort.lr, epochs=self.epochs)
        cohort.observe(**{"loss/main": end.loss.value})
        return end

    def _step(self, rule: Training, carry: Carry, batch: Batch, lr: Tensor) -> Carry:
        """Take one batch of one client; theta goes on from where it was, w_k follows it."""
        w, theta, velocity, mean = carry.w, carry.theta, carry.velocity, carry.loss
        for _ in range(self.inner_steps):
            g, after, loss = batch.gradient(theta)
            g = proximal(self.lam, center=w)(g, theta)
            theta, velocity = descend(rule, after, g, velocity, lr)
            mean = mean.add(loss)
        w = w.moved(w.trained - theta.trained, -self.eta * self.lam) | theta.buffers
        return Carry(w, theta, velocity, mean)
