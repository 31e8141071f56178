"""Swap tests: one sample is exchanged under a tiny clip, and nothing that leaves a client or is deployed may follow it.

Noise is drawn from the same seed both times, so only what the sample itself changes is seen: at most the clip in every
sum that it is in. A method that promises so much and makes something else of samples is refused before a client works.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.crossings import task_of

from atoll import LocalEngine, create, federate
from atoll.algorithms import FedAvg, list_methods, list_pairs
from atoll.compose import as_method
from atoll.compose.pieces import Dpsgd
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.predictor import predictor_of
from atoll.protect.client_level import NoisySum
from atoll.protect.rehearsal import rehearse
from atoll.testing.conformance.methods import shorten
from atoll.testing.conformance.rehearsal import with_hooks
from atoll.testing.conformance.trees import list_leaves
from atoll.toolbox.client.losses import losses_of

CLIP = 1e-6
MOST = 100 * CLIP  # what steps and passes make of it
PIECES = (
    "fedavg+prox", "fedavg+tune", "fedavg+gate", "fedper+partial", "fedavg+sam", "ditto+gate", "ditto@cfl",
    "fedavg@flhc",
)  # fmt: skip
INSIDE = ("fedavg+dpsgd+tune", "fedavg+dpsgd+gate", "ditto+dpsgd@cfl", "fedavg+dpsgd@ifca", "local+dpsgd+gate")
STATISTICS = {"counts", "moments", "count", "sum", "square", "labels"}


class Counting(LocalEngine):
    """Counts how often clients were asked to work."""

    jobs = 0

    def run(self, *given):
        self.jobs += 1
        return super().run(*given)


def exchanged(task, *, labels):
    """The same task in which the first sample of client 0 is another one, far away; with `labels`, of another class."""
    train = task.splits["train"]
    row = int(train.order[train.offsets[0]])
    x, y = task.x.clone(), task.y.clone()
    if task.recommends or labels:
        y[row] = (y[row] + 1) % task.classes
    if x.is_floating_point():
        x[row] = -50 * x[row] + 7
    return replace(task, x=x, y=y)


def played(task, words, servers=None, **more):
    """Play a method; return what is sent, kept and deployed, as leaves by place, and the server's states.

    With `servers` the server has these states, whatever is sent: then what clients receive is the same. What it would
    have made of the replies is there as well.
    """
    seen, states = {}, []

    def aggregate(inner, server, replies):
        after = inner.aggregate(server, replies)
        seen.update(list_leaves({f"server after round {len(states)}": after}))
        states.append(after if servers is None else servers[len(states)])
        return states[-1]

    def note(name):
        def hook(inner, received, cohort):
            made = getattr(inner, name)(received, cohort)
            if not cohort._host.measures:
                where = f"of {cohort.clients.tolist()} in round {cohort.round}"
                seen.update(list_leaves({f"{name} {where}": show(made, cohort)}))
                if name == "personalize":
                    seen.update(list_leaves({f"welcome {where}": show(inner.welcome(received, cohort), cohort)}))
            return made

        return hook

    method = shorten(as_method(words))
    hooks = {name: note(name) for name in ("local", "finish", "personalize") if method.defines(name)}
    hooks["aggregate"] = aggregate
    engine = Counting(device="cpu", strategy="whole eager", dtype=torch.float64)
    try:
        federate(
            task, with_hooks(method, hooks), rounds=1 if method.one_shot else max(3, method.least_rounds),
            engine=engine, progress=False, **more,
        )  # fmt: skip
    except AtollError:
        assert not engine.jobs, "it was refused after clients had worked"
        raise
    return seen, states


def show(made, cohort: Cohort):
    """What a hook returned, as a tree."""
    if hasattr(made, "send"):
        return {"send": dict(made.send), "keep": made.keep, "beside": dict(made.beside)}
    if made is None or isinstance(made, dict):
        return made
    try:
        one = predictor_of(made)
    except AttributeError:
        return made
    return {"model": cohort.stacked(one.model), "beside": cohort.stacked(one.beside)}


def furthest(one, other):
    """Where two outcomes differ most, and by how much."""
    assert one.keys() == other.keys()
    gaps = {
        place: float((leaf.double() - other[place].double()).abs().max()) if leaf.numel() else 0.0
        for place, leaf in one.items()
        if isinstance(leaf, torch.Tensor)
    }
    place = max(gaps, key=gaps.__getitem__)
    return place, gaps[place]


def task_for(words):
    method = create(words)
    kind = "items" if method.items_by else "classes"
    return task_of(kind, public=kind != "items", items_by=method.items_by or "")


def with_privacy(name, noise="1"):
    inner, _, values = name.partition(":")
    piece = "" if "dpsgd" in inner else "+dpsgd"
    return f"{inner}{piece}:{values + ',' if values else ''}sample_clip={CLIP},noise={noise}"


@pytest.mark.parametrize("name", [*list_methods(), *list_pairs(), *PIECES, *INSIDE])
def test_no_sample_moves_what_leaves_or_is_deployed_beyond_the_clip(name):
    try:
        words = with_privacy(name)
        task = task_for(words)
        one, servers = played(task, words)
    except AtollError:
        return
    counts = any(STATISTICS & {*place.split("/")} for place in one)  # a label moves its count by 1, whatever the clip
    again, _ = played(exchanged(task, labels=not counts), words, servers)
    one, again = ({place: leaf for place, leaf in some.items() if place[:6] != "server"} for some in (one, again))
    place, gap = furthest(one, again)
    assert gap <= MOST, f"{place} moves by {gap:.3g}"


@pytest.mark.parametrize(
    "name", ["fedavg-ft", "fedbabu", "reptile", "fedrep", "ditto", "mtfl", "oneshot-margins", "fedavg+tune"]
)
def test_what_can_be_covered_is_not_refused(name):
    rehearse(create(with_privacy(name)), task_for(name))


@pytest.mark.parametrize(
    ("name", "hook", "split", "made"),
    [
        ("knn-per", "personalize", "training", "what clients deploy"),
        ("fedala", "local", "training", "what clients send and keep"),
        ("interp-bandit", "local", "validation", "what clients send and keep"),
        ("local-items", "local", "training", "what clients send and keep"),
        ("fedavg+gate", "local", "training", "what clients send and keep"),
        ("fedavg+dpsgd+tune", "personalize", "training", "what clients deploy"),
        ("ditto+dpsgd@cfl", "local", "training", "what clients send and keep"),
    ],
)
def test_who_reads_samples_otherwise_is_refused_and_told_what_would_not_be_covered(name, hook, split, made):
    words = with_privacy(name)
    with pytest.raises(PrivacyError, match=f"`{hook}` of .* reads {split} samples as they are, so {made} would not be"):
        played(task_for(words), words)


def test_a_method_that_deploys_what_it_read_is_found():
    """The planted fault: a model that is moved by losses of its client's samples."""

    class Sly(FedAvg):
        def personalize(self, server, cohort):
            return cohort.stacked(server) * (1 + losses_of([server], cohort).mean())

    method = Dpsgd(inner=Sly(), sample_clip=CLIP)
    with pytest.raises(PrivacyError, match=r"`personalize` of Sly\+dpsgd reads training samples"):
        federate(task_for("fedavg"), method, rounds=1, progress=False)


def test_two_trainings_of_a_round_have_noise_of_their_own(make_task):
    """Ditto's two models see the same batches; with the same noise, their difference would have none."""
    task = make_task(sizes=(8, 8), dtype=torch.float64)
    words = f"ditto+dpsgd:sample_clip={CLIP},noise=1e6,lam=0"
    seen, _ = played(task, words)
    sent, kept = (
        torch.cat([leaf.flatten() for place, leaf in seen.items() if f"in round 0/{part}" in place])
        for part in ("send", "keep")
    )
    kept = kept - torch.cat([leaf.flatten() for leaf in task.network.initial.values()]).repeat(2)
    assert abs(np.corrcoef(sent, kept)[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("name", "passes", "last"),
    [("fedavg:epochs=2", 6, 0), ("fedavg-ft:tune_epochs=4", 7, 4), ("fedrep:head_epochs=1,final_epochs=5", 11, 5)],
)
def test_the_sentence_counts_passes_for_what_is_deployed(make_task, name, passes, last):
    report = federate(make_task(sizes=(8, 5)), with_privacy(name), rounds=3, progress=False)
    (sentence,) = report.privacy
    deployed = f", {last} of them for what it deploys" if last else ""
    assert f"({passes} passes{deployed})" in sentence
    assert "what clients send, keep and deploy" in sentence


def test_the_sentence_says_what_blanking_and_exchanging_a_sample_cost(make_task):
    """One pass at noise 2: blanking moves the sum by the clip, which is mu = 1/2, exchanging by twice as much."""
    (sentence,) = federate(make_task(sizes=(8, 5)), "fedavg+dpsgd:noise=2", rounds=1, progress=False).privacy
    assert "epsilon 1.99 at delta 1e-05 for blanking one sample" in sentence
    assert "and 4.38 for exchanging it for any other" in sentence


# -- clients -----------------------------------------------------------------------------------------------------------
PROMISE = {"dp": f"client:noise=1,clip={CLIP},delta=1e-2"}


def with_another_first_client(task):
    """The same task in which client 0 has other samples, far away and of other classes: as many of them."""
    x, y = task.x.clone(), task.y.clone()
    for split in task.splits.values():
        rows = split.order[split.offsets[0] : split.offsets[1]]
        y[rows] = (y[rows] + 1) % task.classes
        if x.is_floating_point():
            x[rows] = -50 * x[rows] + 7
    return replace(task, x=x, y=y)


def played_with_releases(task, words, monkeypatch, given=None):
    """Play a method under a promise about clients; return what others than client 0 see, and the noisy sums.

    With `given`, the server reads these sums, whatever was sent: then nothing else may differ.
    """
    released, close = [], NoisySum.close

    def closing(rule, sums, total):
        noisy, expected = close(rule, sums, total)
        released.append(noisy)
        return (noisy if given is None else given[len(released) - 1]), expected

    monkeypatch.setattr(NoisySum, "close", closing)
    seen, _ = played(task, words, **PROMISE)
    monkeypatch.setattr(NoisySum, "close", close)
    return of_others(seen), released


def of_others(seen):
    """What the server makes, and what clients other than the first do, each by itself."""
    found = {}
    for place, leaf in seen.items():
        where = place.partition(" of [")[2]
        clients = [int(one) for one in where.partition("]")[0].split(",")] if where else []
        if place.startswith("server"):
            found[place] = leaf
        elif isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(clients):
            found |= {f"{place} client {client}": leaf[k] for k, client in enumerate(clients) if client}
    return found


@pytest.mark.parametrize("name", [*list_methods(), *list_pairs(), "fedavg+tune", "fedper+gate", "ditto+prox"])
def test_no_client_moves_what_others_see_beyond_the_clip(name, monkeypatch):
    """What others see follows from noisy sums, to the last bit, and no client moves a sum further than the clip."""
    try:
        task = task_for(name)
        one, sums = played_with_releases(task, name, monkeypatch)
    except AtollError:
        return
    again, other_sums = played_with_releases(with_another_first_client(task), name, monkeypatch, sums)
    for mine, theirs in zip(sums, other_sums, strict=True):
        gaps = [(mine[field] - theirs[field]).norm() for field in mine if len(mine[field].floating)]
        assert torch.stack(gaps).norm() <= 2 * CLIP * (1 + 1e-6)
    assert furthest(one, again)[1] == 0


def test_promises_about_clients_are_played(monkeypatch):
    """The tests above pass over what is refused: these are not."""
    for name in ("fedavg", "ditto", "fedper", "fedrep", "scaffold", "knn-per", "fedala", "perfedavg", "ccvr", "afl"):
        seen, sums = played_with_releases(task_for(name), name, monkeypatch)
        assert seen
        assert sums


def test_a_server_that_reads_more_than_sums_is_found(monkeypatch):
    """The planted fault: a server that looks at what the first client sent before noise was added."""
    seen = {}

    class Sly(FedAvg):
        def local(self, w, cohort):
            update = super().local(w, cohort)
            seen["delta"] = update.send["delta"].client(0)
            return update

        def aggregate(self, server, replies):
            return super().aggregate(server, replies) + seen["delta"]

    task = task_for("fedavg")
    one, sums = played_with_releases(task, Sly(), monkeypatch)
    again, _ = played_with_releases(with_another_first_client(task), Sly(), monkeypatch, sums)
    assert furthest(one, again)[1] > MOST
