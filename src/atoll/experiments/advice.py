"""advise(): from a federation to a sentence: which method, what it is worth, who is worse off, how sure that is.

Methods that fit are raced as in `tune`, Local and FedAvg always among them and tuned as much. The choice rests on
validation samples; what is said of it rests on test samples of new runs, with seeds that nothing was chosen by: the
best of many looks better than it is, also on test samples, if they are those of the runs that it won.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from rich.table import Table as RichTable

from atoll.algorithms import name_of
from atoll.compose import as_method
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.experiments.candidates import Constraints, Look, normalise_lead, propose
from atoll.experiments.comparison import Comparison
from atoll.experiments.race import Arm, Race
from atoll.experiments.tuning import (
    Course,
    NothingTrains,
    Say,
    add_reference_texts,
    arms_table,
    list_arms,
    open_race,
)
from atoll.federation.labels import label
from atoll.federation.numbers import Numbers
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine
from atoll.kernel.errors import RunError
from atoll.metrics.gains import BY_CHANCE, FEWEST_CLIENTS, SURE_SEEDS, Gain, estimate_gain, pool_seeds
from atoll.records.files import write_json, writing
from atoll.report.table import count_range, megabytes

if TYPE_CHECKING:
    from atoll.federation.typed import GivenSettings

FEW_CLIENTS = 10  # below which a warning is given
LEAST_KEPT = 3  # methods that go on after the middle rung, beside Local and FedAvg


@dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """Which method to use, and why."""

    choice: Arm  # by validation samples; Local: do not federate
    best: Arm  # the best that is not Local; the choice, unless that is Local
    second: Arm | None
    gains: Mapping[str, Gain]  # of `best`, over "local" and "fedavg", on test samples of new runs
    second_gain: Gain | None  # of `second`, over Local
    race: Race
    comparison: Comparison | None  # of the new runs; None without test samples
    look: Look
    constraints: Constraints
    reasons: Mapping[str, str]  # why each method was raced
    warnings: Sequence[str]

    def __repr__(self) -> str:
        return f"<Advice: {self.sentence}>"

    @property
    def federate(self) -> bool:
        """Whether federating pays: a method was chosen and its new runs do not say otherwise, or they make it likely.

        Local is the choice where it is near the best on validation samples; what they leave open, the new runs decide.
        """
        chosen, gain = name_of(self.choice.method) != "local", self.gains.get("local")
        return chosen if gain is None else gain.mean > 0 and (chosen or gain.words in ("sure", "likely"))

    @property
    def method(self) -> Algorithm:
        """The method to use."""
        return self.best.method if self.federate else self._local.method

    @property
    def _local(self) -> Arm:
        return next(arm for arm in self.race.arms if name_of(arm.method) == "local" and self.race.rounds in arm.rungs)

    @property
    def _numbers(self) -> Numbers:
        return Numbers(**next(iter(self.race.reports.values())).metric)

    @property
    def harmed(self) -> float | None:
        """How many clients are worse off with `best` than alone, by more than one standard error; mean over seeds."""
        row = self._row(self.best)
        return None if row is None else row["harmed"]

    def _row(self, arm: Arm) -> dict[str, Any] | None:
        rows = [] if self.comparison is None else self.comparison.results
        return next((row for row in rows if row["method"] == label(arm.method)), None)

    # -- in words ----------------------------------------------------------------------------------------------------
    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        name, gain = self._name(self.best), self.gains.get("local")
        if gain is None:
            if not self.federate:
                return (
                    f"Federating does not pay here: {name} is the best method on validation samples, and not clearly "
                    "ahead of training alone."
                )
            return f"Use {name}: it is best on validation samples; nothing was tested, so nothing is claimed."
        over_local = f"{self._amount(gain)} over training alone"
        if not self.federate:
            return (
                f"Federating does not pay here: the best method, {name}, is {over_local} ({gain.words}); {self._harm}."
            )
        fedavg = self.gains.get("fedavg")
        others = f", {self._numbers.gain(fedavg.mean)} over FedAvg" if fedavg is not None else ""
        seeds = f"{gain.seeds} fresh seed{'s' * (gain.seeds > 1)}"
        return (
            f"Use {name}: {over_local}{others}, {self._harm}; {gain.words} ({seeds}); "
            f"{megabytes(self.race.megabytes(self.best))} MB each in {self.race.rounds} "
            f"round{'s' * (self.race.rounds > 1)}; the race cost {self.full_runs:.1f} full runs per seed."
        )

    @property
    def sentences(self) -> list[str]:
        """What comes after the first sentence: the second choice, single clients, what was seen."""
        found = []
        if self.second is not None:
            gain = "" if self.second_gain is None else f", {self._amount(self.second_gain)} over training alone"
            found.append(f"The second choice is {self._name(self.second)}{gain}.")
        if self.comparison is not None and self.comparison.scored < FEWEST_CLIENTS:
            found.append(f"Client by client, {self._name(self.best)} gains over training alone: {self._list_gains()}.")
        return [*found, f"The federation: {self.look.sentence}"]

    def _list_gains(self) -> str:
        assert self.comparison is not None
        gains = self.comparison.gains(label(self.best.method))
        assert gains is not None
        means = np.nanmean(gains, axis=0)
        return ", ".join(
            f"{self.comparison.client(k)} {self._numbers.gain(float(mean))}" for k, mean in enumerate(means)
        )

    @property
    def _harm(self) -> str:
        if self.comparison is None or self.harmed is None:
            return "nobody is compared with training alone"
        clients, harmed = self.comparison.scored, self.comparison.find_harmed(label(self.best.method))
        assert harmed is not None
        chance = int(BY_CHANCE * clients)
        by_chance = f" (up to {chance} by chance)" if chance else ""
        return f"{count_range(harmed.sum(axis=1))} of {clients} clients worse off{by_chance}"

    def _name(self, arm: Arm) -> str:
        values = label(arm.method).partition(":")[2].replace("=", " ").replace(",", ", ")
        return f"{name_of(arm.method)}{f' ({values})' if values else ''}"

    def _amount(self, gain: Gain) -> str:
        numbers = self._numbers
        half = "" if gain.half is None else f" ± {numbers.score(gain.half)}"
        return f"{numbers.gain(gain.mean)}{half}{' points' if numbers.share else ''}"

    @property
    def full_runs(self) -> float:
        """How many whole runs the race cost, for each seed that it chose by."""
        return self.race.cost["rounds"] / (self.race.rounds * len(self.race.tasks))

    # -- for programs ------------------------------------------------------------------------------------------------
    def table(self) -> RichTable:
        """Return the table of all configurations for a terminal."""
        return arms_table(self.race, [self.best if self.federate else self._local])

    def as_json(self) -> dict[str, Any]:
        """Return everything for programs."""
        gain, example = self.gains.get("local"), next(iter(self.race.tasks.values()))
        over_fedavg = self.gains.get("fedavg")
        claim = None if gain is None else {
            "gain_local": gain.mean, "half": gain.half,
            "gain_fedavg": None if over_fedavg is None else over_fedavg.mean,
            "se_clients": gain.of_clients, "se_seeds": gain.of_seeds, "harmed": self.harmed,
            "chance": int(BY_CHANCE * example.clients), "words": gain.words,
            "seeds": [] if self.comparison is None else self.comparison.seeds,
        }  # fmt: skip
        return {
            "sentence": self.sentence,
            "task": {"name": example.name, "clients": example.clients},
            "constraints": asdict(self.constraints),
            "arms": list_arms(self.race),
            "raced_because": dict(self.reasons),
            "choice": {"method": label(self.method), "federate": self.federate, "best": label(self.best.method)},
            "second": None if self.second is None else label(self.second.method),
            "claim": claim,
            "cost": {**self.race.cost, "full_runs": self.full_runs},
            "shared_statistics": self.look.shared,
            "warnings": [*self.warnings],
        }

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write advice.json and the files of the comparison; return their paths by name."""
        folder = Path(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "advice.json", self.as_json())
        return {"advice": folder / "advice.json"} | ({} if self.comparison is None else self.comparison.save(folder))


def advise(
    task: Recipe | Task,
    methods: Sequence[Algorithm | str] | Algorithm | str = (),
    *,
    one_shot: bool = False,
    individual_updates: bool = True,
    max_mb: float | None = None,
    trials: int = 5,
    chosen_by: int = 2,
    seeds: int = 3,
    settings: Settings | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    together: bool | None = None,
    progress: bool = True,
    say: Say | None = None,
    **more: Unpack[GivenSettings],
) -> Advice:
    """Race the methods that fit a federation, and say which one to use, or that federating does not pay.

    Without `methods`, those are raced that what clients have makes worth trying. `one_shot`: clients upload once;
    `individual_updates=False`: the server may see sums over clients only; `max_mb`: what a client may send and receive
    in all rounds. The rest is as in `tune`. With a `folder`, a second call continues what was interrupted.

        print(advise(Task.own("hospitals/", target="readmitted"), rounds=27).sentence)
    """
    constraints = Constraints(one_shot, individual_updates, max_mb)
    settings = (settings or (Settings(rounds=1) if one_shot else Settings())).change(more, advise)
    methods = [methods] if isinstance(methods, str | Algorithm) else [*methods]
    if max_mb is not None and max_mb <= 0:
        raise RunError(f"`max_mb` must be above 0. Got {max_mb!r}.", hint="what one client may send and receive.")
    options = {
        "trials": trials, "chosen_by": chosen_by, "seeds": seeds, "one_shot": one_shot,
        "individual_updates": individual_updates, "max_mb": max_mb,
    }  # fmt: skip
    if one_shot and settings.rounds != 1:
        raise RunError(f"With one upload there is one round. Got rounds={settings.rounds}.", hint="leave out `rounds`.")
    reads = partial(_may_read_validation, methods, constraints)
    with open_race(
        "advise",
        task,
        methods,
        settings,
        engine,
        folder,
        options,
        reads=reads,
        together=together,
        progress=progress,
        say=say,
    ) as course:
        return _race_methods(course, methods, constraints)


def _race_methods(course: Course, methods: list[Algorithm | str], constraints: Constraints) -> Advice:
    race, look = course.race, Look.at(course.example)
    asked = add_reference_texts(methods or _list_references(propose(look, constraints), constraints))
    references = [one for one in asked if name_of(as_method(one)) in ("local", "fedavg")]
    course.expect(8 if not methods else len(asked), finalists=6, confirmed=4)
    found = {one: course.search(entry) for one in references if (entry := course.enter(one, must=True)) is not None}
    local, fedavg = (next(arm for arm in found.values() if name_of(arm.method) == name) for name in ("local", "fedavg"))
    metric = next(iter(race.reports.values())).metric
    lead = normalise_lead(
        fedavg.rungs[course.middle], local.rungs[course.middle], higher_is_better=metric.higher_is_better,
        share=metric.share,
    )  # fmt: skip
    look = replace(look, lead=lead)
    reasons = {"local": "reference", "fedavg": "reference"}
    reasons |= dict.fromkeys([_text(one) for one in asked if one not in references], "asked for")
    reasons |= {} if methods else propose(look, constraints)
    rivals: list[Arm] = []
    for one in [one for one in asked if one not in references] if methods else [*reasons][2:]:
        arm = _search_allowed(course, one, constraints)
        if arm is not None:
            rivals.append(arm)
    kept = _drop_methods(course, [local, fedavg, *rivals], constraints)
    race.run(kept, race.rounds)
    return _conclude(course, kept, local, fedavg, look, constraints, reasons)


def _list_references(names: Iterable[str], constraints: Constraints) -> list[Algorithm | str]:
    """Return Local and FedAvg; where all upload once, with as many epochs as the others."""
    if not constraints.one_shot:
        return ["local", "fedavg"]
    epochs = max(getattr(as_method(name), "epochs", 1) for name in names)
    return [f"local:epochs={epochs}", f"fedavg:epochs={epochs}"]


def _may_read_validation(methods: Sequence[Algorithm | str], constraints: Constraints, task: Task) -> bool:
    """Return whether a method that may be raced reads validation samples, whatever Local and FedAvg will show."""
    look = Look.at(task)
    names = methods or {name for lead in (-1.0, 0.0, 1.0) for name in propose(replace(look, lead=lead), constraints)}
    return any(as_method(one).reads_validation for one in names if constraints.forbids(as_method(one)) is None)


def _search_allowed(course: Course, asked: Algorithm | str, constraints: Constraints) -> Arm | None:
    """Find the best configuration of a method; None, and a note, for one that is not allowed or cannot run."""
    method = as_method(asked)
    reason = constraints.forbids(method)
    if reason is None and constraints.one_shot and not method.one_shot:
        reason = "it uploads more than once"
    if reason is not None:
        course.notes.append(f"{_text(asked)} is left out: {reason}.")
        return None
    entry = course.enter(asked)
    if entry is None:
        return None
    try:
        return course.search(entry)
    except NothingTrains as error:
        course.notes.append(f"{entry.text} is left out: {str(error).splitlines()[0]}")
        return None


def _drop_methods(course: Course, arms: Sequence[Arm], constraints: Constraints) -> list[Arm]:
    """Return the methods that go on after the middle rung: the better half, Local and FedAvg."""
    race, middle = course.race, course.middle
    local, fedavg, *_ = arms
    fitting = [arm for arm in arms[2:] if _fits(race, arm, middle, constraints)]
    ranked = race.rank(fitting, middle)
    number = max(LEAST_KEPT, math.ceil(len(arms) / 2))
    tests = max(1, len(arms) * 3)
    leader = race.rank([local, fedavg, *fitting], middle)[0]
    kept = [local, fedavg]
    for place, arm in enumerate(ranked):
        if place >= number:
            arm.drop(middle, "behind other methods")
        elif arm is not leader and race.is_beaten(arm, leader, middle, tests) and place > 0:
            arm.drop(middle, "behind other methods beyond doubt")
        else:
            kept.append(arm)
    return kept


def _fits(race: Race, arm: Arm, rounds: int, constraints: Constraints) -> bool:
    if constraints.max_mb is None or race.megabytes(arm) <= constraints.max_mb:
        return True
    arm.drop(rounds, f"{megabytes(race.megabytes(arm))} MB each, more than {constraints.max_mb:g}")
    return False


def _conclude(
    course: Course, kept: Sequence[Arm], local: Arm, fedavg: Arm, look: Look, constraints: Constraints,
    reasons: Mapping[str, str],
) -> Advice:  # fmt: skip
    """Choose by validation samples, and test the choice with new seeds."""
    race = course.race
    last = race.rounds
    allowed = [arm for arm in kept if arm.reason != "diverged"]
    too_dear = constraints.max_mb is not None and race.megabytes(fedavg) > constraints.max_mb
    eligible = [arm for arm in allowed if not (arm is fedavg and too_dear)]
    if [arm for arm in eligible if arm is not local] == []:
        sizes = [race.megabytes(arm) for arm in race.arms if name_of(arm.method) != "local" and arm.rungs]
        raise RunError(
            "No method but training alone fits these constraints: the cheapest sends and receives "
            f"{megabytes(min(sizes))} MB for each client. Got max_mb={constraints.max_mb:g}.",
            hint="raise `max_mb`, lower `rounds`, or take a smaller model.",
        )
    choice = choose(race, eligible, local)
    ranked = [arm for arm in race.rank(eligible, last) if arm is not local]
    best = ranked[0] if choice is local else choice
    others = [arm for arm in race.rank(eligible, last) if arm not in (choice, best)]
    second = others[0] if others else None
    tested = {id(arm): arm for arm in (local, fedavg, best, *([second] if second else []))}
    comparison = course.confirm([arm.method for arm in tested.values() if arm.reason != "diverged"])
    gains: dict[str, Gain] = {}
    second_gain = None
    warnings = [*course.notes, *course.warn_of_edges({arm.entry: arm for arm in [best]})]
    if comparison is not None:
        gains = {
            over: gain for over in ("local", "fedavg") if (gain := _test(comparison, race, kept, best, local, over))
        }
        if second is not None and second is not local:
            second_gain = _test(comparison, race, kept, second, local, "local")
        if len(course.fresh) < SURE_SEEDS:
            warnings.append(f"{len(course.fresh)} fresh seeds are few: the spread over seeds is pooled over methods.")
        half = gains["local"].half if "local" in gains else None
        if half is not None and _late_rise(race, best) > half:
            warnings.append(f"{best.label} is still rising: more rounds may help.")
    if look.clients < FEW_CLIENTS:
        warnings.append(f"{look.clients} clients are few: what holds for them may not hold for others.")
    return Advice(choice, best, second, gains, second_gain, race, comparison, look, constraints, reasons, warnings)


def choose(race: Race, arms: Sequence[Arm], local: Arm) -> Arm:
    """Return the best arm on validation samples; of near-equals the one with the fewest harmed clients, MB, gradients.

    Near-equal is whose deficit is below one standard error of the difference. Local harms nobody and sends nothing,
    so where it is that near, it is the choice.
    """
    best = race.rank(arms, race.rounds)[0]
    near = [best]
    for arm in arms:
        if arm is not best:
            deficit, error, _ = race.lead(best, arm, race.rounds)
            if deficit < error:
                near.append(arm)
    return min(near, key=lambda arm: (race.count_harmed(arm, local), race.megabytes(arm), race.gradients(arm)))


def _test(comparison: Comparison, race: Race, kept: Sequence[Arm], arm: Arm, local: Arm, over: str) -> Gain | None:
    """Estimate the gain of an arm on test samples; with two seeds, the spread over seeds is that of all methods."""
    name = label(arm.method)
    gains = comparison.gains(name, over)
    if gains is None or name == comparison.reference(over):
        return None
    pooled = None
    if gains.shape[0] < SURE_SEEDS:
        finished = [one for one in kept if one is not local and race.rounds in one.rungs and one.reason != "diverged"]
        alike = [race.scores(one, race.rounds) - race.scores(local, race.rounds) for one in finished]
        pooled = pool_seeds([gains, *alike])
    return estimate_gain(gains, pooled)


def _late_rise(race: Race, arm: Arm) -> float:
    """Return how much the last fifth of the rounds added to the validation score."""
    curves = [dict(race.reports[arm, seed].curve("test")) for seed in race.tasks]
    before = max((round for round in curves[0] if round <= 0.8 * race.rounds), default=None)
    if before is None:
        return 0.0
    return race.sign * float(np.mean([curve[race.rounds] - curve[before] for curve in curves if race.rounds in curve]))


def _text(asked: Algorithm | str) -> str:
    return asked if isinstance(asked, str) else label(asked)
