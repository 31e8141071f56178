"""Uploads: the model that a server rebuilds from what one client sent, w + delta, without anybody else's part.

Whoever reads single messages has more than the shared model: a client's own upload was trained on its samples alone in
that round. The run is played once more, and the last message of each audited client is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.kernel.algorithm import Arrival
from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.predictor import Predictor, predictor_of


def rebuild_model(arrival: Arrival, row: int, network: Network) -> Params | None:
    """Return the model that one client's message gives away; None where it holds only a part of one."""
    sent = arrival.fields.get("model")
    if sent is not None:
        model = sent.client(row)
    elif "delta" in arrival.fields and isinstance(arrival.broadcast, Params):
        w, delta = arrival.broadcast, arrival.fields["delta"].client(row).floating
        if not set(delta) <= set(w):
            return None
        model = w | (w.only(delta) + delta)
    else:
        return None
    whole = network.initial
    return whole | model if set(whole.trained) <= set(model) else None


@dataclass
class Uploads:
    """Collects the last upload of some clients as models."""

    clients: Sequence[int]
    network: Network
    found: dict[int, tuple[Predictor, Network]] = field(default_factory=dict)

    def see(self, round: int, arrival: Arrival) -> None:
        """Keep the models of replies; see `on_reply` of `federate`."""
        if arrival.summed:
            return
        for row in np.flatnonzero(np.isin(arrival.clients, self.clients)):
            model = rebuild_model(arrival, int(row), self.network)
            if model is not None:
                self.found[int(arrival.clients[row])] = predictor_of(model), self.network
