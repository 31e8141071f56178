"""Margins: every client says how far a sample is on the way from its other classes to each class, and all are added.

    l_c(x) = s sum_k a_kc m_kc(x),     m_kc(x) = w_kc . (z_k(x) - r_kc) / w_kc . (mu_kc - r_kc),     w = S^-1 (mu - r)

Clients train alone by cross-entropy and send, with the model, sums of their features z_k and of their products, from
which the server makes Fisher's discriminant of every class and the client's other samples. m_kc is 1 on average for
samples of class c and 0 for others, for every client, so the answers of clients who never saw the same samples are
on one scale; a_kc goes by how well a client can tell a class from others. `toolbox.objectives.margins` has more.

Reference: none; an ensemble (Guha et al., 2019) whose members answer by Fisher's discriminants.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.margins import Margins
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class OneShotMargins(Pair, training=CrossEntropy, answering=Margins):
    """All clients' models, whose answers are put on one scale."""

    cites: ClassVar[str] = "guha2019one"
