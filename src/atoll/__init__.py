"""Atoll: personalized and one-shot federated learning on non-IID data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.compose import create
    from atoll.data.recipe import Recipe
    from atoll.data.task import Task, Training
    from atoll.experiments.advice import advise
    from atoll.experiments.audit import audit
    from atoll.experiments.comparison import Comparison, compare
    from atoll.experiments.tuning import tune
    from atoll.federation.loop import federate
    from atoll.federation.report import Report
    from atoll.federation.settings import Settings
    from atoll.kernel.algorithm import Algorithm, Replies, Update
    from atoll.kernel.batch import Batch
    from atoll.kernel.cohort import Cohort
    from atoll.kernel.params import Params, Stack
    from atoll.kernel.predictor import Predictor
    from atoll.runtime.engines import LocalEngine
    from atoll.runtime.engines.cluster.rays import RayEngine

# Names are imported when they are first asked for: `atoll --help` need not wait for torch.
_HOMES = {
    "Algorithm": "kernel.algorithm",
    "Batch": "kernel.batch",
    "Cohort": "kernel.cohort",
    "Comparison": "experiments.comparison",
    "LocalEngine": "runtime.engines",
    "Params": "kernel.params",
    "Predictor": "kernel.predictor",
    "RayEngine": "runtime.engines.cluster.rays",
    "Recipe": "data.recipe",
    "Replies": "kernel.replies",
    "Report": "federation.report",
    "Settings": "federation.settings",
    "Stack": "kernel.params",
    "Task": "data.task",
    "Training": "kernel.task",
    "Update": "kernel.algorithm",
    "advise": "experiments.advice",
    "audit": "experiments.audit",
    "compare": "experiments.comparison",
    "create": "compose",
    "federate": "federation.loop",
    "tune": "experiments.tuning",
}

__all__ = [
    "Algorithm",
    "Batch",
    "Cohort",
    "Comparison",
    "LocalEngine",
    "Params",
    "Predictor",
    "RayEngine",
    "Recipe",
    "Replies",
    "Report",
    "Settings",
    "Stack",
    "Task",
    "Training",
    "Update",
    "advise",
    "audit",
    "compare",
    "create",
    "federate",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(f"atoll.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
