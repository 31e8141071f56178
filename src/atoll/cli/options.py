"""The options that commands have in common: of the task, of clients' steps, of the federation, of the engine."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from atoll.cli import completion
from atoll.cli.display import listen
from atoll.cli.program import VERBOSE, option
from atoll.kernel.errors import EngineError, UnknownName

if TYPE_CHECKING:
    from atoll.data.own import Own
    from atoll.data.recipe import Recipe
    from atoll.federation.settings import Settings
    from atoll.kernel.algorithm import Algorithm
    from atoll.kernel.engine import Engine

TASK, OWN, STEPS, ROUNDS, PROTECTION, ENGINE, TRACKING = (
    {"panel": name}
    for name in (
        "The task",
        "Your own data",
        "Clients' steps",
        "The federation",
        "Protection and attacks",
        "The engine",
        "Tracking",
    )
)
COMPRESS = option("How messages become lean: topk:P, randk:P, qsgd:BITS, sign, lowrank:R.", **PROTECTION)
AGGREGATE = option("How replies become one: mean, or a rule: nnm+trimmed; see `atoll list rules`.", **PROTECTION)
DP_AT_SITES = option("What is promised about a client: client:epsilon=4,clip=1; or local:epsilon=50.", **PROTECTION)
FEW_MASKS = "masks:neighbours=20 (faster; 15 of a client's 20 neighbours can uncover it, fewer if others are gone)"
SECURE_AT_SITES = option(f"What the server reads: all (none), or only sums: masks, {FEW_MASKS}.", **PROTECTION)
TOGETHER = option("Run side by side what need not wait: lanes of a GPU, workers of a cluster; there the default.")


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """The options of any command that takes own data: the words of `Task.own`."""

    own: Annotated[Path | None, option("Your data: a folder with a file per client, or one file.", **OWN)] = None
    target: Annotated[str | None, option("The column to predict; else y.", **OWN)] = None
    client: Annotated[str | None, option("Of one file, the column that names the client.", **OWN)] = None
    kind: Annotated[str, option("auto, classification, regression, tokens or ratings.", **OWN)] = "auto"
    features: Annotated[str | None, option("The columns to use, as age,sex; else all others.", **OWN)] = None
    categorical: Annotated[str | None, option("Columns of codes that look like numbers, as ward,icd.", **OWN)] = None
    classes: Annotated[str | None, option("How many, or the labels in order, as low,high.", **OWN)] = None
    standardise: Annotated[
        str, option("Whose training samples give mean and spread: client, global or none; auto: client.", **OWN)
    ] = "auto"
    group: Annotated[str | None, option("A column, as patient: no group is on both sides of the split.", **OWN)] = None
    order: Annotated[str | None, option("A column of times: the past trains, the future tests.", **OWN)] = None
    gap: Annotated[int, option("With --order, samples left out before val and before test.", min=0, **OWN)] = 0
    min_samples: Annotated[int, option("The fewest samples of a client.", min=1, **OWN)] = 2
    lone_labels: Annotated[str, option("A label that one client alone has: warn or error.", **OWN)] = "warn"
    name: Annotated[str | None, option("What your data are called; else as their folder or file.", **OWN)] = None

    def own_data(self) -> "Own | None":
        """Return the words of own data; None where a data set is asked for."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(OwnOptions) if one.name != "own"}
        if self.own is None:
            changed = [one.name for one in dataclasses.fields(OwnOptions) if one.default != getattr(self, one.name)]
            if changed:
                raise UnknownName(
                    f"`{changed[0]}` must come with `own`, which says where your data are.",
                    hint="for example --own hospitals/ --target readmitted.",
                )
            return None
        from atoll.data.own import Own, parse_classes

        lists = {name: split_names(given[name]) for name in ("features", "categorical")}
        return Own.of(
            self.own,
            **{**given, **lists, "categorical": lists["categorical"] or (), "classes": parse_classes(self.classes)},
        )


@dataclasses.dataclass(frozen=True)
class Options(OwnOptions):
    """The options of `run` and `compare`, with their help."""

    task: Annotated[str, option("Data set; see `atoll list tasks`.", **TASK, **completion.TASKS)] = "digits"
    partition: Annotated[
        str, option("How samples are dealt; see `atoll list partitions`.", **TASK, **completion.PARTITIONS)
    ] = "auto"
    clients: Annotated[int | None, option("How many there are; else 20, or all natural ones.", **TASK)] = None
    model: Annotated[
        str, option("Network, see `atoll list models`; several in turn: mlp:32/mlp:64.", **TASK, **completion.MODELS)
    ] = "auto"
    data: Annotated[Path | None, option("Folder of the data sets; else $ATOLL_DATA.", **TASK)] = None
    samples: Annotated[int | None, option("So many of the data set's samples; else all.", **TASK)] = None
    partition_seed: Annotated[int | None, option("Who gets what; else the seed.", **TASK)] = None
    split: Annotated[
        str, option("Per cent of a client's samples: train/val/test; of own data, or a column that says it.", **TASK)
    ] = "60/15/25"
    stratify: Annotated[bool, option("Cut class by class; flatters personal models.", "--stratify", **TASK)] = False
    central: Annotated[str, option("The server's test set: none, official, or a share as 0.1.", **TASK)] = "none"
    public: Annotated[float, option("Share of samples that everybody may see.", **TASK)] = 0.0
    augment: Annotated[
        str, option("How training images are changed: none, crop-flip, crop, simclr or simclr-batch.", **TASK)
    ] = "none"
    unseen: Annotated[float, option("Share of clients that take no part and are welcomed at the end.", **TASK)] = 0.0
    devices: Annotated[
        Path | None, option("CSV file with client, speed, memory, energy: how unequal devices are.", **TASK)
    ] = None
    lr: Annotated[float, option("Step size.", **STEPS)] = 0.1
    batch_size: Annotated[int, option("Samples per step.", **STEPS)] = 10
    momentum: Annotated[float, option("Of a client's steps.", **STEPS)] = 0.0
    weight_decay: Annotated[float, option("Pull of all parameters to 0.", **STEPS)] = 0.0
    lr_decay: Annotated[float, option("Factor on the step size per round, at most 1.", **STEPS)] = 1.0
    clip: Annotated[float | None, option("Largest norm of a gradient.", **STEPS)] = None
    set_: Annotated[list[str] | None, option("A hyperparameter, name=value; repeatable.", "--set", **STEPS)] = None
    rounds: Annotated[
        int | None, option("Exchanges between server and clients; else 30, or 1 if all methods upload once.", **ROUNDS)
    ] = None
    seed: Annotated[int, option("Of everything drawn; the first one of a comparison.", **ROUNDS)] = 0
    cohort: Annotated[
        str | None, option("Clients per round: a number, a share as 0.1, or poisson:0.1; else all.", **ROUNDS)
    ] = None
    select_clients: Annotated[
        str, option("Who of them is asked: uniform, power-of-choice:D, oort, ucb:GAMMA, turns.", **ROUNDS)
    ] = "uniform"
    participation: Annotated[
        str, option("Who is there: constant, random:P, diurnal:T, turnover:S, file:PATH.", **ROUNDS)
    ] = "constant"
    drop: Annotated[float, option("Probability that a client drops out of a round.", **ROUNDS)] = 0.0
    late: Annotated[float, option("Probability that a reply arrives in a later round.", **ROUNDS)] = 0.0
    delay: Annotated[int, option("The most rounds that a late reply needs.", min=1, **ROUNDS)] = 1
    eval_every: Annotated[int | None, option("Rounds between evaluations; else a tenth.", min=1, **ROUNDS)] = None
    curve: Annotated[
        str | None, option("Score a one-shot method after these epochs of its training, too: 1,11,21,36.", **ROUNDS)
    ] = None
    evaluation: Annotated[
        str,
        option(
            "Who is scored: all clients, sample:N of them, nobody but the server's test set (central), or none; "
            "auto: all, of more than 10,000 a sample of 1,000.",
            **ROUNDS,
        ),
    ] = "auto"
    metric: Annotated[
        str,
        option(
            "What clients are judged by: accuracy, balanced-accuracy, f1, auroc, average-precision, log-loss, top-K; "
            "mae, mse, rmse, r2; auto: the task's own.",
            **ROUNDS,
        ),
    ] = "auto"
    memory: Annotated[str, option("Where clients keep their state: ram, disk; auto: which fits.", **ROUNDS)] = "auto"
    compress: Annotated[str, COMPRESS] = "none"
    aggregate: Annotated[str, AGGREGATE] = "mean"
    dp: Annotated[
        str,
        option("What is promised about a client: client:epsilon=4,clip=adaptive; or local:epsilon=50.", **PROTECTION),
    ] = "none"
    secure: Annotated[
        str,
        option(f"What the server reads: all (none), or only sums: sums, masks, {FEW_MASKS}, ckks.", **PROTECTION),
    ] = "none"
    attack: Annotated[
        str, option("What some clients do to others: sign-flip:0.2; see `atoll list attacks`.", **PROTECTION)
    ] = "none"
    engine: Annotated[
        str,
        option(
            "Clients at once: auto, loop, whole, threads, chunk:N, threads:N; or a plan. On a Ray cluster: ray, "
            "ray:HOST:PORT.",
            **ENGINE,
        ),
    ] = "auto"
    workers: Annotated[
        int | None, option("Of a cluster; else one per GPU, or per core if there is none.", min=1, **ENGINE)
    ] = None
    compile: Annotated[bool | None, option("Else if it pays.", "--compile/--no-compile", **ENGINE)] = None
    precision: Annotated[str, option("fp32, tf32 or bf16.", **ENGINE)] = "fp32"
    device: Annotated[str, option("auto, cpu, cuda or mps.", **ENGINE, **completion.WHERE)] = "auto"
    timeout: Annotated[
        float | None,
        option("Seconds after which a reply counts as lost (one that never comes is waited for).", **ENGINE),
    ] = None
    tensorboard: Annotated[bool, option("Write events for TensorBoard.", "--tensorboard", **TRACKING)] = False
    mlflow: Annotated[bool, option("Log to $MLFLOW_TRACKING_URI; else in the folder.", "--mlflow", **TRACKING)] = False
    out: Annotated[Path | None, option("Folder of the results; else one in runs/.")] = None
    verbose: Annotated[bool, VERBOSE] = False

    def recipe(self) -> "Recipe":
        """Return the recipe of the task."""
        from atoll.data.recipe import Recipe
        from atoll.data.task import Training

        names = ("lr", "batch_size", "momentum", "weight_decay", "lr_decay", "clip")
        training = Training(**{name: getattr(self, name) for name in names})
        data = None if self.data is None else str(self.data.resolve())
        named = (
            "partition", "clients", "model", "seed", "samples", "partition_seed", "split", "stratify",
            "central", "public", "augment", "unseen",
        )  # fmt: skip
        words = {name: getattr(self, name) for name in named}
        words["devices"] = None if self.devices is None else str(self.devices.resolve())
        own = self.own_data()
        if own is not None:
            return Recipe.of_own(own, training=training, **words)
        return Recipe(self.task, data=data, training=training, **words)

    def settings(self, methods: Sequence["Algorithm"]) -> "Settings":
        """Return the settings of a federation with these methods."""
        from atoll.federation.settings import Settings

        rounds = (1 if all(method.one_shot for method in methods) else 30) if self.rounds is None else self.rounds
        names = (
            "seed", "select_clients", "participation", "drop", "late", "delay", "eval_every", "evaluation",
            "metric", "memory", "compress", "aggregate", "attack", "dp", "secure",
        )  # fmt: skip
        return Settings(
            rounds=rounds,
            cohort=parse_cohort(self.cohort),
            curve=parse_curve(self.curve),
            **{name: getattr(self, name) for name in names},
        )

    def build_engine(self) -> "Engine":
        """Build the engine."""
        return build_engine(self.engine, self.compile, self.precision, self.device, self.timeout, self.workers)

    @property
    def hyperparameters(self) -> dict[str, str]:
        """The values that --set gives."""
        pairs = [text.partition("=") for text in self.set_ or ()]
        for name, given, value in pairs:
            if not (name and given and value):
                raise UnknownName(f"`--set` must be given as name=value. Got {name + given + value!r}.")
        return {name: value for name, _, value in pairs}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the class that its `options` is annotated with; it receives them as one object."""
    own = [entry for entry in inspect.signature(command).parameters.values() if entry.name != "options"]
    kind = get_type_hints(command)["options"]
    hints = get_type_hints(command, include_extras=True) | get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
    ]

    @wraps(command)
    def call_command(**given: Any) -> None:
        options = kind(**{entry.name: given.pop(entry.name) for entry in shared})
        if getattr(options, "verbose", False):
            listen(verbose=True)
        command(**given, options=options)

    mine = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own]
    call_command.__signature__ = inspect.Signature([*mine, *shared])  # type: ignore[attr-defined]
    call_command.__annotations__ = {entry.name: hints[entry.name] for entry in [*mine, *shared]}
    return call_command


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Parse `age,sex` into names; None stays None."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def parse_cohort(text: str | None) -> int | float | str | None:
    """Parse clients per round: `10` is a number, `0.1` a share, `poisson:0.1` a probability for each."""
    if text is None or text.startswith("poisson"):
        return text
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise UnknownName(f"`--cohort` must be a number of clients or a share of them. Got {text!r}.") from None


def parse_curve(text: str | None) -> tuple[int, ...]:
    """Parse `1,11,21` into epochs; nothing is no curve."""
    words = split_names(text) or ()
    if not all(re.fullmatch(r"\d+", word) for word in words):
        raise UnknownName(f"`--curve` must be numbers of epochs, as 1,11,21. Got {text!r}.")
    return tuple(map(int, words))


def build_engine(
    strategy: str,
    compile_: bool | None,
    precision: str,
    device: str,
    timeout: float | None,
    workers: int | None = None,
) -> "Engine":
    """Build the engine that these options ask for."""
    from atoll.runtime.engines.local import LocalEngine
    from atoll.runtime.installed import ENGINES, list_installed, load_installed

    asked: dict[str, Any] = {"compile": compile_, "precision": precision, "device": device, "timeout": timeout}
    name, _, address = strategy.partition(":")
    if name in list_installed(ENGINES):
        engine: Engine = load_installed(ENGINES, name)(address or None, workers=workers, **asked)
        return engine
    if workers is not None:
        raise EngineError(
            f"`--workers` is for a cluster. Got --workers {workers} and --engine {strategy}.", hint="give --engine ray."
        )
    return LocalEngine(strategy=strategy, **asked)
