"""Pieces: what can be added to a method without editing it, written after a plus: `fedper+prox:mu=0.1`.

A piece changes how the clients of a method train, wherever it calls `sgd`; or, as `tune` and `gate`, what they deploy.
A piece wraps the method, and is a method itself: its hyperparameters are those of both, it has a name, and everything
else treats it like any other. With the piece's neutral values it is the method alone, which the conformance battery
checks. A piece may keep something with the clients; the method never sees it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.algorithms import name_of
from atoll.algorithms.local import Local
from atoll.kernel.algorithm import (
    Algorithm,
    Deployed,
    Epochs,
    Limits,
    Natural,
    NonNegative,
    Predictor,
    Update,
    hyperparameters,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError, PrivacyError
from atoll.kernel.hyperparameters import Range, Share
from atoll.kernel.params import Params, Part, Stack, Tree
from atoll.kernel.predictor import Answer
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import Wrapper, fact, values_of
from atoll.toolbox.client import proximal, sgd
from atoll.toolbox.client.change import Change
from atoll.toolbox.client.paired import Judge, lead
from atoll.toolbox.client.private import Private, suggest_promise
from atoll.toolbox.client.sensitivity import Sensitivity, layers, most_sensitive, radii, require_layers, sensitivities
from atoll.toolbox.references import bibtex


@dataclass(frozen=True, kw_only=True)
class Piece(Wrapper):
    """Base of all pieces."""

    inner: Algorithm

    called: ClassVar[str]
    neutral: ClassVar[Mapping[str, Any]] = {}  # the values with which the piece changes nothing
    paper: ClassVar[str] = ""  # a key of references.bib

    def __post_init__(self) -> None:
        own = {one.name for one in hyperparameters(type(self))}
        both = sorted(own & values_of(self.inner).keys())
        if both:
            raise HyperparameterError(
                "A method and a piece must not share the name of a hyperparameter. "
                f"{name_of(self.inner)} and {self.called} both have {', '.join(both)}.",
                hint="the method may have the piece in it already.",
            )
        super().__post_init__()

    @fact
    def added(self) -> str:
        """What the method is put together with, and the piece."""
        return f"{self.inner.added}+{self.called}"

    @fact
    def cites(self) -> str:
        """The entries of the method and of the piece."""
        return "\n\n".join(filter(None, map(bibtex, (self.inner.cites, self.paper))))

    @fact
    def limits(self) -> Limits:
        """The method alone, with neutral values."""
        return {name_of(self.inner): dict(self.neutral)}


# -- pieces that change training ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfTraining(Piece):
    """Base of pieces that change every call of `sgd` in a method's `local`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trains_by_sgd:
            raise HyperparameterError(
                f"For a piece that changes training, a method must train by `sgd`. That in {name_of(self)} "
                "trains in another way, or with these values not at all.",
                hint="use the method without the piece.",
            )

    def _train(self, change: Change, broadcast: Tree, cohort: Cohort) -> Update:
        """Do the method's own work, on a cohort whose training has the change in it."""
        update = self.inner.local(broadcast, replace(cohort, changes=(*cohort.changes, change)))
        if not change.measured:
            raise HyperparameterError(
                f"For a piece that changes training, a method must train by `sgd`. That in {name_of(self)} says "
                "that it does, and did not.",
                hint="use the method without the piece; its author should set `trains_by_sgd = False`.",
            )
        return update


@dataclass(frozen=True, kw_only=True)
class Prox(OfTraining):
    """(mu / 2) ||w - start||^2: training is pulled back to where it began in this round. FedAvg with it is FedProx."""

    mu: NonNegative = 0.1  # μ: pull towards the start of the round

    called: ClassVar[str] = "prox"
    neutral: ClassVar[Mapping[str, Any]] = {"mu": 0.0}
    paper: ClassVar[str] = "li2020federated"

    def pulls(self, lr: float) -> dict[str, float]:
        """Say how far steps go towards what pulls them: all training is pulled to its start."""
        return {**self.inner.pulls(lr), "lr * mu": lr * self.mu}

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Work as the method, with the proximal term around the start of every training."""
        change = Change(term=lambda start: proximal(self.mu, center=start))
        return self._train(change, broadcast, cohort)


@dataclass(frozen=True, kw_only=True)
class Sam(OfTraining):
    """Sharpness-aware gradients, g(w + rho g / ||g||). FedAvg with them is FedSAM.

    With `part`, only that part of the model is perturbed: g / ||g|| is the part's own, and all of w is trained. Of norm
    layers alone it is SAM-ON (Mueller et al., NeurIPS 2023).
    """

    rho: NonNegative = 0.05  # ρ: radius of the neighbourhood
    part: Part = "all"  # which leaves are perturbed

    called: ClassVar[str] = "sam"
    neutral: ClassVar[Mapping[str, Any]] = {"rho": 0.0}
    paper: ClassVar[str] = "foret2021sharpness"

    @fact
    def follows_samples(self) -> bool:
        """Whether steps are not sharpness-aware."""
        return not self.rho and self.inner.follows_samples

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Work as the method, along sharpness-aware gradients."""
        if self.rho and not cohort.task.network.layout.part(self.part) & frozenset(cohort.initial.trained):
            cohort.warn(f"part={self.part} of sam has nothing to perturb in this model: training is not changed")
        return self._train(Change(radius=lambda _: self.rho, part=self.part), broadcast, cohort)


@dataclass(frozen=True, kw_only=True)
class Asam(OfTraining):
    """Sharpness-aware gradients in a neighbourhood that scales with the weights, g(w + rho w^2 g / || |w| g ||)."""

    rho: NonNegative = 0.5  # ρ: radius of the neighbourhood, for weights of size 1

    called: ClassVar[str] = "asam"
    neutral: ClassVar[Mapping[str, Any]] = {"rho": 0.0}
    paper: ClassVar[str] = "kwon2021asam"

    @fact
    def follows_samples(self) -> bool:
        """Whether steps are not sharpness-aware."""
        return not self.rho and self.inner.follows_samples

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Work as the method, along sharpness-aware gradients."""
        change = Change(radius=lambda _: self.rho, adaptive=True)
        return self._train(change, broadcast, cohort)


@dataclass(frozen=True, kw_only=True)
class Dpsgd(Piece):
    """Sample-level differential privacy: gradients of samples are cut to norm C, and noise is added to their sum.

    Every model that clients train is covered, those that they keep and deploy as well. A sample is in one sum per
    epoch, so E epochs in all cost sqrt(E) / z standard deviations, whatever the batch size; `report.privacy` says it as
    epsilon. Statistics whose sensitivity the method declares get the same noise, at the price of one epoch each; a
    method that sends anything else, or reads samples in any other way, is refused.
    """

    sample_clip: NonNegative = 1.0  # C: the largest norm of a sample's gradient, and of its features; 0: none is cut
    noise: NonNegative = 1.0  # z: standard deviation of the noise on a sum, over C

    called: ClassVar[str] = "dpsgd"
    neutral: ClassVar[Mapping[str, Any]] = {"sample_clip": 0.0, "noise": 0.0}
    paper: ClassVar[str] = "abadi2016deep"

    def __post_init__(self) -> None:
        if "noise" in values_of(self.inner):
            raise HyperparameterError(
                f"{name_of(self.inner)} has a `noise` of its own, which is not that of sample-level privacy.",
                hint=suggest_promise(self.inner),
            )
        super().__post_init__()
        if self.noise and not self.sample_clip:
            raise HyperparameterError("Noise is a multiple of the norm `sample_clip`, which must be above 0. Got 0.")
        if not self.trains_by_sgd and "model" in self.sends.values():
            raise HyperparameterError(
                f"For sample-level privacy, a method must train by `sgd`. That in {name_of(self)} trains in another "
                "way, or with these values not at all.",
                hint=suggest_promise(self.inner),
            )
        if self.sample_clip and self.inner.defines("prepare"):
            raise PrivacyError(
                f"{name_of(self.inner)} asks clients for more before their first round, and sample-level privacy does "
                "not cover that exchange.",
                hint=suggest_promise(self.inner),
            )
        self._require_covered({name for name, kind in self.sends.items() if kind != "model"} - self.releases)

    def _require_covered(self, uncovered: Set[str]) -> None:
        if self.sample_clip and uncovered:
            raise PrivacyError(
                f"Sample-level privacy covers what is trained, and statistics whose sensitivity is declared. What "
                f"{name_of(self.inner)} sends as {', '.join(sorted(uncovered))} is neither.",
                hint=suggest_promise(self.inner),
            )

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Work as the method, along private gradients; write down how often each sample was used."""
        if not self.sample_clip:
            return self.inner.local(broadcast, cohort)
        before, inside = cohort.passes, self._guard(cohort)
        update, change = self.inner.local(broadcast, inside), inside.changes[-1]
        covered = {name for fields in change.released for name in fields}
        covered |= {name for name, kind in self.sends.items() if kind == "model" and change.measured}
        self._require_covered({name for name, value in update.send.items() if len(value)} - covered)
        times = cohort.passes - before + len(change.released)
        cohort.observe(private_passes=torch.full((len(cohort),), float(times), device=cohort.device))
        return update

    def finish(self, server: Tree, cohort: Cohort) -> Tree:
        """Do the method's last step along private gradients."""
        return self.inner.finish(server, self._guard(cohort, "finish"))

    def personalize(self, server: Tree, cohort: Cohort) -> Deployed:
        """Return what the method deploys, made along private gradients."""
        return self.inner.personalize(server, self._guard(cohort, "personalize"))

    def welcome(self, server: Tree, cohort: Cohort) -> Deployed:
        """Return what the method gives new clients, made along private gradients."""
        return self.inner.welcome(server, self._guard(cohort, "welcome"))

    def joined(self, server: Tree, cohort: Cohort) -> Tensor:
        """Return the clusters of new clients, found without reading samples as they are."""
        return self.inner.joined(server, self._guard(cohort, "joined"))

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack | None:
        """Tune along private gradients."""
        inside = self._guard(cohort, "tune")
        own_way = self.inner.tune_newcomer(given, model, inside, epochs=epochs, stream=stream)
        return sgd(inside, start=model, epochs=epochs, stream=stream) if own_way is None else own_way

    def _guard(self, cohort: Cohort, hook: str = "") -> Cohort:
        """Return the clients for one hook, with private gradients, and nothing else to read their samples by."""
        if not self.sample_clip:
            return cohort
        change = Change(private=Private(self.sample_clip, self.noise, f"private {hook}".strip()))
        return replace(cohort, changes=(*cohort.changes, change), guarded=True)


@dataclass(frozen=True, kw_only=True)
class Fsa(OfTraining):
    """Sharpness-aware gradients with a larger radius for the layers that changed most the last time (FedFSA)."""

    rho: NonNegative = 0.1  # ρ: radius of most layers
    rho_larger: NonNegative = 0.2  # radius of the most sensitive ones
    top_c: Natural = 2  # C: how many these are
    sensitivity: Sensitivity = "raw"  # s_l: what makes a layer sensitive

    called: ClassVar[str] = "fsa"
    neutral: ClassVar[Mapping[str, Any]] = {"rho": 0.0, "rho_larger": 0.0}
    paper: ClassVar[str] = "xing2025flexible"

    @fact
    def follows_samples(self) -> bool:
        """Whether steps are not sharpness-aware."""
        return not (self.rho or self.rho_larger) and self.inner.follows_samples

    def start(self, task: Facts) -> Tree:
        """Start as the method; raise if the model has too few layers."""
        require_layers(self, task.network.initial, self.top_c)
        return self.inner.start(task)

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Train with the radii that the last sensitivities ask for; then keep the new ones, summed over trainings."""
        w = cohort.initial
        s = cohort.beside(Fsa.called).recall(default=Params.of(**dict.fromkeys(layers(w), 0.0)))
        chosen = most_sensitive(s, self.top_c)
        change = Change(
            radius=lambda start: radii(start, chosen, self.rho, self.rho_larger),
            measure=lambda start, end: sensitivities(self.sensitivity, cohort, start, end),
        )
        update = self._train(change, broadcast, cohort)
        s = Stack({name: torch.stack([one[name] for one in change.measured]).sum(0) for name in layers(w)})
        return replace(update, beside={**update.beside, Fsa.called: s})


@dataclass(frozen=True, kw_only=True)
class Partial(Piece):
    """Clients do unequal parts of their local work, and send what they have got to. FedProx with it is its paper's.

    A client's speed is drawn once, from `slowest` to 1: it takes that share of its steps. In a round, some clients stop
    earlier still, after a share of these that is drawn from 0 to 1. Everybody takes a step at least.
    """

    slowest: Annotated[float, Range(0, 1, open_low=True)] = 0.2  # the least speed that a client may have
    stragglers: Share = 0.0  # probability that a client stops early in a round

    called: ClassVar[str] = "partial"
    neutral: ClassVar[Mapping[str, Any]] = {"slowest": 1.0, "stragglers": 0.0}
    paper: ClassVar[str] = "li2020federated"

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Work as the method, as far as each client gets; write down how far that is."""
        if self.slowest == 1 and not self.stragglers:
            return self.inner.local(broadcast, cohort)
        work = np.array([self.share(cohort.task.seed, cohort.round, int(client)) for client in cohort.clients])
        work = work if cohort.work is None else work * cohort.work  # on a device that is slow by itself
        cohort.observe(work=torch.from_numpy(work).to(cohort.device))
        return self.inner.local(broadcast, replace(cohort, work=work))

    def share(self, seed: int, round: int, client: int) -> float:
        """Return the share of its steps that a client takes in a round."""
        speed = 1 - (1 - self.slowest) * generator(seed, "speed", client).random()
        stops, after = generator(seed, "straggler", round, client).random(2)
        return float(speed * (1 - after) if stops < self.stragglers else speed)


# -- pieces that change what is deployed -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tune(Piece):
    """Each client tunes a part of what it deploys on its training data. FedAvg with it is FedAvg-FT."""

    tune: Part = "head"  # which leaves are tuned
    tune_epochs: Epochs = 10  # E_ft: epochs of tuning

    called: ClassVar[str] = "tune"
    neutral: ClassVar[Mapping[str, Any]] = {"tune_epochs": 0}
    paper: ClassVar[str] = "wang2019federated"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune_epochs and not self.deploys_a_model:
            raise HyperparameterError(
                f"To be tuned, what a method deploys must be a model. That in {name_of(self)} deploys more.",
                hint="use the method without the piece.",
            )

    def personalize(self, server: Tree, cohort: Cohort) -> Deployed:
        """Tune the method's model."""
        return self._tune(self.inner.personalize(server, cohort), cohort)

    def welcome(self, server: Tree, cohort: Cohort) -> Deployed:
        """Tune the model of new clients, too, if they have labels."""
        offered = self.inner.welcome(server, cohort)
        return self._tune(offered, cohort) if cohort.labelled else offered

    def _tune(self, offered: Deployed, cohort: Cohort) -> Deployed:
        if not self.tune_epochs:
            return offered
        if isinstance(offered, Predictor):
            raise HyperparameterError(
                f"To be tuned, what a method deploys must be a model. That in {name_of(self)} says that it is, "
                "and deploys more.",
                hint="use the method without the piece; its author should set `deploys_a_model = False`.",
            )
        return sgd(cohort, start=offered, epochs=self.tune_epochs, only=self.tune, stream="tune")


@dataclass(frozen=True, kw_only=True)
class Gate(Piece):
    """Each client also trains alone, and deploys that model where its validation data speak for it."""

    margin: NonNegative | Literal["never", "always"] = 1.0  # by how many standard errors it must be better
    judge: Judge = "loss"  # what validation samples are judged by; the loss tells more of few samples

    called: ClassVar[str] = "gate"
    neutral: ClassVar[Mapping[str, Any]] = {"margin": "never"}
    reads_validation: ClassVar[bool] = True

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Do the method's own work, and that of `local` with as many gradients; pieces change the method only."""
        before = cohort.passes
        update = self.inner.local(broadcast, cohort)
        if self.margin == "never":
            return update
        alone = Local(epochs=cohort.passes - before)
        own = alone.local(None, replace(cohort.beside(Gate.called), changes=()))
        return replace(update, beside={**update.beside, Gate.called: own.keep})

    def personalize(self, server: Tree, cohort: Cohort) -> Deployed:
        """Return the method's model, or the client's own where that is better by more than the margin."""
        if self.margin == "never":
            return self.inner.personalize(server, cohort)
        own = Local().personalize(None, cohort.beside(Gate.called))
        if self.margin == "always":
            return own
        offered = self.inner.personalize(server, cohort)
        better = lead(cohort, own, offered, self.judge)
        cohort.observe(lead=better, alone=better > self.margin)
        return _either(better > self.margin, own, offered, cohort)


def _either(alone: Tensor, own: Stack, offered: Deployed, cohort: Cohort) -> Deployed:
    """Choose what each client deploys: its own model, or what it is offered."""
    if isinstance(offered, Predictor):
        one = len(offered.model) > 0  # an ensemble has no single model: all of it is beside
        model = _either(alone, own, offered.model, cohort) if one else own
        assert isinstance(model, Stack)
        beside = cohort.stacked(offered.beside) | Stack.of(alone=alone)
        return Predictor(model, beside, functools.partial(_answer, offered.answer, one))
    return own.where(alone, offered)


def _answer(offered: Answer, one: bool, model: Params, beside: Params, batch: Batch) -> Tensor:
    theirs = offered(model if one else Params({}, model.layout), beside.without(["alone"]), batch)
    return torch.where(beside["alone"], batch.outputs(model), theirs)


PIECES: dict[str, type[Piece]] = {piece.called: piece for piece in (Prox, Sam, Asam, Fsa, Dpsgd, Partial, Tune, Gate)}
