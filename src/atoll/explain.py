"""Why clients gain or lose: sentences with numbers, from what runs wrote down.

What was counted is said as it is. Why it came so is guessed by the rules below, each with its evidence for the client
and with the rank correlation over all clients that shows whether it holds in this run at all.

    study = Study.read(Path("runs/mine"), method="ditto")
    for client in study.affected(3):
        explain(study, client)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll import algorithms
from atoll.algorithm import Algorithm
from atoll.algorithms import name_of
from atoll.comparison import runs_in
from atoll.data.statistics import Statistics
from atoll.errors import UnknownName, unknown
from atoll.metrics import significance
from atoll.metrics.groups import terciles
from atoll.randomness import generator
from atoll.report.table import Numbers
from atoll.results import REFERENCES, SIGNIFICANT, Comparison, Outcome, Select
from atoll.runs import Run

Values = NDArray[np.float64]

SMALL, LARGE = 0, 2  # thirds of the clients
FAR = 2  # times what chance alone gives
NEAREST = 3  # clients named as the most similar
MOST_LISTED = 10
MOST_REASONS = 2
MOST_ADVICE = 2
FEWEST_CLIENTS = 5  # for a rank correlation
FEWEST_SAMPLES = 10  # for a validation loss
CHANCE_DRAWS = 200
NO_ROOM = 0.95  # a score alone that leaves little to gain
WORSE = 1.25  # times the lowest validation loss
STILL_RISING = 0.01  # of the score, over the last quarter of the rounds


class Gain(NamedTuple):
    """What a client gains over a reference, on its test samples."""

    over: str
    score: float  # of the reference
    value: float
    error: float
    only: tuple[int, int, float] | None = None  # samples right with the method or the reference only, McNemar's p

    @property
    def helped(self) -> bool:
        """Whether it gains more than one standard error."""
        return self.value > self.error

    @property
    def harmed(self) -> bool:
        """Whether it loses more than one standard error."""
        return self.value < -self.error


class Relation(NamedTuple):
    """Spearman's rank correlation of the gain with something that clients have, over all clients."""

    rho: float
    p: float

    def __str__(self) -> str:
        return f"ρ = {self.rho:+.2f}, {_p(self.p)}"


class Reason(NamedTuple):
    """What may explain a gain or a loss, and what would help."""

    text: str
    advice: tuple[str, ...] = ()


# -- one method, one seed, all clients ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Study:
    """One method of a comparison with one of its seeds."""

    comparison: Comparison
    method: str
    index: int = 0  # of the seed

    @classmethod
    def read(cls, folder: Path, method: str | None = None, seed: int | None = None) -> Study:
        """Of the folder of a comparison, or of a run; for a run of a comparison, the references beside it are found.

        Of a comparison, the best mean that is not a reference's and the first seed, unless others are asked for.
        """
        if (folder / "comparison.json").exists():
            comparison = Comparison.of_runs(map(Outcome.read, runs_in(folder)))
            method = _best(comparison) if method is None else method
        else:
            run = Outcome.read(folder)
            run.chosen()  # says what to do where nothing was evaluated
            comparison = Comparison.of_runs([run, *_references_beside(run, folder)])
            method = run.label if method is None else method
        if method not in comparison.outcomes:
            raise unknown("method", method, comparison.outcomes)
        if seed is not None and seed not in comparison.seeds:
            raise unknown("seed", str(seed), map(str, comparison.seeds))
        return cls(comparison, method, 0 if seed is None else comparison.seeds.index(seed))

    @property
    def outcome(self) -> Outcome:
        """What the run has shown."""
        return self.comparison.outcomes[self.method][self.index]

    @property
    def statistics(self) -> Statistics | None:
        """What the clients have."""
        return self.outcome.statistics

    @property
    def clients(self) -> int:
        """How many there are."""
        return self.comparison.clients

    @property
    def select(self) -> Select:
        """Which round counts."""
        return self.comparison.select

    @property
    def scores(self) -> Values:
        """Every client's score."""
        return self.outcome.scores(select=self.select)

    @property
    def over(self) -> str | None:
        """What gains are measured against: Local, or FedAvg for Local itself; None if it is not there."""
        return next((name for name in REFERENCES if self.reference(name) not in (None, self.method)), None)

    def reference(self, over: str) -> str | None:
        """What Local or FedAvg is called here, if there is one."""
        return self.comparison.reference(over)

    def gains(self, over: str) -> tuple[Values, Values] | None:
        """What every client gains over a reference, and the standard errors."""
        values, errors = self.comparison.gains(self.method, over), self.comparison.errors(self.method, over)
        return None if values is None or errors is None else (values[self.index], errors[self.index])

    def affected(self, most: int) -> list[int]:
        """The clients that lose or gain most, beyond one standard error: half of them harmed, and these first.

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
        """In what clients differ, one value for each."""
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
        """How the gain goes with what clients have."""
        gains = None if self.over is None else self.gains(self.over)
        related = {} if gains is None else {what: _relation(gains[0], one) for what, one in self.measured.items()}
        return {what: relation for what, relation in related.items() if relation is not None}

    @cached_property
    def replies(self) -> NDArray[np.int64] | None:
        """In how many rounds each client replied; None if it was not written down."""
        if self.outcome.folder is None or not self.outcome.algorithm.sends:
            return None
        who: dict[int, set[int]] = {}
        for entry in Run.open(self.outcome.folder).ledger():
            if entry.direction == "up" and entry.round >= 0:
                who.setdefault(entry.round, set()).update(entry.clients)
        return np.bincount([client for some in who.values() for client in some], minlength=self.clients)

    # -- words -----------------------------------------------------------------------------------------------------
    @property
    def numbers(self) -> Numbers:
        """How figures are written."""
        return Numbers.of(self.comparison)

    def score(self, value: float) -> str:
        """A score with its unit."""
        return f"{self.numbers.score(value)}{' %' if self.numbers.share else ''}"

    def points(self, value: float) -> str:
        """A gain with its unit."""
        return f"{self.numbers.gain(value)}{' points' if self.numbers.share else ''}"

    def name(self, client: int) -> str:
        """What a client is called."""
        return str(client) if self.statistics is None else self.statistics.name(client)

    def named(self, clients: Iterable[int]) -> str:
        """Clients by name."""
        return _listed([self.name(client) for client in clients])

    def title(self, client: int) -> str:
        """What a client is called, with its number."""
        name = self.name(client)
        return f"Client {client}" if name in (str(client), f"client {client}") else f"{name} (client {client})"

    def find(self, text: str) -> int:
        """The client of a name or a number; names count first."""
        names = [self.name(client) for client in range(self.clients)]
        if text in names:
            return names.index(text)
        if text.isdecimal() and int(text) < self.clients:
            return int(text)
        near = get_close_matches(text, names)
        raise UnknownName(
            f"A client must be given by its name or by a number from 0 to {self.clients - 1}. Got {text!r}.",
            hint=f"did you mean: {', '.join(near)}?" if near else f"they are called {_listed(names)}.",
        )


def overview(study: Study) -> list[str]:
    """All clients in a few sentences."""
    outcome, task = study.outcome, study.outcome.config["task"]
    dealt = task.get("recipe", {}).get("partition")
    lower = "" if study.numbers.higher_is_better else "; lower is better, and a positive gain is good"
    level = (
        f"{study.method} on {task['name']}{f' ({dealt})' if dealt else ''}, seed {outcome.seed}: {study.numbers.name} "
        f"{study.score(outcome.figures(select=study.select)['macro'])} on average over {study.clients} clients after "
        f"round {outcome.chosen(study.select)['round']}{lower}."
    )
    gains = _no_gains(study) if study.over is None else _helped_and_harmed(study, study.over)
    return [level, *study.comparison.missing, *_uneven(study), gains, *_related(study), *_still_rising(study)]


def explain(study: Study, client: int) -> dict[str, list[str]]:
    """What there is to say about one client: sentences under short headings, without what is not known."""
    case = Case(study, client)
    reasons = _reasons(case)
    advice = [*_stay_local(case), *(one for reason in reasons for one in reason.advice), *_best_on_validation(case)]
    paragraphs = {
        "data": _data(case),
        "learned from": _sources(case),
        "result": _result(case),
        "plausible": [reason.text for reason in reasons],
        "may help": [*dict.fromkeys(advice)][:MOST_ADVICE],
    }
    return {heading: sentences for heading, sentences in paragraphs.items() if sentences}


# -- all clients -------------------------------------------------------------------------------------------------------


def _no_gains(study: Study) -> str:
    return (
        "What clients gain is not known, because no run of Local or FedAvg is beside this one; "
        f"`atoll compare {study.method}` with the same options makes them."
    )


def _helped_and_harmed(study: Study, over: str) -> str:
    gains = study.gains(over)
    assert gains is not None
    values, errors = gains
    known = ~np.isnan(values)
    if not known.any():
        return "No client has test samples, so that nothing is known about gains."
    harmed = np.flatnonzero(values < -errors)
    which = f" ({study.named(harmed)})" if len(harmed) else ""
    return (
        f"Against {study.reference(over)} the mean gain is {study.points(float(values[known].mean()))}; "
        f"{int((values > errors).sum())} of {known.sum()} clients gain and {len(harmed)} lose{which} more than one "
        "standard error, a bar that chance alone lets up to a third pass."
    )


def _uneven(study: Study) -> list[str]:
    """A run that was cut short is behind its references."""
    beside = [study.method, *(study.reference(name) for name in REFERENCES)]
    outcomes = {name: study.comparison.outcomes[name][study.index] for name in dict.fromkeys(beside) if name}
    rounds = {name: one.chosen(study.select)["round"] for name, one in outcomes.items() if not one.algorithm.one_shot}
    if len(set(rounds.values())) < 2:
        return []
    listed = _listed([f"{name} after round {done}" for name, done in rounds.items()])
    return [f"Gains compare scores of different rounds: {listed}."]


def _related(study: Study) -> list[str]:
    if not study.relations:
        return []
    listed = "; ".join(f"{what} {relation}" for what, relation in study.relations.items())
    clear = [what for what, relation in study.relations.items() if relation.p < SIGNIFICANT]
    verdict = f"clear (p < {SIGNIFICANT}) is {_listed(clear) if clear else 'none'}"
    return [f"Rank correlation of the gain with what clients have, over all clients: {listed}; {verdict}."]


def _still_rising(study: Study) -> list[str]:
    """More rounds may help where the mean validation score still improves."""
    curve = [(round, value) for round, value in study.outcome.curve() if math.isfinite(value)]
    before = [point for point in curve if point[0] <= 0.75 * curve[-1][0]]
    if not before:
        return []
    (then, old), (now, new) = before[-1], curve[-1]
    if study.outcome.sign * (new - old) < STILL_RISING * (1 if study.numbers.share else abs(old)):
        return []
    rise = f"from {study.score(old)} after round {then} to {study.score(new)} after round {now}"
    return [f"Validation still improves, {rise}: more --rounds may help everybody."]


def _relation(gains: Values, values: Values) -> Relation | None:
    """None where there are too few clients, or nothing varies."""
    from scipy.stats import spearmanr

    known = ~np.isnan(gains) & ~np.isnan(values)
    gains, values = np.round(gains[known], 12), values[known]  # equal differences may differ in their last digit
    if len(gains) < FEWEST_CLIENTS or np.ptp(gains) == 0 or np.ptp(values) == 0:
        return None
    rho, p = spearmanr(gains, values)
    return Relation(float(rho), float(p))


# -- one client --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """One client of a study, seen among the others."""

    study: Study
    client: int

    @property
    def data(self) -> Statistics | None:
        """What the clients have."""
        return self.study.statistics

    @cached_property
    def tested(self) -> int:
        """On how many samples it is tested."""
        return int(self.study.outcome.samples()[self.client])

    @cached_property
    def gain(self) -> Gain | None:
        """Over Local; over FedAvg, for Local itself."""
        return None if self.study.over is None else self.gain_over(self.study.over)

    def gain_over(self, over: str) -> Gain | None:
        """None without that reference or without test samples."""
        study, reference, gains = self.study, self.study.reference(over), self.study.gains(over)
        if reference is None or gains is None or reference == study.method or not self.tested:
            return None
        other = study.comparison.outcomes[reference][study.index]
        score = float(other.scores(select=study.select)[self.client])
        value, error = (float(part[self.client]) for part in gains)
        return Gain(reference, score, value, error, self._only(other))

    def _only(self, other: Outcome) -> tuple[int, int, float] | None:
        """For samples that are right or wrong; they are known after the last round."""
        ours, theirs = self.study.outcome.each_of(self.client), other.each_of(self.client)
        if ours is None or theirs is None or self.study.select != "last":
            return None
        if not np.isin([ours, theirs], (0, 1)).all():
            return None
        table = significance.mcnemar_table(ours == 1, theirs == 1)
        return int(table[0, 1]), int(table[1, 0]), significance.mcnemar(ours == 1, theirs == 1)

    def third(self, what: str) -> int | None:
        """Which third of the clients it is in."""
        values = self.study.measured.get(what)
        return None if values is None else int(terciles(values)[self.client])

    @cached_property
    def chance(self) -> dict[str, float]:
        """How far chance alone puts a client of this size; labels are drawn from those of all."""
        if self.data is None:
            return {}
        distance = 1 / math.sqrt(max(1, int(self.data.samples[self.client])))
        found = {"target shift": distance, "feature distance": distance}
        if self.data.counts is not None:
            everybody = self.data.counts.sum(axis=0) / self.data.counts.sum()
            labels = max(1, int(self.data.counts[self.client].sum()))
            draws = generator(0, "labels by chance").multinomial(labels, everybody, size=CHANCE_DRAWS)
            found["label divergence"] = float(_divergence(draws / labels, everybody).mean())
        return found

    @cached_property
    def far(self) -> dict[str, str]:
        """In what it is in the third that is farthest from all, and beyond chance; with its rank."""
        names = {"label divergence": "labels", "target shift": "targets", "feature distance": "features"}
        return {
            what: f"{name} ({_rank(self.study.measured[what], self.client)})"
            for what, name in names.items()
            if self.third(what) == LARGE and self.study.measured[what][self.client] > FAR * self.chance.get(what, 0)
        }

    @property
    def personal(self) -> bool:
        """Whether clients of this method deploy models of their own."""
        return type(self.study.outcome.algorithm).personalize is not Algorithm.personalize

    @cached_property
    def weights(self) -> Values | None:
        """The share of every client in what it gets: from the method's matrix, or from one mean over clients."""
        outcome = self.study.outcome
        if outcome.mixing is not None:
            row = outcome.mixing[self.client]
            return np.asarray(row / (np.abs(row).sum() or 1))
        if type(outcome.algorithm).mixing is not Algorithm.mixing or not hasattr(outcome.algorithm, "weighting"):
            return None
        if outcome.algorithm.weighting != "samples":
            return np.full(self.study.clients, 1 / self.study.clients)
        return None if self.data is None else self.data.samples / self.data.samples.sum()

    @cached_property
    def alike(self) -> list[int]:
        """The other clients, those with the most similar labels first; none if labels do not tell them apart."""
        if self.data is None or self.data.counts is None or not self.data.counts[self.client].any():
            return []
        totals = self.data.counts.sum(axis=1)
        shares = self.data.counts / np.maximum(totals, 1)[:, None]
        distances = _divergence(shares, shares[self.client])
        order = np.argsort(distances, kind="stable")
        others = [int(other) for other in order if other != self.client and totals[other]]
        return others if np.ptp(distances) > 1e-9 else []

    def holds(self, what: str) -> str:
        """Whether the gain falls with something over all clients, as a rule supposes."""
        relation = self.study.relations.get(what)
        if relation is None:
            return ""
        if relation.p >= SIGNIFICANT:
            return f"; over all clients the gain does not clearly go with {what} ({relation})"
        way = "over all clients the gain falls with" if relation.rho < 0 else "yet over all clients the gain rises with"
        return f"; {way} {what} ({relation})"


def _data(case: Case) -> list[str]:
    """How the client's data differ."""
    data, client, measured = case.data, case.client, case.study.measured
    if data is None:
        return ["What the clients have was not written down, so that how their data differ is not known."]
    samples, median = int(data.samples[client]), float(np.median(data.samples))
    times = f", {samples / median:.2f} times the median of {median:,g}" if median else ""
    among = f"{times}, {_rank(data.samples, client)} by size" if np.ptp(data.samples) else ", as all clients do"
    words = [f"It trains on {_count(samples, 'sample')}{among}{_group(case)}."]
    if not samples:
        return words

    def place(what: str) -> str:
        by_chance = f" (by chance alone about {case.chance[what]:.2g})" if what in case.chance else ""
        return f"{by_chance}, {_rank(measured[what], client)}"

    if data.present is not None and data.entropy is not None:
        most = math.log2(data.classes or 2)
        words.append(
            f"It has {data.present[client]} of {data.classes} classes{_dominant(case)}; its label entropy is "
            f"{data.entropy[client]:.1f} bits of at most {most:.1f}."
        )
    if data.divergence is not None and data.variation is not None:
        words.append(
            f"Its labels diverge from those of all by {data.divergence[client]:.2g} bits of at most 1"
            f"{place('label divergence')}; total variation {data.variation[client]:.2f}."
        )
    if data.target_shift is not None and data.target_mean is not None:
        side = "above" if data.target_shift[client] > 0 else "below"
        words.append(
            f"Its mean target, {data.target_mean[client]:.3g}, is {abs(data.target_shift[client]):.2f} standard "
            f"deviations {side} that of all{place('target shift')}."
        )
    if data.feature_distance is not None:
        words.append(
            f"Its mean sample is {data.feature_distance[client]:.2f} standard deviations from that of all"
            f"{place('feature distance')}."
        )
    return words


def _group(case: Case) -> str:
    if case.data is None or case.data.groups is None:
        return ""
    group = case.data.groups[case.client]
    return f"; it belongs to planted group {group}, as {int((case.data.groups == group).sum()) - 1} others do"


def _dominant(case: Case) -> str:
    """The most frequent classes, with their shares."""
    if case.data is None or case.data.counts is None:
        return ""
    counts = case.data.counts[case.client]
    top = [label for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
    return f", the most frequent {_listed([f'{label} ({_percent(counts[label] / counts.sum())})' for label in top])}"


def _sources(case: Case) -> list[str]:
    """Which clients it learned from."""
    outcome, replies = case.study.outcome, case.study.replies
    if not outcome.algorithm.sends:
        return ["It learned from nobody: every client trains alone."]
    if case.weights is None:
        words = ["Which clients it learned from is not known."]
    elif outcome.mixing is not None:
        words = _mixed(case, case.weights)
    else:
        words = _averaged(case, case.weights)
    if replies is not None:
        mine = int(replies[case.client])
        there = "all" if mine == outcome.done else f"{mine} of the"
        mean = "" if mine == outcome.done else f", the mean client in {replies.mean():.1f}"
        words.append(f"It took part in {there} {outcome.done} rounds{mean}.")
    return words


def _mixed(case: Case, weights: Values) -> list[str]:
    """Whom the method's matrix names."""
    shares = np.abs(weights)
    if not shares.any():
        return ["The method gives no client any weight in what it gets."]
    spread = math.exp(-sum(share * math.log(share) for share in shares if share > 0))
    others = [int(one) for one in np.argsort(-shares, kind="stable") if one != case.client and shares[one]][:NEAREST]
    listed = _listed([f"{case.study.name(one)} ({_percent(weights[one])})" for one in others])
    mine, largest = _percent(weights[case.client]), f", most of the rest that of {listed}" if others else ""
    words = [f"Of what it gets, {mine} is its own{largest}; it is as spread as over {spread:.1f} equal clients."]
    if case.data is not None and case.data.groups is not None:
        same = case.data.groups == case.data.groups[case.client]
        words.append(f"Its planted group has {_percent(shares[same].sum())} of the weight.")
    elif case.alike and others:
        near = len(set(others) & set(case.alike[: len(others)]))
        words.append(f"{near} of these {len(others)} are among the {len(others)} with the most similar labels.")
    return words


def _averaged(case: Case, weights: Values) -> list[str]:
    """Its share of one mean over clients, and that of clients like it."""
    nearest, even = case.alike[:NEAREST], np.ptp(weights) == 0
    mine, theirs = _percent(weights[case.client]), _percent(weights[nearest].sum())
    how = "each the same" if even else "weighted by samples"
    similar = f", those with the most similar labels ({case.study.named(nearest)}) together {theirs}" if nearest else ""
    return [f"What the server hands out is a mean over clients, {how}: it has {mine} of all weight{similar}."]


def _result(case: Case) -> list[str]:
    """What it has, and what it gained or lost."""
    study = case.study
    if not case.tested:
        return ["It has no test samples, so that what it gains or loses is not known."]
    score = study.score(float(study.scores[case.client]))
    words = [f"With {study.method} its {study.numbers.name} is {score} on {_count(case.tested, 'test sample')}."]
    gains = [gain for over in REFERENCES if (gain := case.gain_over(over)) is not None]
    return [*words, *(_gained(study, gain) for gain in gains), *_other_seeds(case)]


def _gained(study: Study, gain: Gain) -> str:
    only, beyond = "", "beyond" if gain.helped or gain.harmed else "within"
    if gain.only is not None:
        ours, theirs, p = gain.only
        only = f"; right only with {study.method}: {ours}, only with {gain.over}: {theirs} (McNemar's {_p(p)})"
    return (
        f"Against {gain.over} ({study.score(gain.score)}) that is {study.points(gain.value)}, {beyond} one standard "
        f"error ({study.numbers.score(gain.error)}){only}."
    )


def _other_seeds(case: Case) -> list[str]:
    """The same client with other seeds, where its data are the same."""
    study, gain = case.study, case.gain
    gains = None if study.over is None else study.comparison.gains(study.method, study.over)
    data = [outcome.config["task"].get("data") for outcome in study.comparison.outcomes[study.method]]
    same = [one for one in range(len(data)) if one != study.index and data[one] == data[study.index] is not None]
    if gains is None or gain is None or not same:
        return []
    listed = _listed([study.points(float(gains[one, case.client])) for one in same])
    return [f"With other seeds, on the same data, it is {listed} against {gain.over}."]


# -- why that is plausible ---------------------------------------------------------------------------------------------


def _reasons(case: Case) -> list[Reason]:
    """The first of those that apply; the rules are about gains over Local."""
    if case.study.over != "local" or case.gain is None:
        return []
    reasons = [reason for rule in RULES if (reason := rule(case, case.gain)) is not None]
    return reasons[:MOST_REASONS] or [Reason("None of the rules accounts for it.")]


def _by_chance(case: Case, gain: Gain) -> Reason | None:
    """Few test samples: noise."""
    if gain.helped or gain.harmed:
        doubtful = gain.only is not None and gain.only[-1] >= SIGNIFICANT
        return Reason("By McNemar's test it may still be chance.") if doubtful else None
    what = f"a difference of {case.study.points(gain.value)} may be chance" if gain.value else "it makes no difference"
    return Reason(
        f"On {_count(case.tested, 'test sample')} {what}.",
        ("More seeds (--seeds) or a larger test share (--split 50/15/35) would tell more.",),
    )


def _seldom(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """It was hardly there."""
    replies = case.study.replies
    if replies is None or replies[case.client] > replies.mean() / 2:
        return None
    return Reason(
        f"It took part in {_count(int(replies[case.client]), 'round')}, the mean client in {replies.mean():.1f}, so "
        "that what it gets owes little to its data.",
        ("Ask it more often: a larger --cohort, or more --rounds.",),
    )


def _other_groups(case: Case, gain: Gain) -> Reason | None:
    """It learns from planted groups that have another truth."""
    if case.data is None or case.data.groups is None or case.weights is None or not gain.harmed:
        return None
    share = np.abs(case.weights[case.data.groups != case.data.groups[case.client]]).sum()
    if not share:
        return None
    return Reason(
        f"{_percent(share)} of the weight in what it gets is that of other planted groups, which have another truth.",
        _more_personal(case),
    )


def _pulled_away(case: Case, gain: Gain) -> Reason | None:
    """Far data and a shared model."""
    if not case.far or not gain.harmed:
        return None
    how = "its own part may be too weak against what it shares" if case.personal else "one model serves all"
    return Reason(
        f"Its {_listed([*case.far.values()])} are far from those of all, and {how}: it may be pulled away from its "
        f"task{case.holds(next(iter(case.far)))}.",
        _more_personal(case),
    )


def _few_samples(case: Case, gain: Gain) -> Reason | None:
    """Federation has much to give to a small client."""
    if case.data is None or case.third("size") != SMALL or not gain.helped:
        return None
    far = f"although its {_listed([*case.far.values()])} are far from those of all"
    return Reason(
        f"It has few samples ({case.data.samples[case.client]:,}, median {np.median(case.data.samples):,g}), which "
        f"leaves much to learn from others, {far if case.far else 'and its data are ordinary'}{case.holds('size')}."
    )


def _large(case: Case, gain: Gain) -> Reason | None:
    """A large client with ordinary data knows what the others know."""
    if case.data is None or case.third("size") != LARGE or case.far or gain.helped:
        return None
    return Reason(
        f"It has many samples ({case.data.samples[case.client]:,}, median {np.median(case.data.samples):,g}) and "
        f"ordinary data, so that others add little{case.holds('size')}."
    )


def _no_room(case: Case, gain: Gain) -> Reason | None:
    """Alone it is nearly as good as can be."""
    numbers = case.study.numbers
    if not (numbers.share and numbers.higher_is_better and gain.score >= NO_ROOM) or gain.helped:
        return None
    return Reason(
        f"Alone it has {case.study.score(gain.score)}: at most {numbers.score(1 - gain.score)} points are left to gain."
    )


def _against_shared(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """Its own model and the shared one, on the same samples."""
    study, client = case.study, case.client
    models = study.outcome.chosen(study.select)["evaluation"]
    if "shared" not in models:
        return None
    own, shared = (models[name]["test"] for name in ("personal", "shared"))
    error = float(significance.standard_error(own["variances"][client], shared["variances"][client], case.tested))
    difference = study.outcome.sign * (own["clients"][client] - shared["clients"][client])
    if abs(difference) <= error:
        return None
    verdict = "what is personal helps it" if difference > 0 else "what is personal costs it, as few samples may"
    return Reason(
        f"Its own model has {study.score(own['clients'][client])}, the shared one "
        f"{study.score(shared['clients'][client])} (standard error {study.numbers.score(error)}): {verdict}.",
        () if difference > 0 else _less_personal(case),
    )


def _worse_validation(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """Its validation loss was lower before: a little longer ago is overfitting, just before is a jump."""
    figures = [(line["round"], line["evaluation"]["personal"]["val"]) for line in case.study.outcome.evaluations]
    if len(figures) < 2 or figures[-1][1]["samples"][case.client] < FEWEST_SAMPLES:
        return None
    losses = [(val["losses"][case.client], round) for round, val in figures]
    (lowest, when), (before, _), (last, now) = min(losses), losses[-2], losses[-1]
    if not last > WORSE * lowest:
        return None
    if before <= WORSE * lowest:
        return Reason(
            f"Its validation loss jumped from {before:.3g} to {last:.3g} in round {now}: its steps may be too large.",
            ("A smaller --lr or --clip makes its steps steadier.",),
        )
    return Reason(
        f"Its validation loss was lowest after round {when} ({lowest:.3g}) and is {last:.3g} now: it may overfit.",
        ("Fewer --rounds, a smaller --lr or --weight-decay may stop the overfitting.",),
    )


RULES: tuple[Callable[[Case, Gain], Reason | None], ...] = (
    _by_chance, _seldom, _other_groups, _pulled_away, _few_samples, _large, _no_room, _worse_validation,
    _against_shared,
)  # fmt: skip


# -- what would likely help --------------------------------------------------------------------------------------------


def _stay_local(case: Case) -> list[str]:
    gain = case.gain
    if case.study.over != "local" or gain is None or not gain.harmed:
        return []
    return [f"It can stay with {gain.over}, which has {case.study.score(gain.score)} here."]


def _more_personal(case: Case) -> tuple[str, ...]:
    """Ways to a model that is more its own, among the methods there are."""
    algorithm = case.study.outcome.algorithm
    name, lam = name_of(type(algorithm)), getattr(algorithm, "lam", 0)
    if name == "ditto" and lam:
        return (f"A smaller pull towards the shared model (ditto:lam={lam / 10:g}) leaves it more of its own.",)
    ways = {
        "fedper": "fedper keeps a head for each client, which suits other labels",
        "fedavg-ft": "fedavg-ft tunes the shared model on each client's data",
        "ditto": "ditto gives each client a second model",
    }
    there = [words for way, words in ways.items() if way in algorithms.found() and way != name]
    return (f"It may need more of its own: {', '.join(there[:2])}.",) if there else ()


def _less_personal(case: Case) -> tuple[str, ...]:
    """Ways to a model that is more the shared one."""
    algorithm = case.study.outcome.algorithm
    name, lam, epochs = name_of(type(algorithm)), getattr(algorithm, "lam", 0), getattr(algorithm, "tune_epochs", 0)
    if name == "ditto":
        return (f"A stronger pull towards the shared model (ditto:lam={10 * lam or 1:g}) lets it share more.",)
    if name == "fedavg-ft":
        return (f"Fewer epochs of tuning than {epochs} (tune_epochs) keep it nearer to the shared model.",)
    return ("It can deploy the shared model instead.",)


def _best_on_validation(case: Case) -> list[str]:
    """Which method of the comparison its validation samples prefer."""
    study, samples = case.study, int(case.study.outcome.samples("val")[case.client])
    scores = {
        method: float(study.outcome.sign * study.comparison.scores(method, "val")[study.index, case.client])
        for method in study.comparison.outcomes
    }
    best = max(scores, key=lambda method: scores[method])
    if not samples or scores[best] <= scores[study.method]:
        return []
    mine, other = (study.score(study.outcome.sign * scores[method]) for method in (study.method, best))
    return [f"On its {_count(samples, 'validation sample')} {best} is the best method here, {other} against {mine}."]


# -- small parts -------------------------------------------------------------------------------------------------------


def _references_beside(run: Outcome, folder: Path) -> list[Outcome]:
    """Local and FedAvg with the same seed, if the run is one of a comparison."""
    parent = folder.resolve().parent
    beside = map(Outcome.read, runs_in(parent)) if (parent / "comparison.json").exists() else ()
    of_seed = [one for one in beside if one.seed == run.seed and one.label != run.label]
    return [one for one in of_seed if name_of(type(one.algorithm)) in REFERENCES]


def _best(comparison: Comparison) -> str:
    """The best mean that is not a reference's; of references alone, FedAvg."""
    local, fedavg = (comparison.reference(name) for name in REFERENCES)
    rows = [row for row in comparison.results if row["method"] not in (local, fedavg)]
    if not rows:
        return fedavg or comparison.best
    return str(max(rows, key=lambda row: comparison.example.sign * row["mean"])["method"])


def _divergence(p: Values, q: Values) -> Values:
    """Jensen and Shannon's, in bits, of distributions along the last axis."""
    from scipy.special import rel_entr

    middle = (p + q) / 2
    return np.asarray((rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / (2 * math.log(2)))


def _rank(values: Values | NDArray[np.int64], client: int) -> str:
    """The place among the clients, the largest first; equals share the better one."""
    known = values[~np.isnan(values)]
    if np.ptp(known) == 0:
        return f"the same for all {len(known)} clients"
    return f"rank {int((known > values[client]).sum()) + 1} of {len(known)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`; of very many the first."""
    if len(names) > MOST_LISTED:
        return f"{', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
