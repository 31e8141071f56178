"""Say what was protected: who attacked and how often it worked, what replies pass, what is promised about clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from atoll.federation.folds import list_pooled
from atoll.federation.numbers import Numbers
from atoll.federation.report import DELTA
from atoll.protect.account import gaussian_epsilon
from atoll.protect.local_level import LocalPrivacy
from atoll.report.names import join_words, name_methods
from atoll.report.table import megabytes

if TYPE_CHECKING:
    from atoll.federation.report import Report
    from atoll.federation.results import Results
    from atoll.federation.settings import Settings


def write_protection(comparison: Results) -> list[str]:
    """Write a sentence for each protection and each attack; nothing where there was none."""
    settings = comparison.example.settings
    rule = settings.describe_rule(comparison.clients)
    return [
        *_describe_attack(comparison),
        *([] if rule is None else [rule]),
        *_describe_success(comparison),
        *_describe_promises(comparison),
        *_describe_together(comparison),
        *_describe_sums(settings),
        *_describe_packing(comparison),
    ]


def _describe_attack(comparison: Results) -> list[str]:
    settings, attackers = comparison.example.settings, comparison.attackers
    if not attackers:
        return []
    name = settings.attack.partition(":")[0]
    plain = settings.aggregate == "mean" and settings.secure == "none" and settings.dp == "none"
    mean = " The server takes the plain mean, which any single one of them can move." if plain else ""
    sentence = (
        f"{attackers:,} of {comparison.clients:,} clients attack ({name}). They are not scored: every score here is "
        f"of the {comparison.example.honest:,} honest clients.{mean}"
    )
    return [sentence]


def _describe_success(comparison: Results) -> list[str]:
    names, found = name_methods(comparison), attack_success(comparison)
    if not found:
        return []
    numbers = Numbers.of(comparison)
    mean = {row["method"]: row["mean"] for row in comparison.results}
    unit = " %" if numbers.share else ""
    each = [
        f"{100 * value:.1f} % with {names[method]} ({numbers.name} {numbers.score(mean[method])}{unit})"
        for method, value in found.items()
    ]
    return [f"On samples that show its trigger, the backdoor works in {join_words(each)}."]


def attack_success(comparison: Results) -> dict[str, float]:
    """Return how often a backdoor works on honest clients, by method, as a mean over seeds; nothing without one."""
    found = {
        method: [one.select_evaluation(comparison.select).attack for one in outcomes]
        for method, outcomes in comparison.outcomes.items()
    }
    return {
        method: float(np.mean([value for value in values if value is not None]))
        for method, values in found.items()
        if any(value is not None for value in values)
    }


def _describe_promises(comparison: Results) -> list[str]:
    """Return what methods promise; once, where all promise the same."""
    names = name_methods(comparison)
    by_sentence: dict[str, list[str]] = {}
    for method, (one, *_) in comparison.outcomes.items():
        for sentence in one.privacy:
            by_sentence.setdefault(sentence, []).append(names[method])
    return [
        sentence if len(methods) == len(names) else f"{join_words(methods)}: {sentence}"
        for sentence, methods in by_sentence.items()
    ]


def _describe_together(comparison: Results) -> list[str]:
    """Say what all runs give away together: each of them is a release of the same data, whichever is chosen."""
    runs = [one for outcomes in comparison.outcomes.values() for one in outcomes for _ in list_pooled([one])]
    released = [one.release for one in runs if one.megabytes("up") and one.release is not None]
    cost, noised = sum(one.sample_cost for one in runs), sum(one.sample_cost > 0 for one in runs)
    found: list[tuple[int, float, float, str]] = []
    privacy = comparison.example.settings.privacy
    if privacy is not None and len(released) > 1:
        found.append((len(released), privacy.spent_together(released), privacy.delta, "client"))
    if noised > 1:
        found.append((noised, gaussian_epsilon(math.sqrt(cost), DELTA), DELTA, "sample"))
    return [
        f"All {number} runs that promise something are releases of the same data, over methods, seeds and folds: "
        f"together epsilon {epsilon:.2f} at delta {delta:g} about each {unit}. Choosing one of them counts as seeing "
        "all, and the scores that it is chosen by are not covered."
        for number, epsilon, delta, unit in found
    ]


def _describe_sums(settings: Settings) -> list[str]:
    if settings.secure == "none":
        return []
    told = " What the sums tell is not bounded." if settings.privacy is None else ""
    key = (
        " All clients have one key: one that helps the server gives every message away." if _encrypts(settings) else ""
    )
    return [f"The server reads sums of replies only, never a single one ({settings.secure}).{key}{told}"]


def _encrypts(settings: Settings) -> bool:
    return settings.secure.startswith("ckks")


def _describe_packing(comparison: Results) -> list[str]:
    compress = comparison.example.settings.compress
    if compress == "none":
        return []
    by_size: dict[str, list[str]] = {}
    for row in comparison.results:
        if row["megabytes_up"]:
            size = f"{megabytes(row['megabytes_up'])} MB up and, unpacked, {megabytes(row['megabytes_down'])} MB down"
            by_size.setdefault(size, []).append(name_methods(comparison)[row["method"]])
    sizes = "; ".join(f"{size} with {join_words(methods)}" for size, methods in by_size.items())
    return [f"Clients pack what they send by {compress}, which hides nothing{f': {sizes}' if sizes else ''}."]


# -- from whom ---------------------------------------------------------------------------------------------------------


def list_threats(comparison: Results) -> dict[str, str]:
    """Say from whom clients are protected, and how far: by those one may fear."""
    return {who: _merge(comparison, say) for who, say in THREATS.items()}


def _merge(comparison: Results, say: Callable[[Report], str]) -> str:
    """Return what is said of all methods, once where it is the same."""
    by_text: dict[str, list[str]] = {}
    for method, (one, *_) in comparison.outcomes.items():
        by_text.setdefault(say(one), []).append(method)
    if len(by_text) == 1:
        return next(iter(by_text))
    return " ".join(f"{join_words(methods)}: {text}" for text, methods in by_text.items())


def _protect_from_users(one: Report) -> str:
    if not one.megabytes("up"):
        return "Nothing is shared."
    if (epsilon := one.client_epsilon) is not None:
        return f"Bounded: epsilon {epsilon:.2f} about each client."
    if found := one.sample_epsilons.values():
        return f"Bounded: epsilon at most {max(found):.2f} about each sample, {min(found):.2f} for the best client."
    return "Not bounded."


def _protect_from_server(one: Report) -> str:
    if not one.megabytes("up"):
        return "It gets nothing."
    if one.settings.secure != "none":
        return "It reads sums only, never a single message" + (
            ", as long as no client gives it the key." if _encrypts(one.settings) else "."
        )
    if found := one.sample_epsilons.values():
        return f"It reads every message; epsilon at most {max(found):.2f} about each sample."
    if isinstance(one.settings.privacy, LocalPrivacy):
        return f"It reads messages that had their noise before: epsilon {one.client_epsilon:.2f} about each client."
    if one.client_epsilon is not None:
        return "Not protected: it reads every message and adds the noise itself, so it must be trusted."
    return "Not protected: it reads every message."


def _protect_from_holders(one: Report) -> str:
    if found := one.sample_epsilons.values():
        return f"Bounded as far as the model is trained with noise: epsilon at most {max(found):.2f} about each sample."
    return "Not bounded: what is done to messages does not cover what a client keeps."


def _protect_from_attackers(one: Report) -> str:
    settings, clients = one.settings, one.config.task.clients
    if not one.megabytes("up"):
        return "Clients use nothing of each other."
    rule = settings.describe_rule(clients)
    if rule is not None:
        return rule
    if settings.dp != "none" or settings.secure != "none":
        return "Each can move the sum by no more than the norm to which messages are cut, if it cuts its own."
    return "Not protected: the mean follows any of them."


THREATS: dict[str, Callable[[Report], str]] = {
    "Whoever gets the shared model, other clients too": _protect_from_users,
    "The server": _protect_from_server,
    "Whoever gets a personal model": _protect_from_holders,
    "Clients that mean harm": _protect_from_attackers,
}
