"""Own data in a federation: the task of a site from its file, and that of a coordinator from the schema alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.data.building import build_network, choose_model
from atoll.data.own import OwnData
from atoll.data.rows import Rows
from atoll.data.schema import Schema
from atoll.data.splits import SHARES, Shares
from atoll.data.task import Task
from atoll.deploy.tasks import task_elsewhere
from atoll.kernel.objective import absolute_error, accuracy, cross_entropy, metric_of, squared_error
from atoll.kernel.task import Training


def choose_network(schema: Schema) -> str:
    """Return the name of the usual network for data of a schema."""
    return "char-transformer" if schema.kind == "tokens" else choose_model(tuple(_blank(schema).x.shape[1:]))


def task_of_schema(
    schema: Schema, names: Sequence[str], *, name: str, model: str, training: Training, seed: int
) -> Task:
    """Return the task of a coordinator: the network that sites have too, and nobody's samples."""
    blank = _blank(schema)
    return task_elsewhere(
        name, build_network(model, blank, seed), blank.x[0].float() if blank.x.is_floating_point() else blank.x[0],
        blank.y[0], clients=len(names), classes=blank.classes, training=training, names=names, facts=blank.facts,
    )  # fmt: skip


def task_of_site(
    source: Path, schema: Schema, *, site: str, client: str | None, model: str, training: Training, seed: int,
    shares: Shares = SHARES, **words: Any,
) -> Task:  # fmt: skip
    """Return the task of a site: one client, or one for each value of the column `client`."""
    asked: dict[str, Any] = {"model": model, "training": training, "seed": seed, "shares": shares, **words}
    if client is None and source.is_file():
        return Task.of_site(source, schema, name=site, **asked)
    return Task.own(source, schema=schema, client=client, **asked)


def count_clients(source: Path, client: str | None) -> int:
    """Return how many clients a site's data have."""
    return 1 if client is None and source.is_file() else len(Rows.of(source, client).owners)


def _blank(schema: Schema) -> OwnData:
    """Return data of a schema without a sample: one of zeros stands for all."""
    array, tokens = schema.array, schema.kind == "tokens"
    shape = (len(schema.columns),) if array is None else array.shape
    classes = schema.outputs if tokens else len(schema.classes) or None
    x = torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32)
    y = torch.zeros(1, *(shape if tokens else ()), dtype=torch.float32 if classes is None else torch.int64)
    return OwnData(
        "own", x, y, classes=classes, central=None, source="own data at sites",
        loss=squared_error if classes is None else cross_entropy,
        metric=metric_of(absolute_error if classes is None else accuracy), schema=schema,
    )  # fmt: skip
