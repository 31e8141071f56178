"""What the server gets from one client: the method's own work on a probe, through the run's own channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.batches import Split, find_offsets
from atoll.data.task import Task
from atoll.experiments.audit.subject import Rows, Subject
from atoll.kernel.errors import PrivacyError, RunError
from atoll.kernel.job import Done, Job, Local
from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.task import Training
from atoll.kernel.wrapper import core_of
from atoll.protect.channel import Channel
from atoll.runtime.memory import open_memory
from atoll.runtime.population import Population


@dataclass(frozen=True, eq=False)
class Message:
    """What a client sent in its first round, and what an attacker knows beside it."""

    client: int
    rows: Rows  # the samples it was made of; the attacker wants these
    start: Params  # the model that the client received
    fields: Mapping[str, Params]  # what the server reads
    network: Network
    training: Training
    steps: int
    noisy: bool  # whether noise was added, as a promise of client-level privacy has it

    @property
    def delta(self) -> Params | None:
        """The change of the model; None where no model is sent."""
        if "delta" in self.fields:
            return self.fields["delta"]
        return self.fields["model"] - self.start if "model" in self.fields else None


def require_single_replies(subject: Subject) -> None:
    """Raise where nobody has the reply of one client, or it does not stand alone."""
    secure = subject.live.settings.secure
    if secure != "none":
        raise PrivacyError(
            f"Inversion needs what single clients sent. Under secure={secure!r} the server has sums only, and nobody "
            "has single replies.",
            hint="audit membership, which reads models, or a run without `secure`.",
        )
    if subject.method.defines("prepare"):
        raise RunError(
            f"Inversion plays the first message of a client alone, and {subject.report.label} exchanges more with all "
            "clients before."
        )


def play_message(subject: Subject, client: int, rows: Rows) -> Message:
    """Have a client that owns only these samples do its first round, and return what the server reads.

    Under client-level privacy the noise of the release is added, as if the attacker knew all other messages: the
    strongest one that the promise speaks of.
    """
    require_single_replies(subject)
    live, method = subject.live, subject.method
    settings, task = live.settings, _keep_only(subject, client, rows)
    here = live.engine.place(task)
    population = Population(here, open_memory("ram", task.clients, None), subject.seed)
    server = method.equip(method.start(population.facts), live.engine.bench(population, -1))
    clients = np.array([client])
    job = Job(Local(), method, server, clients, 0, method.groups(server))
    protection = settings.protect((), task.clients, np.empty(0, dtype=np.int64), here.network.dtype)
    for outcome in live.engine.run(job, population):
        if isinstance(outcome, Done):
            channel = Channel(protection.stages, seed=settings.seed)
            arrival = channel.up(method, clients, outcome.result, 0, outcome.memory)
            fields = {name: value.client(0) for name, value in arrival.fields.items()}
            noisy = settings.dp != "none"
            if noisy and protection.rule is not None:
                rule = protection.rule_in(client, clients)  # noise of its own for each: nothing cancels between them
                assert rule is not None
                fields, _ = rule.close(fields, torch.ones(()))
            network = method.networks(population.facts)[0]
            start = job.broadcast if isinstance(job.broadcast, Params) else network.initial
            epochs = int(getattr(core_of(method), "epochs", 1))
            steps = epochs * -(-len(rows) // task.training.batch_size)
            return Message(client, rows, start, fields, network, task.training, steps, noisy)
    raise RunError(f"Client {task.client_name(client)} could not do its first round; see the log.")


def _keep_only(subject: Subject, client: int, rows: Rows) -> Task:
    """Return the task in which a client has only these training samples."""
    task, train = subject.task, subject.task.splits["train"]
    first, last = train.offsets[client], train.offsets[client + 1]
    order = torch.cat([train.order[:first], torch.from_numpy(rows).to(train.order), train.order[last:]])
    sizes = np.diff(train.offsets).copy()
    sizes[client] = len(rows)
    split = Split(order, find_offsets(sizes))
    return replace(task, splits={**task.splits, "train": split}, unseen=None, augment=None)


def choose_probes(subject: Subject, singles: int = 4, group: int = 4) -> list[tuple[int, Rows]]:
    """Choose what is to be inverted: one sample of each of some clients, then several classes of one client."""
    rng = generator(subject.seed, "probes")
    clients = rng.permutation(subject.clients)
    probes = [(int(client), rng.permutation(subject.rows("train", int(client)))[:1]) for client in clients[:singles]]
    largest = max(map(int, clients), key=lambda one: len(np.unique(subject.labels(subject.rows("train", one)))))
    mine = rng.permutation(subject.rows("train", largest))
    _, first = np.unique(subject.labels(mine), return_index=True)
    several = mine[np.sort(first)][:group]
    return [*probes, *([(largest, several)] if len(several) > 1 else [])]


def other_samples(subject: Subject, client: int) -> Tensor:
    """Return the training samples of all other clients: what an attacker may know of the world."""
    mine = subject.rows("train", client)
    every: NDArray[np.int64] = subject.task.splits["train"].order.cpu().numpy()
    return subject.task.x[torch.from_numpy(np.setdiff1d(every, mine))]
