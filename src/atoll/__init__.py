"""Atoll: personalized and one-shot federated learning on non-IID data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.algorithm import Algorithm, Replies, Update
    from atoll.batch import Batch
    from atoll.cohort import Cohort
    from atoll.comparison import compare
    from atoll.data.task import Task, Training
    from atoll.engines import LocalEngine
    from atoll.federation import Settings, federate
    from atoll.params import Params, Stack
    from atoll.predictor import Predictor
    from atoll.recipe import Recipe
    from atoll.report.report import Report
    from atoll.results import Comparison

# Names are imported when they are first asked for: `atoll --help` need not wait for torch.
_HOMES = {
    "Algorithm": "algorithm",
    "Batch": "batch",
    "Cohort": "cohort",
    "Comparison": "results",
    "LocalEngine": "engines",
    "Params": "params",
    "Predictor": "predictor",
    "Recipe": "recipe",
    "Replies": "algorithm",
    "Report": "report.report",
    "Settings": "federation",
    "Stack": "params",
    "Task": "data.task",
    "Training": "data.task",
    "Update": "algorithm",
    "compare": "comparison",
    "federate": "federation",
}

__all__ = [
    "Algorithm",
    "Batch",
    "Cohort",
    "Comparison",
    "LocalEngine",
    "Params",
    "Predictor",
    "Recipe",
    "Replies",
    "Report",
    "Settings",
    "Stack",
    "Task",
    "Training",
    "Update",
    "compare",
    "federate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(f"atoll.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
