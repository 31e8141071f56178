"""OTFusion: the neurons of all models are put into a common order before they are averaged.

    for every hidden layer:   T_k = argmin_T  sum_ij T_ij |w_i - w_kj|^2,      w = sum_k p_k (T_k w_k T_k'^-1)

w_i are the incoming weights and the bias of neuron i of the reference, w_kj those of neuron j of client k, whose inputs
are in order already: T' is the plan of the layer before. Plans between equally many neurons of equal mass are
permutations, so the exact one is an assignment. All are put into the order of the client with the most samples.

A permutation of hidden neurons does not change what a network answers, but moves its average with others. Made for
small networks of linear and convolutional layers one after the other. BatchNorm moves with the neurons below it.

Reference: Singh, Jaggi. "Model Fusion via Optimal Transport." NeurIPS 2020. https://arxiv.org/abs/1910.05653
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.otfusion import Matched
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class OTFusion(Pair, training=CrossEntropy, answering=Matched):
    """The average of models whose neurons were matched."""

    cites: ClassVar[str] = "singh2020model"
