"""A small task of ratings for tests of recommenders, and how they run on it."""

from typing import Any

import torch

from atoll import Algorithm, Task, federate
from atoll.federation.report import Report
from atoll.runtime.engines import LocalEngine


def make_ratings(users: int = 8, first: int = 0, model: str | None = None) -> Task:
    """Make users with 5 to 7 of 11 items each, in an order of time; numbers begin with the `first` user."""
    everybody = range(first, first + users)
    rows = [(user, (3 * user + step * (1 + user % 3)) % 11, step) for user in everybody for step in range(5 + user % 3)]
    columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    return Task.ratings(columns, fewest=(4, 1), model=model)


def recommend(task: Task, method: Algorithm | str, rounds: int, **more: Any) -> Report:
    """Run a method in float64, all users at once."""
    engine = LocalEngine(strategy="whole eager", dtype=torch.float64)
    return federate(task, method, rounds=rounds, progress=False, engine=engine, **more)
