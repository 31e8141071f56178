"""Settings as keywords, such as `rounds=50`.

Written by `python tests/stubs.py`; do not edit.
"""

from typing import TypedDict

class GivenSettings(TypedDict, total=False):
    rounds: int
    seed: int
    cohort: int | float | str | None
    select_clients: str
    participation: str
    drop: float
    late: float
    delay: int
    eval_every: int | None
    curve: tuple[int, ...]
    evaluation: str
    metric: str
    memory: str
    compress: str
    aggregate: str
    attack: str
    dp: str
    secure: str
