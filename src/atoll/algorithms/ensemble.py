"""Ensemble: the server keeps all models, and they answer together.

    answer(x) = sum_k a_kc z_kc(x),        sum_k a_kc = 1 for every class c

z_k(x) are the logits of client k's model, less their mean over classes, which says nothing; or its probabilities, whose
sum is normalised again. a_kc is the same for all clients, or goes by their samples, by the square root of these, or by
their samples of class c, so nobody is heard about classes it never saw. The accuracy that distillation aims at, at
the price of K models.

Reference: Guha, Talwalkar, Smith. "One-Shot Federated Learning." 2019. https://arxiv.org/abs/1902.11175
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.ensemble import Together
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Ensemble(Pair, training=CrossEntropy, answering=Together):
    """All clients' models, heard together."""

    cites: ClassVar[str] = "guha2019one"
