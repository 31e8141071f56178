"""A comparison, or a single run, as one page: nothing is loaded from elsewhere, and without its script it is whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.metrics import significance
from atoll.metrics.fairness import DECILES
from atoll.records.runs import machine, versions
from atoll.report import clusters, figures
from atoll.report.clients import Clients
from atoll.report.figures import Line, Style
from atoll.report.partition import caption, picture
from atoll.report.summary import cautions, findings, spoken
from atoll.report.table import (
    HARM,
    SERVERS_TEST,
    UNKNOWN,
    Numbers,
    gain_text,
    harmed_text,
    mean_text,
    megabytes,
    newcomers_cells,
    newcomers_notes,
)

if TYPE_CHECKING:
    from atoll.kernel.clusters import Clusters as Found
    from atoll.records.report import Report
    from atoll.records.results import Results

BEST = "★"
MOST_CLIENTS = 200  # rows of the table by client; clients.csv has them all
MOST_GROUPS = 40
MOST_MEMBERS = 30  # of a cluster by name; clients.csv has them all
WIDE_SPREAD = 20  # between the least and the most megabytes: beyond, their axis is logarithmic
HATCH = (
    '<svg class="hidden" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5" '
    'patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><rect class="hatched" width="5" height="5"/>'
    '<path class="gap" d="M0 0v5"/></pattern></defs></svg>'
)


def page(comparison: Results) -> str:
    """The whole page."""
    return Page(comparison).text()


class Cell(NamedTuple):
    """A cell of a table: its text, and what it belongs to."""

    text: str
    kind: str = ""
    method: int | None = None


class Row(NamedTuple):
    """A row of a table: what it is about, its cells, and its attributes in HTML."""

    head: str
    cells: Sequence[str | Cell]
    attributes: str = ""


@dataclass(frozen=True, eq=False)
class Page:
    """The sections of the page of one comparison."""

    comparison: Results

    @cached_property
    def numbers(self) -> Numbers:
        """How figures are written."""
        return Numbers.of(self.comparison)

    @cached_property
    def clients(self) -> Clients:
        """What is shown of each client."""
        return Clients(self.comparison)

    @cached_property
    def looks(self) -> dict[str, Style]:
        """How methods are drawn."""
        return figures.styles(list(self.comparison.outcomes))

    @cached_property
    def names(self) -> list[str]:
        """What clients are called."""
        return [self.comparison.client(client) for client in range(self.comparison.clients)]

    def text(self) -> str:
        """All of it."""
        title = self._title()
        sections = {
            "Results": self._results(),
            "Learning curves": self._curves(),
            "What each client gains": self._gains(),
            "New clients": self._newcomers(),
            "Score against megabytes": self._bytes(),
            "How scores are spread": self._spread(),
            "Groups of clients": self._groups(),
            "Who has what": self._partition(),
            "Clusters that were found": self._clusters(),
            "Who learns from whom": self._mixing(),
            "Which layers are sensitive": self._sensitivity(),
            "Client by client": self._each_client(),
            "What it costs": self._costs(),
            "Configuration": self._configuration(),
            "Please cite": self._citations(),
        }
        sections = {head: body for head, body in sections.items() if body}
        links = " ".join(f'<a href="#{_anchor(head)}">{escape(head)}</a>' for head in sections)
        results = _section("Results", sections.pop("Results"))
        body = "".join(_section(head, text) for head, text in sections.items())
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)} · Atoll</title><style>{figures.palette()}{_part('page.css')}</style></head><body>"
            f'{HATCH}<main><header>{self._banner()}<p class="eyebrow">Atoll report</p><h1>{escape(title)}</h1>'
            f'<p class="soft" id="protocol">{escape(self.comparison.protocol)}</p></header>'
            f'{self._summary()}<nav aria-label="Contents">{links}</nav>{results}{self._legend()}{body}'
            f"</main>{self._script(results + body)}</body></html>\n"
        )

    def _title(self) -> str:
        methods = list(self.comparison.outcomes)
        what = f"{len(methods)} methods" if len(methods) > 1 else methods[0]
        return f"{what} on {self.comparison.example.config['task']['name']}, {self.comparison.clients:,} clients"

    def _banner(self) -> str:
        """What is not there, if something is not."""
        missing = [*self.comparison.missing]
        for outcome in (one for of_method in self.comparison.outcomes.values() for one in of_method):
            run = f"{outcome.label} with seed {outcome.seed}"
            if not outcome.finished and not any(line.startswith(run) for line in missing):
                missing.append(f"{run} is incomplete: {outcome.done} of {outcome.rounds} rounds.")
        if not missing:
            return ""
        listed = "".join(f"<li>{escape(line)}</li>" for line in missing)
        return (
            '<div class="banner" role="alert"><strong>Incomplete: what there is is shown.</strong>'
            f"<ul>{listed}</ul></div>"
        )

    def _summary(self) -> str:
        found, care = (
            "".join(f"<li>{escape(sentence)}</li>" for sentence in part(self.comparison))
            for part in (findings, cautions)
        )
        careful = f'<h3>Read with care</h3><ul class="soft">{care}</ul>' if care else ""
        return _section("Summary", f'<ul class="findings">{found}</ul>{careful}')

    # -- results -----------------------------------------------------------------------------------------------------
    def _results(self) -> str:
        comparison, numbers = self.comparison, self.numbers
        several = len(comparison.outcomes) > 1
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "Mean" if len(comparison.seeds) == 1 else "Mean ±\u00a095\u00a0%": lambda row: mean_text(numbers, row),
            "Server's test": lambda row: numbers.score(row["central"]),
            "Worst client": lambda row: numbers.score(row["worst"]),
            "Bottom 10\u00a0%": lambda row: numbers.score(row["bottom10"]),
            "Std over clients": lambda row: numbers.score(row["std"]),
            "Gain vs Local": lambda row: gain_text(comparison, row),
            "Gain vs FedAvg": lambda row: gain_text(comparison, row, "fedavg"),
            f"Harmed of\u00a0{comparison.clients}": lambda row: harmed_text(comparison, row),
            "Mean over samples": lambda row: numbers.score(row["micro"]),
            "Shared model": lambda row: numbers.score(row["shared_union"]),
            "ECE": lambda row: _figure(row["ece"]),
            "Rounds to target": lambda row: _known(row["rounds_to_target"], "{:.3g}".format),
            "MB to target": lambda row: _known(row["megabytes_to_target"], megabytes),
        }  # fmt: skip
        columns = {
            head: text for head, text in columns.items() if any(text(row) != UNKNOWN for row in comparison.results)
        }
        rows = []
        for row in comparison.results:
            best = several and row["method"] == comparison.best
            attributes = f"{self._of(row['method'])}{' class=best' if best else ''}"
            cells = [_harm(text(row)) for text in columns.values()]
            rows.append(Row(f"{row['method']}{f' {BEST}' if best else ''}", cells, attributes))
        return _table(["Method", *columns], rows, self._notes(columns)) + self._details()

    def _notes(self, columns: Mapping[str, Any]) -> str:
        """What the table means, of the columns it has."""
        target = (
            f"{self.numbers.score(self.comparison.target)}{' %' if self.numbers.share else ''}"
            if self.comparison.target is not None
            else "95 % as good as FedAvg's best"
        )
        words = {
            "Gain": f"Gains are paired, client by client, in {self.numbers.points}; † differs by Wilcoxon's test over "
            "all clients of all seeds (p < 0.05 after Holm's correction).",
            "Harmed": f"{HARM} Harmed: worse off than alone by more than one standard error, mean over seeds.",
            "Server": SERVERS_TEST,
            "Shared": "Shared model: the one model of all, on the test samples of all clients together.",
            "ECE": "ECE: expected calibration error, 0 is best.",
            "Rounds": f"Target: a validation score of {target}, by the mean of three evaluations; – if a seed does not "
            "reach it. MB are of all clients, both directions.",
        }
        star = f"{BEST} best mean. " if len(self.comparison.outcomes) > 1 else ""
        told = [text for word, text in words.items() if any(head.startswith(word) for head in columns)]
        return f"<span>{star}{escape(' '.join(told))} {_PROTOCOL}</span>"

    def _details(self) -> str:
        """The figures a reader asks for after the first ones, methods side by side."""
        numbers, results = self.numbers, self.comparison.results
        lines: dict[str, tuple[str, Callable[[float | None], str]]] = {
            **{f"Decile p{decile}": (f"p{decile}", numbers.score) for decile in DECILES},
            "Best less worst client": ("spread", numbers.score),
            "Wilson bound of the worst client": ("worst_wilson", numbers.score),
            "Coefficient of variation": ("cv", _figure),
            "Gini": ("gini", _figure),
            "Jain": ("jain", _figure),
            "Jain of errors": ("jain_error", _figure),
            "Entropy": ("entropy", _figure),
            "Mean loss": ("loss", _figure),
            "Clusters": ("clusters", _count),
            "Adjusted Rand index of clusters and planted groups": ("adjusted_rand", _figure),
            "Median gain vs Local": ("gain_local_median", numbers.gain),
            "± 95 % of the gain vs Local": ("gain_local_interval", numbers.score),
            "Mean loss against Local, gains as 0": ("harm_mass", numbers.score),
            "Clients that gain vs Local": ("helped", _count),
            "Harmed vs FedAvg": ("harmed_fedavg", _count),
            "p vs Local": ("p_local", _p),
            "p vs FedAvg": ("p_fedavg", _p),
        }
        rows = [
            Row(head, [Cell(form(row[name]), method=place) for place, row in enumerate(results)])
            for head, (name, form) in lines.items()
            if any(form(row[name]) != UNKNOWN for row in results)
        ]
        heads = [Cell(row["method"], method=place) for place, row in enumerate(results)]
        table = _table(["Figure", *heads], rows, f"<span>Means over seeds. {_PROTOCOL}</span>")
        return f"<details><summary>Deciles, evenness, significance</summary>{table}</details>"

    def _legend(self) -> str:
        """The methods; the script makes switches of them."""
        if len(self.looks) == 1:
            return ""
        entries = "".join(
            f'<li class="{look.kind}" data-of="{look.place}"><svg viewBox="0 0 30 12" aria-hidden="true">'
            f'<path class="line" stroke-dasharray="{look.dash}" d="M0 6H30"/></svg>{escape(method)}</li>'
            for method, look in self.looks.items()
        )
        return f'<ul class="legend" aria-label="Methods">{entries}</ul>'

    # -- figures -----------------------------------------------------------------------------------------------------
    def _curves(self) -> str:
        lines = {method: self._line(method, lambda outcome: [*outcome.curve()]) for method in self.looks}
        seeds = len(self.comparison.seeds)
        bands = "bands are 95 % t-intervals, cut where they leave the figure"
        over = f" Means over {seeds} seeds; {bands}." if seeds > 1 else ""
        words = f"Validation score after each evaluated round, mean over all clients.{over}"
        title = f"Mean validation {self.numbers.name} by round, one line per method"
        return _figure_of(words, self._both(lines, title, "round"))

    def _bytes(self) -> str:
        def spent(outcome: Report) -> list[tuple[float, float]]:
            return [(at, score) for at, (_, score) in zip(outcome.spent, outcome.curve(), strict=True)]

        sending = [method for method, (one, *_) in self.comparison.outcomes.items() if one.bytes]
        lines = {method: self._line(method, spent).bare for method in sending}
        known = [point[0] for line in lines.values() for point in line.points]
        if not known:
            return ""
        low, high = min(known), max(known)
        silent = [method for method in self.looks if method not in sending]
        for method in silent:  # a level to be beaten, wherever one looks
            last = self._line(method, lambda outcome: [*outcome.curve()]).bare.points[-1:]
            lines[method] = Line([(at, *point[1:]) for point in last for at in (low, high)])
        log = high > WIDE_SPREAD * low
        words = (
            "Mean validation score of all clients after so many megabytes, sent by all clients and the server together."
            f"{f' {_listed(silent)} sends nothing: its last score is drawn as a level.' if len(silent) == 1 else ''}"
        )
        title = f"Mean validation {self.numbers.name} against megabytes, one line per method"
        across = f"megabytes, both directions{', logarithmic' if log else ''}"
        return _figure_of(words, self._both(lines, title, across, log=log))

    def _line(self, method: str, of: Callable[[Report], list[tuple[float, float]]]) -> Line:
        """Means over seeds at every evaluation that all of them have."""
        scale, name = (100 if self.numbers.share else 1), self.numbers.name
        seeds = [of(outcome) for outcome in self.comparison.outcomes[method]]
        points = []
        for at_once in zip(*seeds, strict=False):  # an incomplete run has fewer
            x, values = float(np.mean([x for x, _ in at_once])), [scale * value for _, value in at_once]
            mean, half = float(np.mean(values)), significance.interval(values)
            if math.isfinite(mean):
                spread = "" if half is None else f" ± {half:.3g}"
                points.append((x, mean, half, f"{method}, {x:.4g}: {name} {mean:.4g}{spread}"))
        return Line(points)

    def _newcomers(self) -> str:
        """How clients that took no part are served, and how fast they make it their own."""
        if not self.comparison.newcomers:
            return ""
        (_, *heads), found = newcomers_cells(self.comparison)
        rows = [Row(method, cells, self._of(method)) for method, *cells in found]
        note = f"<span>{escape(newcomers_notes(self.comparison))} {_PROTOCOL}</span>"
        table = _table(["Method", *(f"{head[0].upper()}{head[1:]}" for head in heads)], rows, note)

        def tuned(outcome: Report) -> list[tuple[float, float]]:
            stages = outcome.newcomers["labelled"] if outcome.newcomers else {}
            return [(float(epochs), scores["macro"]) for epochs, scores in stages.items()]

        lines = {row["method"]: self._line(row["method"], tuned).bare for row in self.comparison.newcomers}
        title = f"Mean test {self.numbers.name} of new clients by epochs of tuning, one line per method"
        words = "Test score of new clients with labels, after so many epochs of tuning on their own training samples."
        return table + _figure_of(words, self._both(lines, title, "epochs of tuning", split="test"))

    def _both(
        self, lines: Mapping[str, Line], title: str, across: str, *, log: bool = False, split: str = "validation"
    ) -> str:
        up, most = f"{split} {self.numbers.name}{self.numbers.unit}", 100 if self.numbers.share else math.inf
        wide, narrow = (
            figures.curves(lines, self.looks, title, across, up, width=width, log=log, most=most)
            for width in (figures.WIDTH, figures.NARROW)
        )
        return _wide_and_narrow(wide, narrow)

    def _gains(self) -> str:
        """One small chart per method, all with the same scale."""
        clients, scale = self.clients, 100 if self.numbers.share else 1
        if not clients.gains:
            return ""
        known = np.concatenate([values[np.isfinite(values)] for values in clients.gains.values()]) * scale
        ticks = figures.ticks_between(min(0.0, known.min(initial=0)), max(0.0, known.max(initial=0)), 5)
        charts = []
        for method, values in clients.gains.items():
            look, harmed = self.looks[method], clients.harmed[method]
            count, helped = int(np.isfinite(values).sum()), int((values > 0).sum())
            words = f"{helped} of {count} gain, {f'{HARM} ' if harmed.any() else ''}{harmed.sum()} harmed"
            notes = [
                f"client {name}, {method}: {self.numbers.gain(gain)}{' (harmed)' if harm else ''}"
                for name, gain, harm in zip(self.names, values, harmed, strict=True)
            ]
            title = f"Gain of each client with {method} against training alone, sorted"
            svg = figures.gains(values * scale, harmed, self.names, notes, look, ticks, title)
            charts.append(f'<div data-method="{look.place}"><h3>{escape(method)}</h3><p>{escape(words)}</p>{svg}</div>')
        words = (
            f"What each client gains over training alone, in {self.numbers.points}. {HARM} and hatching mark clients "
            f"that are harmed: worse off than alone by more than one standard error. {clients.words}"
        )
        return f'<figure><figcaption>{escape(words)}</figcaption><div class="grid">{"".join(charts)}</div></figure>'

    def _spread(self) -> str:
        numbers, scale = self.numbers, 100 if self.numbers.share else 1
        scores = {method: found for method, found in self.clients.scores.items() if np.isfinite(found).any()}
        if not scores:
            return ""
        best, worst = (np.nanmax, np.nanmin) if numbers.higher_is_better else (np.nanmin, np.nanmax)
        medians = {
            method: f"{method}: median {numbers.score(float(np.nanmedian(of)))}" for method, of in scores.items()
        }
        ends = {
            method: f"{median}, worst {numbers.score(float(worst(of)))}, best {numbers.score(float(best(of)))}"
            for (method, median), of in zip(medians.items(), scores.values(), strict=True)
        }
        notes = {
            method: [f"client {name}, {method}: {numbers.score(one)}" for name, one in zip(self.names, of, strict=True)]
            for method, of in scores.items()
        }
        wide, narrow = (
            figures.strips(
                {method: scale * of for method, of in scores.items()}, heads, notes, self.looks,
                f"Test {numbers.name} of each client, one row per method", f"test {numbers.name}{numbers.unit}",
                width=width,
            )
            for width, heads in ((figures.WIDTH, ends), (figures.NARROW, medians))
        )  # fmt: skip
        some = ""
        if self.comparison.clients > figures.MOST_MARKS:
            some = f" {figures.MOST_MARKS} of them are drawn, evenly spaced in the order of their scores."
        words = f"Each dot is a client.{some} The box holds the middle half of all clients, the line is their median."
        return _figure_of(f"{words} {self.clients.words}", _wide_and_narrow(wide, narrow))

    def _groups(self) -> str:
        """What a mean over all may hide."""
        found = {method: self.comparison.groups(method) for method in self.comparison.outcomes}
        kinds = next(iter(found.values()))
        rows = []
        sign = self.comparison.example.sign
        for kind, groups in kinds.items():
            if len(groups) < 2:
                continue
            rows.append(Row(_GROUPS[kind], [""] * (len(found) + 1), " class=rows"))
            for name, group in [*groups.items()][:MOST_GROUPS]:
                scores = [found[method][kind][name].mean for method in found]
                top = max(sign * score for score in scores)
                cells = [
                    Cell(self.numbers.score(score), "top" if sign * score == top and len(found) > 1 else "", place)
                    for place, score in enumerate(scores)
                ]
                rows.append(Row(name, [str(group.clients), *cells]))
            if len(groups) > MOST_GROUPS:
                rows.append(Row(f"{len(groups) - MOST_GROUPS} more in results.json", [""] * (len(found) + 1)))
        if not rows:
            return ""
        heads = [Cell(method, method=place) for place, method in enumerate(found)]
        note = (
            "Means over the clients of a group. Thirds by rank, of the training data; the best of a row is bold. "
            f"{_PROTOCOL}"
        )
        return _table(["Group", "Clients", *heads], rows, f"<span>{note}</span>")

    def _partition(self) -> str:
        found = self.comparison.example.statistics
        if found is None:
            return ""
        many = len(self.comparison.seeds) > 1 and not self.clients.together
        seed = f" With seed {self.comparison.seeds[0]}; other seeds deal anew." if many else ""
        words = f"{found.sentence} {caption(found)} Training data.{seed}"
        return _figure_of(words, f'<div class="scroll"{_FOCUS}><div class="wide-only">{picture(found)}</div></div>')

    def _clusters(self) -> str:
        """For each method that finds some: who is in which, how they came about, how far planted groups agree."""
        drawn = []
        for method, (one, *others) in self.comparison.outcomes.items():
            found, words = one.clusters, clusters.sentence(self.comparison, method, spoken(self.comparison)[method])
            if found is None or words is None:
                continue
            planted = None if one.statistics is None else one.statistics.groups
            tree = "" if found.merges is None else "the tree they are cut from, "
            beside = "their clusters" if planted is None else "their clusters and their planted groups"
            some = f" {figures.MOST_MARKS} of them are drawn." if self.comparison.clients > figures.MOST_MARKS else ""
            caption = f"Each column is a client; below each other are {tree}{beside}.{some}"
            caption += f" Of seed {one.seed}; other seeds have clusters of their own." if others else ""
            order = clusters.in_order(found, planted)
            notes = [self._belongs(client, found, planted) for client in range(len(found.of_client))]
            title = f"Clusters of clients with {method}"
            wide, narrow = (
                figures.clusters(found, planted, order, self.names, notes, title, width=width)
                for width in (figures.WIDTH, figures.NARROW)
            )
            drawn.append(
                f'<div class="clusters"{self._of(method)}><h3>{escape(method)}</h3><p>{escape(words)}</p>'
                f"{_figure_of(caption, _wide_and_narrow(wide, narrow))}{self._members(found, planted)}</div>"
            )
        return "".join(drawn)

    def _members(self, found: Found, planted: Any) -> str:
        """The clusters as a table."""
        rows = []
        for cluster in sorted({*found.of_client.tolist()}, key=lambda number: (number < 0, number)):
            members = np.flatnonzero(found.of_client == cluster)
            listed = _listed([self.names[client] for client in members[:MOST_MEMBERS]])
            more = f" and {len(members) - MOST_MEMBERS} more" if len(members) > MOST_MEMBERS else ""
            cells = [str(len(members)), f"{listed}{more}"]
            if planted is not None:
                groups, counts = np.unique(planted[members], return_counts=True)
                cells.insert(
                    1, _listed([f"{count} of group {group}" for group, count in zip(groups, counts, strict=True)])
                )
            rows.append(Row(str(cluster) if cluster >= 0 else "in none", cells))
        heads = ["Cluster", "Clients", *([] if planted is None else ["Planted"]), "Who"]
        left_out = [Row(f"{len(rows) - MOST_GROUPS} more in clients.csv", [""] * (len(heads) - 1))]
        return _table(heads, rows[:MOST_GROUPS] + left_out * (len(rows) > MOST_GROUPS), kind="words")

    def _belongs(self, client: int, found: Found, planted: Any) -> str:
        cluster = int(found.of_client[client])
        where = f"in cluster {cluster}" if cluster >= 0 else "in no cluster"
        group = "" if planted is None else f", of planted group {planted[client]}"
        return f"client {self.names[client]} is {where}{group}"

    def _mixing(self) -> str:
        """Where a method says who takes how much from whom."""
        drawn = []
        for method, (one, *_) in self.comparison.outcomes.items():
            matrix = one.mixing
            if matrix is None:
                continue
            notes = [self._takes(client, row) for client, row in enumerate(matrix)]
            title = f"Who learns from whom with {method}: row by row what a client takes from each client"
            left_out = f" The first {figures.MOST_MIXING} clients." if len(matrix) > figures.MOST_MIXING else ""
            words = (
                f"{method}, seed {one.seed}. Each row is a client, each column one it takes from; the strongest shade "
                f"is {np.nanmax(matrix):.3g}.{left_out}"
            )
            drawn.append(self._scrolled(method, words, figures.heatmap(matrix, self.names, notes, title)))
        return "".join(drawn)

    def _sensitivity(self) -> str:
        """Where a method measures how sensitive clients are to their layers."""
        drawn = []
        for method, (one, *_) in self.comparison.outcomes.items():
            if one.sensitivity is None:
                continue
            layers, values = one.sensitivity
            shares = values / np.fmax(np.nanmax(values, axis=1, keepdims=True, initial=0), np.finfo(np.float64).tiny)
            notes = [
                f"client {name}: " + ", ".join(f"{layer} {value:.2g}" for layer, value in zip(layers, row, strict=True))
                for name, row in zip(self.names, values, strict=True)
            ]
            title = f"Sensitivity of layers with {method}: row by row a client, column by column a layer"
            words = (
                f"{method}, seed {one.seed}. Each row is a client when it last trained, each column a layer; the "
                "strongest shade is the client's most sensitive layer."
            )
            drawn.append(self._scrolled(method, words, figures.heatmap(shares, self.names, notes, title, layers)))
        return "".join(drawn)

    def _scrolled(self, method: str, words: str, svg: str) -> str:
        """A wide picture of one method, which goes when the method is hidden."""
        inner = f'<div class="scroll"{_FOCUS}><div class="wide-only">{svg}</div></div>'
        return f'<div data-method="{self.looks[method].place}">{_figure_of(words, inner)}</div>'

    def _takes(self, client: int, row: Any) -> str:
        most = np.argsort(-row, kind="stable")[:3]
        takes = ", ".join(f"{row[other]:.2g} from {self.names[other]}" for other in most if row[other] > 0)
        return f"client {self.names[client]} takes {takes or 'nothing'}"

    # -- tables ------------------------------------------------------------------------------------------------------
    def _each_client(self) -> str:
        clients = self.clients
        rows = []
        for client, samples in enumerate(clients.samples[:MOST_CLIENTS].tolist()):
            cells: list[str | Cell] = [f"{samples:,}"]
            for place, (method, scores) in enumerate(clients.scores.items()):
                text = self.numbers.score(scores[client])
                harmed = method in clients.harmed and bool(clients.harmed[method][client])
                cells.append(Cell(f"{HARM} {text}" if harmed else text, "harm" if harmed else "", place))
            rows.append(Row(self.names[client], cells, f' data-client="{client}"'))
        heads = [Cell(method, method=place) for place, method in enumerate(self.comparison.outcomes)]
        all_of = f" The first {MOST_CLIENTS}; clients.csv has all." if self.comparison.clients > MOST_CLIENTS else ""
        marks = f" {HARM} harmed: worse off than alone by more than one standard error." if clients.gains else ""
        note = f"<span>{escape(f'{clients.words}{marks}{all_of}')} {_PROTOCOL}</span>"
        table = _table(["Client", "Test samples", *heads], rows, note)
        opened = " open" if len(rows) <= 30 else ""
        return f"<details{opened}><summary>{len(rows)} clients</summary>{table}</details>"

    def _costs(self) -> str:
        rows, kinds_sent = [], []
        for row in self.comparison.results:
            method, of = row["method"], self._of(row["method"])
            each = (row["megabytes_up"] + row["megabytes_down"]) / self.comparison.clients
            sizes = [megabytes(size) for size in (row["megabytes_up"], row["megabytes_down"], each)]
            sizes.append(UNKNOWN if row["megabytes_deployed"] is None else megabytes(row["megabytes_deployed"]))
            memory = f"{row['memory_megabytes']:,.0f}" if row["memory_megabytes"] else UNKNOWN
            gradients = f"{row['gradients']:,.0f}" if row["gradients"] else UNKNOWN
            rows.append(Row(method, [*sizes, gradients, f"{row['seconds']:.1f}", memory], of))
            outcomes = self.comparison.outcomes[method]
            for kind in sorted({kind for outcome in outcomes for _, kind in outcome.bytes}):
                ways = [np.mean([one.bytes.get((way, kind), 0) for one in outcomes]) / 1e6 for way in ("up", "down")]
                kinds_sent.append(Row(method, [kind, *(megabytes(float(size)) for size in ways)], of))
        sizes = ["MB up", "MB down", "MB per client", "MB deployed"]
        heads = ["Method", *sizes, "Gradients", "Seconds of training", "Peak MB of memory"]
        note = (
            "<span>All clients and rounds together, means over seeds; bytes are those of the serialised payloads. "
            "Deployed: what one client must hold to answer by itself, an ensemble all of its models. "
            "Seconds include what the engine takes to measure and compile; memory is the largest of all seeds, of "
            f"tensors on a GPU, else of the process. {_PROTOCOL}</span>"
        )
        by_kind = _table(
            ["Method", "What is sent", "MB up", "MB down"], kinds_sent, f"<span>Bytes by kind. {_PROTOCOL}</span>"
        )  # fmt: skip
        return _table(heads, rows, note) + (by_kind if kinds_sent else "")

    def _configuration(self) -> str:
        config = self.comparison.example.config
        seeds = ", ".join(map(str, self.comparison.seeds))
        task = {name: value for name, value in config["task"].items() if name not in ("recipe", "metric")}
        parts = {
            **{
                method: _pairs(asdict(one.algorithm)) or "no hyperparameters"
                for method, (one, *_) in self.comparison.outcomes.items()
            },
            "Clients' steps": _pairs(config.get("training", {})),
            "Federation": _pairs({**config["settings"], "seed": seeds}),
            "Task": _pairs({**task, **config["task"].get("recipe", {})}),
            "Metric": _pairs(self.comparison.metric),
            "Model": _pairs(config.get("model", {})),
            "Engine": _pairs(config.get("engine", {})),
            "Versions": _pairs(config.get("versions") or versions()),
            "Machine": _pairs(config.get("machine") or machine()),
        }
        rows = [Row(name, [text]) for name, text in parts.items() if text]
        command = (
            f"<h3>Command</h3><pre class=wrap>{escape(str(config['command']))}</pre>" if "command" in config else ""
        )
        whole = escape(json.dumps(config.as_json(), indent=2, default=str))
        first = f"{self.comparison.example.label}, seed {self.comparison.seeds[0]}"
        return (
            f"{command}{_table(['Part', 'Values'], rows, kind='words')}<details><summary>The configuration of "
            f"{escape(first)} in full</summary><pre>{whole}</pre></details>"
        )

    def _citations(self) -> str:
        return f"<pre>{escape(self.comparison.citations)}</pre>" if self.comparison.citations else ""

    # -- script ------------------------------------------------------------------------------------------------------
    def _script(self, body: str) -> str:
        """What the page tells about the clients that are drawn, and the script that does."""
        clients = self.clients
        drawn = sorted({int(client) for client in re.findall(r'data-client="(\d+)"', body)})
        told = {
            "methods": [*clients.scores],
            "clients": {
                client: [
                    self.names[client],
                    int(clients.samples[client]),
                    [
                        [
                            self.numbers.score(scores[client]),
                            self.numbers.gain(clients.gains[method][client]) if method in clients.gains else "",
                            int(method in clients.harmed and bool(clients.harmed[method][client])),
                        ]
                        for method, scores in clients.scores.items()
                    ],
                ]
                for client in drawn
            },
        }
        data = json.dumps(told, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        return (
            f'<div id="tip" role="status" hidden></div><script type="application/json" id="told">{data}</script>'
            f"<script>{_part('page.js')}</script>"
        )

    def _of(self, method: str) -> str:
        return f' data-method="{self.looks[method].place}"'


# -- the parts of a page -----------------------------------------------------------------------------------------------

_PROTOCOL = '<a href="#protocol">Protocol</a>.'
_FOCUS = ' tabindex="0" role="region" aria-label="Scrolls sideways"'
_GROUPS = {
    "size": "by size",
    "label entropy": "by label entropy",
    "label divergence": "by label divergence",
    "planted": "planted",
}


def _part(name: str) -> str:
    return (resources.files("atoll.report") / name).read_text(encoding="utf-8")


def _anchor(head: str) -> str:
    return head.lower().replace(" ", "-")


def _section(head: str, body: str) -> str:
    anchor = _anchor(head)
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(head)}</h2>{body}</section>'


def _table(heads: Sequence[str | Cell], rows: Iterable[Row], note: str = "", *, kind: str = "") -> str:
    head = "".join(_cell(text, "th", ' scope="col"') for text in heads)
    body = "".join(
        f'<tr{row.attributes}><th scope="row">{escape(row.head)}</th>{"".join(map(_cell, row.cells))}</tr>'
        for row in rows
    )
    caption = f"<caption>{note}</caption>" if note else ""
    return (
        f'<div class="scroll"{_FOCUS}><table class="{kind}">{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str | Cell, tag: str = "td", attributes: str = "") -> str:
    text, kind, method = cell if isinstance(cell, Cell) else Cell(cell)
    attributes += f' class="{kind}"' if kind else ""
    attributes += "" if method is None else f' data-method="{method}"'
    return f"<{tag}{attributes}>{escape(text)}</{tag}>"


def _harm(text: str) -> Cell:
    return Cell(text, "harm" if HARM in text else "")


def _figure_of(words: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(words)}</figcaption>{inner}</figure>" if inner else ""


def _wide_and_narrow(wide: str, narrow: str) -> str:
    """The same figure for two widths; a style sheet shows one."""
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>' if wide else ""


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else form(value)


def _figure(value: float | None) -> str:
    return _known(value, "{:.3f}".format)


def _count(value: float | None) -> str:
    return _known(value, "{:.1f}".format)


def _p(value: float | None) -> str:
    return _known(value, lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}")


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value is not None)
