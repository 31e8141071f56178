"""A `Report` is the evidence of one run: every round, every client that was scored, every byte."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.data.preprocessing import Scaling
from atoll.data.statistics import Statistics
from atoll.federation.config import Metric, RunConfig, describe
from atoll.federation.labels import label
from atoll.federation.numbers import Numbers, run_cells
from atoll.federation.settings import Settings, count_messages
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.clusters import Clusters
from atoll.kernel.errors import HyperparameterError, PrivacyError, RunError, unknown
from atoll.kernel.html import html_table
from atoll.metrics.evaluation import INDUCTIVE, Arrays, ClientScores
from atoll.metrics.groups import adjusted_rand
from atoll.metrics.measures import measure_of
from atoll.protect.account import passes_epsilon
from atoll.protect.ledger import Direction, Ledger
from atoll.protect.local_level import LocalPrivacy
from atoll.protect.promise import Release
from atoll.protect.releases import count_most, require_counted
from atoll.protect.secure import WEIGHT
from atoll.protect.shares import PrivacyInShares
from atoll.records.audits import Audited, read_audit
from atoll.records.rounds import ByName, Central, Evaluation, Figures, Newcomers, Round
from atoll.records.runs import Run
from atoll.runtime.population import MANY_CLIENTS
from atoll.toolbox.references import bibtex

if TYPE_CHECKING:
    from atoll.data.task import Task
    from atoll.export.folder import Exported
    from atoll.export.model import ClientModel
    from atoll.kernel.engine import Engine
    from atoll.kernel.params import Params, Tree
    from atoll.runtime.population import Population

Scores = NDArray[np.float64]
Select = Literal["last", "best", "oracle"]
MEGABYTE = 1e6
DELTA = 1e-5  # of sample-level privacy


@dataclass(frozen=True, eq=False)
class Live:
    """What a run that just ended holds in this process; a folder does not have it."""

    task: Task
    settings: Settings
    server: Tree
    population: Population
    engine: Engine


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """The evidence of one run, from memory or from its folder: what `federate` returns."""

    algorithm: Algorithm
    written: RunConfig | None  # the configuration; of a run without a folder it is made when somebody asks
    history: Sequence[Round]
    ledger: Ledger
    counted: Statistics | None = None  # what the clients have, as it was written
    outcomes: Arrays | None = None  # after the last round, by name: `test` is the score of every test sample
    folder: Path | None = None
    live: Live | None = None
    scaled: Scaling | None = None  # how raw samples became numbers, as it was written

    @classmethod
    def of_run(
        cls,
        task: Task,
        algorithm: Algorithm,
        settings: Settings,
        history: Sequence[Round],
        ledger: Ledger,
        server: Tree,
        population: Population,
        engine: Engine,
        outcomes: Arrays | None = None,
        run: Run | None = None,
    ) -> Report:
        """Make the report of a run that just ended; with a folder, the same that is read from it."""
        live = Live(task, settings, server, population, engine)
        if run is None:
            return cls(algorithm, None, history, ledger, None, outcomes, None, live)
        config = RunConfig.of_run(run)
        return cls(algorithm, config, history, ledger, run.statistics, run.outcomes(), run.folder, live, run.scaling)

    @classmethod
    def read(cls, folder: Path | str, *, trust: bool = False) -> Report:
        """Read the report of a run in a folder, finished or not.

        Raises RunError if a file is damaged or was changed. A method's file that this user has not run before is run
        only with `trust`.
        """
        run = Run.open(folder)
        config = RunConfig.of_run(run)
        run.verify()
        algorithm = config.algorithm.create(trust=trust)
        report = cls(
            algorithm, config, run.metrics(), Ledger(run.ledger()), run.statistics, run.outcomes(), run.folder,
            scaled=run.scaling,
        )  # fmt: skip
        report.require_clients()
        return report

    def __repr__(self) -> str:
        found = f"{self.clients:,} clients, {self.done} of {self.rounds} rounds, seed {self.seed}"
        if self.evaluations:
            numbers = Numbers(**self.metric)
            score = numbers.score(_scores_by_split(self.evaluations[-1])["test"].macro)
            found += f", mean test {numbers.name} {score}{' %' * numbers.share}"
        return f"<Report of {self.label} on {self.task_name}: {found}>"

    def _repr_html_(self) -> str:
        """Show in a notebook the figures of the last evaluation, their protocol, and the costs."""
        from atoll.federation.results import Results

        heads, rows = run_cells(self)
        protocol = [Results.of_runs([self]).protocol] if self.evaluations else []
        costs = (
            f"{self.megabytes('up'):.1f} MB up and {self.megabytes('down'):.1f} MB down by all clients, "
            f"{self.gradients:,} gradients, {self.seconds:.1f} s of training."
        )
        return str(html_table(heads, rows, title=str(self)[1:-1], note=" ".join([*protocol, costs])))

    def require_clients(self) -> None:
        """Raise RunError unless every file of the folder is about the same clients."""
        clients = self.config.task.clients
        counts = {
            f"round {line.round} of metrics.jsonl": line.evaluation.find_other_number(clients)
            for line in self.history
            if line.evaluation
        }
        counts["clients.json"] = None if self.statistics is None else self.statistics.clients
        counts["outcomes.npz"] = None if self.outcomes is None else self._count_kept(self.outcomes)
        for where, count in counts.items():
            if count not in (None, clients):
                raise RunError(
                    f"The files of a run must be about the same clients. {self.folder} has {clients} in config.json "
                    f"and {count} in {where}."
                )

    def _count_kept(self, outcomes: Arrays) -> int | None:
        """Return a number of clients that arrays are about and the run is not; None if there is none."""
        clients, names = self.config.task.clients, ("client", "samples", "score", "variance")
        kept = [len(outcomes[name]) for name in names if name in outcomes]
        wrong = [size for size in kept if size != self._last.scored]
        wrong += [len(outcomes[name]) for name in ("cluster",) if name in outcomes and len(outcomes[name]) != clients]
        return wrong[0] if wrong else None

    # -- what this process holds -------------------------------------------------------------------------------------
    @property
    def _live(self) -> Live:
        if self.live is None:
            raise RunError(
                "Only a run of this process has its task, server and clients. This report has what its folder holds.",
                hint="resume it: federate(task, ..., folder=..., resume=True) returns at once if it is finished.",
            )
        return self.live

    def require_live(self) -> Live:
        """Return what the run held when it ended; of a finished run in a folder, read from there."""
        return self._live if self.live is not None or self.folder is None else self._restored

    @cached_property
    def _restored(self) -> Live:
        from atoll.federation.models import restore

        return restore(self)

    def reopen(self, task: Task | None = None) -> Report:
        """Return this report with the task, the server's state and the clients of a finished run in a folder.

        A task that was not built from words must be given, as it was.
        """
        from atoll.federation.models import restore

        return self if self.live is not None else replace(self, live=restore(self, task))

    @property
    def task(self) -> Task:
        """The task that was run."""
        return self._live.task

    @property
    def server(self) -> Tree:
        """The server's state after the last round."""
        return self._live.server

    @property
    def population(self) -> Population:
        """The clients with what they keep."""
        return self._live.population

    @property
    def engine(self) -> Engine:
        """The engine that ran it."""
        return self._live.engine

    def without_live(self) -> Report:
        """Return the evidence alone: models and data need not stay in memory."""
        return replace(self, written=self.config, counted=self.statistics, scaled=self.scaling, live=None)

    def welcome(self, x: Any, y: Any = None) -> Params:
        """Return the model of a client that took no part, from its samples, and its targets if it has them."""
        from atoll.metrics.newcomers import welcome

        here, seed, rounds = self.population.task, self.settings.seed, self.settings.rounds
        return welcome(self.engine, self.algorithm, self.server, here, x, y, seed=seed, round=rounds)

    def model(self, client: int | str) -> ClientModel:
        """Return what a client deploys, by its name or number: raw samples in, probabilities or numbers out."""
        from atoll.federation.models import find_client, make_models

        number = find_client(self.require_live().task, client)
        return next(model for _, model in make_models(self, np.array([number])))

    def model_for(self, raw: Any, labels: Any = None, *, unlabelled: bool = False) -> ClientModel:
        """Return the model of a client that took no part, from raw samples: a file, a frame, columns, an array.

        Labels are those of the target's column, or `labels`. `unlabelled` reads none.
        """
        from atoll.federation.models import make_newcomer

        return make_newcomer(self, raw, labels, unlabelled=unlabelled)

    def export(
        self,
        folder: Path | str,
        clients: Sequence[int | str] | int | str | None = None,
        *,
        format: str = "safetensors",  # noqa: A002 - the word users know
        int8: bool = False,
        licence: str | None = None,
        on_client: Callable[[Exported], None] | None = None,
    ) -> list[Exported]:
        """Write the models of some clients, or of all, each to a folder of its own inside `folder`.

        `format` is safetensors, onnx or pt2. With `int8` weights have 8 bits, and size, time and validation score
        before and after are returned. `licence` is that of own data, for the manifest. `on_client` is called with each.
        """
        from atoll.federation.models import export

        listed = [clients] if isinstance(clients, int | str) else clients
        return export(self, folder, listed, format=format, int8=int8, licence=licence, on_client=on_client)

    # -- the run -----------------------------------------------------------------------------------------------------
    @property
    def label(self) -> str:
        """What the method is called in tables."""
        return label(self.algorithm)

    @cached_property
    def config(self) -> RunConfig:
        """What was asked for, resolved."""
        return describe(self.task, self.algorithm, self.settings) if self.written is None else self.written

    @cached_property
    def statistics(self) -> Statistics | None:
        """What the clients have, in numbers; None if it is not known."""
        return self.counted if self.live is None or self.counted is not None else self.live.task.statistics

    @property
    def scaling(self) -> Scaling | None:
        """How raw samples of own data became numbers, client by client, with class names; None of other data."""
        return self.live.task.scaling if self.live is not None and self.scaled is None else self.scaled

    @property
    def settings(self) -> Settings:
        """How the federation was run."""
        return self._live.settings if self.written is None else self.written.settings

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return self.settings.seed

    @property
    def rounds(self) -> int:
        """How many rounds were asked for."""
        return self.settings.rounds

    @property
    def done(self) -> int:
        """How many rounds were done."""
        return self.history[-1].round if self.history else 0

    @cached_property
    def finished(self) -> bool:
        """Whether all rounds were done and, of a run in a folder, their checkpoint is whole."""
        return self.done == self.rounds and (self.folder is None or Run(self.folder).is_finished(self.rounds))

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        if self.done < self.rounds or self.finished:
            return f"{self.done} of {self.rounds} rounds"
        return f"all {self.rounds} rounds, but its last checkpoint is missing or damaged"

    @property
    def metric(self) -> Metric:
        """The name of the score, whether higher is better, and whether it is a share of 1."""
        if self.written is None:  # the whole configuration would take a while
            return Metric.of_json(measure_of(self.settings.metric, self.task.network).facts)
        return self.written.task.metric

    @property
    def task_name(self) -> str:
        """The name of the task."""
        return self.task.name if self.written is None else self.written.task.name

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return self.task.clients if self.written is None else self.written.task.clients

    @property
    def citations(self) -> str:
        """BibTeX of the method that was used."""
        return bibtex(self.algorithm.cites)

    @property
    def privacy(self) -> list[str]:
        """What is promised about clients and their samples, a sentence each; nothing without a mechanism."""
        return [*self._describe_clients(), *self._describe_samples()]

    def _describe_clients(self) -> list[str]:
        """Say what is promised about clients; raise where more left them than was counted."""
        if self.settings.privacy is None:
            return []
        promise = self.settings.describe_privacy(
            self.config.task.clients, *self._counted_messages, sites=self._is_of_sites
        )
        return [] if promise is None else [promise]

    @property
    def _is_of_sites(self) -> bool:
        """Whether clients were at sites, so noise did not follow from the seed."""
        return "sites" in (self.config.engine if self.live is None else self.live.engine.options)

    @property
    def client_epsilon(self) -> float | None:
        """What is promised about every client; None without such a promise."""
        if self.settings.privacy is None:
            return None
        return self.settings.promised_epsilon(self.config.task.clients, *self._counted_messages)

    @property
    def release(self) -> Release | None:
        """What was released about every client, for an account over several runs; None without a promise."""
        if self.settings.privacy is None:
            return None
        return self.settings.release(self.config.task.clients, *self._counted_messages)

    @property
    def sample_cost(self) -> float:
        """The square of mu of the samples that were used most, which adds up over runs; 0 without such a promise."""
        if not self.sample_epsilons:
            return 0.0
        noise = self.config.algorithm.values["noise"]
        return max(self._private_passes.values()) / noise**2 if noise else math.inf

    @property
    def _covered_fields(self) -> set[str]:
        """What may leave a client under its promise; under masks it counts as one, which everybody knows."""
        return {*self.algorithm.sends} | ({WEIGHT} if isinstance(self.settings.privacy, PrivacyInShares) else set())

    @cached_property
    def _counted_messages(self) -> tuple[int, int]:
        """The most messages that a client sent, and for how many noise was found; raises for some not counted."""
        method, rounds = self.algorithm, len(self.history)
        counts = isinstance(self.settings.privacy, LocalPrivacy | PrivacyInShares)  # messages, not rounds
        exchanges = count_messages(0, method) if counts else 0
        require_counted(self.ledger.entries, self._covered_fields, exchanges=exchanges)
        if counts:
            rounds = count_most(self.ledger.entries, exchanges=exchanges) or rounds + exchanges
        return rounds, count_messages(self.settings.rounds, method)

    @cached_property
    def sample_epsilons(self) -> dict[int, float]:
        """What is promised about each sample of a client, by client, at delta 1e-5; nothing without such a promise."""
        noise = self.config.algorithm.values.get("noise") if "+dpsgd" in self.config.algorithm.name else None
        if noise is None:
            return {}
        return {int(client): passes_epsilon(noise, count, DELTA) for client, count in self._private_passes.items()}

    @cached_property
    def _private_passes(self) -> dict[str, float]:
        """How often each client's samples were used under sample-level privacy."""
        passes: dict[str, float] = defaultdict(float)
        for line in self.history:
            for client, count in ((line.observed or {}).get("private_passes") or {}).items():
                passes[client] += count
        return {client: count + self._passes_at_the_end for client, count in passes.items()}

    @property
    def _passes_at_the_end(self) -> int:
        """How often a client's samples are used after the last round, for what it keeps and deploys."""
        return sum(self.config.passes.get(hook, 0) for hook in ("finish", "personalize"))

    def _describe_samples(self) -> list[str]:
        """Say what sample-level privacy promises after all rounds."""
        if not self.sample_epsilons:
            return []
        passes, delta = self._private_passes, DELTA
        most = max(passes, key=lambda client: passes[client])
        found = sorted(self.sample_epsilons.values())
        exchanged = passes_epsilon(self.config.algorithm.values["noise"], 4 * passes[most], delta)  # twice as far apart
        last = f", {self._passes_at_the_end} of them for what it deploys" if self._passes_at_the_end else ""
        sentence = (
            f"Sample-level differential privacy: epsilon {found[-1]:.2f} at delta {delta:g} for blanking one sample, "
            f"whose place in the batches stays, and {exchanged:.2f} for exchanging it for any other. That is of client "
            f"{most}, whose samples were used most often ({passes[most]:g} passes{last}); least {found[0]:.2f}, median "
            f"{found[len(found) // 2]:.2f} for blanking. It covers what clients send, keep and deploy. Batches are "
            "shuffled passes, so nothing is gained by sampling; noise is drawn from the run's seed (simulated). How "
            "many samples a client has, scores and losses in this report are not covered."
        )
        return [sentence]

    @cached_property
    def audited(self) -> Audited | None:
        """What the last audit of this run found, kept in its folder; None if there was none."""
        return None if self.folder is None else read_audit(self.folder)

    @property
    def sign(self) -> int:
        """1 if a higher score is better, else -1."""
        return 1 if self.metric.higher_is_better else -1

    # -- scores ------------------------------------------------------------------------------------------------------
    @cached_property
    def evaluations(self) -> list[Round]:
        """The rounds after which clients were scored."""
        return [line for line in self.history if line.personal is not None]

    def select_round(self, select: Select = "last") -> Round:
        """Return the evaluated round that counts."""
        if not self.evaluations:
            raise RunError(
                f"A comparison needs the scores of clients. This run of {self.label} has none.",
                hint="finish it with `atoll resume`, and run it with evaluation='all' or 'sample:N'.",
            )
        if select == "last":
            return self.evaluations[-1]
        if self.settings.privacy is not None or "+dpsgd" in self.config.algorithm.name:
            raise PrivacyError(
                "A round that is chosen by scores gives away what clients' scores say, which this run's promise of "
                f"privacy does not count. Got select={select!r}.",
                hint="use select='last', which reads no scores.",
            )
        split = "val" if select == "best" else "test"
        first = _scores_by_split(self.evaluations[0])[split]
        if math.isnan(first.macro) if first.samples is None else not any(first.samples):
            raise RunError(f"Selection by the {split} split needs samples in it. There are none.")
        # of equals the first
        return max(self.evaluations, key=lambda line: self.sign * _scores_by_split(line)[split].macro)

    def select_evaluation(self, select: Select = "last") -> Evaluation:
        """Return the evaluation of the round that counts."""
        evaluation = self.select_round(select).evaluation
        assert evaluation is not None
        return evaluation

    @cached_property
    def scored(self) -> NDArray[np.int64]:
        """The clients that were scored, in order: scores, samples and variances are theirs."""
        evaluation = self.select_evaluation()
        if evaluation.sample is not None:
            return np.array(evaluation.sample, dtype=np.int64)
        if evaluation.scored == self.config.task.clients:
            return np.arange(self.config.task.clients)
        return self._take_kept("client")

    @property
    def share(self) -> float | None:
        """The share of the honest clients that were scored; None if all were."""
        scored = self.select_evaluation().scored
        assert scored is not None
        return None if scored == self.honest else scored / self.honest

    @property
    def honest(self) -> int:
        """How many clients do not attack: figures are theirs."""
        return self.settings.count_honest(self.config.task.clients)

    def _take_kept(
        self, name: str, split: str = "test", model: str = "personal", select: Select = "last"
    ) -> NDArray[Any]:
        """Return what lines of metrics leave out of very many clients, and is kept after the last round only."""
        last = self.select_round(select).round == self.rounds
        if (split, model) != ("test", "personal") or not last or self.outcomes is None or name not in self.outcomes:
            raise RunError(
                f"Of more than {MANY_CLIENTS:,} clients, only the test scores of the models that they deploy after the "
                f"last round are kept. Asked for were those of the {model} models on {split}, {self.progress} done.",
                hint="a sample keeps all of them: `evaluation=sample:1000`.",
            )
        return self.outcomes[name]

    def figures(self, split: str = "test", model: str = "personal", select: Select = "last") -> Figures:
        """Return the figures over clients."""
        found = self.select_evaluation(select)
        models = {name: of_model for name in ("personal", "shared") if (of_model := getattr(found, name)) is not None}
        if model not in models:
            raise unknown("model", model, models)
        if split == INDUCTIVE and split not in models[model]:
            raise RunError(self._explain_no_inductive())
        if split not in models[model]:
            raise unknown("split", split, models[model])
        figures: Figures = models[model][split]
        return figures

    def scores(self, split: str = "test", model: str = "personal", select: Select = "last") -> Scores:
        """Return the score of each client of `scored`."""
        listed = self.figures(split, model, select).clients
        return self._take_kept("score", split, model, select) if listed is None else np.array(listed, dtype=np.float64)

    def summary(self, split: str = "test", model: str = "personal") -> dict[str, float]:
        """Return mean, worst and so on after the last round."""
        return {name: value for name, value in self.figures(split, model).items() if isinstance(value, float)}

    def samples(self, split: str = "test") -> NDArray[np.int64]:
        """Return how many samples each client of `scored` has."""
        listed = self.figures(split).samples
        return self._take_kept("samples", split) if listed is None else np.array(listed, dtype=np.int64)

    def variances(self, split: str = "test", select: Select = "last") -> Scores:
        """Return the variance of the score over each client's samples."""
        figures, scores = self.figures(split, select=select), self.scores(split, select=select)
        if figures.clients is None:
            return self._take_kept("variance", split, select=select)
        found = scores * (1 - scores) if figures.variances is None else figures.variances
        return np.array(found, dtype=np.float64)

    def each_of(self, place: int) -> Scores | None:
        """Return the score of every test sample of a client of `scored` after the last round; None if it is unknown.

        A metric that is no mean over samples has no score of a single one.
        """
        if not self.metric.mean or self.outcomes is None or len(self.outcomes["test"]) != self.samples().sum():
            return None
        ends = np.cumsum(self.samples())
        return self.outcomes["test"][ends[place] - self.samples()[place] : ends[place]]

    @property
    def classes(self) -> int | None:
        """How many classes there are, where every sample has one and its answer is known."""
        if self.outcomes is None or not {"answer", "label"} <= {*self.outcomes}:
            return None
        counted = None if self.statistics is None else self.statistics.classes
        highest = max(int(self.outcomes[name].max(initial=0)) for name in ("answer", "label"))
        return max(counted or 0, highest + 1)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty where they have none."""
        return tuple(map(str, self.config.task.more.get("class_names") or ()))

    def class_name(self, label: int) -> str:
        """Return the name of a class; its number where it has none."""
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def confusion(self, client: int | None = None) -> NDArray[np.int64]:
        """Count the test samples of each class (rows) that were given each class (columns), after the last round.

        Of all clients that were scored, each with its own model, or of the `client` with this number.
        """
        classes = self.classes
        if classes is None or self.outcomes is None:
            raise RunError(
                "A confusion matrix needs the answer to every test sample, which a finished run of a task with one "
                f"class per sample has. This run of {self.label} has none ({self.progress}).",
                hint="finish it with `atoll resume`, or run it again if an older Atoll made it.",
            )
        some = slice(None)
        if client is not None:
            place = int(np.searchsorted(self.scored, client))
            if place == len(self.scored) or self.scored[place] != client:
                raise RunError(
                    f"A client must have been scored. {client} is none of the {len(self.scored):,} that were."
                )
            ends = np.cumsum(self.samples())
            some = slice(int(ends[place] - self.samples()[place]), int(ends[place]))
        pairs = self.outcomes["label"][some] * classes + self.outcomes["answer"][some]
        return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)

    def curve(self, split: str = "val", figure: str = "macro") -> list[tuple[int, float]]:
        """Return one figure by round."""
        return [(line.round, getattr(_scores_by_split(line)[split], figure)) for line in self.evaluations]

    def by_epoch(self) -> list[tuple[int, float]]:
        """Return the score of a one-shot method after each epoch that its `curve` names.

        On the server's test set if there is one, else the mean over clients' own test samples.
        """
        found = []
        for point in (self.history[-1].curve or ()) if self.history else ():
            central, personal = point.evaluation.central, point.evaluation.personal or {}
            found.append((point.epoch, personal["test"].macro if central is None else central.score))
        return found

    @property
    def transductive(self) -> bool:
        """Whether an answer to a sample depends on the others of its batch."""
        return self.algorithm.transductive or (self.inductive, self.central_inductive) != (None, None)

    @property
    def inductive(self) -> float | None:
        """The mean score on test samples that are answered one at a time; None where that is no other, or impossible.

        Where answers depend on the other samples of a batch, this is what a client gets who asks for one.
        """
        found = (self.evaluations[-1].personal or {}).get(INDUCTIVE) if self.evaluations else None
        return None if found is None else found.macro

    def _explain_no_inductive(self) -> str:
        if not self.algorithm.transductive:
            return (
                f"Scores of one test sample at a time are those of the test split where no answer depends on other "
                f"samples. So it is with {self.label}."
            )
        return (
            f"{self.label} must have several numbers of a sample in every BatchNorm to be scored one sample at a time. "
            "In this network a layer gets one number per channel, and one number has no variance."
        )

    @property
    def union(self) -> float | None:
        """The shared model's score on the test samples of all scored clients together; None without a shared model."""
        if self.select_evaluation().shared is not None:
            return self.figures(model="shared").micro
        same = not self.algorithm.defines("personalize")
        return self.figures().micro if same else None

    @property
    def central(self) -> float | None:
        """The shared model's score on the server's own test set."""
        found = self._last_central
        return None if found is None else found.score

    @property
    def central_inductive(self) -> float | None:
        """The same with one sample at a time, where an answer depends on the others of its batch."""
        found = self._last_central
        return None if found is None else found.inductive

    @property
    def _last_central(self) -> Central | None:
        found = [line.evaluation.central for line in self.history if line.evaluation and line.evaluation.central]
        return found[-1] if found else None

    def score_average(self) -> ClientScores:
        """Score the average of all clients' models on every client's test samples: `.macro`, `.micro`, `.worst`."""
        from atoll.federation.models import method_as_run
        from atoll.metrics.deployed import score_average

        live = self.require_live()
        method, rounds, metric = method_as_run(self, live), self.settings.rounds, self.settings.metric
        return score_average(live.engine, live.population, method, live.server, round=rounds, metric=metric)

    def personal_parts(self) -> tuple[list[str], Scores]:
        """Return the leaves of a model, and how far each client's lie from the average of all, [client, leaf].

        In lengths of the average: 0 for a leaf that all clients share.
        """
        from atoll.federation.models import method_as_run
        from atoll.metrics.deployed import measure_parts

        live = self.require_live()
        method, rounds = method_as_run(self, live), self.settings.rounds
        return measure_parts(live.engine, live.population, method, live.server, round=rounds)

    def sharpness(self, rho: float = 0.05) -> Scores:
        """Return how much each client's training loss rises within a distance `rho` of the model that it deploys."""
        from atoll.federation.models import method_as_run
        from atoll.metrics.deployed import measure_sharpness

        if not 0 < rho < math.inf:
            raise HyperparameterError(f"`rho` of sharpness must be a float in (0, inf). Got {rho!r}.")
        live = self.require_live()
        method, rounds = method_as_run(self, live), self.settings.rounds
        return measure_sharpness(live.engine, live.population, method, live.server, round=rounds, rho=rho)

    @property
    def mixing(self) -> Scores | None:
        """Who learns from whom, where the method says so: row k holds what client k takes from every client."""
        found = self.select_evaluation().mixing
        return None if found is None else np.array(found, dtype=np.float64)

    @cached_property
    def sensitivity(self) -> tuple[list[str], Scores] | None:
        """The layers, and how sensitive each client of `scored` was when it last trained; None if it is not known."""
        last: dict[str, dict[str, float]] = {}
        for line in self.history:
            for name, values in (line.observed or {}).items():
                if name.startswith("sensitivity/"):
                    last.setdefault(name.removeprefix("sensitivity/"), {}).update(values)
        if not last:
            return None
        clients = map(str, self.scored)
        return [*last], np.array([[of.get(client, math.nan) for of in last.values()] for client in clients])

    @property
    def clusters(self) -> Clusters | None:
        """The clusters of clients, where the method finds some."""
        if self.outcomes is not None and "cluster" in self.outcomes:
            return Clusters(self.outcomes["cluster"])
        found = self.select_evaluation().clusters
        return None if found is None else found.clusters

    @property
    def agreement(self) -> float | None:
        """The adjusted Rand index of these clusters and the planted groups, where there are both."""
        clusters, data = self.clusters, self.statistics
        planted = None if data is None else data.groups
        return None if clusters is None or planted is None else adjusted_rand(clusters.of_client, planted)

    # -- cost --------------------------------------------------------------------------------------------------------
    @property
    def newcomers(self) -> Newcomers | None:
        """How clients that took no part were served after the last round; None if there were none."""
        return self._last.newcomers

    @property
    def _last(self) -> Evaluation:
        """What was found after the last round."""
        return (self.history[-1].evaluation if self.history else None) or Evaluation()

    @cached_property
    def bytes(self) -> Mapping[tuple[Direction, str], int]:
        """All bytes by direction and kind."""
        return self.ledger.by_kind()

    def megabytes(self, direction: Direction) -> float:
        """Sum the megabytes that all clients together received (down) or sent (up)."""
        return sum(size for (way, _), size in self.bytes.items() if way == direction) / MEGABYTE

    @property
    def deployed(self) -> float | None:
        """The megabytes that a client must hold to answer by itself, on average; None where that was not measured."""
        size = self._last.deployed
        return None if size is None else size / MEGABYTE

    @property
    def deployment(self) -> ByName:
        """What clients observed when they made the models that they deploy: by name, a number for each client."""
        return self._last.observed or {}

    @cached_property
    def spent(self) -> list[float]:
        """Megabytes in both directions until each evaluation, with those before the first round."""
        of_rounds = [sum(line.bytes.values()) / MEGABYTE for line in self.history]
        before = self.megabytes("up") + self.megabytes("down") - sum(of_rounds)
        until = dict(zip((line.round for line in self.history), before + np.cumsum(of_rounds), strict=True))
        return [float(until[line.round]) for line in self.evaluations]

    @property
    def seconds(self) -> float:
        """How long training took, without evaluation; trainings found on disk count as long as they took."""
        return float(sum(line.seconds["round"] + line.seconds.get("found", 0.0) for line in self.history))

    @property
    def gradients(self) -> int:
        """Gradients of one batch that all clients together took."""
        return sum(line.gradients for line in self.history)

    @property
    def memory(self) -> float:
        """The largest number of megabytes held: by tensors on a GPU, else by the process."""
        return max((line.memory for line in self.history), default=0) / MEGABYTE


def _scores_by_split(line: Round) -> dict[str, Figures]:
    """Return the scores of all clients by split, of a round after which they were evaluated."""
    assert line.personal is not None
    return line.personal
