"""Tasks by a schema: a coordinator's, who has no data, and a site's, from its own file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.data.building import are_amounts, build_network, choose_model
from atoll.data.own import OwnData
from atoll.data.schema import Schema
from atoll.data.task import Task
from atoll.deploy.store import writing
from atoll.deploy.tasks import task_elsewhere
from atoll.deploy.terms import Terms
from atoll.kernel.errors import AtollError, DeployError, RefusedError
from atoll.kernel.objective import absolute_error, accuracy, cross_entropy, metric_of, squared_error
from atoll.records.files import read_record, write_record
from atoll.records.schema import Record
from atoll.runtime import serialise
from atoll.runtime.files import read_regular, write_whole

SEQUENCE = "char-transformer"
READING = "reading.json"  # in the folder of what a site keeps
PUBLIC = "public.safetensors"  # in the run's folder
Public = tuple[Tensor, Tensor]  # samples and targets


def choose_model_for(schema: Schema) -> str:
    """Return the name of the usual network for samples of a schema."""
    sample = _blank_samples(schema)
    tokens = schema.kind == "tokens" and sample[1].ndim == 2
    return SEQUENCE if tokens else choose_model(tuple(sample[0].shape[1:]))


def task_without_data(terms: Terms, public: Public | None = None) -> Task:
    """Return the coordinator's task: what the schema says, samples that everybody may see, and nobody's own."""
    schema = schema_of(terms)
    x, y = _blank_samples(schema)
    classes = schema.outputs if schema.kind == "tokens" else len(schema.classes) or None
    data = OwnData(
        terms.name, x, y, classes=classes, central=None, source="data of sites",
        loss=squared_error if classes is None else cross_entropy,
        metric=metric_of(absolute_error if classes is None else accuracy), schema=schema,
    )  # fmt: skip
    assert terms.model is not None
    network = build_network(terms.model, data, terms.seed)
    if are_amounts(x, [network]):
        x = x.float()
    names = [_client_name(terms, number) for number in range(terms.clients)]
    return task_elsewhere(
        terms.name, network, x[0], y[0], clients=terms.clients, classes=classes, training=terms.rule, names=names,
        facts={"source": "data of sites", "schema": terms.form}, public=public,
    )  # fmt: skip


def read_public(terms: Terms, data: Path) -> Public:
    """Return the samples of a file that everybody may see, scaled by themselves as those of a site are."""
    try:
        task = Task.of_site(str(data), schema_of(terms), name="public", model=terms.model, shares=(1.0, 0.0, 0.0))
    except AtollError as error:
        message, _, hint = str(error).partition("\nhint: ")
        raise DeployError(f"{data} must have the columns of the schema: {message}", hint=hint or None) from error
    return task.x, task.y


def save_public(public: Public | None, folder: Path) -> None:
    """Write public samples into a run's folder, where a coordinator that goes on finds them."""
    if public is not None:
        write_whole(folder / PUBLIC, serialise.to_bytes([*public]))


def load_public(folder: Path) -> Public | None:
    """Return the public samples of a run, if it has some."""
    if not (folder / PUBLIC).exists():
        return None
    x, y = serialise.from_bytes(read_regular(folder / PUBLIC))
    return x, y


def task_of_site(terms: Terms, site: str, data: Path, *, client: str | None = None, **reading: Any) -> Task:
    """Return a site's task from its own file: one client, or one for each value of the column `client`.

    Raise, naming the column, where the file does not fit the schema.
    """
    first = terms.sites[site].clients[0]
    words = {"model": terms.model, "seed": terms.seed, "training": terms.rule, "first": first, **reading}
    try:
        if client is None:
            return Task.of_site(str(data), schema_of(terms), name=site, **words)
        return Task.own(str(data), client=client, schema=schema_of(terms), **words)
    except DeployError:
        raise
    except AtollError as error:
        message, _, hint = str(error).partition("\nhint: ")
        raise RefusedError(f"{data} does not fit the data that were agreed on: {message}", hint=hint or None) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading(Record):
    """Where a site's data are and how they are read; the site remembers it from one round to the next."""

    data: str
    client: str | None = None
    group: str | None = None
    order: str | None = None

    def save(self, state: Path) -> None:
        """Write it into the folder of what the site keeps."""
        with writing(state):
            state.mkdir(parents=True, exist_ok=True)
            write_record(state / READING, self)

    @classmethod
    def find(cls, state: Path, data: Path | None, **given: str | None) -> Reading:
        """Return what is given, or else how it was the last time."""
        if data is not None:
            return cls(data=str(data.resolve()), **given)
        if not (state / READING).exists():
            raise DeployError("A site must know where its data are: give the file, `data`. There was no round before.")
        return replace(read_record(state / READING, cls), **{name: one for name, one in given.items() if one})

    def build_task(self, terms: Terms, site: str) -> Task:
        """Return the site's task."""
        return task_of_site(terms, site, Path(self.data), client=self.client, group=self.group, order=self.order)


def schema_of(terms: Terms) -> Schema:
    """Return the schema of a federation's data."""
    if terms.form is None:
        raise DeployError("The terms of this federation must hold a schema of the data. They do not.")
    return Schema.of_json(terms.form)


def require_for_sites(schema: Schema) -> None:
    """Raise for a schema that sites cannot follow alone."""
    if schema.standardise == "global":
        raise DeployError(
            "Sites scale numbers by their own training samples: the schema must say `standardise` client or none. It "
            "says global, which needs the samples of all.",
            hint="write the schema again with --standardise client; see `atoll data schema`.",
        )
    if schema.kind == "tokens" and schema.outputs is None:
        raise DeployError("A schema of tokens must say how many there are: `classes`.")


def _client_name(terms: Terms, number: int) -> str:
    site = terms.site_of[number]
    clients = terms.sites[site].clients
    return site if len(clients) == 1 else f"{site}-{clients.index(number) + 1}"


def _blank_samples(schema: Schema) -> tuple[Tensor, Tensor]:
    """Return two samples of zeros with targets, in the form in which sites have theirs."""
    array = schema.array
    shape = (len(schema.columns),) if array is None else array.shape
    whole = array is not None and array.holds == "tokens"
    x = torch.zeros((2, *shape), dtype=torch.int64 if whole else torch.float32)
    if schema.kind == "tokens" and schema.target is None:
        return x[:, :-1], x[:, 1:]
    return x, torch.zeros(2, dtype=torch.float32 if schema.kind == "regression" else torch.int64)
