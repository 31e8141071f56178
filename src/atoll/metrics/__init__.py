"""How good the models are, for every client."""

from atoll.metrics import calibration, cost, fairness, groups, significance
from atoll.metrics.evaluation import ClientScores, evaluate, evaluate_central

__all__ = [
    "ClientScores", "evaluate", "evaluate_central",
    "calibration", "cost", "fairness", "groups", "significance",
]  # fmt: skip
