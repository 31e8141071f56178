"""FedSMOO: FedDyn along sharpness-aware gradients whose perturbations are drawn to a common one.

    eps <- rho d / ||d||,   d = g(theta) - mu_k - s;        mu_k <- mu_k + eps - s        (in every local step)

    steps along g(theta + eps) - q_k + alpha (theta - w);        s <- rho m / ||m||,   m = mean_k mu_k

q_k, w and h are those of FedDyn. mu_k is the dual variable of the constraint that every client's perturbation be s.
With ``rho = 0`` this is FedDyn.

Reference: Sun, Shen, Chen, Ding, Tao. "Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape." ICML 2023. https://arxiv.org/abs/2305.11584
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from atoll.algorithms.feddyn import FedDyn
from atoll.kernel.algorithm import Limits, NonNegative, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Tree
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client import at_rest, descend, linear, proximal
from atoll.toolbox.client.penalties import Onto
from atoll.toolbox.client.sharpness import ascent, gradient_beside


@dataclass(frozen=True, kw_only=True)
class FedSMOO(FedDyn):
    """One shared model; dynamic regularisation and a flat neighbourhood of it that all clients agree on."""

    rho: NonNegative = 0.1  # ρ: radius of the neighbourhood

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "dual": "model"}
    limits: ClassVar[Limits] = {"feddyn": {"rho": 0.0}}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "sun2023dynamic"

    def start(self, task: Facts) -> dict[str, Any]:
        """As FedDyn, and no common perturbation yet."""
        server = super().start(task)
        return server | {"s": server["h"]}

    def broadcast(self, server: dict[str, Any]) -> Tree:
        """The model and the common perturbation."""
        return {"w": server["w"], "s": server["s"]}

    def local(self, received: Tree, cohort: Cohort) -> Update:
        """Train as FedDyn, along gradients that are taken uphill; both dual variables go on."""
        w, rule = received["w"], cohort.training
        mine = cohort.recall(default={"q": w.zeros(), "against": w.zeros()})
        carry = {
            "theta": w,
            "against": mine["against"],
            "velocity": at_rest(rule, w),
            "seen": Params.of(loss=0.0, steps=0.0),
        }
        pull = linear(-mine["q"]) + proximal(self.alpha, center=w)
        given = {"s": received["s"], "pull": pull.given, "lr": cohort.lr}
        end = cohort.scan(partial(self._step, rule, pull.onto), carry, given=given, epochs=self.epochs)
        cohort.observe(**{"loss/main": end["seen"]["loss"] / end["seen"]["steps"].clamp(min=1)})
        delta = end["theta"] - w
        keep = {"q": mine["q"] - delta.trained * self.alpha, "against": end["against"]}
        return Update(send={"delta": delta, "dual": -end["against"]}, keep=keep)

    def aggregate(self, server: dict[str, Any], replies: Replies) -> dict[str, Any]:
        """As FedDyn; the common perturbation is where the dual variables point on average."""
        dual = replies.mean("dual")
        return super().aggregate(server, replies) | {"s": ascent(server["w"], dual, self.rho)}

    def personalize(self, server: dict[str, Any], cohort: Cohort) -> Params:
        """The shared model."""
        return self.shared(server)

    def shared(self, server: dict[str, Any]) -> Params:
        """The shared model."""
        w: Params = server["w"]
        return w

    def _step(
        self, rule: Training, onto: Onto, carry: dict[str, Any], batch: Batch, given: dict[str, Any]
    ) -> dict[str, Any]:
        """One batch of one client; `against` is -mu_k, what is added to its gradient before it climbs."""
        theta, against, seen = carry["theta"], carry["against"], carry["seen"]
        g, after, loss = batch.gradient(theta)
        eps = ascent(theta, g + against - given["s"], self.rho)
        uphill = onto(gradient_beside(theta, batch, eps), theta, given["pull"])
        theta, velocity = descend(rule, after, uphill, carry["velocity"], given["lr"])
        seen = Params.of(loss=seen["loss"] + loss, steps=seen["steps"] + 1)
        return {"theta": theta, "against": against + given["s"] - eps, "velocity": velocity, "seen": seen}
