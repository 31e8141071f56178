"""pFedMe: the shared model descends on the Moreau envelopes of the clients' losses; each deploys its proximal point.

    min_w  sum_k p_k min_theta F_k(theta) + (lam / 2) ||theta - w||^2

    theta <- about argmin of f(theta) + (lam / 2) ||theta - w_k||^2 on one batch, by `inner_steps` gradient steps
    w_k   <- w_k - eta lam (w_k - theta),    for every batch;        w <- (1 - beta) w + beta sum_k p_k w_k

``form = "survey"`` is what a survey describes under this name: the case eta lam = 1, beta = 1 with one proximal problem
per round, over all of a client's data. The server then averages the theta_k themselves.

Reference: Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020, Algorithm 1.
https://arxiv.org/abs/2006.08848
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Replies, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Training
from atoll.toolbox.client import at_rest, descend, proximal, sgd


@dataclass(frozen=True, kw_only=True)
class PFedMe(Algorithm):
    """A personal model per client: the proximal point of its loss around the shared one."""

    form: Literal["published", "survey"] = "published"  # which of the two methods of this name
    lam: NonNegative = 15.0  # λ: pull of the personal model towards w_k
    inner_steps: Epochs = 5  # K: gradient steps on theta per batch; published form only
    eta: NonNegative = 0.005  # η: step of w_k towards theta is η λ; published form only
    beta: NonNegative = 1.0  # β: step of the server towards the mean of w_k; published form only
    epochs: Epochs = 1  # passes over the data per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    cites: ClassVar[str] = "dinh2020personalized"

    @property
    def trains_by_sgd(self) -> bool:
        """In the published form two models take their steps together."""
        return self.form == "survey"

    def pulls(self, lr: float) -> dict[str, float]:
        """In the published form w_k is pulled to theta, too."""
        outer = {"eta * lam": self.eta * self.lam} if self.form == "published" else {}
        return {"lr * lam": lr * self.lam} | outer

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Find the proximal points; send where w_k went and keep the last theta."""
        w_k, theta = self._envelope(w, cohort)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=theta)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        """Go the share β of the way to the mean, further than it if β is above 1; statistics are averaged."""
        return w.step(replies.mean("delta"), self.beta if self.form == "published" else 1.0)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """The client's theta; a client that never took part uses w."""
        return cohort.recall(default=w)

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """The proximal point of a new client around w: a round of its own, of which nothing is sent."""
        return self._envelope(w, cohort)[1]

    def _envelope(self, w: Params, cohort: Cohort) -> tuple[Stack, Stack]:
        """w_k and theta after a round from w."""
        if self.form == "survey":
            theta = sgd(cohort, start=w, epochs=self.epochs, penalty=proximal(self.lam, center=w))
            return theta, theta
        rest, seen = at_rest(cohort.training, w), Params.of(loss=0.0, steps=0.0)
        carry = {"w": w, "theta": w, "velocity": rest, "seen": seen}
        end = cohort.scan(partial(self._step, cohort.training), carry, given={"lr": cohort.lr}, epochs=self.epochs)
        cohort.observe(**{"loss/main": end["seen"]["loss"] / end["seen"]["steps"].clamp(min=1)})
        return end["w"], end["theta"]

    def _step(self, rule: Training, carry: dict[str, Any], batch: Batch, given: dict[str, Any]) -> dict[str, Any]:
        """One batch of one client; theta goes on from where it was, w_k follows it."""
        w, theta, velocity, seen = carry["w"], carry["theta"], carry["velocity"], carry["seen"]
        for _ in range(self.inner_steps):
            g, after, loss = batch.gradient(theta)
            g = proximal(self.lam, center=w)(g, theta)
            theta, velocity = descend(rule, after, g, velocity, given["lr"])
            seen = Params.of(loss=seen["loss"] + loss, steps=seen["steps"] + 1)
        w = w.moved(w.trained - theta.trained, -self.eta * self.lam) | theta.buffers
        return {"w": w, "theta": theta, "velocity": velocity, "seen": seen}
