"""The models of a run: of its clients, of clients that were never there, in this process or from the run's folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.algorithms import name_of
from atoll.compose.architectures import InArchitectures, within_architectures
from atoll.compose.steps import adopt_step_size
from atoll.data.datasets import CATALOGUE
from atoll.data.preprocessing import Preprocessing
from atoll.data.rows import Rows
from atoll.data.splits import FOLDS
from atoll.data.tables import table_of
from atoll.data.task import Task
from atoll.export.deployed import deploy, deploy_newcomer, is_untrained
from atoll.export.folder import MANIFEST, MOST, Exported, Judging, WrittenModel, export_model, find_format
from atoll.export.model import ClientModel
from atoll.federation.config import is_another_model
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DataError, LabelsNeeded, ModelError, RunError, UnknownName
from atoll.kernel.randomness import generator
from atoll.metrics.measures import measure_of
from atoll.records.runs import Run
from atoll.records.trust import remember, require_trusted
from atoll.runtime.engines import LocalEngine
from atoll.runtime.memory import open_memory
from atoll.runtime.population import Population

if TYPE_CHECKING:
    from atoll.federation.report import Live, Report

log = logging.getLogger("atoll.export")

NOT_STATED = "not stated"
NEWCOMERS = "models/new"  # in a run's folder, the models of clients that were welcomed


def restore(report: Report, task: Task | None = None) -> Live:
    """Return what a finished run held when it ended, from its folder; a task that was built by hand must be given."""
    from atoll.federation.report import Live

    assert report.folder is not None
    if not report.finished:
        raise RunError(
            f"A model can be taken from a finished run. {report.folder} has done {report.progress}.",
            hint=f"finish it with `atoll resume {report.folder}`.",
        )
    task = adopt_step_size(report.config.recipe.build() if task is None else task, report.algorithm)
    if report.config.task.data not in (None, task.fingerprint):
        raise RunError(
            f"The samples must be those of the run. {report.folder} was run on others than {task.name} has now.",
            hint="put the data back, or begin a new run.",
        )
    if is_another_model(report.config, task):
        raise RunError("The model must be that of the run. It computes something else now: an attribute differs.")
    engine, run, settings = LocalEngine(device="cpu", compile=False), Run.open(report.folder), report.settings
    here = engine.place(task)
    memory = open_memory(settings.memory, task.clients, run.folder)
    loaded = run.load(here.layouts, engine.device)
    if loaded is None or loaded[0] != settings.rounds:
        raise RunError(f"The last checkpoint of {report.folder} must be whole. It cannot be read.")
    memory.load(loaded[1]["memory"], round=settings.rounds)
    return Live(task, settings, loaded[1]["server"], Population(here, memory, settings.seed), engine)


def find_client(task: Task, given: int | str) -> int:
    """Find a client by its name or number; names count first."""
    names, text = task.names or (), str(given)
    if text in names and not isinstance(given, int):
        return names.index(text)
    if text.isdecimal() and int(text) < task.clients:
        return int(text)
    near = get_close_matches(text, names)
    called = f"they are called {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}." if names else None
    raise UnknownName(
        f"A client must be given by its name or by a number from 0 to {task.clients - 1}. Got {given!r}.",
        hint=f"did you mean: {', '.join(near)}?" if near else called,
    )


def make_models(report: Report, clients: NDArray[np.int64]) -> Iterator[tuple[int, ClientModel]]:
    """Yield the numbers of clients and their models, in no particular order."""
    live = report.require_live()
    method = method_as_run(report, live)
    found = deploy(live.engine, live.population, method, live.server, clients, round=live.settings.rounds)
    for client, predictor, network in found:
        if is_untrained(predictor, network):
            raise ModelError(
                f"Client {live.task.client_name(client)} has no model: it took part in no round, and "
                f"{name_of(report.algorithm)} gives such a client the initial model, which has learnt nothing.",
                hint="run more rounds or a larger `cohort`, or take a method with a shared model, as fedavg or ditto.",
            )
        yield client, ClientModel.of(predictor, network, live.population.facts, live.task.preprocessing(client))


def method_as_run(report: Report, live: Live) -> Algorithm:
    """Return the method as it ran: a report from a folder has it without what several architectures add."""
    method = report.algorithm
    wrapped = isinstance(method, InArchitectures)
    return method if wrapped else within_architectures(method, live.task.public_facts())


def make_newcomer(report: Report, raw: Any, labels: Any = None, *, unlabelled: bool = False) -> ClientModel:
    """Make the model of a client that took no part, from raw samples and their labels.

    Labels stand in the column of the target, unless they are given; without any, or `unlabelled`, none are read.
    """
    mine = _preprocess_newcomer(report, raw)
    model = _deploy_newcomer(report, mine, *_read_newcomer(mine, raw, labels, unlabelled=unlabelled))
    assert model is not None
    return model


@dataclass(frozen=True)
class Quality:
    """How well new clients' models answer samples that they were not made from, beside the shared model."""

    samples: int
    folds: int
    score: float | None  # None where it does not exist
    shared: float | None  # None without a shared model


def score_newcomer(report: Report, raw: Any, labels: Any = None) -> Quality | None:
    """Score the model of a client that took no part by cross-validation: it has no samples to spare.

    Its samples are dealt to at most 5 folds, groups whole; each fold is answered by a model made from the others. None
    where there are fewer than 2 samples, or groups.
    """
    x, y = _read_newcomer(mine := _preprocess_newcomer(report, raw), raw, labels, unlabelled=False)
    fold = _deal_folds(report, raw, len(x))
    if y is None or fold.max() == 0:
        return None
    answers: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    order = [np.flatnonzero(fold == one) for one in range(fold.max() + 1)]
    for held in order:
        rest = np.setdiff1d(np.arange(len(x)), held)
        mine = _preprocess_newcomer(report, raw, rest)
        x, y = _read_newcomer(mine, raw, labels, unlabelled=False)
        for shared, found in answers.items():
            model = _deploy_newcomer(report, mine, x[rest], y[rest], shared=shared)
            if model is not None:
                with torch.no_grad():
                    found.append(model.eval()(model.number(raw)[held]))
    network = report.require_live().population.task.network
    truth = torch.as_tensor(y)[np.concatenate(order)]
    judging = Judging(measure_of(report.settings.metric, network), truth, truth, truth)
    classes = report.require_live().task.classes is not None
    score, shared_score = (judging.score(torch.cat(of), classes=classes) if of else None for of in answers.values())
    return Quality(len(x), len(order), score, shared_score)


def _deal_folds(report: Report, raw: Any, samples: int) -> NDArray[np.int64]:
    """Return the fold of each sample: groups are kept whole if the run's clients have them and they stand here too."""
    own = (report.config.task.recipe or {}).get("own") or {}
    rows = None if isinstance(raw, np.ndarray | torch.Tensor) else Rows([table_of(raw)])
    group, name = np.arange(samples), own.get("group")
    if rows is not None and name in rows.names:
        group = np.unique(rows.column(name, categorical=True).astype(str), return_inverse=True)[1]
    groups = int(group.max()) + 1
    turns = generator(report.seed, "folds of a newcomer").permutation(groups) % min(FOLDS, groups)
    return np.asarray(turns[group])


def _preprocess_newcomer(report: Report, raw: Any, rows: NDArray[np.int64] | None = None) -> Preprocessing:
    """Return what a new client does with raw samples; it learns the scale from all rows or some."""
    scaling = report.require_live().task.scaling
    return report.require_live().task.preprocessing(0) if scaling is None else scaling.welcome(raw, rows)


def _deploy_newcomer(
    report: Report, mine: Preprocessing, x: Any, y: Any, *, shared: bool = False
) -> ClientModel | None:
    """Make a new client's model, or the shared one; None if there is none."""
    live = report.require_live()
    method = method_as_run(report, live)
    try:
        found = deploy_newcomer(
            live.engine, method, live.server, live.population.task, x, y, seed=report.seed, round=report.rounds,
            shared=shared,
        )  # fmt: skip
    except LabelsNeeded as error:
        raise LabelsNeeded(
            f"{name_of(report.algorithm)} needs labels to make a model for a new client. Got samples without them.",
            hint="add the column of the target, or take a method that needs none: `atoll list` shows them.",
        ) from error
    return None if found is None else ClientModel.of(*found, live.population.facts, mine)


def _read_newcomer(mine: Preprocessing, raw: Any, labels: Any, *, unlabelled: bool) -> tuple[Any, Any]:
    """Return a new client's samples as its network takes them, and its targets; None without labels."""
    x, target = mine.encode(raw), mine.schema.target
    if unlabelled:
        return x, None
    if labels is not None:
        names = [str(one) for one in np.asarray(labels).tolist()]
        if mine.classes and set(names) <= set(mine.classes):
            return x, torch.tensor([mine.classes.index(one) for one in names])
        return x, labels
    if isinstance(raw, np.ndarray | torch.Tensor):
        return x, None
    rows = Rows([table_of(raw)])
    if target is None or target not in rows.names:
        raise DataError(
            f"A new client's labels must be in the column `{target}`. There is none.",
            hint="without labels, pass `unlabelled`: some methods need none.",
        )
    return x, torch.from_numpy(np.ascontiguousarray(mine.schema.encode_target(rows)))


def export(
    report: Report,
    folder: Path | str,
    clients: Sequence[int | str] | None,
    *,
    format: str,  # noqa: A002 - the word users know
    int8: bool,
    licence: str | None,
    on_client: Callable[[Exported], None] | None,
) -> list[Exported]:
    """Write the models of some clients, or of all: each to a folder of its own inside `folder`."""
    live, form, folder = report.require_live(), find_format(format), Path(folder)
    task = live.task
    wanted = np.arange(task.clients) if clients is None else np.array([find_client(task, one) for one in clients])
    places = name_folders(task, wanted)
    found = {}
    for client, model in make_models(report, np.unique(wanted)):
        facts = describe(report, client, task.client_name(client), licence)
        judging = judge(report, model, client)
        found[client] = export_model(model, folder / places[client], form, judging, facts, int8=int8)
        if on_client is not None:
            on_client(found[client])
    return [found[int(client)] for client in np.unique(wanted)]


def export_newcomer(
    report: Report,
    model: ClientModel,
    raw: Any,
    folder: Path,
    name: str,
    *,
    format: str,  # noqa: A002
    licence: str | None,
    quality: Quality | None = None,
) -> Exported:
    """Write the model of a client that took no part; it has no validation samples, and may have a `quality`."""
    x, measure = model.number(raw)[:MOST], measure_of(report.settings.metric, model.rule.network)
    judging = Judging(measure, x, x[:0], report.require_live().task.y[:0].cpu())
    facts = describe(report, None, name, licence)
    facts |= {} if quality is None else {"cross_validation": asdict(quality)}
    found = export_model(model, folder, find_format(format), judging, facts)
    remember(folder / MANIFEST)
    return found


def read_newcomer(folder: Path, *, trust: bool = False) -> WrittenModel:
    """Read the model of a client that was welcomed; raise RunError unless this user welcomed it: it is a program."""
    require_trusted(folder / MANIFEST, trust=trust)
    return WrittenModel.read(folder)


def newcomers_of(report: Report) -> dict[str, Path]:
    """Return the folders of clients that were welcomed by this run, by name."""
    assert report.folder is not None
    return {place.parent.name: place.parent for place in sorted((report.folder / NEWCOMERS).glob(f"*/{MANIFEST}"))}


def judge(report: Report, model: ClientModel, client: int) -> Judging:
    """Return the samples that a client's files are tried on."""
    task = report.require_live().task

    def take(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, held, place = task.splits[split].hold(task.x, task.y, np.array([client]))
        rows = held.of(place).order
        return model.unscale(x[rows]), y[rows].cpu()

    some, (x, y) = take("train")[0][:MOST], take("val")
    return Judging(measure_of(report.settings.metric, model.rule.network), some, x, y)


def describe(report: Report, client: int | None, name: str, licence: str | None) -> dict[str, Any]:
    """Return what a manifest says of the run that a model comes from."""
    config = report.config
    recipe, versions = config.task.recipe or {}, config.versions or {}
    known = None if recipe.get("own") else CATALOGUE.get(str(recipe.get("dataset")))
    return {
        "client": {"name": name, "number": client, "took_part": client is not None},
        "method": {**config.algorithm.as_json(), "label": report.label, "rounds": report.rounds, "seed": report.seed},
        "made_by": {
            "atoll": metadata.version("atoll"), "run_with": versions.get("atoll"), "commit": versions.get("commit"),
            "torch": torch.__version__,
        },
        "data": {
            "task": config.task.name, "fingerprint": config.task.data,
            "licence": licence or (NOT_STATED if known is None else known.licence),
        },
    }  # fmt: skip


def name_folders(task: Task, clients: NDArray[np.int64]) -> dict[int, str]:
    """Return a folder's name for each client: its own name, as far as folders can have it."""
    names: dict[int, str] = {}
    for client in map(int, clients):
        name = re.sub(r"[^\w.-]+", "-", task.client_name(client)).strip(".-") or str(client)
        taken = name.lower() in {one.lower() for one in names.values()}
        names[client] = f"{name}-{client}" if taken else name
    return names
