"""Choosing a plan: which grouping of clients and which kind of program are fastest is measured, not guessed.

Which is fastest depends on the model, the batch and the hardware. On the first steps of real work the candidates worth
trying are timed, and the winner is remembered. How much is tried depends on how much work lies ahead. What another
process has measured on this machine is not measured again, see `figures.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from atoll.data.task import Task
from atoll.kernel.errors import AtollError, EngineError, first_line
from atoll.kernel.fingerprints import Unstable
from atoll.kernel.network import Precision
from atoll.kernel.params import Tree
from atoll.kernel.task import Facts
from atoll.runtime.engines.figures import Figures, Measured, describe_work
from atoll.runtime.engines.measuring import FORCED, Trial
from atoll.runtime.engines.parts import Part
from atoll.runtime.engines.plan import VARIANTS, Mode, NotVectorisable, Plan
from atoll.runtime.engines.programs import Programs

log = logging.getLogger("atoll.engine")

PlanKey = tuple[str, Hashable, Hashable, int]  # phase, method, facts of the task, number of clients

LARGEST_CHUNK = 128  # larger ones gain nothing, and memory would grow with the cohort
WORTH_MEASURING = 3.0  # seconds of work ahead
WORTH_COMPILING = 60.0
WORTH_LOADING = 10.0  # what another process compiled, which takes a second or two
MEASURING_SHARE = 0.1  # of the work ahead may go into measuring
FILLS_A_GPU = 10**9  # parameters times samples in a batch: with so many, one client at a time is as fast as several
MODES = get_args(Mode)


class Planner:
    """Chooses how the parts of jobs run on this machine, and remembers it."""

    options: dict[str, Any]
    device: torch.device
    strategy: Any
    chunk: int | None
    compile: bool | None
    precision: Precision
    threads: int
    remember: bool  # whether what is measured is kept for other processes, and what they kept is used
    spelled: Plan | None  # what was asked for in words: then nothing is measured
    programs: Programs
    plans: dict[PlanKey, Plan]

    @cached_property
    def _tried(self) -> set[tuple[PlanKey, Plan]]:
        """The plans whose programs were made here."""
        return set()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Threads that live as long as the engine, because each has a copy of the model."""
        return ThreadPoolExecutor(self.threads)

    def best_alone(self, task: Task) -> bool:
        """Return whether models are faster one at a time: grouped convolutions are slow on this device."""
        return _convolves(task) and (self.device.type == "cpu" or _fills_a_gpu(task))

    def _calls(self, part: Part, plan: Plan) -> int:
        """Return how often a program made now will be used: in every coming part, once per chunk."""
        if self.spelled is not None and part.job.phase.name == "local":
            return FORCED  # it was asked for
        return part.job.calls * -(-part.usual // plan.size(part.usual))

    # -- choosing a plan -------------------------------------------------------------------------------------------
    def _plan(self, part: Part) -> Plan:
        key = self._key(part)
        try:
            if key not in self.plans:
                self.plans[key] = self._calibrate(part)
            self._make_programs(self.plans[key], part)
        except (AtollError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a client fails; the round will find out which
            log.info("%s: nothing was measured, because a client failed (%s)", part.name, error)
        return self.plans.get(key) or self._first_plan(part)

    def _make_programs(self, plan: Plan, part: Part) -> None:
        """Take one step under a plan that was found, because measuring it would have made its programs.

        Those of the first plan are made if they pay, those of others however seldom they are called: otherwise a run
        that measured and one that did not would differ in their last bits.
        """
        if plan.mode != "eager" and self.spelled is None and (self._key(part), plan) not in self._tried:
            self._tried.add((self._key(part), plan))
            calls = self._calls(part, plan) if plan == self._first_plan(part) else FORCED
            self._trial(plan, part, calls).take(limit=1)

    def export_plans(self, method: Hashable, facts: Facts) -> list[Tree]:
        """Return how a method's jobs run here: a resumed run needs the same plans to get the same bits."""
        return [
            {"phase": phase, "architecture": number, "clients": clients, "plan": asdict(plan)}
            for (phase, by, known, clients), plan in self.plans.items()
            for number, one in enumerate(facts.by_architecture)
            if by == method and known == _speed_facts(one)
        ]

    def import_plans(self, plans: list[Tree], method: Hashable, facts: Facts) -> None:
        """Take over the plans of `export_plans`, unless something else is forced now."""
        for one in plans if self.spelled is None else ():
            plan = Plan(**one["plan"])
            phase = one["phase"] if isinstance(one["phase"], str) else " ".join(map(str, one["phase"]))  # once, a list
            if self.strategy in ("auto", plan.strategy) and self.precision == plan.precision:
                known = _speed_facts(facts.by_architecture[one.get("architecture", 0)])  # once, a run had one
                self.plans[phase, method, known, one["clients"]] = plan

    def _key(self, part: Part) -> PlanKey:
        return part.job.phase.name, part.job.method, _speed_facts(part.population.facts), part.usual

    def _parse_plan(self, words: list[str], precision: Precision, compile: bool | None) -> Plan:  # noqa: A002
        """Parse a plan from words such as `traced graph`, after its grouping."""
        modes, known = [word for word in words if word in MODES], {*MODES, *VARIANTS, precision}
        if self.strategy == "auto" or len(modes) != 1 or not known.issuperset(words):
            raise EngineError(
                f"A plan that is spelled out must be a grouping (not auto), one of {', '.join(MODES)}, and any of "
                f"{', '.join(VARIANTS)}. Got {self.options['strategy']!r} with precision {precision}.",
                hint="take the words from a log, such as `whole traced graph`, and give the precision by itself.",
            )
        if compile is not None:
            raise EngineError(
                f"A plan that is spelled out says itself whether it is compiled. Got {self.options['strategy']!r} "
                f"and compile={compile}.",
                hint="leave out `compile`.",
            )
        variants = {name: name in words for name in VARIANTS}
        return Plan(self.strategy, self.chunk, cast("Mode", modes[0]), **variants, precision=precision)

    def _plan_for(self, strategy: Literal["loop", "threads", "chunk", "whole"]) -> Plan:
        one_core = self.device.type == "cpu" and strategy != "threads"
        return Plan(strategy, self.chunk, one_core=one_core, precision=self.precision)

    def _first_plan(self, part: Part) -> Plan:
        """Return the plan to begin with: the forced one, else as many clients at once as is sensible.

        Of several clients it is traced on a CPU, if there are calls enough: a step then takes a third of the time. On a
        GPU a program also needs a graph, which takes longer to make than a short run.
        """
        on_cpu = self.device.type == "cpu"
        if self.strategy != "auto":
            plan = self._plan_for(self.strategy)
        elif self.best_alone(part.task):
            plan = self._plan_for("loop")
        else:
            plan = replace(self._group_plan(min(part.usual, LARGEST_CHUNK), part.usual), one_core=on_cpu)
        return replace(plan, mode="traced") if on_cpu and plan.vectorised else plan

    def _plan_alone(self, part: Part, reason: NotVectorisable) -> Plan:
        """Return the plan for a step that fails under `vmap`."""
        if self.strategy in ("chunk", "whole"):
            raise EngineError(
                f"This step cannot run for many clients at once: {reason}", hint="use `strategy=loop`."
            ) from reason
        log.warning("%s: runs one client at a time, because the step cannot be vectorised (%s)", part.name, reason)
        return Plan("threads" if self.strategy == "threads" else "loop", plain=True, precision=self.precision)

    def _group_plan(self, size: int, clients: int) -> Plan:
        whole = size >= clients
        return Plan("whole" if whole else "chunk", None if whole else size, precision=self.precision)

    def _calibrate(self, part: Part) -> Plan:
        network = part.task.network
        if network.draws_globally:
            log.warning("the model draws random numbers of its own in its forward pass: it runs one client at a time")
            return Plan("loop", plain=True, precision=self.precision)
        if self.spelled is not None:
            # Compiling takes long and is asked for where most of the time goes.
            compiles = part.job.phase.name == "local" or self.spelled.mode != "compiled"
            return self.spelled if compiles else replace(self.spelled, mode="traced")
        first, figures = self._first_plan(part), self._figures(part)
        try:
            best = self._look_up(first, part, figures, self._calls(part, first))
        except NotVectorisable as reason:
            return self._plan_alone(part, reason)
        except torch.OutOfMemoryError:
            if self.strategy != "auto" or not first.vectorised:
                raise
            log.info("%s: %s needs more memory than there is", part.name, first)
            torch.cuda.empty_cache()
            best = self._look_up(self._plan_for("loop"), part, figures)
        tried = [best]
        if best.ahead(part) > WORTH_MEASURING or self.compile:
            tried += self._try(self._candidates(part, best), part, tried, figures)
        best = min(tried, key=lambda measured: measured.seconds)
        if plans := self._worth_compiling(part, tried, figures):
            compiled = self._try(plans, part, tried, figures)
            best = min(compiled if self.compile and compiled else [*tried, *compiled], key=lambda one: one.seconds)
            tried += compiled
        if best.ahead(part) > WORTH_MEASURING or self.compile:
            figures.save()
        log.info(
            "%s: %s, %.1f us per client-step, %.1f s ahead (%s %s)",
            part.name, best.plan, best.seconds * 1e6, best.ahead(part),
            "tried" if figures.grew else "known from an earlier run:",
            "; ".join(f"{one.plan} {one.seconds * 1e6:.1f}" for one in tried),
        )  # fmt: skip
        return best.plan

    def _figures(self, part: Part) -> Figures:
        """Return what is known of this kind of work."""
        sizes, batch = part.task.splits["train"].sizes(part.clients), part.task.training.batch_size
        one_pass = float((-(-sizes // batch)).sum())
        try:
            return Figures(describe_work(part, self.device, self.threads) if self.remember else None, one_pass)
        except (Unstable, RuntimeError) as reason:  # a user may be without a home
            log.info("%s: what is measured is not kept (%s)", part.name, reason)
            return Figures(None, one_pass)

    def _look_up(self, plan: Plan, part: Part, figures: Figures, calls: int = FORCED) -> Measured:
        """Return the figure of a plan; measure it if there is none, or none good enough for the work ahead.

        Its programs are made if so many `calls` pay for them.
        """
        found = figures.get(plan)
        if found is None or (found.rough and self._matters(found, part)):
            found = self._measure(plan, part, calls)
            figures.add(found)
        return found

    def _candidates(self, part: Part, first: Measured) -> list[Plan]:
        """Return plans that need no compiler."""
        clients, convolves = part.usual, _convolves(part.task)
        on_gpu = self.device.type == "cuda"
        first_traced = replace(first.plan, mode="traced", graph=on_gpu)
        loop = Plan("loop", mode="traced", graph=on_gpu, precision=self.precision)
        loops = [loop, replace(loop, channels_last=True)] if convolves else [loop]
        if on_gpu and first.plan.strategy == "loop":
            # Programs of a large network take long to make, so the layout that tensor cores read comes first, or alone.
            return loops[::-1] if self.precision == "fp32" else loops[-1:]
        if self.strategy != "auto":
            extras = [replace(first_traced, columns=True)] if on_gpu and convolves else []
            if not first.plan.vectorised and convolves:
                extras = [replace(first_traced, channels_last=True)]
            plans = [first_traced, *extras]
            return plans + [replace(plan, one_core=False) for plan in plans if plan.one_core]
        if on_gpu:
            return [first_traced, *([replace(first_traced, columns=True)] if convolves else []), *loops]
        threads = [replace(plan, strategy="threads") for plan in loops] if self.threads > 1 else []
        grouped = [
            replace(self._group_plan(size, clients), mode="traced")
            for size in (min(clients, LARGEST_CHUNK), 32, 16, 8)
            if size <= clients
        ]
        if convolves:
            # What is usually best comes first: measuring stops when it has taken its share of the work ahead.
            return [*loops, *threads, *grouped[-1:]]
        several = [Plan("threads", size, "traced", precision=self.precision) for size in (16, 8)]
        several = [plan for plan in several if threads and self.threads * plan.size(clients) <= clients]
        return [first_traced, *grouped, *several, *loops]

    def _compiled_candidates(self, part: Part, tried: list[Measured]) -> list[Plan]:
        """Return the plans worth compiling, by how well they do without."""
        ranked = sorted((one for one in tried if one.plan.mode == "traced"), key=lambda one: one.seconds)
        if not ranked:
            return []
        chosen = ranked[:1]
        if self.device.type == "cuda":  # the compiler makes more of columns, so they are tried even if they are slower
            chosen += [one for one in ranked[1:] if one.plan == replace(ranked[0].plan, columns=True)]
        elif self.strategy == "auto" and (
            ranked[0].plan.vectorised or (not _convolves(part.task) and any(one.plan.vectorised for one in ranked))
        ):
            # Compiled steps are bound by memory, so a chunk that fits the cache may win, or one per core; also where
            # steps that write everything to memory are faster alone.
            size = min(part.usual, 10)
            others = [self._group_plan(size, part.usual)]
            if 1 < self.threads <= part.usual // size:
                others.append(Plan("threads", size, precision=self.precision))
            chosen += [replace(ranked[0], plan=plan) for plan in others]
        plans = [replace(one.plan, mode="compiled") for one in chosen]
        return list(dict.fromkeys(plans))

    def _worth_compiling(self, part: Part, tried: list[Measured], figures: Figures) -> list[Plan]:
        """Return the plans to compile, if any: those whose programs torch has already pay sooner."""
        ahead = min(one.ahead(part) for one in tried)
        if self.compile is False or (not self.compile and ahead <= WORTH_LOADING):
            return []
        plans = self._compiled_candidates(part, tried)
        if self.compile or ahead > WORTH_COMPILING:
            return plans
        return [plan for plan in plans if figures.has_programs(plan)]

    def _try(self, plans: list[Plan], part: Part, so_far: list[Measured], figures: Figures) -> list[Measured]:
        """Return the figures of plans; those that are not known are measured as long as the work ahead is worth it."""
        measured: list[Measured] = []
        spent = 0.0  # also by other processes, so a run that is repeated tries the same plans
        known = [one.plan for one in so_far]
        for plan in [plan for plan in plans if plan not in known]:
            ahead = min(one.ahead(part) for one in [*so_far, *measured])
            if figures.get(plan) is None and spent > MEASURING_SHARE * ahead and not self.compile:
                continue
            began = time.perf_counter()
            try:
                measured.append(self._look_up(plan, part, figures))
                spent += max(measured[-1].took, time.perf_counter() - began)
            except AtollError:
                raise
            except torch.OutOfMemoryError:
                spent += time.perf_counter() - began
                log.info("%s: %s needs more memory than there is", part.name, plan)
                torch.cuda.empty_cache()
            except Exception as reason:  # noqa: BLE001 - the first plan went well, so it is not the step that fails
                spent += time.perf_counter() - began
                log.info("%s: %s is not possible (%s)", part.name, plan, first_line(reason))
        return measured

    def _matters(self, measured: Measured, part: Part) -> bool:
        """Return whether a figure decides anything."""
        return bool(self.compile) or measured.ahead(part) > WORTH_MEASURING / 3

    def _measure(self, plan: Plan, part: Part, calls: int) -> Measured:
        """Time a plan on a few real steps, after one that makes its programs."""
        self._tried.add((self._key(part), plan))
        began = time.perf_counter()
        found = self._trial(plan, part, calls).measure(lambda measured: self._matters(measured, part))
        programs = self.programs.compiler.kept_in if plan.mode == "compiled" else None
        return replace(found, took=time.perf_counter() - began, programs=programs)

    def _trial(self, plan: Plan, part: Part, calls: int) -> Trial:
        return Trial(plan, part, self.programs, self.threads, lambda: self._pool, calls)


def parse_strategy(text: str) -> tuple[Any, int | None]:
    """Parse `auto`, `loop`, `threads`, `whole`, `chunk:N`, or `threads:N` for chunks of N in threads."""
    if text in ("auto", "loop", "threads", "whole"):
        return text, None
    name, _, number = text.partition(":")
    if name in ("chunk", "threads") and number.isdigit() and int(number) >= 1:
        return name, int(number)
    raise EngineError(
        f"`strategy` must be auto, loop, threads, whole, chunk:N or threads:N with N at least 1. Got {text!r}."
    )


def _speed_facts(task: Facts) -> Hashable:
    """Return the facts of a task that the speed of a plan depends on."""
    return task.network.signature, tuple(task.sample.shape), task.training.batch_size


def _convolves(task: Task) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in task.network.submodules())


def _fills_a_gpu(task: Task) -> bool:
    """Return whether one client's step keeps a GPU busy by itself."""
    return task.network.parameters * task.training.batch_size >= FILLS_A_GPU
