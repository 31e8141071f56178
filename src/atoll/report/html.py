"""A comparison, or a single run, as one page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.report import figures
from atoll.report.table import UNKNOWN, Numbers, gain_text, harmed_text, mean_text, megabytes
from atoll.runs import machine, versions

if TYPE_CHECKING:
    from atoll.results import Comparison

MOST_CLIENTS = 200  # rows of the table by client; clients.csv has them all

CSS = """
:root { color-scheme: light; --ink: #1d2428; --soft: #5b666d; --line: #dde3e6; --reef: #0b6e78; --sand: #f6f4ef; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 28px 20px 64px; }
header { border-bottom: 3px solid var(--reef); padding-bottom: 14px; margin-bottom: 22px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 38px 0 6px; }
p { margin: 6px 0 12px; max-width: 68ch; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; width: 100%; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; text-align: right; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; line-height: 1.25; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: #fff; }
table.words th, table.words td { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; }
table.words td:first-child { white-space: nowrap; }
tr.best td { font-weight: 700; background: var(--sand); }
.harm { color: #c2185b; }
figure { margin: 10px 0 0; }
svg { display: block; width: 100%; min-width: 600px; height: auto; }
svg text { font: 12.5px system-ui, sans-serif; fill: #5b666d; }
svg .axis { font-size: 13px; fill: #1d2428; }
svg .rule { stroke: #e7ebed; stroke-width: 1; }
svg .mean { stroke: #1d2428; stroke-width: 2; }
pre { background: var(--sand); padding: 12px 14px; overflow-x: auto;
  font-size: 0.8rem; line-height: 1.45; border-radius: 4px; }
details summary { cursor: pointer; color: var(--reef); }
@media print { main { max-width: none; } details { display: block; } }
"""


def page(comparison: Comparison) -> str:
    """The whole page."""
    config = comparison.example.config
    methods = list(comparison.outcomes)
    what = f"{len(methods)} methods" if len(methods) > 1 else methods[0]
    title = f"{what} on {config['task']['name']}, {comparison.clients} clients"
    sections = [
        _results(comparison),
        _curves(comparison),
        _gains(comparison),
        _clients(comparison),
        _traffic(comparison),
        _hyperparameters(comparison),
        _origin(comparison),
        _citations(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Atoll</title><style>{CSS}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(comparison.protocol)}</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _results(comparison: Comparison) -> str:
    paired = comparison.reference("local") is not None and len(comparison.outcomes) > 1
    several = len(comparison.seeds) > 1
    heads = [
        "Method",
        "Mean ±\u00a095\u00a0%" if several else "Mean",
        "Worst client",
        "Bottom 10\u00a0%",
        "Std over clients",
    ]
    heads += ["Gain vs Local", "Gain vs FedAvg", f"Harmed of\u00a0{comparison.clients}"] if paired else []
    rows = []
    for row in comparison.results:
        best = paired and row["method"] == comparison.best
        cells = [f"{row['method']}{' ★' if best else ''}", mean_text(Numbers.of(comparison), row)]
        cells += [Numbers.of(comparison).score(row[name]) for name in ("worst", "bottom10", "std")]
        if paired:
            cells += [gain_text(comparison, row), gain_text(comparison, row, "fedavg")]
            cells.append(harmed_text(comparison, row))
        rows.append((' class="best"' if best else "", cells))
    note = (
        "★ highest mean. Gains are means over clients of the paired difference, in percentage points. Harmed: clients "
        "worse off than alone by more than one standard error of the difference (mean over seeds)."
        if paired
        else "One run. `atoll compare` pairs it with Local and FedAvg, over several seeds."
    )
    return f"<h2>Results</h2>{_table(heads, rows)}<p class=soft>{escape(note)}</p>"


def _curves(comparison: Comparison) -> str:
    series = {}
    for method, outcomes in comparison.outcomes.items():
        of_seeds = [outcome.curve() for outcome in outcomes]
        if all(of_seeds):
            rounds = [round for round, _ in of_seeds[0]]
            values = np.array([[value for _, value in curve] for curve in of_seeds]).mean(axis=0)
            series[method] = list(zip(rounds, values.tolist(), strict=True))
    over = f", mean over {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else ""
    return _figure("Learning curves", figures.curves(series), f"Mean validation accuracy of all clients in %{over}.")


def _gains(comparison: Comparison) -> str:
    local = comparison.reference("local")
    gains = {method: comparison.gains(method) for method in comparison.outcomes if method != local}
    harmed = {method: comparison.harmed(method) for method in gains}
    values = {method: value for method, value in gains.items() if value is not None}
    marks = {method: mark for method, mark in harmed.items() if mark is not None}
    caption = (
        "Each dot is a client of one seed, on its own test split. A downward triangle is a client that is harmed; the "
        "bar is the mean."
    )
    return _figure("What each client gains", figures.gains(values, marks, comparison.seeds), caption)


def _clients(comparison: Comparison) -> str:
    seed, first = comparison.seeds[0], comparison.example
    heads = ["Client", "Test samples", *comparison.outcomes]
    marks = {method: comparison.harmed(method) for method in comparison.outcomes}
    rows = []
    for client, samples in enumerate(first.samples()[:MOST_CLIENTS]):
        cells = [str(client), str(samples)]
        for method, outcomes in comparison.outcomes.items():
            mark = marks[method]
            score = outcomes[0].scores()[client]
            text = Numbers.of(comparison).score(score)
            cells.append(f"▼ {text}" if mark is not None and mark[0, client] else text)
        rows.append(("", cells))
    more = f" The first {MOST_CLIENTS}; clients.csv has all." if comparison.clients > MOST_CLIENTS else ""
    legend = " ▼ harmed: worse off than alone." if any(mark is not None for mark in marks.values()) else ""
    caption = f"Test accuracy in % with seed {seed}.{legend}{more}"
    return (
        f"<h2>Client by client</h2><p class=soft>{escape(caption)}</p>"
        f"<details{' open' if len(rows) <= 50 else ''}><summary>{len(rows)} clients</summary>"
        f"{_table(heads, rows)}</details>"
    )


def _traffic(comparison: Comparison) -> str:
    rows = []
    for method, outcomes in comparison.outcomes.items():
        kinds = sorted({kind for outcome in outcomes for _, kind in outcome.bytes})
        seconds = f"{np.mean([outcome.seconds for outcome in outcomes]):.1f}"
        for kind in kinds or ["nothing is sent"]:
            sizes = [np.mean([one.bytes.get((way, kind), 0) for one in outcomes]) / 1e6 for way in ("up", "down")]
            rows.append(("", [method, kind, *(megabytes(float(size)) for size in sizes), seconds]))
    heads = ["Method", "What is sent", "MB up", "MB down", "Seconds of training"]
    note = (
        "All clients and rounds together, means over seeds. Bytes are those of the serialised payloads. Seconds "
        "include what the engine takes to measure and compile."
    )
    return f"<h2>What it costs</h2>{_table(heads, rows)}<p class=soft>{note}</p>"


def _hyperparameters(comparison: Comparison) -> str:
    config = comparison.example.config
    rows = [
        ("", [method, _pairs(asdict(one.algorithm)) or "none"]) for method, (one, *_) in comparison.outcomes.items()
    ]
    rows.append(("", ["clients' steps", _pairs(config["training"])]))
    rows.append(("", ["federation", _pairs({**config["settings"], "seed": ", ".join(map(str, comparison.seeds))})]))
    return f"<h2>Hyperparameters</h2>{_table(['Method', 'Values'], rows, kind='words')}"


def _origin(comparison: Comparison) -> str:
    config = comparison.example.config
    task = {name: value for name, value in config["task"].items() if name != "recipe"}
    parts = {
        "task": _pairs({**task, **config["task"].get("recipe", {})}),
        "model": _pairs(config.get("model", {})),
        "engine": _pairs(config.get("engine", {})),
        "versions": _pairs(config.get("versions") or versions()),
        "machine": _pairs(config.get("machine") or machine()),
        "command": config.get("command", UNKNOWN),
    }
    rows = [("", [name, text]) for name, text in parts.items() if text]
    return f"<h2>Where it comes from</h2>{_table(['', ''], rows, kind='words')}"


def _citations(comparison: Comparison) -> str:
    return f"<h2>Please cite</h2><pre>{escape(comparison.citations)}</pre>" if comparison.citations else ""


# -- the parts of a page -----------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr{attributes}>{''.join(map(_cell, cells))}</tr>" for attributes, cells in rows)
    shown = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table class="{kind}">{shown}<tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=harm' if text.startswith('▼') else ''}>{escape(text)}</td>"


def _figure(title: str, svg: str, caption: str) -> str:
    if not svg:
        return ""
    return (
        f"<h2>{escape(title)}</h2><figure><figcaption>{escape(caption)}</figcaption>"
        f'<div class="scroll">{svg}</div></figure>'
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value is not None)
