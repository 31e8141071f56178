"""What was protected, from whom, and what attacks found; who contributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.federation.numbers import UNKNOWN
from atoll.report.parts import Block, Details, Part, Row, Sentences, Table
from atoll.report.protection import attack_success, list_threats, write_protection

if TYPE_CHECKING:
    from atoll.records.audits import Contributed
    from atoll.report.view import View


def collect_protection(view: View) -> list[Part]:
    """Say what was protected and what was attacked, from whom clients are safe, and what that leaves them with."""
    comparison = view.comparison
    sentences = write_protection(comparison)
    if not sentences:
        return []
    threats = [Row(who, [text]) for who, text in list_threats(comparison).items()]
    return [
        Sentences(sentences),
        Table(["From whom", "How far clients are protected"], threats, kind="words"),
        *_list_figures(view),
        *_list_epsilons(view),
    ]


def _list_figures(view: View) -> list[Part]:
    """List scores beside the success of an attack and what is promised, method by method."""
    comparison, numbers, success = view.comparison, view.numbers, attack_success(view.comparison)
    outcomes = {method: one for method, (one, *_) in comparison.outcomes.items()}
    rows = {row["method"]: row for row in comparison.results}

    def most(method: str) -> float | None:
        return max(outcomes[method].sample_epsilons.values(), default=None)

    columns: dict[str, Callable[[str], str]] = {
        "Mean": lambda method: numbers.score(rows[method]["mean"]),
        "Worst client": lambda method: numbers.score(rows[method]["worst"]),
        "Attack works in %": lambda method: f"{100 * success[method]:.1f}" if method in success else UNKNOWN,
        "Epsilon of a client": lambda method: _write_epsilon(outcomes[method].client_epsilon),
        "Epsilon of a sample, at most": lambda method: _write_epsilon(most(method)),
    }
    shown = {head: write for head, write in columns.items() if any(write(method) != UNKNOWN for method in outcomes)}
    if len(shown) < 3 and not comparison.attackers:
        return []
    listed = [
        Row(method, [write(method) for write in shown.values()], method=view.place(method)) for method in outcomes
    ]
    whose = comparison.who
    note = f"{whose[0].upper()}{whose[1:]}, means over seeds. "
    if success:
        note += (
            "An attack works where a model answers the attackers' class to a sample of another class with a trigger."
        )
    return [Table(["Method", *shown], listed, note.strip())]


def _list_epsilons(view: View) -> list[Part]:
    """List what is promised about a sample of each client, of methods that promise it."""
    found: list[Part] = []
    for method, (one, *_) in view.comparison.outcomes.items():
        each = one.sample_epsilons
        if not each:
            continue
        rows = [
            Row(view.name(client), [_write_epsilon(epsilon)], client=client)
            for client, epsilon in sorted(each.items(), key=lambda pair: -pair[1])
        ]
        table = Table(["Client", "Epsilon of a sample"], rows, "At delta 1e-5, first seed.", tall=len(rows) > 20)
        found.append(Details(f"Epsilon of each client with {method}", table))
    return found


def _write_epsilon(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def collect_audits(view: View) -> list[Part]:
    """Say what audits of these runs found, each run under its method and seed."""
    found: list[Part] = []
    for method, outcomes in view.comparison.outcomes.items():
        for one in outcomes:
            if one.audited is not None:
                head = f"{method}, seed {one.seed}"
                words = "What these attacks found, not the most that any could."
                found.append(Block(view.place(method), [Sentences(one.audited.sentences)], head, words))
    return found


def collect_contributions(view: View) -> list[Part]:
    """List what each client's replies are worth, of runs whose audit valued them."""
    found: list[Part] = []
    for method, outcomes in view.comparison.outcomes.items():
        for one in outcomes:
            if one.audited is not None and one.audited.contribution is not None:
                head = f"{method}, seed {one.seed}"
                found.append(
                    Block(view.place(method), [_tabulate(view, one.audited.contribution)], head, CONTRIBUTIONS)
                )
    return found


def _tabulate(view: View, given: Contributed) -> Table:
    order = sorted(range(len(given.names)), key=lambda client: -given.shapley[client])
    rows = [
        Row(
            given.names[client],
            [f"{100 * given.shapley[client]:+.2f}", f"{100 * given.alone[client]:+.2f}", str(given.rounds[client]),
             view.numbers.score(given.score[client])],
            client=client,
        )
        for client in order
    ]  # fmt: skip
    heads = ["Client", "Shapley value", "Leave-one-out", "Rounds", "Its own score"]
    return Table(heads, rows, f"The score moved by {100 * given.moved:+.1f} points.", tall=len(rows) > 20)


CONTRIBUTIONS = (
    "Points of the shared model's validation score, summed over rounds: what a client's replies add to those of others "
    "(Shapley), and what is lost without them. Beside it the test score of the model that the client deploys. "
    "Indicative: values read validation samples, no epsilon covers them, and a client can game them."
)
