"""Why clients gain or lose: sentences with numbers, from what runs wrote down.

Counts are stated as they are. Reasons are guessed by the rules below, each with its evidence for the client and with
the rank correlation over all clients, which shows whether the rule holds in this run.

    study = Study.read(Path("runs/mine"), method="ditto")
    for client in study.most_affected(3):
        explain(study, client)
"""

from __future__ import annotations

from atoll.experiments.explain.client import Case, describe_data, describe_parts, describe_result, describe_sources
from atoll.experiments.explain.reasons import ask_for_samples, best_on_validation, find_reasons, stay_local
from atoll.experiments.explain.study import Study, overview

__all__ = ["Case", "Study", "explain", "overview"]

MOST_ADVICE = 2


def explain(study: Study, client: int, *, parts: bool = False) -> dict[str, list[str]]:
    """Explain the result of one client: sentences under short headings; headings without any are left out.

    With `parts`, also which parts of its model are its own: that opens the models of all clients.
    """
    case = Case(study, client)
    reasons = find_reasons(case)
    advice = [*stay_local(case), *(one for reason in reasons for one in reason.advice), *best_on_validation(case)]
    paragraphs = {
        "data": describe_data(case),
        "learned from": describe_sources(case),
        "parts": describe_parts(case) if parts else [],
        "result": describe_result(case),
        "plausible": [reason.text for reason in reasons],
        "may help": [*dict.fromkeys(advice)][:MOST_ADVICE] or ask_for_samples(case),
    }
    return {heading: sentences for heading, sentences in paragraphs.items() if sentences}
