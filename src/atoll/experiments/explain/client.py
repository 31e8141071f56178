"""One client: its data, whom it learned from, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.data.statistics import Statistics
from atoll.experiments.explain.study import Gain, Study, Values
from atoll.experiments.explain.words import count_text, join_names, p_text, percent, rank_text
from atoll.federation.labels import REFERENCES
from atoll.federation.report import Report
from atoll.federation.results import SIGNIFICANT
from atoll.kernel.randomness import generator
from atoll.metrics import significance
from atoll.metrics.groups import terciles

SMALL, LARGE = 0, 2  # thirds of the clients
FAR = 2  # times what chance alone gives
NEAREST = 3  # clients named as the most similar
CHANCE_DRAWS = 200
SAME = 1e-5  # of a leaf's length: closer models differ by rounding
MOST_PARTS = 4  # named


@dataclass(frozen=True, eq=False)
class Case:
    """One client of a study, seen among the others."""

    study: Study
    client: int

    @property
    def data(self) -> Statistics | None:
        """The statistics of the clients' data."""
        return self.study.statistics

    @cached_property
    def place(self) -> int:
        """Its place among the clients that were scored."""
        return int(np.searchsorted(self.study.outcome.scored, self.client))

    @cached_property
    def test_samples(self) -> int:
        """The number of its test samples."""
        return int(self.study.outcome.samples()[self.place])

    @cached_property
    def gain(self) -> Gain | None:
        """The gain over Local; for Local itself, over FedAvg."""
        return None if self.study.over is None else self.gain_over(self.study.over)

    def gain_over(self, over: str) -> Gain | None:
        """Return the gain over a reference; None without that reference or without test samples."""
        study, reference, gains = self.study, self.study.reference(over), self.study.gains(over)
        if reference is None or gains is None or reference == study.method or not self.test_samples:
            return None
        other = study.comparison.outcomes[reference][study.index]
        score = float(other.scores(select=study.select)[self.place])
        value, error = (float(part[self.client]) for part in gains)
        return Gain(reference, score, value, error, self.test_samples, self._compare_samples(other))

    def _compare_samples(self, other: Report) -> tuple[int, int, float] | None:
        """Count the samples that only one of two methods has right, with McNemar's p; None if they are not known."""
        ours, theirs = self.study.outcome.each_of(self.place), other.each_of(self.place)
        if ours is None or theirs is None or self.study.select != "last":
            return None
        if not np.isin([ours, theirs], (0, 1)).all():
            return None
        table = significance.mcnemar_table(ours == 1, theirs == 1)
        return int(table[0, 1]), int(table[1, 0]), significance.mcnemar(ours == 1, theirs == 1)

    def tercile(self, what: str) -> int | None:
        """Return which third of the clients it is in, by one of the measured values."""
        values = self.study.measured.get(what)
        return None if values is None else int(terciles(values)[self.client])

    @cached_property
    def chance(self) -> dict[str, float]:
        """The distances that chance alone gives a client of this size; labels are drawn from those of all."""
        if self.data is None:
            return {}
        distance = 1 / math.sqrt(max(1, int(self.data.samples[self.client])))
        found = {"target shift": distance, "feature distance": distance}
        if self.data.counts is not None:
            everybody = self.data.counts.sum(axis=0) / self.data.counts.sum()
            labels = max(1, int(self.data.counts[self.client].sum()))
            draws = generator(0, "labels by chance").multinomial(labels, everybody, size=CHANCE_DRAWS)
            found["label divergence"] = float(jensen_shannon(draws / labels, everybody).mean())
        return found

    @cached_property
    def far(self) -> dict[str, str]:
        """The values that put it into the third that is farthest from all, beyond chance; with its rank."""
        names = {"label divergence": "labels", "target shift": "targets", "feature distance": "features"}
        return {
            what: f"{name} ({rank_text(self.study.measured[what], self.client)})"
            for what, name in names.items()
            if self.tercile(what) == LARGE and self.study.measured[what][self.client] > FAR * self.chance.get(what, 0)
        }

    @property
    def personal(self) -> bool:
        """Whether clients of this method deploy models of their own."""
        return self.study.outcome.algorithm.defines("personalize")

    @cached_property
    def weights(self) -> Values | None:
        """The share of every client in what it gets: from the method's matrix, or from one mean over clients."""
        outcome = self.study.outcome
        if outcome.mixing is not None:
            row = outcome.mixing[self.client]
            return np.asarray(row / (np.abs(row).sum() or 1))
        if outcome.algorithm.defines("mixing") or not hasattr(outcome.algorithm, "weighting"):
            return None
        weighting = outcome.algorithm.weighting
        if weighting == "uniform":
            return np.full(self.study.clients, 1 / self.study.clients)
        return None if self.data is None or weighting != "samples" else self.data.samples / self.data.samples.sum()

    @cached_property
    def alike(self) -> list[int]:
        """The other clients, those with the most similar labels first; none if labels do not tell them apart."""
        if self.data is None or self.data.counts is None or not self.data.counts[self.client].any():
            return []
        totals = self.data.counts.sum(axis=1)
        shares = self.data.counts / np.maximum(totals, 1)[:, None]
        distances = jensen_shannon(shares, shares[self.client])
        order = np.argsort(distances, kind="stable")
        others = [int(other) for other in order if other != self.client and totals[other]]
        return others if np.ptp(distances) > 1e-9 else []

    def correlation_text(self, what: str) -> str:
        """Say whether the gain falls with a measured value over all clients, as a rule supposes."""
        relation = self.study.relations.get(what)
        if relation is None:
            return ""
        if relation.p >= SIGNIFICANT:
            return f"; over all clients the gain is not significantly correlated with {what} ({relation})"
        way = "over all clients the gain falls with" if relation.rho < 0 else "yet over all clients the gain rises with"
        return f"; {way} {what} ({relation})"


def describe_data(case: Case) -> list[str]:
    """Describe how the client's data differ from those of others."""
    data, client, measured = case.data, case.client, case.study.measured
    if data is None:
        return ["The run has no statistics of its clients' data, so it is not known how they differ."]
    samples, median = int(data.samples[client]), float(np.median(data.samples))
    times = f", {samples / median:.2f} times the median of {median:,g}" if median else ""
    among = f"{times}, {rank_text(data.samples, client)} by size" if np.ptp(data.samples) else ", as all clients do"
    words = [f"It trains on {count_text(samples, 'sample')}{among}{_group_text(case)}."]
    if not samples:
        return words

    def place(what: str) -> str:
        by_chance = f" (by chance alone about {case.chance[what]:.2g})" if what in case.chance else ""
        return f"{by_chance}, {rank_text(measured[what], client)}"

    if data.present is not None and data.entropy is not None:
        most = math.log2(data.classes or 2)
        words.append(
            f"It has {data.present[client]} of {data.classes} classes{_dominant_classes(case)}; its label entropy is "
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


def _group_text(case: Case) -> str:
    if case.data is None or case.data.groups is None:
        return ""
    group = case.data.groups[case.client]
    return f"; it belongs to planted group {group}, as {int((case.data.groups == group).sum()) - 1} others do"


def _dominant_classes(case: Case) -> str:
    """Name the most frequent classes, with their shares."""
    if case.data is None or case.data.counts is None:
        return ""
    counts = case.data.counts[case.client]
    top = [int(label) for label in np.argsort(-counts, kind="stable")[:3] if counts[label]]
    named = [f"{case.study.outcome.class_name(label)} ({percent(counts[label] / counts.sum())})" for label in top]
    return f", the most frequent {join_names(named)}"


def describe_sources(case: Case) -> list[str]:
    """Say which clients it learned from."""
    outcome, replies = case.study.outcome, case.study.replies
    if not outcome.algorithm.sends:
        return ["It learned from nobody: every client trains alone."]
    if case.weights is None:
        words = ["Which clients it learned from is not known."]
    elif outcome.mixing is not None:
        words = _describe_mixing(case, case.weights)
    else:
        words = _describe_average(case, case.weights)
    words += [*_describe_cluster(case), *_describe_gate(case), *_describe_fallback(case)]
    if replies is not None:
        mine = int(replies[case.client])
        there = "all" if mine == outcome.done else f"{mine} of the"
        mean = "" if mine == outcome.done else f", the mean client in {replies.mean():.1f}"
        words.append(f"It took part in {there} {outcome.done} rounds{mean}.")
    return words


def _describe_mixing(case: Case, weights: Values) -> list[str]:
    """Name the clients to which the method's matrix gives weight."""
    shares = np.abs(weights)
    if not shares.any():
        return ["The method gives no client any weight in what it gets."]
    spread = math.exp(-sum(share * math.log(share) for share in shares if share > 0))
    others = [int(one) for one in np.argsort(-shares, kind="stable") if one != case.client and shares[one]][:NEAREST]
    listed = join_names([f"{case.study.name(one)} ({percent(weights[one])})" for one in others])
    mine, largest = percent(weights[case.client]), f", most of the rest that of {listed}" if others else ""
    words = [f"Of what it gets, {mine} is its own{largest}; it is as spread as over {spread:.1f} equal clients."]
    if case.data is not None and case.data.groups is not None:
        same = case.data.groups == case.data.groups[case.client]
        words.append(f"Its planted group has {percent(shares[same].sum())} of the weight.")
    elif case.alike and others:
        near = len(set(others) & set(case.alike[: len(others)]))
        words.append(f"{near} of these {len(others)} are among the {len(others)} with the most similar labels.")
    return words


def _describe_cluster(case: Case) -> list[str]:
    """Name its cluster, and who else is in it."""
    found = case.study.outcome.clusters
    if found is None:
        return []
    cluster = found.of_client[case.client]
    if cluster < 0:
        return [f"It is in none of the {count_text(found.number, 'cluster')}."]
    others = [int(one) for one in np.flatnonzero(found.of_client == cluster) if one != case.client]
    company = f"with {case.study.names_of(others)}" if others else "alone"
    return [f"It is in cluster {cluster}, one of {found.number}, {company}."]


def _describe_gate(case: Case) -> list[str]:
    """Say when and how strongly a method with a gate let the client be pulled to what others sent."""
    told = [(line.round, (line.observed or {}).get("lam", {})) for line in case.study.outcome.history]
    pulls = [(round, of[str(case.client)]) for round, of in told if str(case.client) in of]
    if not pulls:
        return []
    opened = [(round, pull) for round, pull in pulls if pull > 0]
    if not opened:
        never = "what others sent was never better on its validation data than its own model"
        return [f"The gate stayed shut in all {len(pulls)} rounds: {never}."]
    mean = sum(pull for _, pull in opened) / len(opened)
    shut = "" if opened[-1][0] == pulls[-1][0] else f" and has been shut since round {opened[-1][0] + 1}"
    when = f"in {len(opened)} of {len(pulls)} rounds, first in round {opened[0][0]}"
    return [f"The gate was open {when}, with a pull of {mean:.2g} on average{shut}."]


def _describe_fallback(case: Case) -> list[str]:
    """Say whether it deploys the model that it trained alone, where a gate decides that."""
    told, client = case.study.outcome.deployment, str(case.client)
    if client not in told.get("alone", {}):
        return []
    lead, margin = told["lead"][client], getattr(case.study.outcome.algorithm, "margin", None)
    what = "the model that it trained alone" if told["alone"][client] else "what the method offers"
    way = "better" if lead > 0 else "worse"
    asked = f"; the margin is {margin:g}" if isinstance(margin, float) else ""
    return [f"It deploys {what}: on its validation data its own model is {abs(lead):.1f} standard errors {way}{asked}."]


def _describe_average(case: Case, weights: Values) -> list[str]:
    """Give its share of one mean over clients, and that of clients like it."""
    nearest, even = case.alike[:NEAREST], np.ptp(weights) == 0
    mine, theirs = percent(weights[case.client]), percent(weights[nearest].sum())
    how = "each the same" if even else "weighted by samples"
    similar = (
        f", those with the most similar labels ({case.study.names_of(nearest)}) together {theirs}" if nearest else ""
    )
    return [f"What the server hands out is a mean over clients, {how}: it has {mine} of all weight{similar}."]


def describe_parts(case: Case) -> list[str]:
    """Say which parts of its model are its own, and which all clients share."""
    names, apart = case.study.parts
    mine, median, shared = apart[case.client], np.median(apart, axis=0), apart.max(axis=0) <= SAME
    own = [int(leaf) for leaf in np.argsort(-mine, kind="stable") if not shared[leaf]][:MOST_PARTS]
    if not own:
        return ["All clients deploy the same model."]
    listed = join_names(
        [f"{names[leaf]} by {percent(mine[leaf])} (median client {percent(median[leaf])})" for leaf in own]
    )
    words = [f"Its model differs from the average of all clients' models most in {listed} of the average's length."]
    if shared.any():
        same = [name for name, one in zip(names, shared, strict=True) if one]
        words.append(f"All clients share {join_names(same)}.")
    return words


def describe_result(case: Case) -> list[str]:
    """State its score, and what it gained or lost."""
    study = case.study
    if not case.test_samples:
        return ["It has no test samples, so its gain or loss is not known."]
    score = study.score(float(study.scores[case.client]))
    words = [
        f"With {study.method} its {study.numbers.name} is {score} on {count_text(case.test_samples, 'test sample')}."
    ]
    gains = [gain for over in REFERENCES if (gain := case.gain_over(over)) is not None]
    return [*words, *(_describe_gain(study, gain) for gain in gains), *_describe_other_seeds(case)]


def _describe_gain(study: Study, gain: Gain) -> str:
    only, beyond = "", "beyond" if gain.helped or gain.harmed else "within"
    error = f"{beyond} one standard error ({study.numbers.score(gain.error)})"
    error = "on a single sample, which has no standard error" if gain.samples == 1 else error
    if gain.only is not None:
        ours, theirs, p = gain.only
        only = f"; right only with {study.method}: {ours}, only with {gain.over}: {theirs} (McNemar's {p_text(p)})"
    return f"Against {gain.over} ({study.score(gain.score)}) that is {study.points(gain.value)}, {error}{only}."


def _describe_other_seeds(case: Case) -> list[str]:
    """Give the gains of the same client with other seeds, where its data are the same."""
    study, gain = case.study, case.gain
    gains = None if study.over is None else study.comparison.gains(study.method, study.over)
    data = [outcome.config.task.data for outcome in study.comparison.outcomes[study.method]]
    same = [one for one in range(len(data)) if one != study.index and data[one] == data[study.index] is not None]
    if gains is None or gain is None or not same:
        return []
    listed = join_names([study.points(float(gains[one, case.client])) for one in same])
    return [f"With other seeds, on the same data, it is {listed} against {gain.over}."]


def jensen_shannon(p: Values, q: Values) -> Values:
    """Return the Jensen-Shannon divergence, in bits, of distributions along the last axis."""
    from scipy.special import rel_entr

    middle = (p + q) / 2
    return np.asarray((rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / (2 * math.log(2)))
