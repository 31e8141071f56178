"""What a comparison cost, how it was configured, and what to cite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.federation.numbers import UNKNOWN
from atoll.federation.results import SPLIT_WITHOUT_SHARES
from atoll.kernel.wrapper import values_of
from atoll.records.runs import machine, versions
from atoll.report.parts import Details, Part, Row, Table, Text
from atoll.report.table import megabytes
from atoll.report.view import View
from atoll.runtime.population import MANY_CLIENTS


def collect_costs(view: View) -> list[Part]:
    """List megabytes, gradients, seconds and memory, and megabytes by kind."""
    comparison = view.comparison
    rows, by_kind = [], []
    for row in comparison.results:
        method, place = row["method"], view.place(row["method"])
        each = (row["megabytes_up"] + row["megabytes_down"]) / comparison.clients
        sizes = [megabytes(size) for size in (row["megabytes_up"], row["megabytes_down"], each)]
        deployed = UNKNOWN if row["megabytes_deployed"] is None else megabytes(row["megabytes_deployed"])
        gradients = f"{row['gradients']:,.0f}" if row["gradients"] else UNKNOWN
        memory = f"{row['memory_megabytes']:,.0f}" if row["memory_megabytes"] else UNKNOWN
        cells = [*sizes, deployed, gradients, f"{row['seconds']:.1f}", memory]
        rows.append(Row(method, cells, method=place))
        outcomes = comparison.outcomes[method]
        for kind in sorted({kind for outcome in outcomes for _, kind in outcome.bytes}):
            ways = [np.mean([one.bytes.get((way, kind), 0) for one in outcomes]) / 1e6 for way in ("up", "down")]
            by_kind.append(Row(method, [kind, *(megabytes(float(size)) for size in ways)], method=place))
    heads = [
        "Method", "MB up", "MB down", "MB per client", "MB deployed", "Gradients", "Seconds of training",
        "Peak MB of memory",
    ]  # fmt: skip
    note = (
        "Totals of all clients and rounds, means over seeds. Bytes are those of the serialised payloads. "
        "Deployed: what one client must hold to predict on its own; for an ensemble, all of its models. "
        "Seconds include the time that the engine takes to measure and compile. Memory is the largest of all seeds: "
        "tensors on a GPU, else the whole process."
    )
    parts: list[Part] = [Table(heads, rows, note)]
    if by_kind:
        parts.append(Table(["Method", "What is sent", "MB up", "MB down"], by_kind, "Bytes by kind."))
    return parts


def collect_configuration(view: View) -> list[Part]:
    """List the hyperparameters of methods and the settings that all of them share."""
    comparison = view.comparison
    config = comparison.example.config
    seeds = ", ".join(map(str, comparison.seeds))
    task = {name: value for name, value in config["task"].items() if name not in ("recipe", "metric")}
    values = {
        **{
            method: _write_pairs(values_of(one.algorithm)) or "no hyperparameters"
            for method, (one, *_) in comparison.outcomes.items()
        },
        "Clients' steps": _write_pairs(config.get("training", {})),
        "Federation": _write_pairs({**config["settings"], "seed": seeds}),
        "Task": _write_pairs({**task, **config["task"].get("recipe", {})}),
        "Split": _describe_split(view),
        "Scaling": _describe_scaling(config["task"]),
        "Metric": _write_pairs(comparison.metric),
        "Model": _describe_model(config),
        "Engine": _write_pairs(config.get("engine", {})),
        "Versions": _write_pairs(config.get("versions") or versions()),
        "Machine": _write_pairs(config.get("machine") or machine()),
    }
    table = Table(["Part", "Values"], [Row(name, [text]) for name, text in values.items() if text], kind="words")
    command = [Text(str(config["command"]), "Command", "wrap")] if "command" in config else []
    whole = Text(json.dumps(config.as_json(), indent=2, default=str))
    first = f"{comparison.example.label}, seed {comparison.seeds[0]}"
    return [*command, table, Details(f"The configuration of {first} in full", whole)]


def _describe_split(view: View) -> str:
    """Say how many samples are for what, and how they were cut."""
    comparison = view.comparison
    facts, one = comparison.example.config["task"], comparison.example
    counts = (
        []
        if one.statistics is None or comparison.scored < comparison.clients
        else [f"train {one.statistics.samples.sum():,}"]
    )
    counts += [f"{split} {one.samples(split).sum():,}" for split in ("val", "test") if not _has_many(view)]
    rule = facts.get("split_by") or "at random"
    recipe = facts.get("recipe") or {}
    cut_by_shares = recipe.get("split") and not facts.get("folds") and not rule.startswith(SPLIT_WITHOUT_SHARES)
    shares = f"train/val/test {recipe['split']} % of each client" if cut_by_shares else ""
    return "; ".join(filter(None, [shares, f"{', '.join(counts)} samples" if counts else "", f"cut {rule}"]))


def _has_many(view: View) -> bool:
    return view.comparison.scored > MANY_CLIENTS


def _describe_scaling(task: Mapping[str, Any]) -> str:
    """Say how numbers are scaled before they enter the network."""
    ways = {
        "none": "none: samples are as they were given",
        "client": "each client's numbers by mean and standard deviation of its own training samples",
        "global": "all numbers by mean and standard deviation of all training samples",
    }
    found = task.get("standardise")
    return "as the data set has it" if found is None else ways.get(str(found), str(found))


def _describe_model(config: Mapping[str, Any]) -> str:
    """Say which network clients have, and how large it is."""
    model, recipe = config.get("model", {}), config["task"].get("recipe") or {}
    asked = recipe.get("model")
    return _write_pairs({**({"asked for": asked} if asked else {}), **model})


def _write_pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value is not None)


def collect_citations(view: View) -> list[Part]:
    """Give the BibTeX entries of what was used."""
    return [Text(view.comparison.citations)] if view.comparison.citations else []
