"""What decides the numbers of a run: its settings, and its whole configuration as it is written down."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.algorithms import name_of
from atoll.compose.architectures import check_mixes
from atoll.data.task import Task
from atoll.federation import participation
from atoll.federation.participation import Moment, Schedule
from atoll.federation.selection import Experience, Pool, Selection, parse_selection
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import (
    CohortError,
    NamesChecked,
    OneShotError,
    PrivacyError,
    TaskError,
    describe_given,
    require_keywords,
    unknown,
)
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.replies import Rule
from atoll.kernel.wrapper import title_of, values_of
from atoll.metrics.measures import OWN, measure_of
from atoll.protect.attacks import Attack, Backdoor, parse_attack
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.compression import Compression, parse_compression
from atoll.protect.local_level import LocalPrivacy
from atoll.protect.promise import Course, Release
from atoll.protect.protection import Protection
from atoll.protect.rehearsal import promises_samples, rehearse
from atoll.protect.rules import Robust, parse_rule
from atoll.protect.secure import Secure, SecureSum, parse_secure
from atoll.protect.shares import PrivacyInShares
from atoll.protect.stages import Stage
from atoll.protect.words import parse_privacy
from atoll.runtime.memory import MEMORIES
from atoll.runtime.population import MANY_CLIENTS
from atoll.toolbox.client.private import require_own_gradients

SAMPLE_SIZE = 1_000  # clients that are scored where there are very many, unless another number is asked for


@dataclass(frozen=True)
class Settings(NamesChecked):
    """How a federation is run; together with task and algorithm, everything that decides its numbers."""

    rounds: int = 30
    seed: int = 0
    # clients per round, or their share; or, with "poisson:Q", each with probability Q; all by default
    cohort: int | float | str | None = None
    select_clients: str = "uniform"  # who of them is asked: uniform, power-of-choice:D, oort, ucb:GAMMA or turns
    participation: str = "constant"  # who is there: constant, random:P, diurnal:T, turnover:S or file:PATH
    drop: float = 0.0  # probability that a client of the cohort is lost
    late: float = 0.0  # probability that a reply arrives in a later round
    delay: int = 1  # the most rounds that a late reply needs
    eval_every: int | None = None  # rounds; a tenth of all by default
    curve: tuple[int, ...] = ()  # local epochs of a one-shot method after which its answer is scored, too
    # who is scored, beside the central test set: "all" clients, "sample:N" of them, nobody ("central"), or nothing at
    # all ("none"); "auto" is all clients, and a sample of SAMPLE_SIZE where there are more than MANY_CLIENTS
    evaluation: str = "auto"
    metric: str = OWN  # what clients are judged by: accuracy, f1, auroc, ...; "auto" is the task's own score
    memory: str = "auto"  # where clients keep what they keep: "ram", "disk", or "auto" for the one that fits
    compress: str = "none"  # how messages become lean: none, topk:P, randk:P, qsgd:BITS, sign or lowrank:R
    aggregate: str = "mean"  # how replies become one: mean, or a rule that bears hostile ones, such as nnm+trimmed
    attack: str = "none"  # what a share of the clients does to the others, such as sign-flip:0.2
    dp: str = "none"  # what is promised about a client, such as client:epsilon=4,delta=1e-5
    secure: str = "none"  # what the server reads of replies: all of each, or only sums: "sums", "masks" or "ckks"

    def change(self, values: Mapping[str, Any], of: Callable[..., Any]) -> Self:
        """Return settings with other values, which were given to a function beside its own arguments."""
        require_keywords(of.__name__, values, of, also=[one.name for one in fields(self)])
        return replace(self, **values)

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise for settings that make no sense for this task and algorithm."""
        for name in ("rounds", "seed", "delay"):
            if not isinstance(value := getattr(self, name), int):
                raise CohortError(f"`{name}` must be a whole number. Got {describe_given(value)}.")
        if self.rounds < 1:
            raise CohortError(f"`rounds` must be at least 1. Got {self.rounds!r}.")
        if algorithm.one_shot and self.rounds != 1:
            raise OneShotError(
                f"{title_of(algorithm)} uploads once, so `rounds` must be 1. Got rounds={self.rounds}.",
                hint="to train longer on each client, raise its `epochs`.",
            )
        if self.rounds < algorithm.least_rounds:
            raise CohortError(
                f"`rounds` must be at least {algorithm.least_rounds}: with less, a part of {name_of(algorithm)} "
                f"never runs. Got rounds={self.rounds}.",
                hint="raise `rounds`, or lower the rounds of the first part.",
            )
        if not 0 <= self.drop < 1:
            raise CohortError(f"`drop` must be a float in [0, 1). Got {self.drop!r}.")
        if not 0 <= self.late < 1:
            raise CohortError(f"`late` must be a float in [0, 1). Got {self.late!r}.")
        if self.delay < 1:
            raise CohortError(f"`delay` must be at least 1 round. Got {self.delay!r}.")
        _ = self.schedule  # raises for words or a file that cannot be read
        self._check_evaluation(task.clients)
        self._check_curve(algorithm)
        measure_of(self.metric, task.network).check(task.public_facts())
        if self.evaluation == "central" and task.central is None:
            raise CohortError("`evaluation='central'` needs a task with a central test set. This one has none.")
        if algorithm.needs_public_data:
            task.public_for(title_of(algorithm))
        if algorithm.items_by and not task.recommends:
            raise TaskError(
                f"{title_of(algorithm)} recommends items to users. {task.name} is no such task.",
                hint="take interactions, such as `movietweetings-5core`, or ratings of your own: Task.ratings(...).",
            )
        check_mixes(algorithm, task.public_facts())
        self._check_protection(task, algorithm)
        if self.memory not in MEMORIES:
            raise unknown("memory", self.memory, MEMORIES)
        size = self.cohort_size(task.clients)
        if self.select_clients != "uniform":
            if self.cohort is None or self._join_share is not None:
                raise CohortError(
                    "`select_clients` says who is asked, so `cohort` must be a number of clients, or a share of them. "
                    f"Got cohort={self.cohort!r}.",
                    hint="for example cohort=5, select_clients='power-of-choice:10'.",
                )
            self.selection.check(size, task.clients)
            if algorithm.one_shot and self.selection.reads_losses:
                raise CohortError(
                    f"`select_clients={self.select_clients}` learns from earlier rounds, and {title_of(algorithm)} has "
                    "one.",
                    hint="leave out `select_clients`.",
                )

    # -- protection: its words are parsed once -----------------------------------------------------------------------
    @cached_property
    def privacy(self) -> ClientPrivacy | LocalPrivacy | PrivacyInShares | None:
        """What is promised about a client."""
        found = parse_privacy(self.dp)
        masked = self._secure is not None and self._secure.masks
        return PrivacyInShares.of(found) if masked and isinstance(found, ClientPrivacy) else found

    @cached_property
    def _secure(self) -> Secure | None:
        return parse_secure(self.secure)

    @cached_property
    def _compression(self) -> Compression | None:
        return parse_compression(self.compress)

    @cached_property
    def _attack(self) -> Attack | None:
        return parse_attack(self.attack)

    @cached_property
    def _rule(self) -> Robust | None:
        return parse_rule(self.aggregate)

    def _check_promises(self, task: Task, algorithm: Algorithm) -> None:
        """Raise for a compression, a promise of privacy or secure sums that cannot be with this task and algorithm."""
        if self._compression is not None:
            self._check_compression(self._compression, task, algorithm)
        if promises_samples(algorithm):
            if algorithm.trains_by_sgd:
                require_own_gradients(algorithm, task.public_facts())
            rehearse(algorithm, task)
        if self.privacy is not None:
            self._check_privacy(self.privacy, task, algorithm)
        if self._secure is not None:
            self._secure.check(
                algorithm, self.cohort_size(task.clients), late=self.late, rule=self.aggregate, compress=self.compress,
                attack=self.attack, drop=self.drop, mixed=task.architecture is not None,
                dp="none" if isinstance(self.privacy, PrivacyInShares) else self.dp,
            )  # fmt: skip
        self._check_beside(task, samples=promises_samples(algorithm))

    def _check_beside(self, task: Task, *, samples: bool) -> None:
        """Raise for what leaves clients beside their messages where these are protected: losses, and scaling."""
        private = samples or self.privacy is not None
        if (private or self._secure is not None) and self.select_clients != "uniform" and self.selection.reads_losses:
            raise PrivacyError(
                "Clients that are asked by their losses send these beside their messages, which no mechanism covers. "
                f"Got select_clients={self.select_clients!r}.",
                hint="use select_clients='uniform' or 'turns'.",
            )
        scaled = "none" if task.scaling is None else task.scaling.schema.standardise
        if private and scaled == "global":
            raise PrivacyError(
                "Scaling by the samples of all clients tells their exact means and deviations, which no mechanism "
                "covers. Got standardise='global'.",
                hint="scale numbers beforehand and use standardise='none'"
                + ("." if samples else ", or let clients scale their own: standardise='client'."),
            )
        if samples and scaled == "client":
            raise PrivacyError(
                "Scaling by a client's own samples makes all of them depend on each other, which sample-level privacy "
                "does not cover. Got standardise='client'.",
                hint="scale numbers beforehand, by what everybody knows of them, and use standardise='none'.",
            )

    def _check_compression(self, compression: Compression, task: Task, algorithm: Algorithm) -> None:
        """Raise for a compression that does not go with the models that are sent; warn where none are."""
        sent = [algorithm.networks(facts) for facts in task.public_facts().by_architecture]
        if compression.feeds_back and any(len(set(networks)) > 1 for networks in sent):
            raise CohortError(
                f"With `compress={self.compress}` clients remember what was cut off from a model, but "
                f"{title_of(algorithm)} sends models of one network first and of another one later.",
                hint="take a compression that remembers nothing, such as qsgd:8.",
            )
        compression.check([network.initial for networks in sent for network in networks])
        compression.warn_of_nothing(algorithm)

    def _check_protection(self, task: Task, algorithm: Algorithm) -> None:
        """Raise for a rule, an attack or a promise that cannot work with this task and algorithm."""
        self._check_promises(task, algorithm)
        if self._attack is not None:
            self._attack.check(task, algorithm)
        rule = self._rule
        if rule is None:
            return
        if not algorithm.sums_suffice:
            raise CohortError(
                f"`aggregate={self.aggregate}` makes one reply of many, but the server of {title_of(algorithm)} reads "
                "single replies.",
                hint="leave out `aggregate`, or take a method whose server needs sums only: `atoll list`.",
            )
        asked, hostile = self.cohort_size(task.clients), self._count_attackers(task.clients)
        resolved = rule.resolve(asked, task.clients, hostile)
        if hostile is not None:
            resolved.warn_of_attackers(asked, task.clients, hostile)
        if rule.needs_public_data:
            task.public_for(f"`aggregate={self.aggregate}`")
            facts = task.public_facts()
            sent = [algorithm.broadcast(algorithm.start(one)) for one in facts.by_architecture]
            if "delta" not in algorithm.sends or not all(isinstance(one, Params) for one in sent):
                raise CohortError(
                    f"For `aggregate={self.aggregate}`, clients must be sent one model and send its change. "
                    f"{title_of(algorithm)} sends something else.",
                    hint="take another rule, such as nnm+trimmed.",
                )
            if {*algorithm.networks(facts)} != {facts.network}:
                raise CohortError(
                    f"For `aggregate={self.aggregate}` the server trains a model of the clients' network, but "
                    f"{title_of(algorithm)} sends models of another one.",
                    hint="take another rule, such as nnm+trimmed.",
                )

    def _check_privacy(
        self, privacy: ClientPrivacy | LocalPrivacy | PrivacyInShares, task: Task, algorithm: Algorithm
    ) -> None:
        chosen = self.select_clients != "uniform"
        course = Course(
            task.clients, sampled=self.cohort is None or self._join_share is not None or self.cohort == 1.0,
            by_chance=self._join_share is not None, late=self.late, schedule=self.participation, selects=chosen,
            aggregate=self.aggregate, compress=self.compress,
            secure=self.secure != "none", one_shot=algorithm.one_shot, mixed=task.architecture is not None,
        )  # fmt: skip
        privacy.check(algorithm, course)
        # raises where no noise reaches epsilon
        privacy.resolve(self.share_asked(task.clients), count_messages(self.rounds, algorithm))

    @property
    def _join_share(self) -> float | None:
        """The probability with which each client joins a round; None where cohorts have a size."""
        if not isinstance(self.cohort, str):
            return None
        found = re.fullmatch(r"poisson:([0-9.eE+-]+)", self.cohort)
        try:
            share = float(found[1]) if found else math.nan
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise CohortError(
                f"`cohort` must be a number of clients, a share of them, or poisson:Q with Q in (0, 1]. Got "
                f"{self.cohort!r}.",
                hint="for example cohort='poisson:0.1'.",
            )
        return share

    def share_asked(self, clients: int) -> float:
        """Return the probability with which a client is asked in a round."""
        return self._join_share or self.cohort_size(clients) / clients

    def describe_privacy(
        self, clients: int, rounds: int, most: int | None = None, *, sites: bool = False
    ) -> str | None:
        """Say what is promised after so many messages of a client, noise being found for `most`; None without any.

        With `sites` it is about real clients.
        """
        if self.privacy is None:
            return None
        share = self.share_asked(clients)
        return self.privacy.resolve(share, most or self.rounds).describe(share, clients, rounds, sites=sites)

    def promised_epsilon(self, clients: int, rounds: int, most: int | None = None) -> float | None:
        """Return epsilon of one client after so many messages, as `describe_privacy`; None without a promise."""
        if self.privacy is None:
            return None
        share = self.share_asked(clients)
        return self.privacy.resolve(share, most or self.rounds).spent(share, rounds)["pld"]

    def release(self, clients: int, rounds: int, most: int | None = None) -> Release | None:
        """Return what a run released: its noise, who was asked, how often; None without a promise."""
        if self.privacy is None:
            return None
        share = self.share_asked(clients)
        noise = self.privacy.resolve(share, most or self.rounds).noise
        assert noise is not None
        return noise, share, rounds

    def describe_rule(self, clients: int) -> str | None:
        """Say which rule makes one reply of many, and what it bears; None for the mean."""
        if self._rule is None:
            return None
        asked = self.cohort_size(clients)
        return self._rule.resolve(asked, clients, self._count_attackers(clients)).describe(asked)

    def _count_attackers(self, clients: int) -> int | None:
        return None if self._attack is None else len(self.draw_attackers(clients))

    def count_honest(self, clients: int) -> int:
        """Return how many of so many clients do not attack: figures are theirs."""
        return clients - (self._count_attackers(clients) or 0)

    def draw_attackers(self, clients: int) -> NDArray[np.int64]:
        """Draw the clients that attack, by the seed alone; nobody without an attack."""
        return _draw_attackers(self._attack, clients, self.seed)

    def poison(self, task: Task, attackers: NDArray[np.int64]) -> Task:
        """Return the task with the attackers' samples as they changed them; as it is unless they do."""
        return task if self._attack is None else self._attack.poison(task, attackers, self.seed)

    def show_trigger(self, task: Task) -> Task | None:
        """Return the task whose test samples show a backdoor's trigger; None without a backdoor."""
        return self._attack.show_trigger(task) if isinstance(self._attack, Backdoor) else None

    def protect(
        self,
        stages: Sequence[Stage],
        clients: int,
        attackers: NDArray[np.int64],
        dtype: torch.dtype = torch.float32,
        messages: int | None = None,
        secret: bytes | None = None,
    ) -> Protection:
        """Return what stands between clients and server: stages in their order, the attack, the rule.

        A client sends so many `messages` at most, one in every round by default. Noise of the server's own is drawn
        from a `secret`, or else from the seed.
        """
        asked, rule = self.cohort_size(clients), self._rule
        made = (*(() if self._compression is None else (self._compression,)), *stages)
        forger = None if self._attack is None or self._attack.on_data else self._attack
        closing: Rule | None = None
        if rule is not None:
            closing = rule.resolve(asked, clients, self._count_attackers(clients))
        if self.privacy is not None:
            share = self.share_asked(clients)
            more, released = self.privacy.protect(
                share, clients, messages or self.rounds, self.seed if secret is None else secret
            )
            made, closing = (*made, *more), closing if released is None else released
        if self._secure is None:
            return Protection(made, forger, attackers, closing)
        secure = replace(self._secure)  # each run has keys of its own
        if isinstance(closing, SecureSum):  # the promise has encoded messages itself
            return Protection(made, forger, attackers, replace(closing, dtype=dtype), secure.adder(self.seed))
        made = (*made, *secure.stages(asked))
        return Protection(made, forger, attackers, secure.rule(asked, dtype), secure.adder(self.seed))

    def _check_curve(self, algorithm: Algorithm) -> None:
        """Raise unless the answer of this method can be scored after these epochs of its clients' one training."""
        if not self.curve:
            return
        numbers, title, last = [*self.curve], title_of(algorithm), count_epochs(algorithm)
        if not all(isinstance(one, int) and one >= 1 for one in numbers) or numbers != sorted({*numbers}):
            raise CohortError(
                f"`curve` must be numbers of epochs, from 1 on and each larger than the one before. Got {numbers}.",
                hint="for example curve=(1, 11, 21, 36).",
            )
        if not algorithm.one_shot:
            raise CohortError(
                f"`curve` scores one long local training after some of its epochs. {title} trains in rounds.",
                hint="leave it out: rounds are scored as they come, as `eval_every` says.",
            )
        if last is None:
            raise CohortError(f"`curve` counts epochs of local training. Clients of {title} have none.")
        if numbers[-1] > last:
            raise CohortError(
                f"`curve` must end at the last epoch at the latest: {title} trains for {last}. Got {numbers[-1]}.",
                hint=f"raise `epochs` to {numbers[-1]}, or leave out what is beyond {last}.",
            )
        plain = {"dp": "none", "secure": "none", "compress": "none", "aggregate": "mean", "late": 0.0}
        changed = [name for name, value in plain.items() if getattr(self, name) != value]
        if changed:
            raise CohortError(
                "`curve` has clients reply after every point of it. What protects, packs, delays or replaces a message "
                f"counts on one. Got {', '.join(f'{name}={getattr(self, name)}' for name in changed)}.",
                hint="leave out one or the other.",
            )
        if self.evaluation == "none":
            raise CohortError("`curve` needs somebody to score. Got evaluation='none'.")

    def _check_evaluation(self, clients: int) -> None:
        size = self._sample_size
        if size is None and self.evaluation not in ("auto", "all", "central", "none"):
            raise CohortError(
                f"`evaluation` must be 'auto', 'all', 'sample:N', 'central' or 'none'. Got {self.evaluation!r}."
            )
        if size is not None and not 2 <= size <= clients:
            raise CohortError(
                f"A sample that is scored must have 2 to {clients} clients, all that there are. Got "
                f"{self.evaluation!r}.",
                hint="`evaluation=all` scores everybody.",
            )

    @property
    def _sample_size(self) -> int | None:
        """How many clients the evaluation asks for; None where it gives no number."""
        found = re.fullmatch(r"sample:(\d{1,15})", self.evaluation)
        return None if found is None else int(found[1])

    def resolve(self, clients: int) -> Self:
        """Return the settings for so many clients: what was left open is decided."""
        if self.evaluation != "auto":
            return self
        return replace(self, evaluation="all" if clients <= MANY_CLIENTS else f"sample:{SAMPLE_SIZE}")

    @property
    def scores_clients(self) -> bool:
        """Whether clients are scored, all or some."""
        return self.evaluation not in ("central", "none")

    def draw_scored(self, clients: int) -> NDArray[np.int64]:
        """Draw the clients that are scored, by the seed alone: the same in every round and for every method."""
        size = self.resolve(clients)._sample_size
        drawn = np.arange(clients)
        if size is not None:
            drawn = np.sort(generator(self.seed, "scored clients").choice(clients, size, replace=False))
        return np.setdiff1d(drawn, self.draw_attackers(clients)).astype(np.int64)  # only honest clients are scored

    @cached_property
    def schedule(self) -> Schedule:
        """Who is there; a file is read once."""
        return participation.parse(self.participation)

    @cached_property
    def selection(self) -> Selection:
        """Who of those that are there is asked."""
        return parse_selection(self.select_clients)

    def cohort_size(self, clients: int) -> int:
        """Count the clients that are asked in a round."""
        asked = clients if self.cohort is None else self.cohort
        if isinstance(asked, str):
            assert self._join_share is not None
            return max(1, round(self._join_share * clients))
        if isinstance(asked, float):
            if not 0 < asked <= 1:
                raise CohortError(f"`cohort` as a share must be in (0, 1]. Got {asked!r}.")
            asked = max(1, round(asked * clients))
        if not 1 <= asked <= clients:
            raise CohortError(
                f"`cohort` must be between 1 and the number of clients, {clients}. Got {asked}.",
                hint="lower `cohort`, or raise `clients`.",
            )
        return asked

    def list_present(self, clients: int, round: int) -> NDArray[np.int64]:
        """List the clients that are there in a round, as the schedule says."""
        return np.flatnonzero(self.schedule(Moment(round, clients, self.seed, self.rounds))).astype(np.int64)

    def choose(
        self,
        clients: int,
        round: int,
        busy: NDArray[np.int64] | None = None,
        known: Experience | None = None,
        samples: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Choose the clients asked in a round, of those that are there and not busy with an older reply.

        A selection reads what is `known` of all clients from earlier rounds, and how many `samples` they have.
        """
        there = self.schedule(Moment(round, clients, self.seed, self.rounds))
        if busy is not None:
            there[busy] = False
        present = np.flatnonzero(there).astype(np.int64)
        if self._join_share is not None:
            joins = generator(self.seed, "cohort", round).random(clients) < self._join_share
            return present[joins[present]]
        size = self.cohort_size(clients)
        if size >= len(present):
            return present
        counts = np.ones(clients) if samples is None else samples.astype(np.float64)
        known = Experience.none(clients) if known is None else known
        pool = Pool(present, size, known, counts, generator(self.seed, "cohort", round))
        return np.sort(self.selection.choose(pool)).astype(np.int64)

    def evaluates_after(self, rounds: int) -> bool:
        """Return whether clients are evaluated after so many rounds."""
        return self.evaluation != "none" and (rounds % self.every == 0 or rounds == self.rounds)

    @property
    def every(self) -> int:
        """How many rounds there are from one evaluation to the next."""
        return self.eval_every or max(1, self.rounds // 10)


def count_epochs(algorithm: Algorithm) -> int | None:
    """Return how many epochs clients train in one go; None where a method does not say."""
    found = values_of(algorithm).get("epochs")
    return found if isinstance(found, int) else None


def count_messages(rounds: int, algorithm: Algorithm) -> int:
    """Return how many messages a client sends at most: one a round, and those before its first round."""
    return rounds + (algorithm.exchanges if algorithm.defines("prepare") else 0)


@functools.lru_cache(maxsize=16)
def _draw_attackers(attack: Attack | None, clients: int, seed: int) -> NDArray[np.int64]:
    drawn = np.empty(0, dtype=np.int64) if attack is None else attack.draw_attackers(clients, seed)
    drawn.flags.writeable = False  # everybody gets the same array
    return drawn
