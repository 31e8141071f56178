"""One score and one gain for each client and method, whatever the number of seeds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from atoll.federation.results import Results

Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Clients:
    """Means over seeds where all seeds have the same clients, else the values of the first seed."""

    comparison: Results

    @property
    def together(self) -> bool:
        """Whether values are means over seeds."""
        return self.comparison.together

    @property
    def words(self) -> str:
        """A sentence that says which clients and which seeds the values come from."""
        who = self.comparison.who
        return f"{who[0].upper()}{who[1:]}. {self._seeds}" if self.comparison.sampled else self._seeds

    @property
    def _seeds(self) -> str:
        seeds = self.comparison.seeds
        if len(seeds) == 1:
            return f"Seed {seeds[0]}."
        if self.together:
            return f"Means over {len(seeds)} seeds, which have the same clients."
        others = "has another sample of clients" if self.comparison.sampled else "has other clients"
        return f"Seed {seeds[0]} only: every seed {others}."

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """The number of test samples of each client, with the first seed."""
        return self.comparison.example.samples()

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """The score of each client by method."""
        return {method: self._over_seeds(self.comparison.scores(method)) for method in self.comparison.outcomes}

    @cached_property
    def gains(self) -> dict[str, Scores]:
        """The gain of each client over training alone, by method; empty without Local."""
        found = {method: self.comparison.gains(method) for method in self.comparison.others()}
        return {method: self._over_seeds(gains) for method, gains in found.items() if gains is not None}

    @cached_property
    def harmed(self) -> dict[str, NDArray[np.bool_]]:
        """Which clients are worse than alone by more than one standard error."""
        found = {method: self.comparison.find_harmed(method) for method in self.gains}
        return {method: harmed[0] for method, harmed in found.items() if harmed is not None}

    def _over_seeds(self, values: Scores) -> Scores:
        return np.asarray(self.comparison.count_once(values)[0])
