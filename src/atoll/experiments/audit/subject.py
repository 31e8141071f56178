"""The subject of an audit: a finished run with its task, its models, and the samples that attacks are tried on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.compose.architectures import within_architectures
from atoll.data.batches import Split, find_offsets
from atoll.data.task import Task
from atoll.experiments.audit.uploads import Uploads
from atoll.export.deployed import deploy
from atoll.federation.loop import federate
from atoll.federation.models import find_client
from atoll.federation.report import Live, Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.batch import HIDDEN, Batch
from atoll.kernel.errors import RunError, TaskError
from atoll.kernel.network import Network, Variant
from atoll.kernel.predictor import Predictor, predictor_of
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import title_of

Rows = NDArray[np.int64]
Values = NDArray[np.float64]
MOST_CLIENTS = 100  # whose models are attacked; of more, so many are drawn


class Sides(NamedTuple):
    """Rows of the task's samples: a client's training samples, and as many of its test samples, classes matched."""

    members: Rows
    others: Rows


@dataclass(frozen=True, eq=False)
class Models:
    """What a run ended with: the shared model, if there is one, and what every audited client deploys."""

    shared: tuple[Predictor, Network] | None
    personal: dict[int, tuple[Predictor, Network]]
    uploaded: dict[int, tuple[Predictor, Network]] = field(default_factory=dict)  # rebuilt from last messages

    def of_client(self, kind: str, client: int) -> tuple[Predictor, Network]:
        """Return the model of a kind that a client uses."""
        if kind == "personal":
            return self.personal[client]
        if kind == "uploaded":
            return self.uploaded[client]
        assert self.shared is not None
        return self.shared


@dataclass(frozen=True, eq=False)
class Subject:
    """A finished run whose samples have one class each."""

    report: Report
    live: Live
    method: Algorithm
    clients: Rows  # whose models are attacked

    @classmethod
    def open(cls, given: Report | Path | str, *, clients: Sequence[int | str] | None = None, trust: bool) -> Subject:
        """Open a run that just ended, or one in a folder."""
        report = given if isinstance(given, Report) else Report.read(given, trust=trust)
        if report.live is None and not report.finished:
            raise RunError(
                f"An audit needs a finished run. {report.folder} has done {report.progress}.",
                hint=f"finish it with `atoll resume {report.folder}`.",
            )
        live = report.require_live()
        task = live.task
        if task.classes is None or not task.public_facts().one_class_each:
            raise TaskError(
                f"An audit needs samples with one class each: its attacks read the probability of the true class. "
                f"{task.name} predicts something else."
            )
        if not task.splits["train"].stored:
            raise TaskError(f"An audit needs samples that are stored. {task.name} makes them when they are needed.")
        if task.architecture is not None:
            raise TaskError("An audit needs clients with one architecture. Here they have several.")
        if clients is not None:
            chosen = np.array(sorted({find_client(task, one) for one in clients}), dtype=np.int64)
        elif task.clients <= MOST_CLIENTS:
            chosen = np.arange(task.clients)
        else:
            chosen = np.sort(generator(report.seed, "audited").choice(task.clients, MOST_CLIENTS, replace=False))
        return cls(report, live, within_architectures(report.algorithm, task.public_facts()), chosen)

    @property
    def task(self) -> Task:
        """The task as it was run, on the host."""
        return self.live.task

    @property
    def seed(self) -> int:
        """The seed of the run, and of all that an audit draws."""
        return self.report.seed

    @cached_property
    def span(self) -> float:
        """How far apart the least and the greatest value of a sample are."""
        return float(self.task.x.max() - self.task.x.min()) or 1.0

    def rows(self, split: str, client: int) -> Rows:
        """Return which samples a client has in a split."""
        mine = self.task.splits[split]
        rows: Rows = mine.order[mine.offsets[client] : mine.offsets[client + 1]].cpu().numpy()
        return rows

    def labels(self, rows: Rows) -> Rows:
        """Return the classes of samples."""
        found: Rows = self.task.y[torch.from_numpy(rows)].cpu().numpy()
        return found

    @cached_property
    def sides(self) -> dict[int, Sides]:
        """The samples that attacks must tell apart, by client; clients that have none are left out."""
        found = {int(client): self._match_classes(int(client)) for client in self.clients}
        return {client: sides for client, sides in found.items() if len(sides.members)}

    def _match_classes(self, client: int) -> Sides:
        rng = generator(self.seed, "members", client)
        train, test = (rng.permutation(self.rows(split, client)) for split in ("train", "test"))
        of_train, of_test, pairs = self.labels(train), self.labels(test), []
        for label in np.intersect1d(of_train, of_test):
            members, others = train[of_train == label], test[of_test == label]
            most = min(len(members), len(others))
            pairs.append(Sides(members[:most], others[:most]))
        nothing = np.empty(0, dtype=np.int64)
        return Sides(*(np.concatenate([nothing, *side]) for side in zip(*pairs, strict=True))) if pairs else Sides(
            nothing, nothing
        )  # fmt: skip

    @cached_property
    def population(self) -> Rows:
        """Validation samples of all clients: samples that nobody trained on."""
        order: Rows = self.task.splits["val"].order.cpu().numpy()
        return order

    @cached_property
    def models(self) -> Models:
        """The models that the run ended with."""
        return take_models(self.live, self.method, self.clients)

    @cached_property
    def with_uploads(self) -> Models:
        """The same, and what a server rebuilds from the last message of each client; the run is played once more."""
        settings = replace(self.live.settings, evaluation="none", memory="auto")
        _, uploaded = self._play(self.task, settings, uploads=True)
        return replace(self.models, uploaded=uploaded)

    def _play(self, task: Task, settings: Settings, *, uploads: bool) -> tuple[Report, dict[int, Any]]:
        """Run the audited method; return how it ended and, if they are asked for, the last uploads as models."""
        watcher = Uploads(self.clients.tolist(), self.method.networks(self.live.population.facts)[-1])
        made = federate(
            task, self.report.algorithm, settings=settings, engine=self.live.engine, progress=False,
            on_reply=watcher.see if uploads else None,
        )  # fmt: skip
        return made, watcher.found

    def shadow(self, number: int, *, uploads: bool = False) -> tuple[Models, NDArray[np.bool_]]:
        """Run the same federation on other halves of the audited samples; return its models, and who was in.

        Every audited sample, member or not, is in with probability 1/2; what is in number 2i is out of 2i + 1.
        Training samples that are not audited stay in, so clients have as much to train on as before.
        """
        task, inside = self.task, np.zeros(len(self.task.x), dtype=bool)
        draws = generator(self.seed, "shadow", number // 2).random(len(inside)) < 0.5
        drawn, train = (draws if number % 2 == 0 else ~draws), task.splits["train"]
        parts = []
        for client in range(task.clients):
            mine = self.rows("train", client)
            if client in self.sides:
                sides = self.sides[client]
                pool = np.concatenate(sides)
                chosen = pool[drawn[pool]]
                mine = np.concatenate([mine[~np.isin(mine, sides.members)], chosen if len(chosen) else pool[:1]])
            inside[mine] = True
            parts.append(torch.from_numpy(mine))
        order = torch.cat(parts).to(train.order)
        split = Split(order, find_offsets(np.array([len(part) for part in parts], dtype=np.int64)))
        settings = replace(self.live.settings, seed=self.seed + 1 + number, evaluation="none", memory="auto")
        task = replace(task, splits={**task.splits, "train": split}, unseen=None)
        made, uploaded = self._play(task, settings, uploads=uploads)
        return replace(take_models(made.require_live(), self.method, self.clients), uploaded=uploaded), inside


def take_models(live: Live, method: Algorithm, clients: Rows) -> Models:
    """Return what a run ended with."""
    shared = method.shared(live.server)
    network = live.population.task.network
    personal = {}
    if shared is None or method.defines("personalize"):
        found = deploy(live.engine, live.population, method, live.server, clients, round=live.settings.rounds)
        personal = {client: (predictor, network) for client, predictor, network in found}
    return Models(None if shared is None else (predictor_of(shared), network), personal)


def answer(model: tuple[Predictor, Network], x: Tensor) -> Tensor:
    """Return what a model answers to samples, a row of logits each."""
    predictor, network = model
    assert not hasattr(predictor.model, "clients")
    like = next(iter(network.initial.floating.values()))
    batch = Batch(
        x.to(like.device, like.dtype if x.is_floating_point() else None), HIDDEN, None, None, network,
        Variant(train=False),
    )  # fmt: skip
    with torch.no_grad():
        outputs: Tensor = predictor.answer(predictor.model, predictor.beside, batch)  # type: ignore[arg-type]
    return outputs.double().cpu()


def confidences(model: tuple[Predictor, Network], subject: Subject, rows: Rows) -> Values:
    """Return ln p_y - ln sum of the other p of samples: how sure the model is of the true class."""
    if not len(rows):
        return np.empty(0)
    where = torch.from_numpy(rows)
    y = subject.task.y[where].cpu().long()
    logits = answer(model, subject.task.x[where]).log_softmax(1)
    true = logits.gather(1, y[:, None])[:, 0]
    rest = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return (true - rest).clamp(-60, 60).numpy()


def each_client(subject: Subject, kind: str, models: Models) -> Iterator[tuple[int, Sides]]:
    """Yield the audited clients that have a model of a kind and samples on both sides."""
    for client, sides in subject.sides.items():
        if kind == "shared" or client in (models.personal if kind == "personal" else models.uploaded):
            yield client, sides


def describe_method(subject: Subject) -> dict[str, Any]:
    """Return what was audited, for the record."""
    return {
        "method": subject.report.label, "task": subject.report.task_name, "seed": subject.seed,
        "rounds": subject.report.rounds, "clients": subject.task.clients, "audited": len(subject.clients),
        "title": title_of(subject.method),
    }  # fmt: skip
