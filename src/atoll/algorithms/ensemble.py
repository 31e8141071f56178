"""Ensemble: the server keeps all models, and they answer together.

    answer(x) = sum_k a_kc z_kc(x),        sum_k a_kc = 1 for every class c

z_k(x) are the logits of client k's model, less their mean over classes, which says nothing; or its probabilities, whose
sum is normalised again. a_kc is the same for all clients, or goes by their samples, by the square root of these, or by
their samples of class c, so that nobody is heard about classes it never saw. The accuracy that distillation aims at, at
the price of K models.

Reference: Guha, Talwalkar, Smith. "One-Shot Federated Learning." 2019. https://arxiv.org/abs/1902.11175
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Predictor
from atoll.kernel.params import Params
from atoll.kernel.predictor import ensemble
from atoll.toolbox.oneshot import ClassVotes, OneShot, Server, class_shares
from atoll.toolbox.server.voting import Of, of_logits, of_probabilities


@dataclass(frozen=True, kw_only=True)
class Ensemble(OneShot):
    """All clients' models, heard together."""

    of: Of = "logits"  # what is averaged
    weighting: ClassVotes = "uniform"  # a_kc: alike, by samples, by their square root, or by samples of the class

    deploys_a_model: ClassVar[bool] = False
    cites: ClassVar[str] = "guha2019one"

    def fused(self, server: Server) -> Predictor:
        """The models with their shares."""
        shares = Params.of(shares=class_shares(server["labels"], self.weighting))
        return ensemble(server["models"], shares, of_logits if self.of == "logits" else of_probabilities)
