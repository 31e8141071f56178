"""An engine whose clients are at sites: it sends the jobs of the one round loop, and hands on the replies.

The server's own work, such as aggregating, is done by a local engine. What clients keep stays where it is.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from atoll.data.task import Task
from atoll.deploy import messages
from atoll.deploy.journal import Exchange, Journal
from atoll.deploy.keys import Key
from atoll.deploy.masking import (
    STEPS,
    Keys,
    Sealed,
    Shares,
    Step,
    add_up_masked,
    read_keys,
    read_sealed,
    read_shares,
    relay_keys,
    unmask,
    write_keys,
    write_sealed,
)
from atoll.deploy.messages import Message, require_in_time, require_version
from atoll.deploy.tasks import learn_sizes
from atoll.deploy.terms import Terms
from atoll.deploy.work import Answer, Clients, Order, Outcome, Part
from atoll.kernel.engine import Memory, Workbench
from atoll.kernel.errors import DeployError, RefusedError, SumLost
from atoll.kernel.job import AtTheEnd, Done, Finish, Job, Lost, Phase
from atoll.kernel.params import Tree, flatten
from atoll.kernel.task import Facts
from atoll.metrics.afterwards import models_after
from atoll.metrics.evaluation import Evaluate, splits_scored
from atoll.metrics.measures import OWN
from atoll.protect.masks import (
    Around,
    default_threshold,
    neighbours_of,
    require_enough,
    require_neighbours,
    threshold_among,
)
from atoll.protect.stages import Sent, Stage
from atoll.runtime.engines import LocalEngine
from atoll.runtime.engines.parts import class_sizes
from atoll.runtime.population import Population

log = logging.getLogger("atoll.federation")
SECRET_BYTES = 32
ReadReply = Callable[[str, Message], Any]  # from a site and its reply to what it says; or it raises


class Transport(Protocol):
    """What carries messages between a coordinator and its sites."""

    shares: bool  # whether sites that are sent the same are sent one message

    def exchange(self, jobs: Mapping[str, bytes], exchange: Exchange) -> Iterator[tuple[str, bytes | str]]:
        """Send each of these sites its job; yield the site and its reply as they come, or why there is none.

        Sites for which nothing is yielded have not replied. Raise to stop here: what was yielded before is kept, and
        the same question is asked again when the federation goes on.
        """
        ...


class InProcess:
    """Sites in this process, for tests and rehearsals: a message is a call."""

    shares = False

    def __init__(self, sites: Mapping[str, Any]) -> None:
        self.sites = sites

    def exchange(self, jobs: Mapping[str, bytes], exchange: Exchange) -> Iterator[tuple[str, bytes | str]]:
        """Let one site after another answer."""
        for site, job in jobs.items():
            try:
                yield site, self.sites[site].answer(job)
            except RefusedError as error:
                yield site, str(error).splitlines()[0]


class KeptAtSites:
    """The memory of clients that are elsewhere: what they keep is theirs."""

    def recall(self, clients: Clients, default: Tree, *, before: int) -> Tree:
        """Refuse."""
        raise DeployError("What clients keep is at their sites. It cannot be read here.")

    def holds(self, clients: Clients, *, before: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Refuse."""
        raise DeployError("What clients keep is at their sites. It cannot be read here.")

    def keep(self, clients: Clients, tree: Tree, *, round: int) -> None:
        """Do nothing: the site has kept it."""

    def save(self, *, round: int, changes: bool = False) -> Tree:
        """Return nothing: sites save what they keep."""
        return None

    def load(self, saved: Sequence[Tree], *, round: int) -> None:
        """Do nothing."""

    def holders(self, *, before: int) -> int | None:
        """Return None: nobody here knows."""
        return None

    def prune(self, *, round: int) -> None:
        """Do nothing."""

    def beside(self, name: str) -> Memory:
        """Return the same."""
        return self


@dataclass(frozen=True, eq=False)
class Federation:
    """Who federates on which terms, as the coordinator knows it."""

    id: str
    terms: Terms
    key: Key  # the coordinator's

    @classmethod
    def begin(cls, terms: Terms, key: Key) -> Federation:
        """Begin a federation with a number of its own."""
        return cls(secrets.token_hex(16), terms, key)


class SitesEngine:
    """Runs jobs at sites. It is an engine like any other: `federate` drives it round by round."""

    def __init__(
        self,
        federation: Federation,
        transport: Transport,
        journal: Journal | None = None,
        *,
        engine: LocalEngine | None = None,
        largest: int = messages.LARGEST_BODY,
        metric: str = OWN,
        secret: bytes | None = None,
    ) -> None:
        self.federation, self.transport, self.journal = federation, transport, journal or Journal()
        self.local = engine or LocalEngine()
        self._metric = metric  # by which sites score at the end
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._protection: tuple[tuple[Stage, ...], bool, int] = (), False, 0  # of replies
        self._largest, self._answers = largest, dict[tuple[int, str], Answer]()  # to the last exchange

    # -- what the server computes here -----------------------------------------------------------------------------
    @property
    def options(self) -> Mapping[str, Any]:
        """What was asked for, for the run's configuration."""
        return {**self.local.options, "sites": len(self.federation.terms.sites)}

    @property
    def device(self) -> torch.device:
        """Where the server's tensors live."""
        return self.local.device

    @property
    def secret(self) -> bytes:
        """What the server's noise is drawn from: a round that is played again must have the same."""
        return self._secret

    @property
    def is_dear(self) -> bool:
        """Whether every round is worth a checkpoint: sites are not asked twice."""
        return True

    def clock(self) -> float:
        """Return seconds."""
        return self.local.clock()

    def place(self, task: Task) -> Task:
        """Move what there is of the task to where the server computes."""
        return self.local.place(task)

    def bench(self, population: Population, round: int) -> Workbench:
        """Return the server's place to work in a round."""
        return self.local.bench(population, round)

    def export_plans(self, method: Hashable, facts: Facts) -> list[Tree]:
        """Return how the server's own work runs here."""
        return self.local.export_plans(method, facts)

    def import_plans(self, plans: list[Tree], method: Hashable, facts: Facts) -> None:
        """Take over what `export_plans` gave."""
        self.local.import_plans(plans, method, facts)

    # -- what sites do ---------------------------------------------------------------------------------------------
    def run(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost]:
        """Have sites do a job; yield what becomes of every client, in the order in which one machine would."""
        job = self._remember_protection(_without_samples(job))
        if job.masked and job.phase.replies:
            yield from self._add_up(job, population)
        else:
            yield from self._hand_on(job, self._ask(job, population), population)

    def _remember_protection(self, job: Job) -> Job:
        """Return the job with the protection of all replies, also where it asks for none: each job says it."""
        if job.phase.replies:
            self._protection = job.stages, job.masked or self._protection[1], job.neighbours or self._protection[2]
        stages, masked, neighbours = self._protection
        return replace(job, stages=stages, masked=masked, neighbours=neighbours)

    def _ask(
        self, job: Job, population: Population, step: Step | None = None, relays: Mapping[str, Tree] | None = None,
        read: ReadReply | None = None,
    ) -> Exchange:  # fmt: skip
        """Ask sites to do a job, or to take a step of a sum under masks; return the exchange once it is closed."""
        name = job.phase.name if step is None else step.name
        exchange = self.journal.find(job.round, name) or self._open(job, population, step, relays or {})
        if not exchange.closed:
            self._collect(job, exchange, population, read)
        return exchange

    def _open(self, job: Job, population: Population, step: Step | None, relays: Mapping[str, Tree]) -> Exchange:
        """Write the messages of a job, and the question down."""
        self._answers.clear()
        works = step is None or step.name == job.phase.name
        phases = self._phases(job, population) if works else ()
        terms, number = self.federation.terms, self.journal.known.next
        parts = {site: some for site in terms.sites if (some := _parts(job, terms.clients_at(site), works=works))}
        alone = not self.transport.shares or any(part.unicast is not None for some in parts.values() for part in some)
        alone = alone or len({id(relay) for relay in relays.values()}) > 1
        apart = isinstance(job.phase, AtTheEnd) and job.method.defines("state_for")
        alone = alone or apart
        together = [[site] for site in parts] if alone else [list(parts)] if parts else []
        jobs: dict[str, bytes] = {}
        for sites in together:
            sent = job.broadcast if works else None
            if apart:
                sent = job.method.state_for(job.server, terms.clients_at(sites[0]))
            order = Order(
                phases, job.method, job.round, sent,
                tuple(p for site in sites for p in parts[site]), job.stages, job.masked, job.neighbours,
                step, relays.get(sites[0]),
            )  # fmt: skip
            about, tree = order.write()
            about |= {
                "to": sites, "terms": terms.as_json(),
                "counted": {site: self.journal.known.counted.get(site) for site in sites},
            }  # fmt: skip
            message = messages.write(
                "job", self.federation.key, federation=self.federation.id, number=number, round=job.round, about=about,
                tree=tree,
            )  # fmt: skip
            jobs |= dict.fromkeys(sites, message)
        names = [phase.name for phase in phases] if works or step is None else [step.name]
        return self.journal.open(job.round, names, jobs, number)

    def _phases(self, job: Job, population: Population) -> tuple[Phase, ...]:
        """Return the phases that are asked for at once: all that need nothing but the server's last state."""
        phase: Any = job.phase
        if not isinstance(phase, Finish | Evaluate) or job.round < self.federation.terms.rounds:
            return (phase,)
        scores = tuple(
            Evaluate(model, splits_scored(job.method, population.task), metric=self._metric)
            for model in models_after(job.method, job.server, last=True)
        )
        if isinstance(phase, Evaluate):
            return scores
        # If some clients are not there for the last step, all are asked for scores by themselves.
        return (phase, *scores) if len(job.clients) == self.federation.terms.clients else (phase,)

    def _answered(self, job: Job, exchange: Exchange, population: Population) -> tuple[Phase, ...]:
        """Return the phases that the sites of an exchange were asked for."""
        known = {one.name: one for one in (Finish(), *self._phases(job, population))}
        return tuple(known[name] for name in exchange.phases)

    def _collect(self, job: Job, exchange: Exchange, population: Population, read: ReadReply | None = None) -> None:
        """Ask the sites that have not replied yet; write down what fits, and who is lost."""
        lost: dict[str, str] = {}

        def open_reply(site: str, reply: bytes) -> Message:
            message = messages.read(reply, f"The reply of {site}", largest=self._largest)
            self.check_reply(message, site, job, exchange, population, read)
            return message

        exchange.check = open_reply
        waiting = {site: job for site, job in exchange.jobs.items() if site not in exchange.replies}
        for site, reply in self.transport.exchange(waiting, exchange) if waiting else ():
            if isinstance(reply, str):
                lost[site] = reply
                continue
            try:
                message = open_reply(site, reply)
            except RefusedError as error:
                log.warning("%s", error)
                lost[site] = str(error).splitlines()[0]
                continue
            self.journal.accept(exchange, site, message, reply)
        silent = {site: "no reply" for site in exchange.jobs if site not in exchange.replies and site not in lost}
        self.journal.close(exchange, {**lost, **silent})

    def check_reply(
        self, message: Message, site: str, job: Job, exchange: Exchange, population: Population,
        read: ReadReply | None = None,
    ) -> None:  # fmt: skip
        """Raise RefusedError unless a message is this site's reply to its job."""
        header, about = message.header, message.header.about
        asked = exchange.asked[site]
        if header.kind != "reply":
            raise message.refuse(f"it must be a reply. It is a {header.kind}")
        if header.federation != self.federation.id:
            raise message.refuse("it belongs to another federation")
        if about.get("site") != site:
            raise message.refuse(f"it must be of {site}. It says that it is of {str(about.get('site'))[:80]}")
        expected = self.federation.terms.sites[site].key or self.journal.known.signers.get(site)
        if expected and header.key != expected:
            raise message.refuse(
                f"it was not signed with the key of {site}",
                hint=f"two sites call themselves {site}, or its key is new: ask its owner.",
            )
        if header.number != exchange.number or header.round != exchange.round:
            when = "outdated" if header.number < exchange.number else "of a job to come"
            raise message.refuse(
                f"it is {when}: it answers number {header.number} (round {header.round + 1}), and number "
                f"{exchange.number} (round {exchange.round + 1}) is under way"
            )
        if about.get("answers") != asked.digest:
            raise message.refuse("it answers another job: of another method, or with other values")
        require_in_time(message, after=asked.written)
        remark = require_version(message)
        if remark:
            log.info("%s", remark)
        if read is None:
            self._read(message, site, job, exchange, population)
        else:
            with message.guarding():
                read(site, message)

    def _read(self, message: Message, site: str, job: Job, exchange: Exchange, population: Population) -> Answer:
        """Return what a site answered."""
        key = exchange.number, site
        if key not in self._answers:
            own = self.federation.terms.clients_at(site)
            everybody = [client for part in exchange.asked[site].header.about["clients"] for client in part]
            self._answers[key] = Answer.read(
                message, population.task.network.layout,
                phases=self._answered(job, exchange, population), method=job.method,
                asked=sorted(set(everybody) & set(own.tolist())), own=own, device=self.device, stages=job.stages,
                seed=self.federation.terms.seed, largest=self._largest,
            )  # fmt: skip
        return self._answers[key]

    def _hand_on(self, job: Job, exchange: Exchange, population: Population) -> Iterator[Done[Any] | Lost]:
        """Yield what came of the sites' work, clients in the order of their sizes, as on one machine."""
        found, lost = self._find_outcomes(job, exchange, population)
        for client in _ordered(job, [*found], population):
            outcome, row = found[client]
            yield _done(job, outcome, row)
        yield from _list_lost(lost, job.clients)

    def _find_outcomes(
        self, job: Job, exchange: Exchange, population: Population
    ) -> tuple[dict[int, tuple[Outcome, int]], dict[str, list[int]]]:
        """Return the outcome of each client that was asked, with its row in it, and who was lost, by reason."""
        place = exchange.phases.index(job.phase.name)
        found: dict[int, tuple[Outcome, int]] = {}
        lost: dict[str, list[int]] = {}
        for site, reply in exchange.replies.items():
            answer = self._answers.get((exchange.number, site)) or self._read(
                messages.read(reply, f"The reply of {site}"), site, job, exchange, population
            )
            own = self.federation.terms.clients_at(site)
            learn_sizes(population.task, own, answer.samples)
            for outcome in answer.outcomes[place]:
                found |= {int(client): (outcome, row) for row, client in enumerate(outcome.clients)}
            for client, reason in answer.lost[place].items():
                lost.setdefault(reason, []).append(client)
        self._add_lost_sites(exchange, lost)
        self._drop_odd_ones(found, lost, rows=bool(job.method.items_by))
        wanted = set(job.clients.tolist())
        return {client: one for client, one in found.items() if client in wanted}, lost

    def _add_lost_sites(self, exchange: Exchange, lost: dict[str, list[int]]) -> None:
        for site, reason in exchange.lost.items():
            lost.setdefault(f"{site}: {reason}", []).extend(self.federation.terms.sites[site].clients)

    # -- sums under masks ------------------------------------------------------------------------------------------
    def _add_up(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost]:
        """Have sites do a job of which nobody here reads a single reply; yield the sum of all, or why there is none."""
        asked, lost = len(job.clients), dict[str, list[int]]()
        job = replace(job, usual=asked)
        begun = self.journal.find(job.round, STEPS[0])
        step = Step(STEPS[0], self.journal.known.next if begun is None else begun.number, default_threshold(asked))
        try:
            keys, job = self._exchange_keys(job, step, population, lost)
            around = neighbours_of(keys, job.neighbours, self.federation.terms.seed, step.session)
            threshold = threshold_among(job.neighbours, step.threshold)
            sealed, job = self._exchange_shares(job, replace(step, name=STEPS[1]), keys, around, population, lost)
            require_neighbours(sealed, sealed, around, threshold)
            relays = {
                site: write_sealed(
                    {who: {to: some[to] for to in place.clients if to in some} for who, some in sealed.items()}
                )
                for site, place in self.federation.terms.sites.items()
            }
            exchange = self._ask(job, population, replace(step, name=STEPS[2]), relays)
            found, failed = self._find_outcomes(job, exchange, population)
            _join_lost(lost, failed, job.clients)
            require_enough(len(found), asked)
            require_neighbours(found, sealed, around, threshold)
            there = np.array(sorted(found), dtype=np.int64)
            sent = [_rows_of(*found[client]) for client in there.tolist()]
            total, sizes = add_up_masked(sent)
            gone = sorted(sealed.keys() - found.keys())
            shares = self._exchange_unmasking(
                replace(job, clients=there), replace(step, name=STEPS[3]), there.tolist(), gone, around, population
            )
            require_enough(len(shares), asked)
            summed = unmask(total, sent[0], sizes, keys, shares, gone, there, step, around, threshold)
        except SumLost as error:
            log.warning("round %d: %s", job.round, error)
            before = {client for some in lost.values() for client in some}
            lost["too few were left to read their sum"] = [one for one in job.clients.tolist() if one not in before]
        else:
            gradients = sum(outcome.gradients for outcome, row in found.values() if row == 0)
            yield Done(there, summed, KeptAtSites(), job.assign(there).unicast, {}, gradients)
        for reason, some in lost.items():
            if some:
                yield Lost(np.array(sorted(some), dtype=np.int64), reason)

    def _exchange_keys(
        self, job: Job, step: Step, population: Population, lost: dict[str, list[int]]
    ) -> tuple[Keys, Job]:
        """Ask for public keys; return them, and the job for those who gave some."""

        def read(site: str, message: Message) -> Keys:
            found = read_keys(message.tree(None))
            self._require_clients(message, site, job, found)
            return found

        exchange = self._ask(job, population, step, None, read)
        keys = {who: both for found in self._read_steps(exchange, read) for who, both in found.items()}
        return dict(sorted(keys.items())), self._go_on(job, exchange, keys, lost)

    def _exchange_shares(
        self, job: Job, step: Step, keys: Keys, around: Around, population: Population, lost: dict[str, list[int]]
    ) -> tuple[Sealed, Job]:
        """Pass public keys on and ask for sealed shares; return these, and the job for those who gave some."""

        def read(site: str, message: Message) -> Sealed:
            found = read_sealed(message.tree(None))
            self._require_clients(message, site, job, found)
            if any(some.keys() != around[who] - {who} for who, some in found.items()):
                raise message.refuse("each of its clients must have a share for every other one that it has masks with")
            return found

        sites = self.federation.terms.sites
        relays = dict.fromkeys(sites, write_keys(keys))
        if 0 < job.neighbours < len(keys) - 1:
            relays = {site: relay_keys(keys, around, place.clients) for site, place in sites.items()}
        exchange = self._ask(job, population, step, relays, read)
        sealed = {who: some for found in self._read_steps(exchange, read) for who, some in found.items()}
        job = self._go_on(job, exchange, sealed, lost)
        return {who: {to: row for to, row in some.items() if to in sealed} for who, some in sealed.items()}, job

    def _exchange_unmasking(
        self, job: Job, step: Step, there: list[int], gone: list[int], around: Around, population: Population
    ) -> Shares:
        """Say who is in the sum; return the shares that remove its masks."""

        def read(site: str, message: Message) -> Shares:
            found = read_shares(message.tree(None), there, gone, around)
            self._require_clients(message, site, job, found, all_of_them=False)
            return found

        relay = {"there": torch.tensor(there), "gone": torch.tensor(gone, dtype=torch.int64)}
        exchange = self._ask(job, population, step, dict.fromkeys(self.federation.terms.sites, relay), read)
        return {who: both for found in self._read_steps(exchange, read) for who, both in found.items()}

    def _read_steps(self, exchange: Exchange, read: ReadReply) -> list[Any]:
        return [read(site, messages.read(reply)) for site, reply in exchange.replies.items()]

    def _require_clients(
        self, message: Message, site: str, job: Job, found: Mapping[int, Any], *, all_of_them: bool = True
    ) -> None:
        """Raise unless a step was taken for the clients of a site that were asked."""
        asked = set(job.clients.tolist()) & set(self.federation.terms.sites[site].clients)
        if not (found.keys() == asked or (not all_of_them and asked <= found.keys())):
            raise message.refuse(f"it must answer for the clients {sorted(asked)}. It does for {sorted(found)}")

    def _go_on(self, job: Job, exchange: Exchange, answered: Mapping[int, Any], lost: dict[str, list[int]]) -> Job:
        """Return the job for the clients that have answered; raise SumLost if too few have."""
        failed: dict[str, list[int]] = {}
        self._add_lost_sites(exchange, failed)
        _join_lost(lost, failed, job.clients)
        require_enough(len(answered), job.usual)
        return replace(job, clients=np.array([one for one in job.clients.tolist() if one in answered], dtype=np.int64))

    def _drop_odd_ones(self, found: dict[int, tuple[Outcome, int]], lost: dict[str, list[int]], *, rows: bool) -> None:
        """Leave out replies whose fields have other names, types or shapes than most others have.

        With `rows`, each client sends rows of tables, as many as it likes.
        """
        forms: dict[Any, list[int]] = {}
        for client, (outcome, _) in found.items():
            leaves, structure = flatten(outcome.result)
            form = (
                str(structure),
                tuple((str(leaf.dtype), leaf.ndim, tuple(leaf.shape[2 if rows else 1 :])) for leaf in leaves),
                None if rows else str(outcome.forms),
            )
            forms.setdefault(form, []).append(client)
        if len(forms) > 1:
            usual = max(forms, key=lambda form: len(forms[form]))
            for form, clients in forms.items():
                if form != usual:
                    lost.setdefault("its reply has another form than those of the others", []).extend(clients)
                    for client in clients:
                        del found[client]


def _without_samples(job: Job) -> Job:
    """Return the job; clients at sites tell sums of their scores, and not the score of every sample."""
    return replace(job, phase=replace(job.phase, each=False)) if isinstance(job.phase, Evaluate) else job


def _parts(job: Job, own: Clients, *, works: bool = True) -> list[Part]:
    """Return what is sent to a site's clients, by group; nothing if none of them is asked.

    Unless there is work to do, they are sent nothing by themselves.
    """
    asked = np.sort(job.clients[np.isin(job.clients, own)])
    if not len(asked):
        return []
    groups = np.zeros(len(asked), np.int64) if job.groups is None else job.groups[asked]
    some = [asked[groups == group] for group in np.unique(groups)]
    return [Part(clients, job.assign(clients).unicast if works else None) for clients in some]


def _ordered(job: Job, clients: list[int], population: Population) -> list[int]:
    """Sort clients as a local engine does: by group, the largest first. Sums then have the same bits."""
    array = np.sort(np.array(clients, dtype=np.int64))
    sizes = population.task.splits["train"].sizes(array)
    groups = np.zeros(len(array), np.int64) if job.groups is None else job.groups[array]
    widths = class_sizes(population.task)[array] if bool(job.method.items_by) else np.zeros_like(groups)
    ordered: list[int] = array[np.lexsort((array, -sizes, widths, groups))].tolist()
    return ordered


def _done(job: Job, outcome: Outcome, row: int) -> Done[Any]:
    """Return the work of one client, as the round loop takes it."""
    client = outcome.clients[row : row + 1]
    result: Any = None
    if outcome.result is not None:
        sent = _rows_of(outcome, row)
        result = sent.fields if isinstance(job.phase, AtTheEnd) else sent
    gradients = outcome.gradients if row == 0 else 0
    return Done(client, result, KeptAtSites(), job.assign(client).unicast, {}, gradients)


def _rows_of(outcome: Outcome, row: int) -> Sent:
    """Return what one client sent."""
    index = slice(row, row + 1)
    fields = {name: value.rows(index) for name, value in outcome.result.items()}
    return Sent(fields, None if outcome.weight is None else outcome.weight[index], outcome.forms)


def _join_lost(lost: dict[str, list[int]], more: Mapping[str, list[int]], wanted: Clients) -> None:
    """Add clients that were lost, by reason, as far as they were wanted."""
    for reason, some in more.items():
        lost.setdefault(reason, []).extend(set(some) & set(wanted.tolist()))


def _list_lost(lost: Mapping[str, list[int]], wanted: Clients) -> Iterator[Lost]:
    """Yield the clients that were lost, by reason, as far as they were wanted."""
    for reason, some in lost.items():
        here = np.array(sorted(set(some) & set(wanted.tolist())), dtype=np.int64)
        if len(here):
            yield Lost(here, reason)


__all__ = ["Federation", "InProcess", "KeptAtSites", "SitesEngine", "Transport"]
