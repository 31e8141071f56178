"""Measures of the models of every client."""

from atoll.metrics import calibration, cost, fairness, groups, measures, significance
from atoll.metrics.evaluation import ClientScores, evaluate, evaluate_central

__all__ = [
    "ClientScores", "evaluate", "evaluate_central",
    "calibration", "cost", "fairness", "groups", "measures", "significance",
]  # fmt: skip
