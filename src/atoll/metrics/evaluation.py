"""Clients' models on their own data, of all clients or of a sample, vectorised as training is."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort, even_batch
from atoll.kernel.engine import Engine, Workbench
from atoll.kernel.job import EVERYTHING, AtTheEnd, Done, Job
from atoll.kernel.params import Params, Stack, Tree, widest
from atoll.kernel.predictor import (
    Answer,
    Deployed,
    Predictor,
    answer_one_by_one,
    answer_samples,
    predictor_of,
)
from atoll.kernel.task import Facts
from atoll.metrics import fairness, significance
from atoll.metrics.calibration import bins, ece
from atoll.metrics.measures import OWN, Figure, Measure, Values, jackknife, measure_of, take_answers, take_figure
from atoll.runtime.engines.plan import arithmetic
from atoll.runtime.population import MANY_CLIENTS, Notes, Population

LARGEST_BATCH = 32  # what a client lacks is filled up: with large batches that is most of it, where clients are unequal
CENTRAL_BATCH = 2_000
CENTRAL_ALONE = 50  # samples that are answered one by one side by side; on a GPU ten times as many
BINS = 15  # of confidence
ABSURD = 1e6  # times the median error of all clients, by which a model has diverged; of an R2, below 0
KEPT = ("each", "answers", "targets", "kept")  # of each sample, where it is asked for
INDUCTIVE = "inductive"  # the test split, one sample at a time: for methods whose answers depend on the others

Clients = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]  # what was found after the last round, by name


@dataclass(frozen=True)
class ClientScores:
    """Scores of clients on one split. NaN: a client has no samples, or the measure does not exist for those it has.

    Without `drawn_from` all clients were scored, else a sample of so many. Figures are those of the scored clients.
    """

    score: NDArray[np.float64]
    loss: NDArray[np.float64]
    samples: NDArray[np.int64]
    higher_is_better: bool = True
    variance: NDArray[np.float64] | None = None  # of the score over a client's samples
    bins: NDArray[np.float64] | None = None  # [client, (count, confidence, right), bin], for calibration
    each: NDArray[np.float64] | None = None  # the score of every sample, client after client
    held: NDArray[np.float64] | None = None  # bytes of what answered
    drawn_from: int | None = None
    pooled: float | None = None  # the measure over all samples together; None: the mean over samples
    answers: NDArray[np.int64] | None = None  # the class that each sample was given, client after client
    labels: NDArray[np.int64] | None = None  # the class that it has
    kept: Values | None = None  # what a measure that is no mean needs of each sample, and its targets
    targets: Values | None = None
    diverged: Clients | None = None  # clients whose model has no sensible score: they count as the worst of the others

    @property
    def macro(self) -> float:
        """The mean over the clients that have a score."""
        return float(np.nanmean(self.score)) if self._any else float("nan")

    @property
    def undefined(self) -> int:
        """How many clients have samples and no score: for these samples, the measure does not exist."""
        return int((np.isnan(self.score) & (self.samples > 0)).sum())

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % interval of the mean over all clients; None if all were scored."""
        if self.drawn_from is None:
            return None
        return significance.interval(fairness.drop_nan(self.score), len(self.score) / self.drawn_from)

    @property
    def micro(self) -> float:
        """The score over all samples together."""
        if self.pooled is not None:
            return self.pooled
        if not self._any:
            return float("nan")
        return float(np.nansum(self.score * self.samples) / self.samples.sum())

    @property
    def worst(self) -> float:
        """The score of the worst client."""
        return fairness.worst(self.score, higher_is_better=self.higher_is_better)

    @property
    def bottom(self) -> float:
        """The mean of the worst tenth of the clients, at least one."""
        return fairness.bottom(self.score, higher_is_better=self.higher_is_better)

    @property
    def spread(self) -> float:
        """The standard deviation over clients."""
        with np.errstate(invalid="ignore", over="ignore"):  # of models that have diverged
            return float(np.nanstd(self.score)) if self._any else float("nan")

    @property
    def deployed(self) -> float | None:
        """The mean bytes of what answered."""
        return None if self.held is None else float(np.nanmean(self.held))

    @property
    def _any(self) -> bool:
        return not bool(np.isnan(self.score).all())

    def as_json(self) -> dict[str, Any]:
        """Return the figures of one split, and those of every client; of very many, the percentiles of their scores."""
        loss = float("nan") if np.isnan(self.loss).all() else float(np.nanmean(self.loss))
        calibration = {} if self.bins is None else {"ece": float(ece(*self.bins.sum(axis=0)))}
        return {
            "macro": self.macro,
            **({} if (half := self.interval) is None else {"interval": half}),
            "micro": self.micro,
            **({"undefined": self.undefined} if self.undefined else {}),
            **({} if self.diverged is None else {"diverged": self.diverged.tolist()}),
            "worst": self.worst,
            "bottom10": self.bottom,
            "std": self.spread,
            "loss": loss,
            **calibration,
            **(self._list_clients() if len(self.score) <= MANY_CLIENTS else self._count_clients()),
        }

    def _list_clients(self) -> dict[str, Any]:
        return {
            "clients": self.score.tolist(),
            "losses": self.loss.tolist(),
            "samples": self.samples.tolist(),
            **({} if self.variance is None else {"variances": self.variance.tolist()}),
            **({} if self.bins is None else {"eces": ece(*self.bins.swapaxes(0, 1)).tolist()}),
        }

    def _count_clients(self) -> dict[str, Any]:
        return {"scored": len(self.score), "percentiles": fairness.percentiles(self.score)}

    def as_arrays(self) -> Arrays:
        """Return what `as_json` leaves out of very many clients, by name; nothing of fewer."""
        if len(self.score) <= MANY_CLIENTS:
            return {}
        variance = self.score * (1 - self.score) if self.variance is None else self.variance
        return {"samples": self.samples, "score": self.score, "variance": variance}

    def list_answers(self) -> Arrays:
        """Return what is known of each sample: its answer and class where it has one, and what the measure needs."""
        known = {"answer": self.answers, "label": self.labels, "kept": self.kept, "target": self.targets}
        return {name: values for name, values in known.items() if values is not None}


@dataclass(frozen=True)
class Evaluate(AtTheEnd):
    """Clients score the models they would deploy, or the shared one, on samples of their own."""

    model: str
    on: tuple[str, ...] = ("val", "test")  # the splits, and `inductive`
    each: bool = False  # also the score of every test sample
    metric: str = OWN  # what they are judged by

    splits: ClassVar[frozenset[str]] = EVERYTHING

    @property
    def name(self) -> str:
        """The name in logs and checkpoints."""
        return f"evaluate {self.model}{', each sample' if self.each else ''}"

    @property
    def scorings(self) -> tuple[Scoring, ...]:
        """What is summed over each split."""
        return tuple(Scoring(on, each=self.each and on == "test", metric=self.metric) for on in self.on)

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return each client's sums, by split."""
        cohort = replace(cohort, exact=method.solved)
        if self.model == "personal":
            # The method makes the model without the test data, which only scoring reads.
            w: Deployed = method.personalize(received, cohort.without("test"))
        else:
            shared = method.shared(received)
            assert shared is not None
            w = shared
        return {one.on: one.scan(cohort, w) for one in self.scorings}


def splits_scored(method: Algorithm, task: Task, splits: tuple[str, ...] = ("val", "test")) -> tuple[str, ...]:
    """Return what a method is scored on: these splits, and one test sample at a time where the others matter.

    A sample alone cannot be scored where a BatchNorm takes the statistics of the batch and gets one number of each.
    """
    networks = task.networks or (task.network,)
    matters = method.transductive or any(one.transductive for one in networks)
    alone = all(one.normalises_alone(task.x[:1]) for one in networks) if matters else False
    return (*splits, INDUCTIVE) if alone and "test" in splits else splits


def split_of(on: str) -> str:
    """Return the split whose samples are scored."""
    return "test" if on == INDUCTIVE else on


def evaluate(
    engine: Engine,
    population: Population,
    algorithm: Algorithm,
    server: Tree,
    *,
    round: int,
    model: str = "personal",
    calls: int = 1,
    clients: Clients | None = None,
    splits: tuple[str, ...] = ("val", "test"),
    each: bool = False,
    notes: Notes | None = None,
    metric: str = OWN,
    out_of: int | None = None,
) -> dict[str, ClientScores]:
    """Score personal models of all clients or of some, or the shared one; with `each`, on every test sample.

    `metric` is what they are judged by, as `measures.find_measure` knows it. `out_of` is how many clients they stand
    for, all of the task unless given: fewer where attackers are no part of what is asked.

    What clients observe while they make their models is added to `notes`.
    """
    task = population.task
    splits = splits_scored(algorithm, task, splits)
    clients = np.arange(task.clients) if clients is None else clients
    job = Job(
        Evaluate(model, splits, each=each, metric=metric), algorithm, server, clients, round, algorithm.groups(server),
        calls=1 if each else calls,
    )  # fmt: skip
    sums: dict[str, ClientSums] = {}
    for outcome in engine.run(job, population):
        if isinstance(outcome, Done):
            sums = sums or {
                split: ClientSums(task, split, clients, metric, out_of) for split in splits
            }  # sizes are known by now
            for split, stack in outcome.result.items():
                sums[split].add(outcome.clients, stack)
            if notes is not None:
                seen = {name: value.double().cpu().numpy() for name, value in outcome.notes.items()}
                notes.append((outcome.clients, seen))
    sums = sums or {split: ClientSums(task, split, clients, metric, out_of) for split in splits}
    return {split: one.scores() for split, one in sums.items()}


def collect_observations(notes: Notes, scored: Clients | None = None) -> dict[str, dict[str, float]]:
    """Collect what clients observed apart from losses: by name, one number for each client.

    Of very many clients, only those that are `scored` count; if these are very many too, none.
    """
    found: dict[str, dict[str, float]] = {}
    many = sum(len(clients) for clients, _ in notes) > MANY_CLIENTS
    few = np.empty(0, dtype=np.int64) if scored is None or len(scored) > MANY_CLIENTS else scored
    for clients, values in notes:
        here = np.isin(clients, few) if many else np.ones(len(clients), dtype=bool)
        for name, value in values.items():
            if not name.startswith("loss/") and here.any():
                found.setdefault(name, {}).update(zip(map(str, clients[here]), map(float, value[here]), strict=True))
    return found


@dataclass(frozen=True)
class Scoring:
    """The sums that clients take over the samples of a split; with `each`, the score of every sample as well."""

    on: str  # a split, or `inductive`
    each: bool = False
    metric: str = OWN

    def scan(self, cohort: Cohort, deployed: Deployed) -> Stack:
        """Return the sums of some clients, what is kept of each sample, and the bytes of what answered."""
        one, task = predictor_of(deployed), cohort.task
        # The largest client of all decides, not of a chunk, so every chunking sums in the same order.
        split = split_of(self.on)
        largest = max(1, task.largest[split])
        batch_size = even_batch(largest, LARGEST_BATCH)
        start = Params.of(score=0.0, square=0.0, loss=0.0)
        if task.one_class_each:
            start = start | Params.of(bins=torch.zeros(3, BINS))
        widths = self._kept_widths(measure_of(self.metric, task.network), task)
        if widths:
            rows = -(-largest // batch_size) * batch_size
            empty = {name: torch.zeros(rows, wide, dtype=task.network.dtype) for name, wide in widths.items()}
            start = start | Params.of(seen=0.0, **empty)
        # With a model that clients share, all their samples are one product, whose last bits depend on the chunk.
        model = cohort.stacked(one.model) if task.network.dtype == torch.float64 else one.model
        found: Stack = cohort.scan(
            functools.partial(_score_step, self._ask(one.answer), self.metric),
            start,
            given=(model, one.beside, list_known(cohort) if task.recommends else Params({})),
            split=split,
            batch_size=batch_size,
            shuffle=False,
            train=False,
            exact=isinstance(deployed, Predictor),
        )
        device = found["score"].device
        held = torch.full((len(cohort),), float(one.bytes), dtype=widest(device), device=device)
        return found | Stack.of(held=held)

    def _ask(self, answer: Answer) -> Answer:
        """Return how samples are answered: without their targets, and for `inductive` one at a time."""
        return functools.partial(answer_one_by_one if self.on == INDUCTIVE else answer_samples, answer)

    def _kept_widths(self, measure: Measure, task: Facts) -> dict[str, int]:
        """Return what is kept of each sample, and how many numbers it is."""
        widths = {"each": 1} if self.each else {}
        if self.each and task.one_class_each:
            widths |= {"answers": 1, "targets": 1}
        if measure.keep is not None:
            targets = task.target.reshape(1, -1)
            outputs = torch.zeros(1, task.classes or targets.shape[1])
            widths |= {"kept": measure.keep(outputs, targets).shape[1], "targets": targets.shape[1]}
        return {name: widths[name] for name in KEPT if name in widths}


def reduce_to_figures(found: Stack, sizes: NDArray[np.int64], figure: Figure) -> Stack:
    """Return sums of clients with their figures and the variances of these, in place of what is kept of each sample.

    Where one does not exist, there is 0, and `exists` says so: what leaves a site must be finite.
    """
    kept, targets = (found[name].double().cpu().numpy() for name in ("kept", "targets"))
    each = [(kept[row, :size], targets[row, :size]) for row, size in enumerate(sizes)]
    told = torch.tensor([[take_figure(figure, *mine), jackknife(figure, *mine)] for mine in each], dtype=torch.float64)
    sums = {name: leaf for name, leaf in found.items() if name not in (*KEPT, "seen")}
    return Stack({**sums, "figure": told.nan_to_num(0), "exists": (~told.isnan()).double()}, found.layout)


def list_known(cohort: Cohort) -> Stack:
    """Return which items each client knows from training or validation: 1 or 0 for every item."""
    facts = cohort.task
    assert facts.classes is not None
    known = cohort.stacked(Params.of(item=torch.zeros(facts.classes, dtype=facts.network.dtype)))
    for split in ("train", "val"):
        size = even_batch(facts.largest[split], LARGEST_BATCH)
        known = cohort.scan(_note_items, known, split=split, batch_size=size, shuffle=False, train=False)
    return known


def _note_items(carry: Params, batch: Batch, given: None) -> Params:  # noqa: ARG001
    known = carry["item"]
    real = torch.ones_like(batch.y, dtype=known.dtype) if batch.mask is None else batch.mask.to(known.dtype)
    return Params({"item": known.scatter_add(0, batch.y, real)}, carry.layout)


class ClientSums:
    """The sums of clients over one split: of all, or of a sample whose numbers are sorted."""

    def __init__(self, task: Task, on: str, clients: Clients, metric: str = OWN, out_of: int | None = None) -> None:
        self.clients = clients
        everybody = task.clients if out_of is None else out_of
        self.drawn_from = everybody if len(clients) < everybody else None
        self.sizes = task.splits[split_of(on)].sizes(clients)
        self.measure = measure_of(metric, task.network)
        self.totals: dict[str, NDArray[np.float64]] = {
            name: np.full(len(clients), np.nan) for name in ("score", "square", "loss", "held")
        }
        self.rows: dict[str, Values] = {}  # numbers of every sample, client after client

    def add(self, clients: Clients, found: Stack) -> None:
        """Add the sums of some clients."""
        places = np.searchsorted(self.clients, clients)
        leaves = {name: leaf for name, leaf in found.items() if name != "seen"}
        columns = [leaf.to(widest(leaf.device)).reshape(len(clients), -1) for leaf in leaves.values()]
        numbers = torch.cat(columns, 1).cpu().double().numpy()  # all at once: the device is waited for once
        ends = np.cumsum([one.shape[1] for one in columns])
        for (name, leaf), part in zip(leaves.items(), np.split(numbers, ends[:-1], axis=1), strict=True):
            if name in KEPT:
                self._add_rows(name, places, part.reshape(leaf.shape))
            else:
                table = self.totals.setdefault(name, np.full((len(self.sizes), *leaf.shape[1:]), np.nan))
                table[places] = part.reshape(leaf.shape)

    def _add_rows(self, name: str, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Put numbers of single samples in their places, without what fills up the rows of small clients."""
        if name not in self.rows:
            self.rows[name] = np.full((int(self.sizes.sum()), values.shape[2]), np.nan)
        columns, starts = np.arange(values.shape[1]), np.cumsum(self.sizes) - self.sizes
        real = columns < self.sizes[places, None]
        self.rows[name][(starts[places, None] + columns)[real]] = values[real]

    def scores(self) -> ClientScores:
        """Return the scores of the clients."""
        score, variance, pooled = self._average() if self.measure.mean else self._take_figures()
        loss = self._mean("loss")
        diverged = self._find_diverged(score, loss)
        if diverged.any():
            others = np.where(diverged, np.nan, score) * (1 if self.measure.higher_is_better else -1)
            worst = int(np.nanargmin(others))
            senseless = diverged & ~(np.isfinite(score) & self.measure.share)  # a share of right answers is one
            score, variance = (np.where(senseless, values[worst], values) for values in (score, variance))
            loss = np.where(diverged, np.nanmax(loss[~diverged]), loss)
        return ClientScores(
            score,
            loss,
            self.sizes,
            self.measure.higher_is_better,
            variance,
            self.totals.get("bins"),
            self.rows["each"][:, 0] if "each" in self.rows else None,
            self.totals["held"],
            self.drawn_from,
            pooled,
            answers=self._of_classes("answers"),
            labels=self._of_classes("targets"),
            kept=self.rows.get("kept") if "each" in self.rows else None,
            targets=self.rows.get("targets") if {"each", "kept"} <= {*self.rows} else None,
            diverged=self.clients[diverged] if diverged.any() else None,
        )

    def _of_classes(self, name: str) -> NDArray[np.int64] | None:
        """Return the class of every sample, or the one that it was given, where samples have a class."""
        return self.rows[name][:, 0].astype(np.int64) if "answers" in self.rows else None

    def _find_diverged(self, score: Values, loss: Values) -> NDArray[np.bool_]:
        """Find clients whose model has diverged: a loss that is not finite, or a score far beyond the median.

        Nobody has diverged where all have: then there is nothing to compare with.
        """
        there = (self.sizes > 0) & ~np.isnan(self.totals["held"])
        broken = there & ~np.isfinite(loss)
        sound = there & ~broken & np.isfinite(score)
        if not self.measure.share and sound.any():
            middle = float(np.median(score[sound]))
            absurd = score < -ABSURD if self.measure.higher_is_better else score > ABSURD * middle
            broken |= sound & absurd & (self.measure.higher_is_better or middle > 0)
        return broken if (sound & ~broken).any() else np.zeros_like(broken)

    def _mean(self, name: str) -> Values:
        sizes = self.sizes.astype(np.float64)
        return np.divide(self.totals[name], sizes, out=np.full_like(sizes, np.nan), where=sizes > 0)

    def _average(self) -> tuple[Values, Values, float | None]:
        """Return means over samples, and the variance of single ones."""
        score = self._mean("score")
        with np.errstate(invalid="ignore", over="ignore"):  # of a model that has diverged
            return score, np.maximum(self._mean("square") - score**2, 0), None

    def _take_figures(self) -> tuple[Values, Values, float | None]:
        """Return the figure of each client, its variance for one sample, and the figure of all samples together."""
        if "figure" in self.totals:  # clients took it themselves, and nobody has all samples together
            told = np.where(self.totals["exists"] > 0, self.totals["figure"], np.nan)
            return told[:, 0], told[:, 1], float("nan")
        figure = self.measure.figure
        assert figure is not None
        nothing = np.empty((0, 1))
        kept, targets = (self.rows.get(name, nothing) for name in ("kept", "targets"))
        ends = np.cumsum(self.sizes)[:-1]
        clients = [*zip(np.split(kept, ends), np.split(targets, ends), strict=True)]
        score = np.array([take_figure(figure, *mine) for mine in clients])
        return score, np.array([jackknife(figure, *mine) for mine in clients]), take_figure(figure, kept, targets)


def _score_step(
    answer: Answer, metric: str, carry: Params, batch: Batch, given: tuple[Params, Params, Params]
) -> Params:
    model, beside, known = given
    outputs, measure = answer(model, beside, batch), measure_of(metric, batch.network)
    if known:  # they are no candidates; one that is asked for is, though clients know it after validation
        asked = batch.y[:, None] == torch.arange(outputs.shape[1], device=batch.y.device)  # `one_hot` cannot be traced
        outputs = torch.where((known["item"] > 0) & ~asked, -torch.inf, outputs)
    # Where the measure is no mean, the score that the task has by itself stands for single samples.
    score = (measure.per_sample or batch.network.score)(outputs, batch.y)
    loss = batch.network.loss(outputs, batch.y)
    after = {
        "score": carry["score"] + batch.total(score),
        "square": carry["square"] + batch.total(score.square()),
        "loss": carry["loss"] + batch.total(loss),
    }
    if "bins" in carry:
        confidence, right = outputs.softmax(1).amax(1), (outputs.argmax(1) == batch.y).to(outputs.dtype)
        after["bins"] = carry["bins"] + bins(confidence, right, BINS, weight=batch.mask)
    if "seen" in carry:  # places past a client's last sample hold what nothing reads
        kept = [name for name in KEPT if name in carry]
        last = len(carry[kept[0]]) - 1  # a lane that has nothing left to do repeats its last step
        place = (carry["seen"].long() + torch.arange(len(score), device=score.device)).clamp(max=last)
        after["seen"] = carry["seen"] + len(score)
        targets = batch.y.reshape(len(score), -1)
        found = {
            "each": lambda: score[:, None],
            "answers": lambda: take_answers(outputs, batch.y),
            "targets": lambda: targets,
            "kept": lambda: measure.keep(outputs, targets) if measure.keep else targets,
        }
        for name in kept:
            rows, values = carry[name], found[name]().to(carry[name].dtype)
            after[name] = rows.scatter(0, place[:, None].expand(-1, rows.shape[1]), values)
    return Params(after, carry.layout)


def evaluate_central(
    bench: Workbench,
    central: tuple[Tensor, Tensor],
    shared: Params | Predictor,
    batch_size: int = CENTRAL_BATCH,
    *,
    exact: bool = False,
    metric: str = OWN,
    alone: bool = False,
) -> dict[str, float]:
    """Score the shared model on the server's own test set; in fp32 if it is `exact` or has a rule of its own.

    `alone` answers one sample at a time.
    """
    ask = answer_one_by_one if alone else answer_samples
    one, (x, y), network = predictor_of(shared), central, bench.network
    model, beside = one.model, one.beside
    assert isinstance(model, Params)
    assert isinstance(beside, Params)
    if alone:
        batch_size = CENTRAL_ALONE * (1 if x.device.type == "cpu" else 10)
    measure, totals = measure_of(metric, network), np.zeros(2)
    kept: list[Tensor] = []
    precision = "fp32" if exact or isinstance(shared, Predictor) else bench.variant.precision
    variant = replace(bench.variant, precision=precision)
    with torch.no_grad(), arithmetic(precision):
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            outputs = ask(one.answer, model, beside, Batch(x[part], y[part], None, None, network, variant))
            score = (measure.per_sample or network.score)(outputs, y[part])
            totals += torch.stack([score.sum(), network.loss(outputs, y[part]).sum()]).double().cpu().numpy()
            if measure.keep is not None:
                kept.append(measure.keep(outputs, y[part].reshape(len(score), -1)).double().cpu())
    score_of_all = totals[0] / len(x)
    if measure.figure is not None:
        targets = y.reshape(len(y), -1).double().cpu().numpy()
        score_of_all = take_figure(measure.figure, torch.cat(kept).numpy(), targets)
    return {"score": score_of_all, "loss": totals[1] / len(x)}
