"""A comparison as its page shows it: how numbers are written, methods drawn and clients called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from atoll.federation.numbers import Numbers
from atoll.report.clients import Clients
from atoll.report.drawing import Style
from atoll.report.figures import assign_styles

if TYPE_CHECKING:
    from atoll.federation.results import Results


@dataclass(frozen=True, eq=False)
class View:
    """What all sections of a page have in common."""

    comparison: Results

    @cached_property
    def numbers(self) -> Numbers:
        """How figures are written."""
        return Numbers.of(self.comparison)

    @cached_property
    def clients(self) -> Clients:
        """The scores and gains of each client."""
        return Clients(self.comparison)

    @cached_property
    def looks(self) -> dict[str, Style]:
        """How methods are drawn."""
        return assign_styles(list(self.comparison.outcomes))

    @cached_property
    def ids(self) -> list[int]:
        """The numbers of the clients that were scored with the first seed."""
        return [int(client) for client in self.comparison.example.scored]

    @cached_property
    def names(self) -> list[str]:
        """Their names."""
        return [self.name(client) for client in self.ids]

    def name(self, client: int) -> str:
        """Return the name of a client by its number."""
        return self.comparison.client(client)

    @property
    def scale(self) -> int:
        """The factor from a score to what figures show: shares are shown in percent."""
        return 100 if self.numbers.share else 1

    def place(self, method: str) -> int:
        """Return the place of a method in the order of all."""
        return self.looks[method].place
