"""FedFSA: MoFedSAM with a larger radius for the layers to which a client is most sensitive.

    eps_l = rho_l g_l / ||g||,        rho_l = rho_larger if l is among the top_c layers with the largest s_l, else rho

    s_l = mean (w_k - w)^2

s_l is measured at the end of a client's round, w_k against the model w it began from, and used when it takes part the
next time; in its first round all radii are rho. At the end each client tunes its head, from the shared model. With
``top_c = 0`` (or ``rho_larger = rho``) this is MoFedSAM followed by that tuning. With ``sensitivity = "minmax"`` the
released code's is taken: tensors are first brought to [0, 1].

Reference: Xing, Zhan, Xie, Yang, Wang, Liu. "Flexible Sharpness-Aware Personalized Federated Learning." AAAI 2025.
https://openreview.net/forum?id=qwNVAsLkI4
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from atoll.algorithms.mofedsam import MoFedSAM, State, begin, move
from atoll.kernel.algorithm import (
    Algorithm,
    Epochs,
    Limits,
    NonNegative,
    Range,
    Replies,
    Share,
    Update,
    Weighting,
)
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.sensitivity import Sensitivity, layers, most_sensitive, radii, require_layers, sensitivities


@dataclass(frozen=True, kw_only=True)
class FedFSA(Algorithm):
    """Sharpness-aware training whose radii follow each client's layers; personal heads at the end."""

    rho: NonNegative = 0.1  # ρ: radius of the neighbourhood
    alpha: Share = 0.1  # α: share of the client's own gradient in a step; the rest is Δ
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all
    rho_larger: NonNegative = 0.2  # radius of the most sensitive layers; `rho` is that of all others
    top_c: Annotated[int, Range(low=0)] = 2  # C: how many layers count as most sensitive
    sensitivity: Sensitivity = "raw"  # s_l: from the change of tensors, as it is or scaled to [0, 1]; or from the loss
    head_epochs: Epochs = 10  # epochs in which a client tunes the head of the shared model for itself

    sends: ClassVar[Mapping[str, str]] = MoFedSAM.sends
    limits: ClassVar[Limits] = {
        "mofedsam": {"top_c": 0, "head_epochs": 0},
        "fedavg": {"rho": 0.0, "rho_larger": 0.0, "alpha": 1.0, "head_epochs": 0},
    }
    cites: ClassVar[str] = "xing2025flexible"

    @property
    def mofedsam(self) -> MoFedSAM:
        """How clients train, and what they send."""
        return MoFedSAM(rho=self.rho, alpha=self.alpha, epochs=self.epochs, weighting=self.weighting)

    def start(self, task: Facts) -> State:
        """Begin as MoFedSAM, with a model of enough layers."""
        require_layers(self, task.network.initial, self.top_c)
        return begin(self, task, max(self.rho, self.rho_larger if self.top_c else 0))

    def local(self, received: State, cohort: Cohort) -> Update:
        """Train with the radii that the last sensitivities ask for, then measure them anew."""
        w = received.w
        s = cohort.recall(default=Params({name: w[name].new_zeros(()) for name in layers(w)}))
        flexible = self.top_c > 0 and self.rho_larger != self.rho
        radius = radii(w, most_sensitive(s, self.top_c), self.rho, self.rho_larger) if flexible else self.rho
        w_k = self.mofedsam.train(received, cohort, radius)
        kept = sensitivities(self.sensitivity, cohort, w, w_k)
        return replace(self.mofedsam.update(received, w_k, cohort), keep=kept)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Aggregate as MoFedSAM."""
        return move(server, replies)

    def shared(self, server: State) -> Params:
        """Return the shared model."""
        return server.w

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the shared model with a head tuned by plain SGD on the client's training data."""
        return sgd(cohort, start=server.w, epochs=self.head_epochs, only="head", stream="tune")
