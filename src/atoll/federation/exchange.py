"""The exchange of a server with its clients in a round: messages down, work, replies up, and who is lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.federation.guards import hint_at_divergence
from atoll.kernel.algorithm import Algorithm, Arrival, Replies, Update
from atoll.kernel.engine import Engine
from atoll.kernel.errors import DivergedError, SumLost
from atoll.kernel.job import Done, Finish, Job, Lost, Prepare
from atoll.kernel.params import Tree
from atoll.protect.channel import Channel
from atoll.protect.protection import Protection
from atoll.protect.stages import Sent, joint_norms
from atoll.runtime.population import Notes, Population, keep_at_clients, reduce_to_numbers

log = logging.getLogger("atoll.federation")

Clients = NDArray[np.int64]


@dataclass
class Traffic:
    """The fate of the clients of one round."""

    asked: int
    replied: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    gradients: int = 0  # evaluations: one batch of one client each
    notes: Notes = field(default_factory=list)

    def losses(self) -> dict[str, float]:
        """Return mean training losses over the clients that trained."""
        totals: dict[str, list[NDArray[np.float64]]] = {}
        for _, values in self.notes:
            for name, value in values.items():
                if name.startswith("loss/"):
                    totals.setdefault(name, []).append(value)
        return {name: float(np.concatenate(parts).mean()) for name, parts in totals.items()}


@dataclass(frozen=True)
class Exchange:
    """Sends a method's messages, has its clients work, and hands on what they reply.

    What clients keep goes to their memory. Work that is not finite does not count: its client is lost.
    """

    method: Algorithm
    engine: Engine
    population: Population
    trainers: Population  # the same clients, whose long training is kept
    channel: Channel
    protection: Protection = field(default_factory=Protection)

    @property
    def _task(self) -> Task:
        return self.population.task

    def prepare(self, server: Tree, new: Clients, round: int, traffic: Traffic) -> tuple[Tree, Clients]:
        """Exchange with clients before their first round; return the server's state, and the clients that got through.

        In the first round these are rounds -n to -1 of the ledger; who comes later exchanges in the round of its
        arrival.
        """
        if not self.method.defines("prepare"):
            return server, new
        for number in range(-self.method.exchanges, 0) if len(new) else ():
            at = round + number
            job = Job(Prepare(number), self.method, server, new, at, stages=self.channel.stages)
            arrivals, answered = [], [new[:0]]
            for outcome in self.engine.run(job, self.population):
                if isinstance(outcome, Lost):
                    log.warning("client(s) %s could not prepare: %s", outcome.clients.tolist(), outcome.reason)
                elif outcome.result is None:  # they have nothing to say
                    answered.append(outcome.clients)
                else:
                    done, _ = self._require_finite(outcome, round, traffic)
                    answered.append(done.clients)
                    if len(done.clients):
                        written = round or at
                        self.channel.broadcast(job.broadcast, done.clients, written)
                        arrivals.append(self._pass_on(done, at, written)._replace(broadcast=job.broadcast))
            if not any(map(len, answered)) and traffic.lost["not finite"]:
                raise _divergence_error(new, round, self._task, self.method)
            new = np.concatenate(answered)
            if arrivals:
                bench = self.engine.bench(self.population, at)
                arrivals = self._forge(arrivals, at, traffic)
                server = self.method.absorb(server, Replies(arrivals, keep=True, workbench=bench))
            if not len(new):
                break
        return server, new

    def gather(self, job: Job, traffic: Traffic, asked: Clients | None = None) -> Iterator[Arrival]:
        """Yield the replies of the clients of a round as they arrive; where some attack, once all are there.

        Where only sums are read it is one: of all who are there of those who were `asked`.
        """
        arrivals: Iterable[Arrival] = self._gather(job, traffic)
        if self.protection.attack is not None:
            arrivals = self._forge(arrivals, job.round, traffic)
        if self.protection.adder is not None:
            arrivals = self._add_up([*arrivals], job, job.clients if asked is None else asked, traffic)
        yield from arrivals

    def _add_up(self, arrivals: list[Arrival], job: Job, asked: Clients, traffic: Traffic) -> list[Arrival]:
        """Return the sum of all replies, unless the engine has it already; nothing if too few are left for it."""
        assert self.protection.adder is not None
        if not arrivals or arrivals[0].summed:
            return arrivals
        adder = self.protection.adder
        try:
            summed = adder.add_up(arrivals, round=job.round, asked=asked)
        except SumLost as error:
            log.warning("round %d: %s", job.round, error)
            traffic.lost["too few were left to read their sum"] += traffic.replied
            traffic.replied = 0
            return []
        self.channel.record_overhead(adder.opening(traffic.replied), summed.clients[:1], job.round, name="sum")
        return [summed]

    def send_nothing(self, job: Job) -> Arrival | None:
        """Return a reply of zeros: what a round releases in which nobody was asked; somebody's work shows its form."""
        for outcome in self.engine.run(replace(job, clients=np.arange(1)), self.population):
            if isinstance(outcome, Done):
                fields = {name: value.map(torch.zeros_like) for name, value in outcome.result.send.items()}
                return Arrival(outcome.clients, fields, torch.zeros(1), broadcast=job.broadcast)
        return None

    def _forge(self, arrivals: Iterable[Arrival], round: int, traffic: Traffic) -> list[Arrival]:
        """Return the replies after the attackers among their clients replaced theirs; not finite ones are lost."""
        attack, attackers = self.protection.attack, self.protection.attackers
        if attack is None or attackers is None:
            return list(arrivals)
        forged = []
        for arrival in attack.forge([*arrivals], attackers, seed=self.population.seed, round=round):
            good = np.atleast_1d(np.isfinite(joint_norms(arrival.fields).cpu().numpy()))
            lost = int((~good).sum())
            if lost:
                traffic.lost["not finite"] += lost
                traffic.replied -= lost
            if good.any():
                forged.append(arrival.only(good) if lost else arrival)
        return forged

    def _gather(self, job: Job, traffic: Traffic) -> Iterator[Arrival]:
        self.channel.broadcast(job.broadcast, job.clients, job.round)
        self.channel.record_overhead(self.protection.overhead(len(job.clients)), job.clients, job.round)
        diverged: Clients = job.clients[:0]
        for outcome in self.engine.run(job, self.trainers) if len(job.clients) else ():
            if isinstance(outcome, Lost):
                traffic.lost[outcome.reason] += len(outcome.clients)
                log.warning("round %d: lost client(s) %s: %s", job.round, outcome.clients.tolist(), outcome.reason)
                continue
            done, bad = self._require_finite(outcome, job.round, traffic)
            diverged = np.concatenate([diverged, bad])
            if not len(done.clients):
                continue
            self.channel.unicast(done.unicast, done.clients, job.round)
            traffic.replied += len(done.clients)
            arrival = self._pass_on(done, job.round, job.round)
            yield arrival._replace(broadcast=job.broadcast, unicast=done.unicast if job.method.needs_unicast else None)
        if len(diverged) and not traffic.replied:
            raise _divergence_error(diverged, job.round, self._task, self.method)

    def _pass_on(self, done: Done[Update | Sent], round: int, written: int) -> Arrival:
        """Return the reply of some clients as the server reads it, counted in the ledger as of the round `written`.

        What clients elsewhere sent has passed their stages there, and what they keep is theirs.
        """
        sent = done.result
        if not isinstance(sent, Sent):
            keep_at_clients(done, round)
            sent = self.channel.send(self.method, done.clients, sent, round, done.memory)
        return self.channel.receive(self.method, done.clients, sent, round, written=written)

    def finish(self, server: Tree, clients: Clients, round: int, traffic: Traffic) -> None:
        """Have clients take their last local step, if the method has one."""
        if not self.method.defines("finish") or not len(clients):
            return
        broadcast, groups = self.method.last_broadcast(server), self.method.groups(server)
        job = Job(Finish(), self.method, server, clients, round, groups)
        for outcome in self.engine.run(job, self.population):
            if isinstance(outcome, Lost):
                log.warning("client(s) %s did not finish: %s", outcome.clients.tolist(), outcome.reason)
            elif outcome.result is not None:
                made = replace(outcome, result=Update(keep=outcome.result), notes={})
                done, _ = self._require_finite(made, round - 1, traffic)
                if len(done.clients):
                    self.channel.last_broadcast(broadcast, done.clients, round - 1)
                    keep_at_clients(done, round - 1)

    def _require_finite(self, done: Done[Any], round: int, traffic: Traffic) -> tuple[Done[Any], Clients]:
        """Return the work of the clients where it is finite, and the other clients, whose work does not count."""
        traffic.gradients += done.gradients
        if isinstance(done.result, Sent):  # it was checked where it arrived
            return done, done.clients[:0]
        notes, numbers = done.notes, reduce_to_numbers(done)
        if numbers is None:
            return done, done.clients[:0]
        good = np.isfinite(numbers).all(axis=0)
        bad: Clients = done.clients[~good]
        if len(bad):
            for client in bad.tolist():
                log.warning(
                    "round %d: client %s is lost: its training did not stay finite, so its reply does not count",
                    round, self._task.client_name(client),
                )  # fmt: skip
            traffic.lost["not finite"] += len(bad)
            done = done.only(torch.from_numpy(np.flatnonzero(good)))
        if notes and good.any():
            traffic.notes.append((done.clients, dict(zip(notes, numbers[: len(notes), good], strict=True))))
        return done, bad


def _divergence_error(clients: Clients, round: int, task: Task, method: Algorithm) -> DivergedError:
    """Return the error for a round in which nobody's work stayed finite."""
    first = int(clients[0])
    return DivergedError(
        f"Training must stay finite. In round {round} it did for none of {len(clients)} clients; the first is client "
        f"{task.client_name(first)}.",
        client=first,
        round=round,
        hint=hint_at_divergence(task, method),
    )
