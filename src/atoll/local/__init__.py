"""The pieces that algorithms share: local training, its gradients and penalties, and what is shared at all."""

from atoll.local.adam import adam, annealed, unmoved
from atoll.local.descent import at_rest, descend
from atoll.local.full import full_gradient
from atoll.local.interpolation import best_share
from atoll.local.meta import adapt, meta_gradient
from atoll.local.penalties import Penalty, linear, proximal
from atoll.local.sgd import sgd

__all__ = [
    "Penalty", "adam", "adapt", "annealed", "at_rest", "best_share", "descend", "full_gradient", "linear",
    "meta_gradient", "proximal", "sgd", "unmoved",
]  # fmt: skip
