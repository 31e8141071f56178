"""Pieces: what can be added to a method without editing it, written after a plus: `fedper+prox:mu=0.1`.

A piece changes how the clients of a method train, wherever it calls `sgd`. `composed` makes a class of the method and
the piece: its hyperparameters are those of both, it has a name, and everything else treats it like any other method.
With the piece's neutral values it is the method alone, which the conformance battery checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any, ClassVar

from atoll.algorithm import Algorithm, NonNegative, Update
from atoll.algorithms import name_of
from atoll.cohort import Cohort
from atoll.errors import HyperparameterError, unknown
from atoll.local import Penalty, proximal
from atoll.params import Params, Stack, Tree
from atoll.references import bibtex


@dataclass(frozen=True, kw_only=True)
class Piece(Algorithm):
    """Base of all pieces."""

    neutral: ClassVar[Mapping[str, Any]] = {}  # the values with which the method is as it was

    def term(self, start: Params | Stack) -> Penalty:
        """What is added to the loss of a call of `sgd` that begins at `start`."""
        raise NotImplementedError(f"{type(self).__name__} must define term().")

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """The method's own work, on a cohort whose training has the piece in it."""
        asked: list[Params | Stack] = []

        def term(start: Params | Stack) -> Penalty:
            asked.append(start)
            return self.term(start)

        update = super().local(broadcast, replace(cohort, terms=(*cohort.terms, term)))
        if not asked:
            raise HyperparameterError(
                f"A piece works where a method trains by `sgd`. {type(self).__name__} does not.",
                hint="use the method without it.",
            )
        return update


@dataclass(frozen=True, kw_only=True)
class Prox(Piece):
    """(mu / 2) ||w - start||^2: training is pulled back to where it began in this round. FedAvg with it is FedProx."""

    mu: NonNegative = 0.1  # μ: pull towards the start of the round

    neutral: ClassVar[Mapping[str, Any]] = {"mu": 0.0}
    cites: ClassVar[str] = "li2020federated"

    def term(self, start: Params | Stack) -> Penalty:
        """The proximal term around the start."""
        return proximal(self.mu, center=start)


PIECES: dict[str, type[Piece]] = {"prox": Prox}


_MADE: dict[tuple[type[Algorithm], str], type[Algorithm]] = {}  # the same class for the same question


def composed(method: type[Algorithm], name: str) -> type[Algorithm]:
    """The method with a piece in it."""
    if (method, name) not in _MADE:
        _MADE[method, name] = _compose(method, name)
    return _MADE[method, name]


def _compose(method: type[Algorithm], name: str) -> type[Algorithm]:
    if name not in PIECES:
        raise unknown("piece", name, PIECES)
    piece, called = PIECES[name], name_of(method)
    both = {field.name for field in fields(method)} & {field.name for field in fields(piece)}
    if both:
        raise HyperparameterError(
            f"A method and a piece must not share the name of a hyperparameter. {called} and {name} both have "
            f"{', '.join(sorted(both))}.",
            hint="the method may have the piece in it already.",
        )
    added = f"{method.added}+{name}"
    facts = {
        "added": added,
        "cites": "\n\n".join(filter(None, map(bibtex, (method.cites, piece.cites)))),
        "limits": {called: dict(piece.neutral)},
        "__module__": method.__module__,  # it is called after the method's file, which is a user's own perhaps
        "__doc__": f"{(method.__doc__ or '').strip()}\n\nWith a piece: {(piece.__doc__ or '').strip()}",
    }
    title = f"{method.__name__}{piece.__name__}"
    return make_dataclass(title, [], bases=(piece, method), namespace=facts, frozen=True, kw_only=True)
