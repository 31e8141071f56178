"""Plausible reasons for a gain or a loss, and what would likely help: rules, each with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from atoll import algorithms
from atoll.algorithms import name_of
from atoll.experiments.explain.client import LARGE, SMALL, Case
from atoll.experiments.explain.study import Gain
from atoll.experiments.explain.words import count_text, join_names, p_text, percent
from atoll.federation.results import SIGNIFICANT
from atoll.metrics import significance

MOST_REASONS = 2
FEWEST_SAMPLES = 10  # for a validation loss
NO_ROOM = 0.95  # a score alone that leaves little to gain
WORSE = 1.25  # times the lowest validation loss


class Reason(NamedTuple):
    """A plausible cause of a gain or a loss, and advice."""

    text: str
    advice: tuple[str, ...] = ()


def find_reasons(case: Case) -> list[Reason]:
    """Return the first reasons that apply; the rules are about gains over Local."""
    if case.study.over != "local" or case.gain is None:
        return []
    reasons = [reason for rule in RULES if (reason := rule(case, case.gain)) is not None]
    return reasons[:MOST_REASONS] or [Reason("None of the rules accounts for it.")]


def _by_chance(case: Case, gain: Gain) -> Reason | None:
    """Suggest chance: there are few test samples, or the difference is small."""
    if gain.sure:
        return None
    test = "" if gain.only is None else "McNemar's "
    what = f"a difference of {case.study.points(gain.value)} may be chance ({test}{p_text(gain.p)})"
    return Reason(f"On {count_text(gain.samples, 'test sample')} {what if gain.value else 'it makes no difference'}.")


def _seldom(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """Suggest that it seldom took part."""
    replies = case.study.replies
    if replies is None or replies[case.client] > replies.mean() / 2:
        return None
    return Reason(
        f"It took part in {count_text(int(replies[case.client]), 'round')}, the mean client in {replies.mean():.1f}, "
        "so what it gets owes little to its data.",
        ("Ask it more often: a larger cohort, or more rounds.",),
    )


def _other_groups(case: Case, gain: Gain) -> Reason | None:
    """Suggest that it learns from planted groups that have another truth."""
    if case.data is None or case.data.groups is None or case.weights is None or not gain.harmed:
        return None
    share = np.abs(case.weights[case.data.groups != case.data.groups[case.client]]).sum()
    if not share:
        return None
    return Reason(
        f"{percent(share)} of the weight in what it gets is that of other planted groups, which have another truth.",
        _more_personal(case) if gain.sure else (),
    )


def _pulled_away(case: Case, gain: Gain) -> Reason | None:
    """Suggest that a shared model pulls a client with distant data away from its task."""
    if not case.far or not gain.harmed:
        return None
    how = "its own part may be too weak against what it shares" if case.personal else "one model serves all"
    return Reason(
        f"Its {join_names([*case.far.values()])} are far from those of all, and {how}: it may be pulled away from its "
        f"task{case.correlation_text(next(iter(case.far)))}.",
        _more_personal(case) if gain.sure else (),
    )


def _few_samples(case: Case, gain: Gain) -> Reason | None:
    """Suggest that a small client has much to learn from others."""
    if case.data is None or case.tercile("size") != SMALL or not gain.helped:
        return None
    far = f"although its {join_names([*case.far.values()])} are far from those of all"
    return Reason(
        f"It has few samples ({case.data.samples[case.client]:,}, median {np.median(case.data.samples):,g}), which "
        f"leaves much to learn from others, {far if case.far else 'and its data are ordinary'}"
        f"{case.correlation_text('size')}."
    )


def _large(case: Case, gain: Gain) -> Reason | None:
    """Suggest that a large client with ordinary data knows what the others know."""
    if case.data is None or case.tercile("size") != LARGE or case.far or gain.helped:
        return None
    return Reason(
        f"It has many samples ({case.data.samples[case.client]:,}, median {np.median(case.data.samples):,g}) and "
        f"ordinary data, so others add little{case.correlation_text('size')}."
    )


def _no_room(case: Case, gain: Gain) -> Reason | None:
    """Suggest that it is nearly perfect alone."""
    numbers = case.study.numbers
    if not (numbers.share and numbers.higher_is_better and gain.score >= NO_ROOM) or gain.helped:
        return None
    return Reason(
        f"Alone it has {case.study.score(gain.score)}: at most {numbers.score(1 - gain.score)} points are left to gain."
    )


def _against_shared(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """Compare its own model with the shared one, on the same samples."""
    study, place = case.study, case.place
    models = study.outcome.select_round(study.select)["evaluation"]
    if "shared" not in models:
        return None
    own, shared = (models[name]["test"] for name in ("personal", "shared"))
    error = float(significance.standard_error(own["variances"][place], shared["variances"][place], case.test_samples))
    difference = study.outcome.sign * (own["clients"][place] - shared["clients"][place])
    if significance.student(difference, error, case.test_samples) >= SIGNIFICANT:
        return None
    verdict = (
        "personalization helps it" if difference > 0 else "personalization costs it, as can happen with few samples"
    )
    return Reason(
        f"Its own model has {study.score(own['clients'][place])}, the shared one "
        f"{study.score(shared['clients'][place])} (standard error {study.numbers.score(error)}): {verdict}.",
        () if difference > 0 else _less_personal(case),
    )


def _worse_validation(case: Case, gain: Gain) -> Reason | None:  # noqa: ARG001
    """Suggest overfitting if its validation loss was lowest long ago, too large steps if it jumped just now."""
    figures = [(line["round"], line["evaluation"]["personal"]["val"]) for line in case.study.outcome.evaluations]
    if len(figures) < 2 or figures[-1][1]["samples"][case.place] < FEWEST_SAMPLES:
        return None
    losses = [(val["losses"][case.place], round) for round, val in figures]
    (lowest, when), (before, _), (last, now) = min(losses), losses[-2], losses[-1]
    if not last > WORSE * lowest:
        return None
    if before <= WORSE * lowest:
        return Reason(
            f"Its validation loss jumped from {before:.3g} to {last:.3g} in round {now}: its steps may be too large.",
            ("A smaller learning rate or gradient clipping makes its steps steadier.",),
        )
    return Reason(
        f"Its validation loss was lowest after round {when} ({lowest:.3g}) and is {last:.3g} now: it may overfit.",
        ("Fewer rounds, a smaller learning rate or weight decay may stop the overfitting.",),
    )


RULES: tuple[Callable[[Case, Gain], Reason | None], ...] = (
    _by_chance, _seldom, _other_groups, _pulled_away, _few_samples, _large, _no_room, _worse_validation,
    _against_shared,
)  # fmt: skip


# -- what would likely help --------------------------------------------------------------------------------------------


def stay_local(case: Case) -> list[str]:
    """Advise a client that is better off alone to stay so."""
    gain = case.gain
    if case.study.over != "local" or gain is None or gain.value >= 0 or not gain.sure:
        return []
    return [f"It can stay with {gain.over}, which has {case.study.score(gain.score)} here."]


def ask_for_samples(case: Case) -> list[str]:
    """Say what is missing where nothing can be advised from a gain or a loss."""
    gain = case.gain
    if case.study.over != "local" or gain is None or gain.sure:
        return []
    few = significance.FEWEST_PAIRS
    if gain.samples < few:
        ways, why = "from more data or a larger test share", f"fewer than {few} never show a difference"
    else:
        ways = "from more data, a larger test share or more seeds"
        why = f"{gain.samples:,} show no difference beyond chance"
    return [f"More test samples, {ways}: {why}, so nothing else is advised."]


def _more_personal(case: Case) -> tuple[str, ...]:
    """Name ways to a model that is more its own, among the methods there are."""
    algorithm = case.study.outcome.algorithm
    name, lam = name_of(algorithm), getattr(algorithm, "lam", 0)
    if name == "ditto" and lam:
        return (f"A smaller pull towards the shared model (ditto:lam={lam / 10:g}) leaves it more of its own.",)
    ways = {
        "fedper": "fedper keeps a head for each client, which suits other labels",
        "fedavg-ft": "fedavg-ft tunes the shared model on each client's data",
        "ditto": "ditto gives each client a second model",
    }
    there = [words for way, words in ways.items() if way in algorithms.list_methods() and way != name]
    return (f"It may need more of its own: {', '.join(there[:2])}.",) if there else ()


def _less_personal(case: Case) -> tuple[str, ...]:
    """Name ways to a model that is closer to the shared one."""
    algorithm = case.study.outcome.algorithm
    name, lam, epochs = name_of(algorithm), getattr(algorithm, "lam", 0), getattr(algorithm, "tune_epochs", 0)
    if name == "ditto":
        return (f"A stronger pull towards the shared model (ditto:lam={10 * lam or 1:g}) lets it share more.",)
    if name == "fedavg-ft":
        return (f"Fewer epochs of tuning than {epochs} (tune_epochs) keep it nearer to the shared model.",)
    return ("It can deploy the shared model instead.",)


def best_on_validation(case: Case) -> list[str]:
    """Name the method of the comparison that its validation samples prefer beyond chance."""
    study, samples = case.study, int(case.study.outcome.samples("val")[case.place])
    scores = {
        method: float(study.outcome.sign * study.comparison.scores(method, "val")[study.index, case.place])
        for method in study.comparison.outcomes
    }
    best = max(scores, key=lambda method: scores[method])
    own, of_best = (
        study.comparison.outcomes[method][study.index].variances("val", study.select)[case.place]
        for method in (study.method, best)
    )
    error = float(significance.standard_error(own, of_best, samples))
    if significance.student(scores[best] - scores[study.method], error, samples) >= SIGNIFICANT:
        return []
    mine, other = (study.score(study.outcome.sign * scores[method]) for method in (study.method, best))
    return [
        f"On its {count_text(samples, 'validation sample')} {best} is the best method here, {other} against {mine}."
    ]
