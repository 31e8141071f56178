"""One method and one seed of a comparison, with all clients: what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.algorithms import name_of
from atoll.data.statistics import Statistics
from atoll.experiments.comparison import Comparison, read_runs
from atoll.experiments.explain.words import count_text, join_names, p_text
from atoll.federation.labels import REFERENCES
from atoll.federation.numbers import Numbers
from atoll.federation.report import Report, Select
from atoll.federation.results import SIGNIFICANT
from atoll.kernel.errors import RunError, UnknownName, unknown
from atoll.metrics import significance
from atoll.runtime.population import MANY_CLIENTS

Values = NDArray[np.float64]

FEWEST_CLIENTS = 5  # for a rank correlation
STILL_RISING = 0.01  # of the score, over the last quarter of the rounds
FEWEST_VALIDATION = 50  # samples of all clients, for advice from their mean score


class Gain(NamedTuple):
    """The gain of a client over a reference, on its test samples."""

    over: str
    score: float  # of the reference
    value: float
    error: float
    samples: int
    only: tuple[int, int, float] | None = None  # samples right with the method or the reference only, McNemar's p

    @property
    def helped(self) -> bool:
        """Whether it gains more than one standard error."""
        return self.value > self.error

    @property
    def harmed(self) -> bool:
        """Whether it loses more than one standard error."""
        return self.value < -self.error

    @property
    def p(self) -> float:
        """How likely chance alone makes such a difference: by McNemar's test, else by Student's."""
        return significance.student(self.value, self.error, self.samples) if self.only is None else self.only[-1]

    @property
    def sure(self) -> bool:
        """Whether it is more than chance: something can be advised from it."""
        return self.p < SIGNIFICANT


class Relation(NamedTuple):
    """Spearman's rank correlation of the gain with a measured value, over all clients."""

    rho: float
    p: float

    def __str__(self) -> str:
        return f"ρ = {self.rho:+.2f}, {p_text(self.p)}"


@dataclass(frozen=True, eq=False)
class Study:
    """One method of a comparison with one of its seeds."""

    comparison: Comparison
    method: str
    index: int = 0  # of the seed

    @classmethod
    def read(cls, folder: Path, method: str | None = None, seed: int | None = None, *, trust: bool = False) -> Study:
        """Read the folder of a comparison or of a run; for a run of a comparison, its references are found too.

        For a comparison, the defaults are the method with the best mean that is not a reference, and the first seed.
        """
        if (folder / "comparison.json").exists():
            runs, absent = read_runs(folder, trust=trust)
            comparison = Comparison.of_runs(runs, absent=absent)
            method = best_method(comparison) if method is None else method
        else:
            run = Report.read(folder, trust=trust)
            run.select_round()  # says what to do where nothing was evaluated
            comparison = Comparison.of_runs([run, *find_references(run, folder, trust=trust)])
            method = run.label if method is None else method
        if method not in comparison.outcomes:
            raise unknown("method", method, comparison.outcomes)
        if comparison.scored > MANY_CLIENTS:
            raise RunError(
                f"An explanation needs the scores of clients after every evaluation, which are kept of at most "
                f"{MANY_CLIENTS:,} clients. Here {comparison.scored:,} were scored.",
                hint="a sample keeps them: `evaluation=sample:1000`.",
            )
        if seed is not None and seed not in comparison.seeds:
            raise unknown("seed", str(seed), map(str, comparison.seeds))
        return cls(comparison, method, 0 if seed is None else comparison.seeds.index(seed))

    @property
    def outcome(self) -> Report:
        """The outcome of the run."""
        return self.comparison.outcomes[self.method][self.index]

    @cached_property
    def parts(self) -> tuple[list[str], Values]:
        """The leaves of a model, and how far each client's lie from the average of all clients'; see `Report`."""
        return self.outcome.personal_parts()

    @property
    def statistics(self) -> Statistics | None:
        """The statistics of the clients' data."""
        return self.outcome.statistics

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self.comparison.clients

    @property
    def select(self) -> Select:
        """The rule that says which round counts."""
        return self.comparison.select

    @property
    def scores(self) -> Values:
        """Every client's score; NaN for one that was not scored."""
        return self.for_all(self.outcome.scores(select=self.select))

    def for_all(self, values: Values) -> Values:
        """Return the values of the clients that were scored in an array for all, with NaN for the others."""
        found = np.full(self.clients, math.nan)
        found[self.outcome.scored] = values
        return found

    @property
    def over(self) -> str | None:
        """The reference for gains: Local, or FedAvg for Local itself; None if it is missing."""
        return next((name for name in REFERENCES if self.reference(name) not in (None, self.method)), None)

    def reference(self, over: str) -> str | None:
        """Return the label of Local or FedAvg here, if there is one."""
        return self.comparison.reference(over)

    def gains(self, over: str) -> tuple[Values, Values] | None:
        """Return the gain of every client over a reference, and the standard errors."""
        values, errors = self.comparison.gains(self.method, over), self.comparison.errors(self.method, over)
        if values is None or errors is None:
            return None
        return self.for_all(values[self.index]), self.for_all(errors[self.index])

    def most_affected(self, most: int) -> list[int]:
        """Return the clients that lose or gain most, beyond one standard error: half of them harmed, and these first.

        Where there are too few of one kind, there are more of the other. Without references, the worst scores.
        """
        gains = None if self.over is None else self.gains(self.over)
        if gains is None:
            order = np.argsort(self.outcome.sign * self.scores, kind="stable")  # NaN, without test samples, comes last
            return [int(client) for client in order[: np.count_nonzero(self.outcome.samples())]][:most]
        values, errors = gains
        order = np.argsort(values, kind="stable")
        harmed = [int(client) for client in order if values[client] < -errors[client]]
        helped = [int(client) for client in order[::-1] if values[client] > errors[client]]
        first = harmed[: max(math.ceil(most / 2), most - len(helped))]
        return [*first, *helped[: most - len(first)]]

    @cached_property
    def measured(self) -> dict[str, Values]:
        """The values in which clients differ, one for each client."""
        data = self.statistics
        if data is None:
            return {}
        values = {
            "size": data.samples.astype(np.float64), "label divergence": data.divergence,
            "target shift": None if data.target_shift is None else np.abs(data.target_shift),
            "feature distance": data.feature_distance,
        }  # fmt: skip
        return {what: one for what, one in values.items() if one is not None}

    @cached_property
    def relations(self) -> dict[str, Relation]:
        """The correlation of the gain with each measured value."""
        gains = None if self.over is None else self.gains(self.over)
        related = {} if gains is None else {what: relation_of(gains[0], one) for what, one in self.measured.items()}
        return {what: relation for what, relation in related.items() if relation is not None}

    @cached_property
    def replies(self) -> NDArray[np.int64] | None:
        """The number of rounds in which each client replied; None if it was not written down."""
        if not self.outcome.ledger.entries or not self.outcome.algorithm.sends:
            return None
        who: dict[int, set[int]] = {}
        for entry in self.outcome.ledger.entries:
            if entry.clients is None:  # of very many clients, replies are counted together
                return None
            if entry.direction == "up" and entry.round >= 0:
                who.setdefault(entry.round, set()).update(entry.clients)
        return np.bincount([client for some in who.values() for client in some], minlength=self.clients)

    # -- words -----------------------------------------------------------------------------------------------------
    @property
    def numbers(self) -> Numbers:
        """The way figures are written."""
        return Numbers.of(self.comparison)

    def score(self, value: float) -> str:
        """Write a score with its unit."""
        return f"{self.numbers.score(value)}{' %' if self.numbers.share else ''}"

    def points(self, value: float) -> str:
        """Write a gain with its unit."""
        return f"{self.numbers.gain(value)}{' points' if self.numbers.share else ''}"

    def name(self, client: int) -> str:
        """Return the name of a client."""
        return str(client) if self.statistics is None else self.statistics.name(client)

    def names_of(self, clients: Iterable[int]) -> str:
        """List clients by name."""
        return join_names([self.name(client) for client in clients])

    def title(self, client: int) -> str:
        """Return the name of a client with its number."""
        name = self.name(client)
        return f"Client {client}" if name in (str(client), f"client {client}") else f"{name} (client {client})"

    def find(self, text: str) -> int:
        """Find a client by name or number; names count first."""
        names = [self.name(client) for client in range(self.clients)]
        if text in names:
            return self._require_scored(names.index(text))
        if text.isdecimal() and int(text) < self.clients:
            return self._require_scored(int(text))
        near = get_close_matches(text, names)
        raise UnknownName(
            f"A client must be given by its name or by a number from 0 to {self.clients - 1}. Got {text!r}.",
            hint=f"did you mean: {', '.join(near)}?" if near else f"they are called {join_names(names)}.",
        )

    def _require_scored(self, client: int) -> int:
        scored = self.outcome.scored
        if client in self.outcome.settings.draw_attackers(self.clients):
            raise UnknownName(f"A client that is explained must have been scored. Client {client} attacks.")
        if client not in scored:
            raise UnknownName(
                f"A client that is explained must have been scored. Client {client} is not in the sample of "
                f"{len(scored):,} of {self.clients:,} clients.",
                hint=f"of the sample are {join_names([str(one) for one in scored[:5]])}, for example.",
            )
        return client


def overview(study: Study) -> list[str]:
    """Describe all clients in a few sentences."""
    outcome, task = study.outcome, study.outcome.config.task
    dealt = (task.recipe or {}).get("partition")
    lower = "" if study.numbers.higher_is_better else "; lower is better, and a positive gain is good"
    scored = study.comparison.scored
    over = f"{scored:,} of {study.clients:,}" if scored < study.clients else f"{study.clients}"
    level = (
        f"{study.method} on {task.name}{f' ({dealt})' if dealt else ''}, seed {outcome.seed}: {study.numbers.name} "
        f"{study.score(outcome.figures(select=study.select).macro)} on average over {over} clients after "
        f"round {outcome.select_round(study.select).round}{lower}."
    )
    gains = _explain_no_gains(study) if study.over is None else _describe_gains(study, study.over)
    return [
        level,
        *study.comparison.missing,
        *_describe_rounds(study),
        gains,
        *_describe_relations(study),
        *_describe_rise(study),
    ]


# -- the sentences of an overview --------------------------------------------------------------------------------------


def _explain_no_gains(study: Study) -> str:
    return (
        "Gains are not known, because there is no run of Local or FedAvg beside this one; "
        f"`atoll compare {study.method}` with the same options makes them."
    )


def _describe_gains(study: Study, over: str) -> str:
    gains = study.gains(over)
    assert gains is not None
    values, errors = gains
    known = ~np.isnan(values)
    if not known.any():
        return "No client has test samples, so nothing is known about gains."
    harmed = np.flatnonzero(values < -errors)
    which = f" ({study.names_of(harmed)})" if len(harmed) else ""
    helped = int((values > errors).sum())
    gain, lose = f"{helped} gain{'s' * (helped == 1)}", f"{len(harmed)} lose{'s' * (len(harmed) == 1)}"
    return (
        f"Against {study.reference(over)} the mean gain is {study.points(float(values[known].mean()))}; "
        f"of {count_text(int(known.sum()), 'client')}, {gain} and {lose}{which} more than one "
        "standard error; by chance alone, up to a third would."
    )


def _describe_rounds(study: Study) -> list[str]:
    """Say where a run that was cut short is behind its references."""
    beside = [study.method, *(study.reference(name) for name in REFERENCES)]
    outcomes = {name: study.comparison.outcomes[name][study.index] for name in dict.fromkeys(beside) if name}
    rounds = {
        name: one.select_round(study.select).round for name, one in outcomes.items() if not one.algorithm.one_shot
    }
    if len(set(rounds.values())) < 2:
        return []
    listed = join_names([f"{name} after round {done}" for name, done in rounds.items()])
    return [f"Gains compare scores of different rounds: {listed}."]


def _describe_relations(study: Study) -> list[str]:
    if not study.relations:
        return []
    listed = "; ".join(f"{what} {relation}" for what, relation in study.relations.items())
    clear = [what for what, relation in study.relations.items() if relation.p < SIGNIFICANT]
    bar = f"(p < {SIGNIFICANT})"
    verdict = f"Significant {bar}: {join_names(clear)}" if clear else f"None is significant {bar}"
    return [f"Rank correlation of the gain over all clients: with {listed}. {verdict}."]


def _describe_rise(study: Study) -> list[str]:
    """Advise more rounds where the mean validation score still improves, and rests on enough samples."""
    curve = [(round, value) for round, value in study.outcome.curve() if math.isfinite(value)]
    before = [point for point in curve if point[0] <= 0.75 * curve[-1][0]]
    if not before:
        return []
    (then, old), (now, new) = before[-1], curve[-1]
    if study.outcome.sign * (new - old) < STILL_RISING * (1 if study.numbers.share else abs(old)):
        return []
    rise = f"from {study.score(old)} after round {then} to {study.score(new)} after round {now}"
    samples = int(study.outcome.samples("val").sum())
    if samples < FEWEST_VALIDATION:
        return [f"Validation improves {rise}; on {count_text(samples, 'sample')} in all that may be chance."]
    return [f"Validation still improves, {rise}: more rounds may help everybody."]


def relation_of(gains: Values, values: Values) -> Relation | None:
    """Correlate gains with a value over clients; None where there are too few clients, or nothing varies."""
    from scipy.stats import spearmanr

    known = ~np.isnan(gains) & ~np.isnan(values)
    gains, values = np.round(gains[known], 12), values[known]  # equal differences may differ in their last digit
    if len(gains) < FEWEST_CLIENTS or np.ptp(gains) == 0 or np.ptp(values) == 0:
        return None
    rho, p = spearmanr(gains, values)
    return Relation(float(rho), float(p))


def find_references(run: Report, folder: Path, *, trust: bool = False) -> list[Report]:
    """Find Local and FedAvg with the same seed, if the run is one of a comparison."""
    parent = folder.resolve().parent
    beside = read_runs(parent, trust=trust)[0] if (parent / "comparison.json").exists() else ()
    of_seed = [one for one in beside if one.seed == run.seed and one.label != run.label]
    return [one for one in of_seed if name_of(one.algorithm) in REFERENCES]


def best_method(comparison: Comparison) -> str:
    """Return the method with the best mean that is not a reference; of references alone, FedAvg."""
    local, fedavg = (comparison.reference(name) for name in REFERENCES)
    rows = [row for row in comparison.results if row["method"] not in (local, fedavg)]
    if not rows:
        return fedavg or local or next(iter(comparison.outcomes))
    return str(max(rows, key=lambda row: comparison.example.sign * row["mean"])["method"])
