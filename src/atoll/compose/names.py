"""Methods by name, as they are written on the command line and in records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.algorithms import file_of, find_pair, found, load_file, name_of
from atoll.compose.hybrids import within_clusters
from atoll.compose.pieces import composed
from atoll.kernel.algorithm import Algorithm, hyperparameters
from atoll.kernel.errors import UnknownName, unknown


def find(name: str) -> type[Algorithm]:
    """A method by its name or file (`./mine.py`), with pieces (`fedper+prox`), inside clusters (`ditto@ifca`).

    One-shot methods are pairs as well, of a training and an answer: `fafi/margins`.
    """
    name, at, clusterer = name.partition("@")
    if at:
        return within_clusters(find(name), find(clusterer))
    before, slash, last = name.rpartition("/")  # in a pair, what stands before the answer belongs to the training
    last, *pieces = re.split(r"\+(?=[a-z]+(?:\+|$))", last)
    name = f"{before}{slash}{last}"
    if name.endswith(".py"):
        method = load_file(Path(name))
    elif "/" in name:
        method = find_pair(name)
    else:
        methods = found()
        if name not in methods:
            raise unknown("algorithm", name, methods)
        method = methods[name]
    for piece in pieces:
        method = composed(method, piece)
    return method


def create(text: str, /, **more: str) -> Algorithm:
    """A method with hyperparameters, as written on the command line: `ditto` or `ditto:lam=0.1,epochs=2`."""
    name, _, rest = text.partition(":")
    method = find(name)
    known = {hyperparameter.name: hyperparameter for hyperparameter in hyperparameters(method)}
    values = {}
    for pair in [*filter(None, rest.split(",")), *(f"{key}={value}" for key, value in more.items())]:
        key, given, value = pair.partition("=")
        if key not in known:
            raise unknown(f"hyperparameter of {name_of(method)}", key, known)
        if not given:
            raise UnknownName(f"Hyperparameters must be written name=value. Got {pair!r}.")
        values[key] = known[key].parse(method.__name__, value)
    return method(**values)


def to_record(algorithm: Algorithm) -> dict[str, Any]:
    """Write a method down: its name, the file of a user's own, and the values of its hyperparameters."""
    file = file_of(type(algorithm))
    return {"name": name_of(type(algorithm)), "file": file and str(file), "values": asdict(algorithm)}


def from_record(record: Mapping[str, Any]) -> Algorithm:
    """Make the method that was written down."""
    name, file, values = (upgrade_record(record)[part] for part in ("name", "file", "values"))
    added = re.search(r"[+@].*$", name)  # what a user's own method was put together with
    return find(f"{file}{added[0] if added else ''}" if file else name)(**values)


def upgrade_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give an older record, whose values stand beside the name, the form that `to_record` writes."""
    if isinstance(record.get("values"), Mapping):
        return dict(record)
    values = {name: value for name, value in record.items() if name not in ("name", "file")}
    return {"name": record["name"], "file": record.get("file"), "values": values}
