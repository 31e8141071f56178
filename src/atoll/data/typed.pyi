"""How own data are read, such as `target='readmitted'`, and clients train, such as `lr=0.1`.

Written by `python tests/stubs.py`; do not edit.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor

from atoll.data.schema import Schema

class GivenReading(TypedDict, total=False):
    target: str | None
    client: str | None
    kind: Literal["auto", "classification", "regression", "tokens", "ratings"]
    features: Sequence[str] | None
    categorical: Sequence[str]
    classes: int | Sequence[Any] | None
    standardise: Literal["auto", "none", "client", "global"]
    group: str | None
    order: str | None
    gap: int
    split: str | None
    lone_labels: Literal["warn", "error"]
    metric: Callable[[Tensor, Tensor], Tensor] | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    schema: Schema | None
    name: str | None

class GivenTraining(TypedDict, total=False):
    lr: float
    batch_size: int
    momentum: float
    weight_decay: float
    clip: float | None
    lr_decay: float
