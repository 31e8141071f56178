"""Why clients gain or lose: sentences with numbers, from what runs wrote down.

What was counted is said as it is. Why it came so is guessed by the rules below, each with its evidence for the client
and with the rank correlation over all clients that shows whether it holds in this run at all.

    study = Study.read(Path("runs/mine"), method="ditto")
    for client in study.affected(3):
        explain(study, client)
"""

from __future__ import annotations

from atoll.experiments.explain.client import Case, data_of, result_of, sources_of
from atoll.experiments.explain.reasons import best_on_validation, reasons_of, stay_local
from atoll.experiments.explain.study import Study, overview

__all__ = ["Case", "Study", "explain", "overview"]

MOST_ADVICE = 2


def explain(study: Study, client: int) -> dict[str, list[str]]:
    """What there is to say about one client: sentences under short headings, without what is not known."""
    case = Case(study, client)
    reasons = reasons_of(case)
    advice = [*stay_local(case), *(one for reason in reasons for one in reason.advice), *best_on_validation(case)]
    paragraphs = {
        "data": data_of(case),
        "learned from": sources_of(case),
        "result": result_of(case),
        "plausible": [reason.text for reason in reasons],
        "may help": [*dict.fromkeys(advice)][:MOST_ADVICE],
    }
    return {heading: sentences for heading, sentences in paragraphs.items() if sentences}
