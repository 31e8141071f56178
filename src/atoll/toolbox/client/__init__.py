"""The pieces that algorithms share: local training, its gradients and penalties, and what is shared at all."""

from atoll.toolbox.client.descent import descend, zero_velocity
from atoll.toolbox.client.full import full_gradient
from atoll.toolbox.client.interpolation import best_share
from atoll.toolbox.client.meta import adapt, meta_gradient
from atoll.toolbox.client.penalties import Penalty, linear, proximal
from atoll.toolbox.client.sgd import sgd
from atoll.toolbox.server.adam import adam, annealed_share, no_past

__all__ = [
    "Penalty", "adam", "adapt", "annealed_share", "zero_velocity", "best_share", "descend", "full_gradient", "linear",
    "meta_gradient", "proximal", "sgd", "no_past",
]  # fmt: skip
