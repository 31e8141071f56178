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
from atoll.compose.pieces import Dpsgd
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.predictor import predictor_of
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


def played(task, words, servers=None):
    """Play a method; return what is sent, kept and deployed, as leaves by place, and the server's states.

    With `servers` the server has these states, whatever is sent: then what clients receive is the same.
    """
    seen, states = {}, []

    def aggregate(inner, server, replies):
        states.append(inner.aggregate(server, replies) if servers is None else servers[len(states)])
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

    method = shorten(create(words))
    hooks = {name: note(name) for name in ("local", "finish", "personalize") if method.defines(name)}
    hooks["aggregate"] = aggregate
    engine = Counting(device="cpu", strategy="whole eager", dtype=torch.float64)
    try:
        federate(
            task, with_hooks(method, hooks), rounds=1 if method.one_shot else max(3, method.least_rounds),
            engine=engine, progress=False,
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
    place, gap = furthest(one, played(exchanged(task, labels=not counts), words, servers)[0])
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
