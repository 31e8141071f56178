"""A site: one data owner, with one or several clients, who answers jobs with what its own engine computes.

    site = Site(key, build_task, folder)
    reply = site.answer(job)            # bytes in, bytes out; what carries them is not its concern

What arrives is read by one guarded reader, checked against what the site has agreed to, and never executed. What leaves
is what `atoll round show` lists.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.data.task import Task
from atoll.deploy import messages
from atoll.deploy.keys import Key
from atoll.deploy.masking import STEPS, SiteMasks, mask_rows
from atoll.deploy.messages import Message, require_in_time, require_version
from atoll.deploy.protection import count_noisy, digest_protection
from atoll.deploy.store import Pending, State, Store
from atoll.deploy.tasks import SitePopulation, place_at_site
from atoll.deploy.terms import Terms
from atoll.deploy.work import Answer, Clients, Order, Outcome, outcome_of, write_phase
from atoll.kernel.algorithm import Update
from atoll.kernel.errors import DeployError, RefusedError
from atoll.kernel.job import Done, Finish, Lost, Phase
from atoll.kernel.params import Tree, flatten, stacked_leaves
from atoll.kernel.sources import own_digest
from atoll.kernel.wrapper import title_of
from atoll.metrics.evaluation import Evaluate, reduce_to_figures, split_of
from atoll.metrics.measures import OWN, measure_of
from atoll.protect.channel import Channel
from atoll.protect.masks import MaskingClient
from atoll.protect.stages import Sent
from atoll.runtime.engines import LocalEngine
from atoll.runtime.engines.trainings import TRAINED, OnEpoch, Trainings
from atoll.runtime.memory import RamMemory

log = logging.getLogger("atoll.site")

BuildTask = Callable[[Terms], Task]  # the site's own clients, by what was agreed on


@dataclass(frozen=True, eq=False)
class Received:
    """A job that this site may do."""

    message: Message
    terms: Terms
    site: str
    order: Order
    counted: str | None  # the job of which the coordinator accepted this site's reply last
    task: Task
    own: Clients

    @property
    def protection(self) -> str:
        """What the protection of its reply is known by."""
        order = self.order
        return digest_protection(order.stages, masked=order.masked, neighbours=order.neighbours)

    def masks(self, folder: Path) -> SiteMasks:
        """Return the site's part in a sum under masks, of which it remembers in the folder."""
        return SiteMasks(folder, seed=self.terms.seed, neighbours=self.order.neighbours, clients=self.terms.clients)

    @property
    def measure(self) -> str:
        """What its clients are scored by, in words."""
        metrics = [phase.metric for phase in self.order.phases if isinstance(phase, Evaluate)]
        return measure_of(metrics[0] if metrics else OWN, self.task.network).name

    @property
    def is_last(self) -> bool:
        """Whether it is the result of the federation."""
        return any(isinstance(phase, Finish) or phase.splits >= {"test"} for phase in self.order.phases) and (
            self.order.round >= self.terms.rounds
        )


class Site:
    """A data owner in federations; its private state is in `folder`, by federation.

    It takes the place called `site`, or else the one of its key or of its key's name; jobs of the `coordinator` with
    this public key, or else of the one who sent the first job. Methods of somebody's own run only from files that are
    `allowed`. Unless `needs_validation` is False, it refuses a method that chooses on validation data it does not have.
    """

    def __init__(
        self,
        key: Key,
        build_task: BuildTask,
        folder: Path,
        *,
        site: str | None = None,
        coordinator: str | None = None,
        engine: LocalEngine | None = None,
        allowed: Sequence[Path] = (),
        largest: int = messages.LARGEST_BODY,
        needs_validation: bool = True,
        on_epoch: OnEpoch | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.key, self.folder, self.engine = key, folder, engine or LocalEngine()
        self._build_task, self._site, self._coordinator = build_task, site, coordinator
        self._largest, self._on_epoch, self._stop = largest, on_epoch, stop
        self.seat: str | None = None  # the name of its place in the federation whose job it has, for `build_task`
        self._files, self._needs_validation = tuple(allowed), needs_validation
        self._tasks: dict[str, tuple[Task, Task]] = {}  # by terms: the site's own, and its place in the federation

    @cached_property
    def _allowed(self) -> dict[str, Path]:
        return {own_digest(path): path for path in self._files}

    # -- what it is asked ------------------------------------------------------------------------------------------
    def answer(self, data: bytes, origin: str = "The job") -> bytes:
        """Do a job and return the reply; the same job again gets the same reply."""
        return self.answer_message(messages.read(data, origin, largest=self._largest))

    def answer_message(self, message: Message) -> bytes:
        """Do a job whose envelope was opened already."""
        received, store = self.receive(message), self._store(message)
        with store.alone():
            state = store.load() or self._first_state(received)
            if state.pending is not None and state.pending.job == message.digest:
                return self._give_again(store, state.pending, received)
            self._require_next(state, received)
            self._require_protection(state, received)
            state = self._count_release(store.settle(state, received.counted), received)
            memory = store.memory(state, received.terms.clients, received.task.network.layout)
            about, tree = self._answer(received, state, memory, store.folder)
            about |= {"answers": message.digest, "site": received.site, "terms": received.terms.digest}
            about["phases"] = [write_phase(phase) for phase in received.order.phases]
            header = message.header
            reply = messages.write(
                "reply", self.key, federation=header.federation, number=header.number, round=header.round,
                about=about, tree=tree,
            )  # fmt: skip
            pending = Pending(
                job=message.digest, number=header.number, round=header.round, kept=None,
                reply=f"reply-{message.digest[:16]}.atoll",
            )  # fmt: skip
            store.save(state, memory, pending, reply)
            store.forget_training()
            if received.order.step is not None and received.order.step.name == STEPS[-1]:
                received.masks(store.folder).forget()
        return reply

    def _give_again(self, store: Store, pending: Pending, received: Received) -> bytes:
        """Return the reply that was written for a job; with another time if the clock was off and is set by now."""
        reply, message = store.reply(pending), received.message
        written = messages.read(reply, "The reply", largest=self._largest)
        try:
            require_in_time(written, after=message.written)
        except RefusedError:
            reply = messages.write(
                "reply", self.key, federation=message.header.federation, number=pending.number, round=pending.round,
                about=written.header.about, tree=written.tree(received.task.network.layout),
            )  # fmt: skip
            store.replace_reply(pending, reply)
        return reply

    def _answer(self, received: Received, state: State, memory: RamMemory, folder: Path) -> tuple[dict[str, Any], Tree]:
        """Return the answer to a job as a message holds it."""
        order = received.order
        sizes = self._count_samples(received, state)
        if order.step is None or order.phases:
            answer = self._work(received, memory, folder)
            # How many gradients were computed tells how many samples there are.
            return replace(answer.without_costs() if state.hides_sizes else answer, samples=sizes).write()
        clients = sorted(int(client) for part in order.parts for client in part.clients)
        tree = received.masks(folder).answer(received.message, order.step, clients, order.relay)
        return Answer((), (), sizes).write()[0], tree

    def _count_samples(self, received: Received, state: State) -> dict[str, list[int]]:
        """Return what the site tells about its sizes: under stages that hide them, only those that scores need."""
        own, _ = self._task(received.terms, received.site)
        everybody = np.arange(own.clients)
        told = set(own.splits)
        if state.hides_sizes:
            scored = any(isinstance(phase, Evaluate) for phase in received.order.phases)
            told = {"val", "test"} if scored else set()
        return {
            name: split.sizes(everybody).tolist() if name in told else [0] * own.clients
            for name, split in own.splits.items()
        }

    def receive(self, message: Message) -> Received:
        """Read a job; raise RefusedError, with the reason, for one that this site does not do."""
        if message.header.kind != "job":
            raise message.refuse("a site takes jobs only")
        require_in_time(message)
        remark = require_version(message)
        if remark:
            log.warning("%s", remark)
        state = self._store(message).load()
        self._require_coordinator(message, state)
        with message.guarding():
            about = message.header.about
            terms = Terms.of_json(about["terms"])
            counted, addressees = dict(about["counted"]), [str(one) for one in about["to"]]
        site = state.site if state is not None else self._find_place(terms, message)
        if self._site is not None and site != self._site:
            raise message.refuse(
                f"in this federation, this site is {site}. It is now called {self._site}",
                hint="each site has a folder of its own, `state`.",
            )
        place = terms.sites.get(site)
        if place is None or (place.key and place.key != self.key.public.value.hex()):
            raise message.refuse(
                f"the place of {site} belongs to another key",
                hint=f"take the key that the coordinator knows, or another place of {', '.join(terms.sites)}.",
            )
        if site not in addressees:
            raise message.refuse(
                f"it is for {', '.join(addressees)[:200]}, and not for {site}",
                hint="each site has a file of its own, with its name.",
            )
        if state is not None and state.terms != terms.digest:
            raise message.refuse(
                "its terms differ from those that this site began with",
                hint="who takes part, model, data schema and training must not change within a federation.",
            )
        own, here = self._task(terms, site)
        if state is not None and state.data != own.samples:
            log.warning("the data of this site are not those of the rounds before")
        numbers = terms.clients_at(site)
        order = Order.read(message, here.network.layout, self._allowed, numbers)
        blind = self._needs_validation and not own.splits["val"].sizes(np.arange(own.clients)).all()
        if blind and order.method.reads_validation:
            raise message.refuse(
                f"{title_of(order.method)} chooses on validation data, and a client of this site has none",
                hint="give the site more samples, or a larger share for validation.",
            )
        one = counted.get(site)
        return Received(message, terms, site, order, None if one is None else str(one), here, numbers)

    def _find_place(self, terms: Terms, message: Message) -> str:
        """Return the name of this site's place: as it was told, or the one with its key, or with its name."""
        mine = self.key.public.value.hex()
        by_key = [name for name, place in terms.sites.items() if place.key == mine]
        if self._site is not None:
            if self._site not in terms.sites:
                raise message.refuse(f"this federation has no place for {self._site}. It has: {', '.join(terms.sites)}")
            return self._site
        if by_key:
            return by_key[0]
        if self.key.name in terms.sites:
            return self.key.name
        raise message.refuse(
            f"this federation has no place for {self.key.name}. It has: {', '.join(terms.sites)}",
            hint="say which `site` this is, or ask the coordinator to begin with this site's key.",
        )

    def _require_coordinator(self, message: Message, state: State | None) -> None:
        """Raise unless the job was signed by the coordinator that this site knows."""
        expected = self._coordinator or (state.coordinator if state is not None else None)
        if expected is not None and message.header.key != expected:
            raise message.refuse(
                "it was not signed by the coordinator that this site knows",
                hint="it is foreign, or the coordinator has a new key: ask, and begin a new federation.",
            )

    def _require_next(self, state: State, received: Received) -> None:
        """Raise for a job that is older than one that was done already."""
        header = received.message.header
        if header.number <= state.number:
            raise received.message.refuse(
                f"it is outdated: it is number {header.number} of its federation, and this site has answered number "
                f"{state.number} already",
                hint="take the newest file of the coordinator.",
            )

    def _require_protection(self, state: State, received: Received) -> None:
        """Raise for a job whose replies would be protected in another way than those before."""
        order = received.order
        if state.protection and state.protection != received.protection:
            raise received.message.refuse(
                "messages must be protected as in the rounds before. It asks for another protection",
                hint="what messages pass before they leave must not change within a federation.",
            )
        if order.masked and order.step is None and any(phase.replies for phase in order.phases):
            raise received.message.refuse("messages must leave under masks. It asks for one without")

    def _count_release(self, state: State, received: Received) -> State:
        """Count a message to which this site adds noise; raise for one more than the noise was found for."""
        order, method = received.order, received.order.method
        if not count_noisy(order.stages) or not any(phase.replies for phase in order.phases):
            return state
        most = received.terms.rounds + (method.exchanges if method.defines("prepare") else 0)
        if state.noisy >= most:
            raise received.message.refuse(
                f"the noise on this site's messages was found for {most} of them, and as many have left already"
            )
        return replace(state, noisy=state.noisy + 1)

    def _first_state(self, received: Received) -> State:
        own, _ = self._task(received.terms, received.site)
        return State(
            site=received.site, coordinator=received.message.header.key, terms=received.terms.digest, data=own.samples,
            protection=received.protection,
            hides_sizes=any(stage.hides_weight for stage in received.order.stages),
        )  # fmt: skip

    def _store(self, message: Message) -> Store:
        return Store(self.folder / message.header.federation)

    def _task(self, terms: Terms, site: str) -> tuple[Task, Task]:
        """Return the site's own task, and the same in its place in the federation, where the engine computes."""
        if terms.digest not in self._tasks:
            self.seat = site
            own, numbers = self._build_task(terms), terms.sites[site].clients
            if own.clients != len(numbers):
                raise DeployError(
                    f"{site} must have {len(numbers)} client(s), as was agreed. Its data have {own.clients}.",
                    hint="name the column of clients, `client`, or ask the coordinator to begin anew.",
                )
            here = self.engine.place(place_at_site(own, numbers, terms.clients))
            self._tasks[terms.digest] = own, here
        return self._tasks[terms.digest]

    # -- its work --------------------------------------------------------------------------------------------------
    def _work(self, received: Received, memory: RamMemory, folder: Path) -> Answer:
        """Do the phases of a job, one after another; what clients keep goes to the memory."""
        population, order = self._population(received, memory, folder), received.order
        masking: Mapping[int, MaskingClient] | None = None
        if order.step is not None:
            asked = sorted(int(client) for part in order.parts for client in part.clients)
            masking = received.masks(folder).prepare(received.message, order.step, asked, order.relay)
        outcomes, lost = [], []
        for phase in order.phases:
            done, failed = self._run(phase, received, population)
            for one in done:
                _keep(one, phase, order.round)
            outcomes.append(tuple(outcome_of(phase, one, self._send(one, received, masking)) for one in done))
            lost.append(failed)
        return Answer(tuple(outcomes), tuple(lost), {})

    def _send(self, done: Done[Any], received: Received, masking: Mapping[int, MaskingClient] | None) -> Sent | None:
        """Return what leaves the site of an update once it has passed all stages, and masks; None if it is none."""
        if not isinstance(done.result, Update):
            return None
        order = received.order
        channel = Channel(order.stages, seed=received.terms.seed, secret=secrets.token_bytes(32))
        sent = channel.send(order.method, done.clients, done.result, order.round, done.memory)
        return sent if masking is None else mask_rows(sent, done.clients.tolist(), masking)

    def _population(self, received: Received, memory: RamMemory, folder: Path) -> SitePopulation:
        task, terms = received.task, received.terms
        facts = replace(task.public_facts(terms.seed), name=terms.name)
        largest = terms.largest or {name: int(split.sizes(received.own).max()) for name, split in task.splits.items()}
        facts = replace(facts, largest=largest)
        one_shot = received.order.method.one_shot
        trainings = Trainings(folder / TRAINED, self._stop, self._on_epoch) if one_shot else None
        return SitePopulation(task, memory, terms.seed, trainings, known=facts)

    def _run(
        self, phase: Phase, received: Received, population: SitePopulation
    ) -> tuple[list[Done[Any]], dict[int, str]]:
        """Do one phase; return what came of it, and why clients failed."""
        done: list[Done[Any]] = []
        failed: dict[int, str] = {}
        some = population if phase.replies else replace(population, trainings=None)
        for job in received.order.jobs(phase):
            try:
                outcomes = list(self.engine.run(job, some))
            except KeyboardInterrupt:
                raise
            except Exception as error:
                if isinstance(error, DeployError):
                    raise
                outcomes = [Lost(job.clients, f"{type(error).__name__}: {error}")]
            for outcome in outcomes:
                if isinstance(outcome, Lost):
                    failed |= {int(client): outcome.reason for client in outcome.clients}
                    continue
                good, bad = _split_finite(_reduce_scores(outcome, phase, received.task))
                failed |= dict.fromkeys(bad, "not finite")
                if good is not None:
                    done.append(good)
        for client, reason in failed.items():
            log.warning("round %d: client %d of this site failed: %s", received.order.round, client, reason)
        return done, failed

    # -- what it found ---------------------------------------------------------------------------------------------
    def read_scores(self, message: Message, reply: bytes) -> dict[str, dict[str, list[float]]]:
        """Return the scores in the reply to a result, by model and split: one for each of the site's clients."""
        received = self.receive(message)
        phases = received.order.phases
        answer = Answer.read(
            messages.read(reply), received.task.network.layout, phases=phases, method=received.order.method,
            asked=sorted(int(client) for part in received.order.parts for client in part.clients), own=received.own,
            device=self.engine.device,
        )  # fmt: skip
        found: dict[str, dict[str, list[float]]] = {}
        for phase, outcomes in zip(phases, answer.outcomes, strict=True):
            if isinstance(phase, Evaluate):
                found[phase.model] = {on: _mean_scores(outcomes, on, received, answer) for on in phase.on}
        return found

    # -- the models that come out ----------------------------------------------------------------------------------
    def open_result(self, message: Message) -> tuple[Received, SitePopulation]:
        """Return a result that was answered, and the clients with all that they keep: what models are made from."""
        received, store = self.receive(message), self._store(message)
        state = store.load()
        if state is None or state.pending is None or state.pending.job != message.digest:
            raise message.refuse("this site must have applied it first")
        memory = store.memory(state, received.terms.clients, received.task.network.layout, pending=True)
        return received, self._population(received, memory, store.folder)

    def own_task(self, received: Received) -> Task:
        """Return the site's own clients, numbered from 0."""
        return self._task(received.terms, received.site)[0]


def _reduce_scores(done: Done[Any], phase: Phase, task: Task) -> Done[Any]:
    """Return the scores of some clients; of a measure that is no mean over samples, each client's figure."""
    figure = measure_of(phase.metric, task.network).figure if isinstance(phase, Evaluate) else None
    if figure is None:
        return done
    result = {
        on: reduce_to_figures(found, task.splits[split_of(on)].sizes(done.clients), figure)
        for on, found in done.result.items()
    }
    return replace(done, result=result)


def _mean_scores(outcomes: Sequence[Outcome], on: str, received: Received, answer: Answer) -> list[float]:
    """Return the score of each of a site's clients on one split; NaN without samples."""
    sizes = dict(zip(received.own.tolist(), answer.samples[split_of(on)], strict=True))
    scores = dict.fromkeys(sizes, math.nan)
    for one in outcomes:
        found = one.result[on]
        for row, k in enumerate(one.clients.tolist()):
            if "figure" in found:
                scores[k] = float(found["figure"][row, 0]) if found["exists"][row, 0] else math.nan
            elif sizes[k]:
                scores[k] = float(found["score"][row]) / sizes[k]
    return [*scores.values()]


def _keep(done: Done[Any], phase: Phase, round: int) -> None:
    """Put what came of some clients' work into their memory."""
    if isinstance(phase, Finish):
        if done.result is not None:
            done.memory.keep(done.clients, done.result, round=round - 1)
        return
    if isinstance(done.result, Update):
        for name, tree in done.result.beside.items():
            done.memory.beside(name).keep(done.clients, tree, round=round)
        if done.result.keep is not None:
            done.memory.keep(done.clients, done.result.keep, round=round)


def _split_finite(done: Done[Any]) -> tuple[Done[Any] | None, list[int]]:
    """Return the clients whose work is finite, and the numbers of the others: their work does not count."""
    result = done.result
    parts: Tree = [dict(result.send), result.keep, dict(result.beside)] if isinstance(result, Update) else result
    leaves, structure = flatten(parts)
    values = [leaf for leaf, row in zip(leaves, stacked_leaves(structure), strict=True) if row]
    values += [result.weight] if isinstance(result, Update) and result.weight is not None else []
    good = torch.ones(len(done.clients), dtype=torch.bool)
    for leaf in [*values, *done.notes.values()]:
        if leaf.is_floating_point():
            good &= torch.isfinite(leaf.reshape(len(leaf), -1)).all(1).cpu()
    if good.all():
        return done, []
    bad = done.clients[~good.numpy()].tolist()
    if not isinstance(result, Update) or not good.any():
        return None, done.clients.tolist()
    return done.only(torch.from_numpy(np.flatnonzero(good.numpy()))), bad
