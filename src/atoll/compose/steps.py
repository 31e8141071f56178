"""A method with a step size of its own: `ditto:lr=0.05`. Its clients step by it, whatever the task's step size is."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm, Positive
from atoll.kernel.wrapper import Wrapper

STEP_SIZE = "lr"  # what it is called beside hyperparameters


@dataclass(frozen=True, kw_only=True)
class WithStepSize(Wrapper):
    """The method as it is, for a task whose step size is `lr`."""

    inner: Algorithm
    lr: Positive

    @property
    def step_size(self) -> float:
        """The step size of its clients."""
        return self.lr


def adopt_step_size(task: Task, method: Algorithm) -> Task:
    """Return the task with the method's step size, where it brings one of its own."""
    return task if method.step_size is None else task.with_training(lr=method.step_size)
