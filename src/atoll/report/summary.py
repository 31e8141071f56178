"""Write a comparison in sentences: who gains, who is better off alone, which method leads, what it costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.federation.numbers import Numbers
from atoll.federation.results import SIGNIFICANT
from atoll.metrics import significance
from atoll.report.clients import Scores
from atoll.report.clusters import describe_clusters
from atoll.report.names import join_words, name_methods
from atoll.report.protection import write_protection
from atoll.report.table import count_range, megabytes

if TYPE_CHECKING:
    from atoll.federation.results import Results

MOST_NAMED = 5  # clients in a sentence
FEW_SEEDS = 5
FEW_SAMPLES = 50  # for one client's test, by the median client


def write_summary(comparison: Results) -> list[str]:
    """Write all sentences."""
    return [*write_findings(comparison), *write_protection(comparison), *write_cautions(comparison)]


def write_verdict(comparison: Results) -> tuple[str, str]:
    """Say what to do in a headline, and what speaks for it and against it in a few sentences more.

    The method is the best one on validation samples; what it is worth is said by test scores.
    """
    names, best = name_methods(comparison), comparison.best
    rows = {row["method"]: row for row in comparison.results}
    if len(rows) == 1:
        return _describe_single(comparison), ""
    if comparison.only_central:
        return " ".join(_compare_on_server(comparison)), (
            "Clients have no test samples of their own, so nobody's gain is known. What is best by test scores looks "
            "better than it is."
        )
    if best is None:
        return (
            "No method can be recommended: there are no validation samples to choose by.",
            "Give every client some, as with split 60/15/25. The table shows test scores.",
        )
    local = comparison.reference("local")
    if best == local:
        return "Federating does not pay here: training alone is best on validation samples.", _describe_rest(comparison)
    behind = rows[best]["gain_local"]
    if behind is not None and behind < 0:
        amount = _write_amount(Numbers.of(comparison), behind)
        lead = f"{names[best]} is best on validation samples, but {amount} behind training alone on test samples."
        return lead, _describe_sureness(comparison, best)
    gains = [
        f"{numbers_of_gain(comparison, rows[best][f'gain_{over}'])} over {words}"
        for over, words in (("local", "training alone"), ("fedavg", "FedAvg"))
        if rows[best][f"gain_{over}"] is not None and comparison.reference(over) != best
    ]
    lead = f"{names[best]}: {', '.join(gains)}." if gains else f"{names[best]} is best on validation samples."
    return lead, _describe_sureness(comparison, best)


def _describe_single(comparison: Results) -> str:
    return _compare_means(comparison)[0]


def numbers_of_gain(comparison: Results, value: float) -> str:
    """Write a gain with its sign and unit."""
    numbers = Numbers.of(comparison)
    return f"{numbers.gain(value)}{_unit(numbers)}"


def _describe_sureness(comparison: Results, best: str) -> str:
    """Say who is harmed by the recommended method, whether its gain may be chance, and what it costs."""
    row = next(row for row in comparison.results if row["method"] == best)
    sentences = []
    gains, harmed = comparison.gains(best), comparison.find_harmed(best)
    if gains is not None and harmed is not None:
        once, counts = comparison.count_once(gains), harmed.sum(axis=1)
        named = f": {_name_harmed(comparison, once, harmed)}" if 0 < harmed.sum() <= MOST_NAMED else ""
        sentences.append(
            f"{_count_over_seeds(counts)} of {_count_clients(comparison.judged)} {_are(counts.max())} worse off than "
            f"alone by more than one standard error{_name_seeds(counts)}{named}."
        )
    p = comparison.significant.get("local", {}).get(best)
    if p is not None and row["gain_local"] is not None:
        what = "gain over" if row["gain_local"] >= 0 else "loss against"
        sure = "is more than chance" if p < SIGNIFICANT else "may be chance"
        sentences.append(f"The {what} training alone {sure} ({_write_p(p)}).")
    size = (row["megabytes_up"] + row["megabytes_down"]) / comparison.clients
    sentences.append(f"Each client sends and receives {megabytes(size)} MB in all.")
    return " ".join(sentences)


def _describe_rest(comparison: Results) -> str:
    """Say how far the best federated method stays behind training alone, on test samples."""
    numbers, names = Numbers.of(comparison), name_methods(comparison)
    rows = [row for row in _rank_methods(comparison) if row["method"] != comparison.reference("local")]
    if rows[0]["gain_local"] is None:
        return ""
    behind = "ahead of" if rows[0]["gain_local"] > 0 else "behind"
    return (
        f"On test samples the best of the others, {names[rows[0]['method']]}, is "
        f"{_write_amount(numbers, rows[0]['gain_local'])} {behind} it."
    )


def write_findings(comparison: Results) -> list[str]:
    """Say who gains, which method leads, which clusters were found, what it costs."""
    clusters = [describe_clusters(comparison, method, name) for method, name in name_methods(comparison).items()]
    if comparison.only_central:
        return [*_compare_on_server(comparison), *_describe_costs(comparison)]
    scores = [*_compare_means(comparison), *_compare_on_server(comparison)]
    return [*_compare_with_local(comparison), *scores, *filter(None, clusters), *_describe_costs(comparison)]


# -- who is helped and who is harmed -----------------------------------------------------------------------------------


def _compare_with_local(comparison: Results) -> list[str]:
    """Say for each method how many clients it helps, and which are better off alone."""
    if comparison.reference("local") is None:
        return []
    return [_describe_gains(comparison, method, first=not place) for place, method in enumerate(comparison.others())]


def _describe_gains(comparison: Results, method: str, *, first: bool) -> str:
    numbers, gains, harmed = Numbers.of(comparison), comparison.gains(method), comparison.find_harmed(method)
    assert gains is not None
    assert harmed is not None
    gains = comparison.count_once(gains)
    known = gains[~np.isnan(gains)]
    if not len(known):
        return f"No client has a score, so gains with {name_methods(comparison)[method]} are unknown."
    rows = len(gains)
    counted = f" ({rows} seeds, each with clients of its own)" if first and rows > 1 else ""
    alone = " compared with training alone" if first else ""
    mean = float(known.mean())
    change = f"{'gains' if mean >= 0 else 'loses'} {_write_amount(numbers, mean)}"
    name, p = name_methods(comparison)[method], _write_p(comparison.significant["local"][method])
    return (
        f"{name} helps {count_range((gains > 0).sum(axis=1))} of {_count_clients(~np.isnan(gains))}{counted}{alone}; "
        f"on average a client {change} ({p}). {_describe_losses(comparison, gains, harmed)}"
    )


def _describe_losses(comparison: Results, gains: Scores, harmed: NDArray[np.bool_]) -> str:
    worse, beyond = (gains < 0).sum(axis=1), harmed.sum(axis=1)
    if not worse.any():
        return "Nobody is better off alone."
    if not beyond.any():
        return f"{count_range(worse)} {_are(worse.max())} better off alone, none by more than one standard error."
    listed, all_of_them = _name_harmed(comparison, gains, harmed), np.array_equal(worse, beyond)
    if all_of_them and harmed.sum() <= MOST_NAMED and len(gains) == 1:
        return f"{listed[0].upper()}{listed[1:]} {_are(beyond.max())} better off alone."
    share = "all" if all_of_them else f"{count_range(beyond)} of them"
    which = f", above all {listed}" if harmed.sum() > MOST_NAMED else f": {listed}"
    return f"{count_range(worse)} {_are(worse.max())} better off alone, {share} by more than one standard error{which}."


def _name_harmed(comparison: Results, gains: Scores, harmed: NDArray[np.bool_]) -> str:
    """Name the harmed clients, of many those that lose most: `clients 3 and 8 (seed 0), client 3 (seed 1)`."""
    pairs = [(int(seed), int(client)) for seed, client in np.argwhere(harmed)]
    by_seed: dict[int, list[str]] = {}
    for seed, client in sorted(sorted(pairs, key=lambda pair: gains[pair])[:MOST_NAMED]):
        by_seed.setdefault(seed, []).append(_name_client(comparison, seed, client))
    listed = {seed: f"client{'s' * (len(names) > 1)} {join_words(names)}" for seed, names in by_seed.items()}
    if len(gains) == 1:
        return listed[0]
    return ", ".join(f"{names} (seed {comparison.seeds[seed]})" for seed, names in listed.items())


def _name_client(comparison: Results, seed: int, place: int) -> str:
    """Return the name of a client by its place among those that were scored."""
    found, number = comparison.first[seed].statistics, int(comparison.first[seed].scored[place])
    return str(number) if found is None else found.name(number)


# -- who leads ---------------------------------------------------------------------------------------------------------


def _compare_means(comparison: Results) -> list[str]:
    """Say which method has the best mean, and whether its lead is more than chance."""
    numbers, names, ranked = Numbers.of(comparison), name_methods(comparison), _rank_methods(comparison)
    if all(math.isnan(row["mean"]) for row in ranked):
        return ["No client has a score, so nothing is known about which method is best."]
    best, level = ranked[0]["method"], f"{numbers.name} {_write_score(numbers, ranked[0]['mean'])}"
    if len(ranked) == 1:
        worst = _write_score(numbers, ranked[0]["worst"])
        over = comparison.who if comparison.sampled or comparison.attackers else _count_clients(comparison.clients)
        return [f"{names[best]}: {level} on average over {over}, {worst} for the worst of them."]
    # sums of the same scores in another order differ in their last digit
    equal = [row["method"] for row in ranked if math.isclose(row["mean"], ranked[0]["mean"], rel_tol=1e-12)]
    if len(equal) > 1:
        return [f"{join_words([names[method] for method in equal])} are equally good on average ({level})."]
    found = [f"{names[best]} is best on average ({level}), {_describe_lead(comparison, best, ranked[1]['method'])}."]
    fedavg = comparison.reference("fedavg")
    if fedavg is not None and fedavg not in (best, ranked[1]["method"]):
        found.append(f"It is {_describe_lead(comparison, best, fedavg)}.")
    return found


def _compare_on_server(comparison: Results) -> list[str]:
    """Say which method is best on the server's own test set, where several were scored on it."""
    numbers, names = Numbers.of(comparison), name_methods(comparison)
    scored = [row for row in comparison.results if row["central"] is not None]
    if len(scored) < 2:
        return []
    first, second = sorted(scored, key=lambda row: -comparison.example.sign * row["central"])[:2]
    best, next_best = (f"{names[row['method']]} ({_write_score(numbers, row['central'])})" for row in (first, second))
    if math.isclose(first["central"], second["central"], rel_tol=1e-12):
        return [f"On the server's own test set nothing is better than {best}."]
    return [f"On the server's own test set {best} is best, ahead of {next_best}."]


def _rank_methods(comparison: Results) -> list[dict[str, Any]]:
    """Sort the rows of the table, the best mean first; equal ones keep their order."""
    return sorted(comparison.results, key=lambda row: -comparison.example.sign * row["mean"])


def _describe_lead(comparison: Results, method: str, other: str) -> str:
    """Say how far one method's mean is ahead of another's, and for how many clients it is better."""
    lead, _ = _compare_pair(comparison, method, other)
    gains = comparison.count_once(comparison.example.sign * (comparison.scores(method) - comparison.scores(other)))
    better, worse = (gains > 0).sum(axis=1), (gains < 0).sum(axis=1)
    p = _test_pair(comparison, method, other)
    verdict = "which may be chance" if p >= SIGNIFICANT else "more than chance"
    if p < SIGNIFICANT and better.sum() < worse.sum():
        verdict = "although more clients lose than gain"
    behind = name_methods(comparison)[other]
    return (
        f"{_write_amount(Numbers.of(comparison), lead)} ahead of {behind}, {verdict} (better for {count_range(better)} "
        f"and worse for {count_range(worse)} of {_count_clients(~np.isnan(gains))}, {_write_p(p)})"
    )


def _compare_pair(comparison: Results, method: str, other: str) -> tuple[float, float | None]:
    """Return how much better the mean of one method is, and half the 95 % interval over seeds."""
    gain = comparison.estimate(method, other)
    if gain is not None:
        return gain.mean, gain.half
    ours, theirs = (np.nanmean(comparison.scores(one), axis=1) for one in (method, other))
    lead, half = significance.paired_interval(ours, theirs)
    return comparison.example.sign * lead, None if comparison.together else half


def _test_pair(comparison: Results, method: str, other: str) -> float:
    """Return p of the difference of two methods; against Local and FedAvg corrected for many tests, as in the table."""
    for over in ("local", "fedavg"):
        pair = {method, other} - {comparison.reference(over)}
        if len(pair) == 1:
            return comparison.significant[over][pair.pop()]
    return comparison.test_pair(method, other)


# -- cost --------------------------------------------------------------------------------------------------------------


def _describe_costs(comparison: Results) -> list[str]:
    """Say what a client sends and receives, and after how many rounds the target is reached."""
    names = name_methods(comparison)
    by_size: dict[str, list[str]] = {}
    for row in sorted(comparison.results, key=lambda row: -row["megabytes_up"] - row["megabytes_down"]):
        size = megabytes((row["megabytes_up"] + row["megabytes_down"]) / comparison.clients)
        by_size.setdefault("nothing" if size == "0" else f"{size} MB", []).append(names[row["method"]])
    parts = [f"{size} with {join_words(methods)}" for size, methods in by_size.items()]
    found = [f"Over all rounds a client sends and receives {', '.join(parts)}."]
    return found if comparison.target_of(0) is None else [*found, _describe_target(comparison)]


def _describe_target(comparison: Results) -> str:
    numbers, names = Numbers.of(comparison), name_methods(comparison)
    by_rounds: dict[float | None, list[str]] = {}
    for row in comparison.results:
        by_rounds.setdefault(row["rounds_to_target"], []).append(names[row["method"]])
    never = by_rounds.pop(None, [])
    soon = [
        f"{join_words(by_rounds[rounds])} after {rounds:.3g} round{'' if rounds == 1 else 's'}"
        for rounds in sorted(filter(None, by_rounds))
    ]
    what = (
        f"the validation target of {_write_score(numbers, comparison.target)}"
        if comparison.target is not None
        else "a validation score 95 % as good as FedAvg's best"
    )
    always = "" if len(comparison.seeds) == 1 else " in every seed"
    if not soon:
        return f"No method reaches {what}{always}."
    rest = f"; not{always} by {join_words(never, 'or')}" if never else ""
    return f"{what[0].upper()}{what[1:]} is reached by {join_words(soon)}{rest}."


# -- what to be careful about ------------------------------------------------------------------------------------------


def write_cautions(comparison: Results) -> list[str]:
    """Say what limits the conclusions."""
    numbers, found = Numbers.of(comparison), []
    seeds = len(comparison.seeds)
    if not numbers.higher_is_better:
        found.append(f"A lower {numbers.name} is better; a positive gain is always good.")
    if comparison.sampled:
        found.append(
            f"Only {comparison.who.removeprefix('a sample of ')} were scored, drawn at random, the same for "
            "every method. Means estimate those of all clients without bias; the worst client of all is likely worse "
            "than the worst of the sample."
        )
    if comparison.select == "oracle":
        found.append(
            "Rounds were chosen by their test score, which cannot be done in practice: all means are too good."
        )
    if seeds == 1 and comparison.folds:
        found.append("Folds were dealt once, so little is known about chance in cuts and in training.")
    elif seeds == 1:
        found.append("There is only one seed, so nothing is known about chance in training.")
    elif seeds < FEW_SEEDS and not comparison.only_central:
        found += _describe_few_seeds(comparison)
    samples = comparison.example.samples()
    tested = samples[samples > 0]
    if len(tested) and np.median(tested) < FEW_SAMPLES:
        worth = f": one sample more or less is up to {100 / tested.min():.1f} points" if numbers.share else ""
        found.append(
            f"Clients have {tested.min()} to {tested.max()} test samples, half of them at most {np.median(tested):g}, "
            f"so scores of single clients are rough{worth}."
            if tested.min() < tested.max()
            else f"Clients have {tested.min()} test samples each, so scores of single clients are rough{worth}."
        )
    single = np.flatnonzero(samples == 1)
    if len(single):
        names = [_name_client(comparison, 0, int(client)) for client in single[:MOST_NAMED]]
        more = ["others"] if len(single) > MOST_NAMED else []
        extremes = ", whose gain is -100, 0 or 100 points" * bool(numbers.share)
        found.append(
            f"{_count_clients(len(single))} {'has' if len(single) == 1 else 'have'} a single test sample "
            f"({join_words([*names, *more])}){extremes}. One sample says nothing of chance, so no such client counts "
            "as harmed."
        )
    if len(tested) < len(samples):
        without = len(samples) - len(tested)
        found.append(f"{_count_clients(without)} without test samples {_are(without)} left out.")
    pairs, fewest = len(tested) * (1 if comparison.together else seeds), significance.FEWEST_PAIRS
    if len(comparison.outcomes) > 1 and pairs < fewest:
        found.append(f"With fewer than {fewest} pairs of scores no test can call a difference significant.")
    return found


def _describe_few_seeds(comparison: Results) -> list[str]:
    """Say how uncertain the lead is that few seeds show; nothing where there is no interval."""
    numbers, names, ranked = Numbers.of(comparison), name_methods(comparison), _rank_methods(comparison)
    few = f"{comparison.cuts} cuts" if comparison.folds else f"{len(comparison.seeds)} seeds are few"
    if len(ranked) == 1:
        half = ranked[0]["interval"]
        uncertain = f"{few}: the mean is uncertain by ± {_write_amount(numbers, half or 0)} (95 % interval)."
        return [] if half is None else [uncertain]
    best, other = (row["method"] for row in ranked[:2])
    lead, half = _compare_pair(comparison, best, other)
    if half is None:
        return []
    over = "clients and cuts" if comparison.together else "seeds"
    between = f"{numbers.gain(lead - half)} and {numbers.gain(lead + half)}{_unit(numbers)}"
    return [f"{few}: the lead of {names[best]} over {names[other]} is between {between} (95 % interval over {over})."]


# -- words -------------------------------------------------------------------------------------------------------------


def _write_score(numbers: Numbers, value: float | None) -> str:
    return f"{numbers.score(value)} %" if numbers.share else numbers.score(value)


def _write_amount(numbers: Numbers, value: float) -> str:
    """Write a distance between scores."""
    return f"{numbers.gain(abs(value)).removeprefix('+')}{_unit(numbers)}"


def _unit(numbers: Numbers) -> str:
    return " points" if numbers.share else ""


def _write_p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}" if value < 0.1 else f"p = {value:.2f}"


def _count_clients(number: int | NDArray[np.bool_]) -> str:
    """Count clients: so many, or those of each seed that a mask marks."""
    counts = [number] if isinstance(number, int) else number.sum(axis=1)
    return f"{count_range(counts)} client{'' if max(counts) == 1 else 's'}"


def _count_over_seeds(counts: NDArray[np.int64]) -> str:
    """Write a count of clients over seeds; where it is the same in all seeds that have any, that one."""
    some = {*counts[counts > 0].tolist()}
    return count_range([some.pop()] if len(some) == 1 else counts)


def _name_seeds(counts: NDArray[np.int64]) -> str:
    """Say in how many seeds such a count was found; nothing where each client is counted once."""
    with_any, seeds = int((counts > 0).sum()), len(counts)
    if seeds == 1:
        return ""
    if not with_any:
        return f" in any of {seeds} seeds"
    if len({*counts[counts > 0].tolist()}) > 1:
        return ", depending on the seed"
    return f" in {'each' if with_any == seeds else 'one' if with_any == 1 else with_any} of {seeds} seeds"


def _are(number: float) -> str:
    return "is" if number == 1 else "are"
