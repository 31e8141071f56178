"""What runs have shown: scores of clients, gains, harm, significance, cost. Arithmetic on what was written down.

Every comparison contains Local (each client alone) and FedAvg (one model for all), because what a method is worth to a
client is what it gains over these two. Gains are paired: the same client, data and seed; a positive gain is good also
where a lower score is better. A client counts as harmed if it is worse off than alone by more than one standard error
of the difference:

    gain_k < -se_k,        se_k^2 = (var a_k + var r_k) / n_k

with the variances of the scores of the method and of Local over the n_k test samples of client k; for accuracies they
are a (1 - a) and r (1 - r). A client is counted once, however many seeds there are: where all seeds have the same
clients, its gain and its standard error are means over seeds. (More seeds do not make its test set larger, so the error
does not shrink with them.) Where every seed has clients of its own, counts are means over seeds.

Where a sample of the clients was scored, it is the same for all methods with a seed: gains stay paired. Figures are
those of the sample; the mean of a simple random sample is an unbiased estimate of the mean over all clients, and has
an interval, as the mean gain does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.algorithms import name_of
from atoll.federation.agreement import require_same_task
from atoll.federation.clients import list_clients, list_percentiles
from atoll.federation.config import Metric
from atoll.federation.folds import list_pooled, pool_folds
from atoll.federation.labels import REFERENCES
from atoll.federation.report import Report, Scores, Select
from atoll.kernel.errors import RunError, unknown
from atoll.metrics import cost, fairness, significance
from atoll.metrics.gains import FEWEST_CLIENTS, Gain, estimate_gain, pool_seeds
from atoll.metrics.groups import GroupScore, by_group, groups_of
from atoll.runtime.population import MANY_CLIENTS
from atoll.toolbox.references import bibtex

MOST_NAMED = 5  # clients in a sentence
SELECTIONS: dict[Select, str] = {
    "last": "after the last round",
    "best": "after the round that is best on validation",
    "oracle": "after the round that is best on test (an oracle: it cannot be chosen in practice)",
}
SPLIT_WITHOUT_SHARES = ("by column", "by time")  # how rules begin that need no shares of samples
SIGNIFICANT = 0.05
GAIN_DIGITS = 12
TARGET_SHARE = 0.95  # of FedAvg's best: the target if none is given


@dataclass(frozen=True, eq=False, repr=False)
class Results:
    """Methods side by side: for each, one outcome per seed. A single run is a comparison of one."""

    outcomes: Mapping[str, Sequence[Report]]
    select: Select = "last"
    target: float | None = None  # score on validation whose rounds and bytes are counted
    missing: Sequence[str] = ()  # what is missing, in sentences

    def __post_init__(self) -> None:
        if self.select not in SELECTIONS:
            raise unknown("selection", self.select, SELECTIONS)
        seeds = {tuple(outcome.seed for outcome in of_method) for of_method in self.outcomes.values()}
        if len(seeds) != 1 or seeds == {()}:
            raise RunError(f"All methods of a comparison must have the same seeds. Got {sorted(seeds)}.")
        for of_seed in zip(*self.outcomes.values(), strict=True):
            for outcome in of_seed[1:]:
                require_same_task(of_seed[0], outcome)

    def __repr__(self) -> str:
        methods, seeds = ", ".join(self.outcomes), ", ".join(map(str, self.seeds))
        task = f"{self.example.task_name}, {self.example.clients:,} clients"
        return f"<{type(self).__name__} of {methods} on {task}; seed{'s' * (len(self.seeds) > 1)} {seeds}>"

    @classmethod
    def of_runs(cls, runs: Iterable[Report], *, absent: Iterable[str] = (), **more: Any) -> Self:
        """Order runs by method and seed; a seed counts if every method was evaluated with it, `missing` names the rest.

        `absent` are sentences about runs that are not there.
        """
        found: dict[str, dict[int, Report]] = {}
        missing = [*absent]
        for run in runs:
            if not run.finished:
                missing.append(f"{run.label} with seed {run.seed} is incomplete: {run.progress}.")
            if run.evaluations:
                of_method = found.setdefault(run.label, {})
                if run.seed in of_method:
                    raise RunError(
                        f"A comparison must have one run of each method and seed. {run.label} with seed {run.seed} is "
                        f"there twice: {of_method[run.seed].folder} and {run.folder}.",
                        hint="give the folder of one of them only.",
                    )
                of_method[run.seed] = run
        if not found:
            raise RunError("A report needs at least one run that was evaluated once. There is none.")
        common = sorted(set.intersection(*(set(of_method) for of_method in found.values())))
        if not common:
            listed = "; ".join(f"{method}: {sorted(of_method)}" for method, of_method in found.items())
            raise RunError(f"The methods of a comparison must have a seed in common. They have none ({listed}).")
        left_out = sorted(set.union(*(set(of_method) for of_method in found.values())) - set(common))
        if left_out:
            missing.append(f"Left out, because not every method has them: seeds {', '.join(map(str, left_out))}.")
        outcomes = {method: pool_folds([of_method[seed] for seed in common]) for method, of_method in found.items()}
        part = [seed for seed in common if seed not in list_pooled(next(iter(outcomes.values())))]
        if part:
            missing.append(
                "Left out, because not all folds of their repeat are there: "
                f"seed{'s' * (len(part) > 1)} {', '.join(map(str, part))}."
            )
        return cls(outcomes, missing=tuple(missing), **more)

    @property
    def seeds(self) -> list[int]:
        """The seeds every method was run with."""
        return [outcome.seed for outcome in self.first]

    @property
    def first(self) -> Sequence[Report]:
        """The outcomes of one of the methods, for what all have in common."""
        return next(iter(self.outcomes.values()))

    @property
    def example(self) -> Report:
        """One of the outcomes, for what all have in common."""
        return self.first[0]

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return self.example.config.task.clients

    @property
    def scored(self) -> int:
        """How many of them were scored."""
        return len(self.example.scored)

    @property
    def sampled(self) -> bool:
        """Whether a sample of the honest clients was scored."""
        return self.scored < self.example.honest

    @property
    def attackers(self) -> int:
        """How many clients attack; they are never scored."""
        return self.clients - self.example.honest

    def client(self, client: int) -> str:
        """Return the name of a client."""
        found = self.example.statistics
        return str(client) if found is None else found.name(client)

    @property
    def metric(self) -> Metric:
        """The name of the score, whether higher is better, and whether it is a share of 1."""
        return self.example.metric

    def reference(self, name: str) -> str | None:
        """Return the label of this comparison's Local or FedAvg, if there is one."""
        return next((method for method, (one, *_) in self.outcomes.items() if name_of(one.algorithm) == name), None)

    def others(self, over: str = "local") -> list[str]:
        """List the methods that are compared with a reference."""
        return [method for method in self.outcomes if method != self.reference(over)]

    @cached_property
    def together(self) -> bool:
        """Whether all of several seeds have the same clients: the same were scored, with the same data or names."""
        if len(self.seeds) == 1 or any(not np.array_equal(one.scored, self.example.scored) for one in self.first):
            return False
        if self.folds:
            return True
        data = {str(one.config.task.data or one.seed) for one in self.first}
        names = {None if (found := one.statistics) is None else found.names for one in self.first}
        return len(data) == 1 or (len(names) == 1 and None not in names)

    def count_once(self, values: Scores) -> Scores:
        """Return values as [seed, client] with each client once: means over seeds that have the same clients.

        Then there is one row; else, every row has clients of its own and the values are returned as they are.
        """
        return _mean_of_known(values)[None] if self.together else values

    @property
    def folds(self) -> int:
        """How many folds each client's samples were cut into; 0 if one part was held out."""
        return int(self.example.config.task.more.get("folds") or 0)

    @property
    def cuts(self) -> int:
        """How many cuts of the clients' samples the figures rest on."""
        if self.folds:
            return len(list_pooled(self.first))
        return len({str(one.config.task.data or one.seed) for one in self.first})

    @property
    def judged(self) -> int:
        """How many of the clients that were scored have a score."""
        return int((~np.isnan(self.example.scores(select=self.select))).sum())

    @property
    def only_central(self) -> bool:
        """Whether no client has test samples of its own: the server's test set decides."""
        return self.judged == 0 and any(one.central is not None for of in self.outcomes.values() for one in of)

    # -- what a client gains -----------------------------------------------------------------------------------------
    def scores(self, method: str, split: str = "test") -> Scores:
        """Return the score of every client that was scored, as [seed, client]."""
        return np.stack([outcome.scores(split, select=self.select) for outcome in self.outcomes[method]])

    def gains(self, method: str, over: str = "local") -> Scores | None:
        """Return what each client gains over a reference, as [seed, client]; None without that reference."""
        reference = self.reference(over)
        if reference is None:
            return None
        # Equal scores that were added up in another order differ in their last digit, and nobody gains by that.
        return np.round(self.example.sign * (self.scores(method) - self.scores(reference)), GAIN_DIGITS)

    def errors(self, method: str, over: str = "local") -> Scores | None:
        """Return the standard error of each of these gains."""
        reference = self.reference(over)
        if reference is None:
            return None
        pairs = zip(self.outcomes[method], self.outcomes[reference], strict=True)
        return np.stack([
            significance.standard_error(
                one.variances(select=self.select), other.variances(select=self.select), one.samples()
            )
            for one, other in pairs
        ])  # fmt: skip

    def find_harmed(self, method: str, over: str = "local") -> NDArray[np.bool_] | None:
        """Return who is worse off than with the reference by more than one standard error, each client once.

        As `count_once` has them: one row where all seeds have the same clients, else one row for each seed.
        """
        gains, errors = self.gains(method, over), self.errors(method, over)
        if gains is None or errors is None:
            return None
        return significance.is_harmed(self.count_once(gains), self.count_once(errors))

    def mcnemar(self, method: str, over: str = "local") -> Scores | None:
        """Return McNemar's p for each client, as [seed, client]: whether it gains or loses beyond chance.

        The test pairs single samples. None where these are not known, or not right or wrong, or where another round
        than the last counts.
        """
        reference = self.reference(over)
        if reference is None or self.select != "last":
            return None
        found = np.full((len(self.seeds), self.scored), math.nan)
        for row, pair in enumerate(zip(self.outcomes[method], self.outcomes[reference], strict=True)):
            for place in range(self.scored):
                ours, theirs = (outcome.each_of(place) for outcome in pair)
                if ours is None or theirs is None or not _right_or_wrong(ours) or not _right_or_wrong(theirs):
                    return None
                found[row, place] = significance.mcnemar(ours == 1, theirs == 1) if len(ours) else math.nan
        return found

    @cached_property
    def significant(self) -> dict[str, dict[str, float]]:
        """By reference and method: the p of `test_pair`, after Holm's correction."""
        found = {}
        for over in REFERENCES:
            reference, methods = self.reference(over), self.others(over)
            if reference is not None and methods:
                tests = [self.test_pair(method, reference) for method in methods]
                found[over] = dict(zip(methods, significance.holm(tests).tolist(), strict=True))
        return found

    @property
    def estimates(self) -> bool:
        """Whether gains are judged over clients and seeds: all seeds have the same clients, and enough of them."""
        return self.together and self.judged >= FEWEST_CLIENTS

    def estimate(self, method: str, other: str) -> Gain | None:
        """Estimate what clients like these gain over another method, over clients and seeds; None for few clients.

        All seeds must have the same clients. The spread over seeds is pooled over methods: few seeds say little of it.
        """
        if not self.estimates:
            return None
        found = {
            one: np.round(self.example.sign * (self.scores(one) - self.scores(other)), GAIN_DIGITS)
            for one in self.outcomes
            if one != other
        }
        return estimate_gain(found[method], pool_seeds([*found.values()]))

    def test_pair(self, method: str, other: str) -> float:
        """Return the p of the difference of two methods: of `estimate`, else Wilcoxon's, one pair for each client."""
        gain = self.estimate(method, other)
        if gain is not None and gain.p is not None:
            return gain.p
        ours, theirs = (self.count_once(self.scores(one)).ravel() for one in (method, other))
        return significance.wilcoxon(ours, theirs)

    def groups(self, method: str) -> dict[str, dict[str, GroupScore]]:
        """Score clients that are alike (in size, label entropy, divergence, planted group, speed); means over seeds.

        All clients make the groups, also where a sample of them was scored.
        """
        collected: dict[str, dict[str, list[GroupScore]]] = {}
        for outcome in self.outcomes[method]:
            found = outcome.statistics
            if found is None:
                return {}
            kinds = groups_of(found.samples, found.entropy, found.divergence, found.groups, found.speed)
            for kind, grouping in kinds.items():
                higher = self.metric.higher_is_better
                here = grouping._replace(member=grouping.member[outcome.scored])
                of_kind = by_group(outcome.scores(select=self.select), here, higher_is_better=higher)
                for name, score in of_kind.items():
                    collected.setdefault(kind, {}).setdefault(name, []).append(score)
        return {
            kind: {
                name: GroupScore(
                    _mean(one.mean for one in scores), _mean(one.worst for one in scores),
                    round(_mean(one.clients for one in scores)),
                )
                for name, scores in of_kind.items()
            }
            for kind, of_kind in collected.items()
        }  # fmt: skip

    def confusion(self, method: str) -> NDArray[np.int64] | None:
        """Count test samples by true class (rows) and answer (columns), over clients and seeds; None if unknown."""
        outcomes = self.outcomes[method]
        if self.select != "last" or any(outcome.classes is None for outcome in outcomes):
            return None
        return np.asarray(np.sum([outcome.confusion() for outcome in outcomes], axis=0))

    @cached_property
    def classes(self) -> list[dict[str, Any]]:
        """One row per method and class: recall, precision and F1 over the test samples of all clients and seeds.

        NaN where there is nothing to divide by. Empty where samples have no classes, or another round than the last
        counts.
        """
        rows = []
        for method in self.outcomes:
            counts = self.confusion(method)
            if counts is None:
                return []
            right, true, said = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
            figures = {"recall": (right, true), "precision": (right, said), "f1": (2 * right, true + said)}
            shares = {
                name: np.divide(above, below, out=np.full(len(right), np.nan), where=below > 0)
                for name, (above, below) in figures.items()
            }
            rows += [
                {
                    "method": method, "class": self.example.class_name(label), "samples": int(true[label]),
                    **{name: float(values[label]) for name, values in shares.items()},
                }
                for label in range(len(right))
            ]  # fmt: skip
        return rows

    # -- cost --------------------------------------------------------------------------------------------------------
    def target_of(self, index: int) -> float | None:
        """Return the validation score to be reached with a seed: as given, else 95 % of FedAvg's best."""
        fedavg = self.reference("fedavg")
        if self.target is not None or fedavg is None:
            return self.target
        curve = [value for _, value in self.outcomes[fedavg][index].curve() if math.isfinite(value)]
        if not curve:
            return None
        best = max(curve) if self.metric.higher_is_better else min(curve)
        # Closer to 0 is worse for a positive score, but better for an error or for an R2 below 0.
        return TARGET_SHARE * best if (best > 0) == self.metric.higher_is_better else best / TARGET_SHARE

    def to_target(self, method: str) -> tuple[float | None, float | None]:
        """Count rounds and megabytes until the target, means over seeds; None if a seed did not reach it."""
        rounds, megabytes = [], []
        for index, outcome in enumerate(self.outcomes[method]):
            target, curve = self.target_of(index), outcome.curve()
            if target is None or not all(math.isfinite(value) for _, value in curve):
                return None, None
            higher = self.metric.higher_is_better
            rounds.append(cost.rounds_to(curve, target, higher_is_better=higher))
            megabytes.append(cost.bytes_to(curve, outcome.spent, target, higher_is_better=higher))
        if any(one is None for one in rounds):
            return None, None
        return _mean(filter(None, rounds)), _mean(one for one in megabytes if one is not None)

    # -- tables ------------------------------------------------------------------------------------------------------
    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """One row per method: means over seeds, in the order in which the methods were named."""
        return [self._row(method, of_method) for method, of_method in self.outcomes.items()]

    def _row(self, method: str, outcomes: Sequence[Report]) -> dict[str, Any]:
        figures = [outcome.figures(select=self.select) for outcome in outcomes]
        macro = [one.macro for one in figures]
        reading = {name: self.metric[name] for name in ("higher_is_better", "share", "mean")}
        spread = [
            fairness.summary(scores, outcome.samples(), **reading)
            for outcome, scores in zip(outcomes, self.scores(method), strict=True)
        ]
        gains, harmed, harmed_fedavg = self.gains(method), self.find_harmed(method), self.find_harmed(method, "fedavg")
        once = None if gains is None else self.count_once(gains)
        rounds, megabytes = self.to_target(method)
        found = [outcome.clusters for outcome in outcomes]
        return {
            "method": method,
            "mean": float(np.mean(macro)),
            "validation": self._mean_validation(outcomes),
            "reads_validation": outcomes[0].algorithm.reads_validation,
            "transductive": outcomes[0].transductive,
            "inductive": _optional(_mean, [outcome.inductive for outcome in outcomes]),
            "central_inductive": _optional(_mean, [outcome.central_inductive for outcome in outcomes]),
            "interval": self._interval(macro, self.scores(method)),
            "interval_of_sample": self._interval_of_sample(self.scores(method)),
            **{name: _nanmean([one[name] for one in spread]) for name in spread[0] if name != "macro"},
            **({} if self.metric.mean else {"micro": _nanmean([one.micro for one in figures])}),
            "undefined": _mean(one.undefined or 0 for one in figures),
            "diverged": _mean(len(one.diverged or ()) for one in figures),
            "loss": _mean(one.loss for one in figures),
            "ece": _optional(_mean, [one.ece for one in figures]),
            "shared_union": _optional(_mean, [outcome.union for outcome in outcomes]),
            "central": _optional(_mean, [outcome.central for outcome in outcomes]),
            "central_interval": self._interval_over_seeds([outcome.central for outcome in outcomes]),
            **{f"gain_{name}": _nanmean(self.gains(method, name)) for name in REFERENCES},
            "gain_local_median": _reduce_known(np.nanmedian, once),
            **{f"gain_{name}_interval": self._interval_of_gain(method, name) for name in REFERENCES},
            **{f"p_{name}": self.significant.get(name, {}).get(method) for name in REFERENCES},
            "helped": None if once is None else float((once > 0).sum(axis=1).mean()),
            "harmed": None if harmed is None else float(harmed.sum(axis=1).mean()),
            "harmed_fedavg": None if harmed_fedavg is None else float(harmed_fedavg.sum(axis=1).mean()),
            "harm_mass": None if once is None else _nanmean(np.maximum(-once, 0)),
            "clusters": _optional(_mean, [None if one is None else one.number for one in found]),
            "adjusted_rand": _optional(_mean, [outcome.agreement for outcome in outcomes]),
            "clients": self.clients,
            "scored": self.scored,
            "round": _mean(outcome.select_round(self.select).round for outcome in outcomes),
            "megabytes_up": _mean(outcome.megabytes("up") for outcome in outcomes),
            "megabytes_down": _mean(outcome.megabytes("down") for outcome in outcomes),
            "megabytes_deployed": _optional(_mean, [outcome.deployed for outcome in outcomes]),
            "rounds_to_target": rounds,
            "megabytes_to_target": megabytes,
            "gradients": _mean(outcome.gradients for outcome in outcomes),
            "seconds": _mean(outcome.seconds for outcome in outcomes),
            "memory_megabytes": max(outcome.memory for outcome in outcomes),
            "seeds": len(outcomes),
        }

    def _mean_validation(self, outcomes: Sequence[Report]) -> float | None:
        """Return the mean score on validation samples in the round that counts; None without any."""
        found = _mean(outcome.figures("val", select=self.select).macro for outcome in outcomes)
        return found if math.isfinite(found) else None

    def _interval_of_gain(self, method: str, over: str) -> float | None:
        """Return half the 95 % interval of a mean gain over a reference."""
        reference, gains = self.reference(over), self.gains(method, over)
        if reference is None or gains is None or method == reference:
            return None
        return self._interval(_known_means(gains), gains)

    def _interval(self, means: Sequence[float], values: Scores) -> float | None:
        """Return half the 95 % interval of a mean: over clients and seeds, if all seeds have the same clients.

        Else it is that over seeds; they have clients, or samples of them, of their own, so what differs between seeds
        includes what differs between clients. Of one seed it is that of its sample of clients.
        """
        if self.together and not self.sampled:
            return estimate_gain(values).half
        return significance.interval(means) if len(means) > 1 else self._interval_of_sample(values)

    def _interval_over_seeds(self, scores: Sequence[float | None]) -> float | None:
        """Return half the 95 % interval of the mean of the server's scores; None where some are not known."""
        known = [score for score in scores if score is not None]
        return significance.interval(known) if len(known) == len(scores) else None

    def _interval_of_sample(self, values: Scores) -> float | None:
        """Return half the 95 % interval of a mean over seeds and all clients, as far as clients were sampled."""
        share = self.example.share
        if share is None:
            return None
        halves = [significance.interval(fairness.drop_nan(of_seed), share) for of_seed in values]
        known = [half for half in halves if half is not None]
        return math.hypot(*known) / len(known) if known else None

    @cached_property
    def newcomers(self) -> list[dict[str, Any]]:
        """Mean scores of clients that took no part, by method: without labels, and by epochs of tuning with them."""
        found = []
        for method, outcomes in self.outcomes.items():
            each = [one.newcomers for one in outcomes if one.newcomers is not None]
            if each:
                labelled = [one.labelled for one in each]
                tuned = {epochs: _mean(one[epochs].macro for one in labelled) for epochs in labelled[0]}
                without = [one.unlabelled.get("macro", math.nan) for one in each]
                found.append({
                    "method": method, "clients": labelled[0]["0"].count,
                    "way": each[0].unlabelled["way"], "unlabelled": _mean(without), "tuned": tuned,
                })  # fmt: skip
        return found

    @property
    def best(self) -> str | None:
        """The method with the best mean on validation samples; None where nobody has any.

        What is chosen by test scores looks better than it is. A method that reads validation samples itself cannot be
        chosen by them either.
        """
        rows = [row for row in self.results if row["validation"] is not None and not row["reads_validation"]]
        return max(rows, key=lambda row: self.example.sign * row["validation"])["method"] if rows else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per method, seed and client that was scored; of very many clients, their percentiles."""
        return list_percentiles(self) if self.scored > MANY_CLIENTS else list_clients(self)

    # -- in words ----------------------------------------------------------------------------------------------------
    @property
    def who(self) -> str:
        """Which clients the figures are of, in words."""
        honest = f"{self.example.honest:,} {'honest ' * bool(self.attackers)}clients"
        return f"a sample of {self.scored:,} of {honest}" if self.sampled else self.everybody

    @property
    def everybody(self) -> str:
        """The clients that figures stand for, in words."""
        return "all honest clients" if self.attackers else "all clients"

    @property
    def protocol(self) -> str:
        """What the figures are figures of."""
        task = self.example.config.task
        recipe = task.recipe or {}
        dealt, split = recipe.get("partition"), recipe.get("split")
        who = f"{self.who}, drawn by the seed," if self.sampled else f"all {task.clients:,} clients,"
        if self.attackers:
            everybody = f"the {self.example.honest:,} honest clients of {task.clients:,}"
            who = f"a sample of {self.scored:,} of {everybody}" if self.sampled else f"{everybody},"
        what = f"{self.metric.title}{' in %' if self.metric.share else ''}"
        rule, leaks = (task.more.get(name) for name in ("split_by", "leaks"))
        share = None if self.folds or (rule and rule.startswith(SPLIT_WITHOUT_SHARES)) else split
        shares = [f"train/val/test {share} %"] if share and not self.folds else []
        cuts = [] if rule and share is None and not self.folds else [self._count_cuts()]  # nothing was drawn
        cut = ", ".join([*shares, *([rule] if rule else []), *cuts])
        ended = sorted({run.select_round().round for of_method in self.outcomes.values() for run in of_method})
        rounds = f" ({' or '.join(map(str, ended))})" if self.select == "last" else ""
        shared = " Clients share samples in this partition." if dealt and dealt.startswith("fafi:") else ""
        measured = (
            f"of the model each client would deploy, on its own test split ({cut}), {SELECTIONS[self.select]}{rounds}"
        )
        if self.only_central:
            measured = (
                f"of the shared model or ensemble on the server's own test set, {SELECTIONS[self.select]}{rounds}"
            )
            who = (
                f"all {task.clients:,} clients train, without test samples of their own ({cut}): nobody's gain is known"
            )
        else:
            who = f"{who} each counted the same"
        return (
            f"{what} {measured}; {who}{self._explain_interval()}. "
            f"{task.name}{f', {dealt}' if dealt else ''}, {self._list_seeds()}.{shared}{self._explain_undefined()}"
            f"{self._explain_diverged()}"
            f"{f' Warning: {leaks}' if leaks else ''}"
        )

    def _count_cuts(self) -> str:
        """Say how many cuts of the samples there are, and where several seeds share one."""
        if self.folds and self.cuts < self.folds:
            return f"{self.cuts} of them so far"
        if self.folds:
            times = "once" if len(self.seeds) == 1 else f"{len(self.seeds)} times"
            return f"every sample tested {times}, {self.cuts} cuts"
        if self.cuts == 1:
            return "one cut" if len(self.seeds) == 1 else f"one cut for all {len(self.seeds)} seeds"
        return f"{self.cuts} cuts"

    def _list_seeds(self) -> str:
        seeds = list_pooled(self.first)
        if len(seeds) > 2 and seeds == [*range(seeds[0], seeds[-1] + 1)] and self.folds:
            return f"seeds {seeds[0]} to {seeds[-1]}"
        return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"

    def _explain_undefined(self) -> str:
        """Say for how many clients the metric does not exist; nothing if it exists for all that have test samples."""
        most = max(row["undefined"] for row in self.results)
        if not most:
            return ""
        tested = int((self.example.samples() > 0).sum())
        each = " of each seed" if len(self.seeds) > 1 else ""
        return (
            f" {self.metric.title} is undefined for {most:g} of {tested:,} clients{each}, whose test samples do not "
            "differ in their targets; means are over the others."
        )

    def _explain_diverged(self) -> str:
        """Name the clients whose models have no sensible score, by method; nothing if there are none."""
        found = {
            method: sorted({client for run in runs for client in run.figures(select=self.select).diverged or ()})
            for method, runs in self.outcomes.items()
        }
        told = [
            f"{'models of clients' if len(who) > 1 else 'model of client'} {', '.join(map(str, who[:MOST_NAMED]))}"
            f"{f' and {len(who) - MOST_NAMED} more' if len(who) > MOST_NAMED else ''} with {method}"
            for method, who in found.items() if who
        ]  # fmt: skip
        one = sum(map(len, found.values())) == 1
        return (
            f" Diverged: the {', the '.join(told)}. {'It counts' if one else 'They count'} as the worst of the others."
            if told
            else ""
        )

    def _explain_interval(self) -> str:
        over = f"; ± is the 95 % t-interval over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        if self.together and not self.sampled:
            few = f" (fewer than {FEWEST_CLIENTS} clients have none)" if self.judged < FEWEST_CLIENTS else ""
            over = f"; ± is the 95 % interval over clients and {'cuts' if self.cuts > 1 else 'seeds'}{few}"
        if not self.sampled:
            return over
        everybody = f"all {self.example.honest:,} {'honest ' * bool(self.attackers)}clients"
        over = over or f"; ± is the 95 % interval of the mean over {everybody}"
        return f"{over}; worst client, bottom 10 %, std and harmed clients are those of the sample"

    @property
    def citations(self) -> str:
        """BibTeX of the methods, each once."""
        cites = (bibtex(one.algorithm.cites) for one, *_ in self.outcomes.values())
        return "\n\n".join(dict.fromkeys(filter(None, cites)))

    def with_selection(self, select: Select) -> Self:
        """Return the same comparison with another round that counts."""
        return replace(self, select=select)


# -- small parts -------------------------------------------------------------------------------------------------------


def _right_or_wrong(scores: Scores) -> bool:
    return bool(np.isin(scores, (0, 1)).all())


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def _optional(function: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if len(known) == len(values) else None


def _reduce_known(function: Callable[[Any], Any], values: Scores | Sequence[float] | None) -> float | None:
    """Reduce values some of which may be NaN; None where nothing is known."""
    return None if values is None or np.isnan(values).all() else float(function(values))


def _nanmean(values: Scores | Sequence[float] | None) -> float | None:
    return _reduce_known(np.nanmean, values)


def _mean_of_known(values: Scores) -> Scores:
    """Return the mean over the first axis of what is not NaN; NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


def _known_means(gains: Scores) -> list[float]:
    """Return the mean over clients of every seed that has one."""
    return [mean for mean in map(_nanmean, gains) if mean is not None]
