"""The clusters of clients that a method has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Clusters:
    """The clusters that a method has found, and the tree they are cut from, if there is one.

    Row i of `merges` is (node, node, height, clients) and makes of the two the node `len(of_client) + i`, as scipy
    writes it. The nodes before are the clients; a client that was not there when the tree was grown is in no row.
    """

    of_client: Numbers  # -1 for a client that is in none
    merges: Table | None = None
    height: str = ""  # what the heights of the merges are

    @property
    def number(self) -> int:
        """How many clusters have a client."""
        return len(np.unique(self.of_client[self.of_client >= 0]))

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        merges = None if self.merges is None else self.merges.tolist()
        return {"of_client": self.of_client.tolist(), "merges": merges, "height": self.height}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Clusters:
        """Make clusters from what `as_json` returned."""
        merges = None if found["merges"] is None else np.array(found["merges"], dtype=np.float64).reshape(-1, 4)
        return cls(np.array(found["of_client"], dtype=np.int64), merges, found["height"])
