"""What a round and its evaluation write down: the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.kernel.clusters import Clusters
from atoll.records.schema import Record, SchemaError

ByName = dict[str, dict[str, float]]  # what clients observed: by name, a number for each client


@dataclass(frozen=True, eq=False, kw_only=True)
class Figures(Record):
    """The scores of clients on one split; NaN for a client without samples, or where the metric does not exist.

    Of very many clients there are percentiles instead of lists. Where a sample was scored, figures are the sample's.
    """

    macro: float  # the mean over the clients that have a score
    interval: float | None = None  # half the 95 % interval of the mean over all clients, where a sample was scored
    micro: float  # over all samples together
    undefined: int | None = None  # clients that have samples and no score; None if there are none
    diverged: list[int] | None = None  # clients whose model has no sensible score, and who count as the worst others
    worst: float
    bottom10: float
    std: float
    loss: float
    ece: float | None = None
    scored: int | None = None  # how many clients, where there are no lists of them
    percentiles: list[float] | None = None  # of the scores, at those of `metrics.fairness`
    clients: list[float] | None = field(default=None, repr=False)
    losses: list[float] | None = field(default=None, repr=False)
    samples: list[int] | None = field(default=None, repr=False)
    variances: list[float] | None = field(default=None, repr=False)  # of the score over a client's samples
    eces: list[float] | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raise SchemaError unless every list has one entry per client, or there are percentiles."""
        lists = {name: getattr(self, name) for name in ("clients", "losses", "samples", "variances", "eces")}
        if self.percentiles is not None:
            if self.scored is None or any(values is not None for values in lists.values()):
                raise SchemaError("percentiles must stand for how many clients are scored, without lists of them")
            return
        if self.clients is None or self.samples is None:
            raise SchemaError("there must be 'clients' and 'samples', or percentiles")
        for name, values in lists.items():
            if values is not None and len(values) != self.count:
                raise SchemaError(f"{name} must have {self.count} entries. It has {len(values)}")

    @property
    def count(self) -> int:
        """How many clients were scored."""
        return len(self.clients or ()) if self.scored is None else self.scored


@dataclass(frozen=True, eq=False, kw_only=True)
class Central(Record):
    """The shared model on the server's own test set."""

    score: float
    loss: float
    inductive: float | None = None  # the score with one sample at a time, where an answer depends on the others


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundClusters(Record):
    """The clusters that a method has found, as `Clusters.as_json` gives them."""

    of_client: list[int]
    merges: list[list[float]] | None
    height: str

    @property
    def clusters(self) -> Clusters:
        """The clusters, as arrays."""
        return Clusters.of_json(self)

    def check(self) -> None:
        """Raise SchemaError unless every merge is two nodes, a height and a number of clients."""
        if any(len(row) != 4 for row in self.merges or ()):
            raise SchemaError("every row of merges must have 4 entries")


@dataclass(frozen=True, eq=False, kw_only=True)
class Newcomers(Record):
    """How clients that took no part were served: with labels by epochs of tuning, and without labels."""

    labelled: dict[str, Figures]
    unlabelled: dict[str, Any]  # the way, and the figures where there is one

    def check(self) -> None:
        """Raise SchemaError unless there are figures without tuning, and the way has a name."""
        if "0" not in self.labelled:
            raise SchemaError("labelled must have '0'")
        if not isinstance(self.unlabelled.get("way"), str):
            raise SchemaError("unlabelled must have a 'way'")
        if not isinstance(self.unlabelled.get("macro", 0.0), int | float):
            raise SchemaError("unlabelled.macro must be a number")


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation(Record):
    """What was found after a round; the shared model and more after the last one only."""

    sample: list[int] | None = None  # the clients that were scored; None if all were, or too many to be listed
    personal: dict[str, Figures] | None = None  # by split, of the models that clients would deploy
    deployed: float | None = None  # bytes that a client must hold to answer, on average
    observed: ByName | None = None  # when the models were made
    shared: dict[str, Figures] | None = None
    mixing: list[list[float]] | None = None  # who learns from whom
    clusters: FoundClusters | None = None
    newcomers: Newcomers | None = None
    central: Central | None = None
    attack: float | None = None  # how often models of honest clients answer what a backdoor teaches

    def check(self) -> None:
        """Raise SchemaError unless scores are there for the test split, and tables fit each other."""
        for scored in (self.personal, self.shared):
            if scored is not None and "test" not in scored:
                raise SchemaError("scores must be there for the test split")
        if self.sample is not None:
            if not self.sample or self.sample != sorted({*self.sample}) or self.sample[0] < 0:
                raise SchemaError("sample must name clients by their numbers, in order, each once")
            if self.scored not in (None, len(self.sample)):
                raise SchemaError(f"all {len(self.sample)} clients of the sample must have scores")
        elif self.scored is not None and not self._sampled:
            for table in self._tables:
                if len(table) != self.scored:
                    raise SchemaError(f"all {self.scored} clients must be in mixing and clusters")
        if any(len(row) != len(self.mixing or ()) for row in self.mixing or ()):
            raise SchemaError("mixing must be square")

    @property
    def scored(self) -> int | None:
        """How many clients were scored; None if none was."""
        return None if self.personal is None else self.personal["test"].count

    def find_other_number(self, clients: int) -> int | None:
        """Return how many clients this is about if it cannot be about so many; None if it can."""
        numbers = [len(table) for table in self._tables]
        if self.sample is not None:
            numbers.append(max(clients, 1 + self.sample[-1]))
        elif self.scored is not None:
            numbers.append(max(clients, self.scored) if self._sampled else self.scored)
        return next((number for number in numbers if number != clients), None)

    @property
    def _tables(self) -> list[Sequence[Any]]:
        """The tables that have a row for each client."""
        tables = [self.mixing, None if self.clusters is None else self.clusters.of_client]
        return [table for table in tables if table is not None]

    @property
    def _sampled(self) -> bool:
        """Whether some clients were scored; they may be too many to be listed."""
        unlisted = self.personal is not None and self.personal["test"].interval is not None
        return self.sample is not None or unlisted


@dataclass(frozen=True, eq=False, kw_only=True)
class Point(Record):
    """What a one-shot method would have been worth had its clients' training ended after fewer epochs."""

    epoch: int
    evaluation: Evaluation
    observed: ByName | None = None  # by clients, over the epochs so far

    def check(self) -> None:
        """Raise SchemaError for a point before the first epoch."""
        if self.epoch < 1:
            raise SchemaError("epochs of a curve are counted from 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class Round(Record):
    """What happened in a round, the first of which is 1."""

    round: int
    asked: int = 0
    replied: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # by reason
    loss: dict[str, float] = field(default_factory=dict)  # of training, means over clients
    observed: ByName | None = None
    gradients: int = 0  # of one batch each, over all clients
    bytes: dict[str, int]  # down and up
    evaluation: Evaluation | None = None
    curve: list[Point] | None = None  # of a one-shot method, in the order of epochs
    seconds: dict[str, float]
    memory: int = 0  # the most bytes held so far

    def check(self) -> None:
        """Raise SchemaError if a count or a time is negative."""
        numbers = [self.round - 1, self.asked, self.replied, self.gradients, self.memory]
        numbers += [*self.lost.values(), *self.bytes.values()]
        if min(numbers) < 0 or not all(0 <= value < math.inf for value in self.seconds.values()):
            raise SchemaError("counts and seconds must not be negative")
        if "round" not in self.seconds:
            raise SchemaError("seconds must have 'round'")

    @property
    def personal(self) -> dict[str, Figures] | None:
        """The scores of all clients by split, if they were evaluated after this round."""
        return None if self.evaluation is None else self.evaluation.personal
