"""The pieces that algorithms share: local training and its penalties."""

from atoll.local.penalties import Penalty, proximal
from atoll.local.sgd import sgd

__all__ = ["Penalty", "proximal", "sgd"]
