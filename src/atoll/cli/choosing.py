"""Commands that choose: tune, advise."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from atoll.cli import completion
from atoll.cli.display import messages, say, write, write_paths
from atoll.cli.options import ROUNDS, TOGETHER, Options, with_options
from atoll.cli.program import RUNS, app, option
from atoll.kernel.errors import EngineError

if TYPE_CHECKING:
    from atoll.experiments.advice import Advice
    from atoll.experiments.tuning import Tuning

CHOICE = {"panel": "The choice"}
TRIALS = option("Configurations that every method tries.", min=3, **CHOICE)
CHOSEN_BY = option("How many seeds choose, from --seed on.", min=1, **CHOICE)
FRESH_SEEDS = option("How many seeds after these test the choice.", min=1, **ROUNDS)


@app.command()
@with_options
def tune(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="As for `run`; values that are given are kept. local and fedavg are added if missing.",
            **completion.METHODS,
        ),
    ],
    trials: Annotated[int, TRIALS] = 9,
    chosen_by: Annotated[int, CHOSEN_BY] = 2,
    seeds: Annotated[int, FRESH_SEEDS] = 3,
    together: Annotated[bool | None, TOGETHER] = None,
    *,
    options: Options,
) -> None:
    """Find step size and hyperparameters on validation samples, then compare on test samples with fresh seeds."""
    from atoll.compose import create
    from atoll.experiments.tuning import choice_name
    from atoll.experiments.tuning import tune as tune_methods

    _refuse_trackers(options)
    asked = _add_values(methods, options.hyperparameters)
    recipe, engine = options.recipe(), options.build_engine()
    settings = options.settings([create(text) for text in asked])
    budget: dict[str, Any] = {"trials": trials, "chosen_by": chosen_by, "seeds": seeds}
    folder = options.out or RUNS / choice_name("tune", recipe, asked, settings, engine, budget)
    present_tuning(
        tune_methods(
            recipe, asked, settings=settings, engine=engine, folder=folder, together=together, say=say_aside, **budget
        ),
        folder,
    )


@app.command()
@with_options
def advise(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD...]", help="Race these; else those that may fit.", **completion.METHODS),
    ] = None,
    no_individual_updates: Annotated[
        bool, option("The server may see sums over clients only.", "--no-individual-updates", **CHOICE)
    ] = False,
    one_shot: Annotated[bool, option("Clients upload once.", "--one-shot", **CHOICE)] = False,
    max_mb: Annotated[
        float | None, option("MB that a client may send and receive in all rounds.", "--max-mb", **CHOICE)
    ] = None,
    trials: Annotated[int, TRIALS] = 5,
    chosen_by: Annotated[int, CHOSEN_BY] = 2,
    seeds: Annotated[int, FRESH_SEEDS] = 3,
    together: Annotated[bool | None, TOGETHER] = None,
    *,
    options: Options,
) -> None:
    """Say which method to use on a federation, what it is worth, how sure that is; or not to federate."""
    from atoll.compose import create
    from atoll.experiments.advice import advise as find_advice
    from atoll.experiments.tuning import choice_name

    _refuse_trackers(options)
    asked = _add_values(methods or [], options.hyperparameters)
    recipe, engine = options.recipe(), options.build_engine()
    settings = options.settings([create("oneshot-avg" if one_shot else "fedavg")])
    limits = {"one_shot": one_shot, "individual_updates": not no_individual_updates, "max_mb": max_mb}
    budget: dict[str, Any] = {"trials": trials, "chosen_by": chosen_by, "seeds": seeds, **limits}
    folder = options.out or RUNS / choice_name("advise", recipe, asked, settings, engine, budget)
    present_advice(
        find_advice(
            recipe, asked, settings=settings, engine=engine, folder=folder, together=together, say=say_aside, **budget
        ),
        folder,
    )


def resume_choice(folder: Path, rebuild_engine: Callable[[dict[str, Any]], Any]) -> None:
    """Continue a choice that was interrupted."""
    from atoll.experiments.advice import advise as find_advice
    from atoll.experiments.tuning import reopen
    from atoll.experiments.tuning import tune as tune_methods

    asked: dict[str, Any] = reopen(folder)
    kind, engine = asked.pop("kind"), rebuild_engine(asked.pop("engine"))
    asked |= {"engine": engine, "say": say_aside}
    if kind == "tune":
        present_tuning(tune_methods(**asked), folder)
    else:
        present_advice(find_advice(**asked), folder)


def say_aside(text: str) -> None:
    """Say what was found on the way, where a bar does not show it."""
    if not messages().is_terminal:
        say(text)


def present_tuning(tuning: "Tuning", folder: Path) -> None:
    """Write the results of tuning, show its tables and how to go on."""
    from atoll.report.table import notes

    paths = tuning.save(folder)
    write("", tuning.table(), Text(f"{tuning.budget} Scores are means over clients.", style="dim"), "")
    if tuning.comparison is not None:
        write(tuning.comparison.table(), Text(notes(tuning.comparison), style="dim"), "")
    for note in tuning.notes:
        say(note, style="yellow")
    labels = " ".join(arm.label for arm in tuning.best.values())
    write(Text(f"Use them, with the same data: atoll compare {labels}"))
    write_paths(**{name: path for name, path in paths.items() if name in ("tuning", "report", "json")})


def present_advice(advice: "Advice", folder: Path) -> None:
    """Write the advice: the sentence first, then the table of the race."""
    paths = advice.save(folder)
    write("", Text(advice.sentence, style="bold"), *map(Text, advice.sentences), "", advice.table(), "")
    if advice.comparison is not None:
        from atoll.report.table import notes

        write(advice.comparison.table(), Text(notes(advice.comparison), style="dim"))
    for warning in advice.warnings:
        say(warning, style="yellow")
    write_paths(**{name: path for name, path in paths.items() if name in ("advice", "report", "json")})


def _add_values(methods: Sequence[str], values: dict[str, str]) -> list[str]:
    """Return the methods with the values of --set, each for those that have it."""
    from atoll.compose import read
    from atoll.kernel.errors import unknown

    known = {text: read(text.partition(":")[0]).hyperparameters.keys() for text in methods}
    for name in values:
        if not any(name in names for names in known.values()):
            raise unknown("hyperparameter", name, set().union(*known.values()))
    found = []
    for text in methods:
        own = ",".join(f"{name}={value}" for name, value in values.items() if name in known[text])
        found.append(f"{text}{',' if ':' in text else ':'}{own}" if own else text)
    return found


def _refuse_trackers(options: Options) -> None:
    if options.tensorboard or options.mlflow:
        raise EngineError(
            "Trackers follow one run at a time, and a race pauses runs. Got --tensorboard or --mlflow.",
            hint="track the comparison that follows: `atoll compare` with the values that were found.",
        )
