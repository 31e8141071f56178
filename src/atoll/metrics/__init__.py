"""How good the models are, for every client."""

from atoll.metrics.evaluation import ClientScores, evaluate, evaluate_central

__all__ = ["ClientScores", "evaluate", "evaluate_central"]
