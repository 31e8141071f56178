"""Atoll: personalized and one-shot federated learning on non-IID data."""

from atoll.algorithm import Algorithm, Replies, Update
from atoll.batch import Batch
from atoll.cohort import Cohort
from atoll.data.task import Task, Training
from atoll.engines import LocalEngine
from atoll.federation import Settings, federate
from atoll.params import Params, Stack
from atoll.report.report import Report

__all__ = [
    "Algorithm",
    "Batch",
    "Cohort",
    "LocalEngine",
    "Params",
    "Replies",
    "Report",
    "Settings",
    "Stack",
    "Task",
    "Training",
    "Update",
    "federate",
]
