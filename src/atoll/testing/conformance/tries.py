"""Work of clients and of the server, done once more in other ways; all must lead to the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernel.algorithm import Algorithm, Arrival, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Tree, flatten, rows_of, stacked_leaves, unflatten
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import title_of
from atoll.protect.channel import Channel
from atoll.runtime.engines.scan import Scanner, Tally
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance.engines import hold_population, population_of, put_on_device, with_task
from atoll.testing.conformance.playing import LONG
from atoll.testing.conformance.tasks import alter, draw_number
from atoll.testing.conformance.trees import require_same, take_row

if TYPE_CHECKING:
    from atoll.testing.conformance.rehearsal import Rehearsal

FAR = (30, 100, 1000)  # rounds that are not played: clients are asked as if they were, and in one that is drawn
TRIED_EVERY = 3  # rounds, for what takes as long as a round
BEYOND = 2000  # the last round that can be drawn
STILL, NO_STEP = 5000, 1e-100  # a far round with a step size that moves nothing: what is sent there was not learned
PURE = "pass what differs between clients in `carry` or `given`; a step must not capture it from outside."


def try_again(seen: Rehearsal, hooks: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Make hooks that also do their work once more in other ways; all must lead to the same."""
    method = seen.method
    last: list[tuple[Cohort, Update]] = []

    def clients(name: str) -> Callable[..., Any]:
        def hook(algorithm: Algorithm, broadcast: Tree, cohort: Cohort) -> Any:
            update = hooks[name](algorithm, broadcast, cohort)
            if update is None:
                return update
            last.append((cohort, update))

            def again(other: Cohort) -> Update:
                return do_again(algorithm, name, broadcast, other)

            if cohort.round % TRIED_EVERY == 0 or name == "prepare":
                with seen.finding("order-of-clients-does-not-matter"):
                    try_in_another_order(cohort, update, again)
            if name == "local":
                with seen.finding("clients-are-isolated"):
                    try_on_device(algorithm, broadcast, cohort, update, cohort.round % len(cohort))
                if cohort.round == (0 if method.one_shot else LONG - 1):
                    try_far_rounds(seen, cohort, again)
            return update

        return hook

    def server(name: str) -> Callable[..., Any]:
        def hook(algorithm: Algorithm, state: Tree, replies: Replies) -> Tree:
            after = hooks.get(name, call_hook(name))(algorithm, state, replies)
            if not last:  # nobody has replied yet, because nothing was asked of the replies
                return after
            if name == "aggregate" and last[0][0].round % TRIED_EVERY:
                last.clear()
                return after
            bench = cast("Workbench", replies.workbench)
            blind = replace(bench, _population=hold_population(bench._population, None))
            keep = name == "absorb" or not method.sums_suffice

            def again(step: int, workbench: Workbench) -> Tree:
                sent = send_again(algorithm, state, tuple(last), step)
                return getattr(algorithm, name)(state, Replies(sent, keep=keep, workbench=workbench))

            with seen.finding("order-of-clients-does-not-matter"):
                message = "The server must not depend on the order in which replies arrive."
                back = again(-1, bench)
                require_same(after, back, message, "weigh replies by their weight, not by their position.", 1e-9)
            with seen.finding("the-server-holds-no-samples"):
                message = f"`{name}` of {title_of(method)} must not depend on clients' samples or memory."
                forth = again(1, blind)
                require_same(after, forth, message, "the server has what clients send, and public samples.", 1e-9)
            last.clear()
            return after

        return hook

    def equip(algorithm: Algorithm, state: Tree, workbench: Workbench) -> Tree:
        after = algorithm.equip(state, workbench)
        with seen.finding("the-server-holds-no-samples"):
            blind = replace(workbench, _population=hold_population(workbench._population, None))
            message = f"`equip` of {title_of(method)} must not depend on clients' samples or memory."
            require_same(after, algorithm.equip(state, blind), message)
        return after

    tried = {"local": clients("local"), "aggregate": server("aggregate")}
    if "prepare" in hooks:
        tried |= {"prepare": clients("prepare"), "absorb": server("absorb")}
    return {**tried, "equip": equip} if method.defines("equip") else tried


def call_hook(name: str) -> Callable[..., Any]:
    """Make a hook that is the method's own."""
    return lambda algorithm, *inputs: getattr(algorithm, name)(*inputs)


def try_in_another_order(cohort: Cohort, update: Update, again: Callable[[Cohort], Update]) -> None:
    """Let clients work in another order: each does the same wherever it stands in the cohort."""
    order = generator(0, "order").permutation(len(cohort))
    shuffled = again(take_some(cohort, order))
    for position, k in enumerate(order):
        require_same(
            take_client(update, int(k)),
            take_client(shuffled, position),
            f"Client {cohort.clients[k]} must do the same wherever it stands in the cohort.",
            "use `cohort.ids`, not positions.",
        )


def do_again(algorithm: Algorithm, name: str, broadcast: Tree, cohort: Cohort) -> Update:
    """Let clients do a part of the method once more; what is tried is no part of the run."""
    host = cast("Scanner", copy.copy(cohort._host))
    host.tally = Tally()
    done: Update = getattr(algorithm, name)(broadcast, replace(cohort, _host=host, notes={}))
    return done


def try_on_device(algorithm: Algorithm, broadcast: Tree, cohort: Cohort, update: Update, k: int) -> None:
    """Let one client of a cohort do its work on its device, which holds nothing of others: it does the same."""
    alone = do_again(algorithm, "local", broadcast, put_on_device(take_some(cohort, [k])))
    message = describe_isolation(cohort.clients[k], len(cohort), cohort.round)
    require_same(take_client(update, k), take_client(alone, 0), message, PURE)


def try_far_rounds(seen: Rehearsal, cohort: Cohort, again: Callable[[Cohort], Update]) -> None:
    """Let clients work in rounds far ahead, which are not played.

    Each does the same as on its device, and with other validation samples, and what it sends is looked at as usual. In
    one more round clients take steps of no length: what is added to what they learned then stands by itself.
    """
    for number, round in enumerate((*FAR, draw_number(seen.method, "far round", LONG, BEYOND))):
        there, k = replace(cohort, round=round, notes={}), number % len(cohort)
        together = again(there)
        with seen.finding("clients-are-isolated"):
            alone = put_on_device(take_some(there, [k]))
            message = describe_isolation(cohort.clients[k], len(cohort), round)
            require_same(take_client(together, k), take_client(again(alone), 0), message, PURE)
        with seen.finding("validation-data-are-read-where-declared"):
            if not seen.method.reads_validation:
                other = again(with_task(there, alter(population_of(there).task, "val")))
                message = f"Training must not depend on validation samples, by which rounds are chosen (round {round})."
                require_same(take_client(together, k), take_client(other, k), message)
        for place, client in enumerate(there.clients.tolist()):
            seen.far[round, client] = together, place
    facts = cohort.task
    still = replace(facts, training=replace(facts.training, lr=NO_STEP))
    together = again(replace(cohort, task=still, round=STILL, notes={}))
    for place, client in enumerate(cohort.clients.tolist()):
        seen.far[STILL, client] = together, place


def describe_isolation(client: int, clients: int, round: int) -> str:
    """Say what must hold of a client in a round."""
    return (
        f"Client {client} must do the same on a device, which holds its samples alone, as in a cohort of {clients} "
        f"(round {round})."
    )


def take_client(update: Update, k: int) -> dict[str, Tree]:
    """Return one client's part of an update."""
    return {
        "send": {name: take_row(stack, k) for name, stack in update.send.items()},
        "weight": None if update.weight is None else update.weight[k],
        "keep": take_row(update.keep, k),
        "beside": take_row(dict(update.beside), k),
    }


def take_some(cohort: Cohort, order: Sequence[int] | NDArray[np.int64]) -> Cohort:
    """Return the clients at these positions of a cohort."""
    leaves, structure = flatten(cohort.received)
    rows = stacked_leaves(structure)
    index = torch.as_tensor(np.asarray(order))
    mine = [leaf[index] if row else leaf for leaf, row in zip(leaves, rows, strict=True)]
    return replace(cohort, clients=cohort.clients[order], received=unflatten(structure, mine))


def send_again(
    algorithm: Algorithm, server: Tree, done: Sequence[tuple[Cohort, Update]], step: int
) -> Iterator[Arrival]:
    """Send what cohorts sent, client by client in their order or, with step -1, in the opposite one."""
    channel = Channel()
    for cohort, update in done[::step]:
        for k in range(len(cohort))[::step]:
            one = slice(k, k + 1)
            send = {name: stack.rows(one) for name, stack in update.send.items()}
            weight = None if update.weight is None else update.weight[one]
            arrival = channel.up(algorithm, cohort.clients[one], Update(send, weight), cohort.round)
            sent = {"broadcast": algorithm.broadcast(server), "unicast": rows_of(cohort.received, one)}
            yield arrival._replace(**sent)
