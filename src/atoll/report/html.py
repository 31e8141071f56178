"""Write a comparison, or a single run, as one page: it loads nothing from elsewhere, and is whole without its script.

Each section collects its values; `templates/page.html` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from atoll.report.figures import write_palette
from atoll.report.parts import Part, templates
from atoll.report.sections.classes import collect_classes
from atoll.report.sections.clients import collect_clients, collect_gains, collect_groups, collect_spread
from atoll.report.sections.curves import collect_curves, collect_epochs, collect_megabytes, collect_newcomers
from atoll.report.sections.protection import collect_audits, collect_contributions, collect_protection
from atoll.report.sections.results import collect_results
from atoll.report.sections.setup import collect_citations, collect_configuration, collect_costs
from atoll.report.sections.structure import collect_clusters, collect_mixing, collect_partition, collect_sensitivity
from atoll.report.summary import write_cautions, write_findings, write_verdict
from atoll.report.svg import join
from atoll.report.view import View

if TYPE_CHECKING:
    from atoll.federation.results import Results

SECTIONS: dict[str, Callable[[View], list[Part]]] = {
    "What each client gains": collect_gains,
    "Learning curves": collect_curves,
    "By epoch of local training": collect_epochs,
    "Class by class": collect_classes,
    "New clients": collect_newcomers,
    "Score against megabytes": collect_megabytes,
    "How scores are spread": collect_spread,
    "Groups of clients": collect_groups,
    "Who has what": collect_partition,
    "Clusters": collect_clusters,
    "Who learns from whom": collect_mixing,
    "Which layers are sensitive": collect_sensitivity,
    "Client by client": collect_clients,
    "What was protected": collect_protection,
    "What an audit found": collect_audits,
    "Who contributes": collect_contributions,
    "What it costs": collect_costs,
    "Configuration": collect_configuration,
    "Please cite": collect_citations,
}


def render_page(comparison: Results, following: str = "") -> str:
    """Render the whole page; `following` says that it reloads while the runs go on."""
    view = View(comparison)
    bodies = {head: join(*collect(view)) for head, collect in SECTIONS.items()}
    results, sections = join(*collect_results(view)), {head: body for head, body in bodies.items() if body}
    template = templates().get_template("page.html")
    return template.render(
        title=_write_title(comparison),
        following=following,
        follow=Markup(_read("follow.js")),
        verdict=write_verdict(comparison),
        results=results,
        protocol=comparison.protocol,
        runs=sum(map(len, comparison.outcomes.values())),
        missing=_list_missing(comparison),
        findings=write_findings(comparison),
        cautions=write_cautions(comparison),
        sections=sections,
        looks=view.looks,
        data=_describe_clients(view, _find_clients(sections.values())),
        style=Markup(write_palette() + _read("page.css")),
        script=Markup(_read("page.js")),
    )


def _write_title(comparison: Results) -> str:
    methods = list(comparison.outcomes)
    what = f"{len(methods)} methods" if len(methods) > 1 else methods[0]
    return f"{what} on {comparison.example.config['task']['name']}, {comparison.clients:,} clients"


def _list_missing(comparison: Results) -> list[str]:
    """Say which runs are not there, or not finished."""
    missing = [*comparison.missing]
    for outcome in (one for outcomes in comparison.outcomes.values() for one in outcomes):
        run = f"{outcome.label} with seed {outcome.seed}"
        if not outcome.finished and not any(line.startswith(run) for line in missing):
            missing.append(f"{run} is incomplete: {outcome.done} of {outcome.rounds} rounds.")
    return missing


def _find_clients(bodies: Iterable[Markup]) -> list[int]:
    """Find the clients that are drawn or listed: of very many, only some are."""
    return sorted({int(client) for body in bodies for client in re.findall(r'data-client="(\d+)"', body)})


def _describe_clients(view: View, clients: Iterable[int]) -> dict[str, Any]:
    """Collect what the script shows of a client under the pointer: name, test samples, and figures by method."""
    found, scored = view.clients, view.comparison.example.scored

    def describe(client: int) -> list[Any]:
        place = int(np.searchsorted(scored, client))
        if place == len(scored) or scored[place] != client:  # it is drawn, but was not scored
            return [view.name(client), None, []]
        figures = [
            [
                view.numbers.score(scores[place]),
                view.numbers.gain(found.gains[method][place]) if method in found.gains else "",
                int(method in found.harmed and bool(found.harmed[method][place])),
            ]
            for method, scores in found.scores.items()
        ]
        return [view.name(client), int(found.samples[place]), figures]

    return {"methods": [*found.scores], "clients": {client: describe(client) for client in clients}}


def _read(name: str) -> str:
    return (resources.files("atoll.report") / "templates" / name).read_text(encoding="utf-8")
