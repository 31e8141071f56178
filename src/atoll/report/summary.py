"""A comparison in sentences: who is helped, who is better off alone, what leads and by how much, what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.algorithms import file_of
from atoll.kernel.wrapper import title_of
from atoll.metrics import significance
from atoll.records.results import SIGNIFICANT
from atoll.report import clusters
from atoll.report.clients import Scores, same_clients
from atoll.report.table import Numbers, megabytes

if TYPE_CHECKING:
    from atoll.records.results import Results

MOST_NAMED = 5  # clients in a sentence
FEW_SEEDS = 5
FEW_SAMPLES = 50  # for one client's test, by the median client
FEWEST_PAIRS = 6  # with fewer, Wilcoxon's test never gives less than 0.05


def sentences(comparison: Results) -> list[str]:
    """The summary, as plain text."""
    return [*findings(comparison), *cautions(comparison)]


def findings(comparison: Results) -> list[str]:
    """Who is helped, who leads, which clusters were found, what it costs."""
    found = [clusters.sentence(comparison, method, name) for method, name in spoken(comparison).items()]
    level = [*_level(comparison), *_on_the_server(comparison)]
    return [*_against_local(comparison), *level, *filter(None, found), *_costs(comparison)]


# -- who is helped and who is harmed -----------------------------------------------------------------------------------


def _against_local(comparison: Results) -> list[str]:
    """For each method, whom it helps and who is better off alone."""
    if comparison.reference("local") is None:
        return []
    return [_helped(comparison, method, first=not place) for place, method in enumerate(comparison.others())]


def _helped(comparison: Results, method: str, *, first: bool) -> str:
    numbers, gains, harmed = Numbers.of(comparison), comparison.gains(method), comparison.harmed(method)
    assert gains is not None
    assert harmed is not None
    known = gains[~np.isnan(gains)]
    if not len(known):
        return f"Nobody has test samples to say whom {spoken(comparison)[method]} helps."
    seeds, clients = gains.shape
    counted = f" ({clients} in each of {seeds} seeds)" if first and seeds > 1 and len(known) == gains.size else ""
    alone = " compared with training alone" if first else ""
    mean = float(known.mean())
    change = f"{'gains' if mean >= 0 else 'loses'} {_amount(numbers, mean)}"
    p = _p(comparison.significant["local"][method])
    return (
        f"{spoken(comparison)[method]} helps {(known > 0).sum()} of {_clients(len(known))}{counted}{alone}; on average "
        f"a client {change} ({p}). {_better_off_alone(comparison, gains, harmed)}"
    )


def _better_off_alone(comparison: Results, gains: Scores, harmed: NDArray[np.bool_]) -> str:
    worse, beyond = int((gains < 0).sum()), int(harmed.sum())
    if not worse:
        return "Nobody is better off alone."
    if not beyond:
        return f"{worse} {_are(worse)} better off alone, none by more than one standard error."
    listed = f"{'clients' if beyond > 1 else 'client'} {_named(comparison, gains, harmed)}"
    if worse == beyond <= MOST_NAMED:
        return f"{listed[0].upper()}{listed[1:]} {_are(beyond)} better off alone."
    share = "all" if worse == beyond else f"{beyond} of them"
    which = f", above all {listed}" if beyond > MOST_NAMED else f": {listed}"
    return f"{worse} {_are(worse)} better off alone, {share} by more than one standard error{which}."


def _named(comparison: Results, gains: Scores, harmed: NDArray[np.bool_]) -> str:
    """The harmed clients by name, of many those that lose most: `3, 8 and 11`, `3 and 8 (seed 0), 3 (seed 1)`."""
    pairs = [(int(seed), int(client)) for seed, client in np.argwhere(harmed)]
    by_seed: dict[int, list[str]] = {}
    for seed, client in sorted(sorted(pairs, key=lambda pair: gains[pair])[:MOST_NAMED]):
        found = comparison.first[seed].statistics
        by_seed.setdefault(seed, []).append(str(client) if found is None else found.name(client))
    if len(comparison.seeds) == 1:
        return _listed(by_seed[0])
    return ", ".join(f"{_listed(names)} (seed {comparison.seeds[seed]})" for seed, names in by_seed.items())


# -- who leads ---------------------------------------------------------------------------------------------------------


def _level(comparison: Results) -> list[str]:
    """The best mean, and whether its lead is more than chance."""
    numbers, names, ranked = Numbers.of(comparison), spoken(comparison), _ranked(comparison)
    best, level = ranked[0]["method"], f"{numbers.name} {_score(numbers, ranked[0]['mean'])}"
    if len(ranked) == 1:
        worst = _score(numbers, ranked[0]["worst"])
        over = _clients(comparison.clients)
        return [f"{names[best]}: {level} on average over {over}, {worst} for the worst of them."]
    # sums of the same scores in another order differ in their last digit
    equal = [row["method"] for row in ranked if math.isclose(row["mean"], ranked[0]["mean"], rel_tol=1e-12)]
    if len(equal) > 1:
        return [f"{_listed([names[method] for method in equal])} are equally good on average ({level})."]
    found = [f"{names[best]} is best on average ({level}), {_lead(comparison, best, ranked[1]['method'])}."]
    fedavg = comparison.reference("fedavg")
    if fedavg is not None and fedavg not in (best, ranked[1]["method"]):
        found.append(f"It is {_lead(comparison, best, fedavg)}.")
    return found


def _on_the_server(comparison: Results) -> list[str]:
    """The best on the server's own test set, where several methods deploy something that all have alike."""
    numbers, names = Numbers.of(comparison), spoken(comparison)
    scored = [row for row in comparison.results if row["central"] is not None]
    if len(scored) < 2:
        return []
    first, second = sorted(scored, key=lambda row: -comparison.example.sign * row["central"])[:2]
    best, next_best = (f"{names[row['method']]} ({_score(numbers, row['central'])})" for row in (first, second))
    if math.isclose(first["central"], second["central"], rel_tol=1e-12):
        return [f"On the server's own test set nothing is better than {best}."]
    return [f"On the server's own test set {best} is best, before {next_best}."]


def _ranked(comparison: Results) -> list[dict[str, Any]]:
    """The rows of the table, best mean first; of equals the first named."""
    return sorted(comparison.results, key=lambda row: -comparison.example.sign * row["mean"])


def _lead(comparison: Results, method: str, other: str) -> str:
    """By how much one method's mean is better than that of another, and for how many clients it is better."""
    lead, _ = _difference(comparison, method, other)
    gains = comparison.example.sign * (comparison.scores(method) - comparison.scores(other))
    better, worse, known = (int(mask.sum()) for mask in (gains > 0, gains < 0, ~np.isnan(gains)))
    p = _p_of(comparison, method, other)
    verdict = "which may be chance" if p >= SIGNIFICANT else "more than chance"
    if p < SIGNIFICANT and better < worse:
        verdict = "although more clients lose than gain"
    return (
        f"{_amount(Numbers.of(comparison), lead)} ahead of {spoken(comparison)[other]}, {verdict} (better for {better} "
        f"and worse for {worse} of {_clients(known)}, {_p(p)})"
    )


def _difference(comparison: Results, method: str, other: str) -> tuple[float, float | None]:
    """How much better the mean of one method is, and half the 95 % interval over seeds."""
    ours, theirs = (np.nanmean(comparison.scores(one), axis=1) for one in (method, other))
    lead, half = significance.paired_interval(ours, theirs)
    return comparison.example.sign * lead, half


def _p_of(comparison: Results, method: str, other: str) -> float:
    """Of the difference of two methods; against Local and FedAvg as in the table, corrected for many tests."""
    for over in ("local", "fedavg"):
        pair = {method, other} - {comparison.reference(over)}
        if len(pair) == 1:
            return comparison.significant[over][pair.pop()]
    return significance.wilcoxon(comparison.scores(method).ravel(), comparison.scores(other).ravel())


# -- cost --------------------------------------------------------------------------------------------------------------


def _costs(comparison: Results) -> list[str]:
    """What a client sends and receives, and how soon the target is reached."""
    names = spoken(comparison)
    by_size: dict[str, list[str]] = {}
    for row in sorted(comparison.results, key=lambda row: -row["megabytes_up"] - row["megabytes_down"]):
        size = megabytes((row["megabytes_up"] + row["megabytes_down"]) / comparison.clients)
        by_size.setdefault("nothing" if size == "0" else f"{size} MB", []).append(names[row["method"]])
    parts = [f"{size} with {_listed(methods)}" for size, methods in by_size.items()]
    found = [f"Over all rounds a client sends and receives {', '.join(parts)}."]
    return found if comparison.target_of(0) is None else [*found, _to_target(comparison)]


def _to_target(comparison: Results) -> str:
    numbers, names = Numbers.of(comparison), spoken(comparison)
    by_rounds: dict[float | None, list[str]] = {}
    for row in comparison.results:
        by_rounds.setdefault(row["rounds_to_target"], []).append(names[row["method"]])
    never = by_rounds.pop(None, [])
    soon = [
        f"{_listed(by_rounds[rounds])} after {rounds:.3g} round{'' if rounds == 1 else 's'}"
        for rounds in sorted(filter(None, by_rounds))
    ]
    what = (
        f"The validation target of {_score(numbers, comparison.target)}"
        if comparison.target is not None
        else "A validation score 95 % as good as FedAvg's best"
    )
    always = "" if len(comparison.seeds) == 1 else " in every seed"
    if not soon:
        return f"{what} is not reached{always} by any method."
    rest = f"; not{always} by {_listed(never, 'or')}" if never else ""
    return f"{what} is reached by {_listed(soon)}{rest}."


# -- what to be careful about ------------------------------------------------------------------------------------------


def cautions(comparison: Results) -> list[str]:
    """What a reader must know before believing it."""
    numbers, found = Numbers.of(comparison), []
    seeds = len(comparison.seeds)
    if not numbers.higher_is_better:
        found.append(f"A lower {numbers.name} is better; a positive gain is always good.")
    if comparison.select == "oracle":
        found.append(
            "Rounds were chosen by their test score, which cannot be done in practice: all means are too good."
        )
    if seeds == 1:
        found.append("There is one seed only, so that nothing is known about how much is due to chance in training.")
    elif seeds < FEW_SEEDS:
        found.append(_few_seeds(comparison))
    samples = comparison.example.samples()
    tested = samples[samples > 0]
    if len(tested) and np.median(tested) < FEW_SAMPLES:
        worth = f": one sample more or less is up to {100 / tested.min():.1f} points" if numbers.share else ""
        found.append(
            f"Clients have {tested.min()} to {tested.max()} test samples, half of them at most {np.median(tested):g}, "
            f"so that single scores are rough{worth}."
            if tested.min() < tested.max()
            else f"Clients have {tested.min()} test samples each, so that single scores are rough{worth}."
        )
    if len(tested) < len(samples):
        found.append(f"{_clients(len(samples) - len(tested))} without test samples count nowhere.")
    if len(comparison.outcomes) > 1 and len(tested) * seeds < FEWEST_PAIRS:
        found.append(f"With fewer than {FEWEST_PAIRS} pairs of scores no test can call a difference significant.")
    elif len(comparison.outcomes) > 1 and seeds > 1 and same_clients(comparison):
        found.append(
            "The tests take the same client in several seeds as independent, which it is not: p may be too small."
        )
    return found


def _few_seeds(comparison: Results) -> str:
    numbers, names, ranked = Numbers.of(comparison), spoken(comparison), _ranked(comparison)
    few = f"{len(comparison.seeds)} seeds are few"
    if len(ranked) == 1:
        return f"{few}: the mean is known up to ± {_amount(numbers, ranked[0]['interval'])} (95 % interval)."
    best, other = (row["method"] for row in ranked[:2])
    lead, half = _difference(comparison, best, other)
    assert half is not None
    return (
        f"{few}: the lead of {names[best]} over {names[other]} is between {numbers.gain(lead - half)} and "
        f"{numbers.gain(lead + half)}{_unit(numbers)} (95 % interval over seeds)."
    )


# -- words -------------------------------------------------------------------------------------------------------------


def spoken(comparison: Results) -> dict[str, str]:
    """What methods are called in a sentence: `Ditto with lam=0.1`. A user's own method is called as in tables."""
    found = {}
    for method, (one, *_) in comparison.outcomes.items():
        values = one.label.partition(":")[2]
        name = title_of(one.algorithm) + (f" with {values.replace(',', ', ')}" if values else "")
        found[method] = name if file_of(one.algorithm) is None else method
    return found


def _score(numbers: Numbers, value: float | None) -> str:
    return f"{numbers.score(value)} %" if numbers.share else numbers.score(value)


def _amount(numbers: Numbers, value: float) -> str:
    """A distance between scores."""
    return f"{numbers.gain(abs(value)).removeprefix('+')}{_unit(numbers)}"


def _unit(numbers: Numbers) -> str:
    return " points" if numbers.share else ""


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}" if value < 0.1 else f"p = {value:.2f}"


def _clients(number: int) -> str:
    return f"{number} client{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _listed(words: Sequence[str], last: str = "and") -> str:
    return " ".join(filter(None, [", ".join(words[:-1]), last if words[1:] else "", words[-1]]))
