import logging
import math
import re
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from samples import Work
from torch import nn

from atoll import LocalEngine, create, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.errors import DivergedError, EngineError
from atoll.kernel.job import Done, Job, Lost
from atoll.kernel.params import Params
from atoll.runtime.engines import planning
from atoll.runtime.engines.parts import parts_of, sort_by_size
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.planning import parse_strategy
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.toolbox.client import sgd


def job_of(task, work, clients=None, **options):
    who = np.arange(task.clients) if clients is None else np.asarray(clients)
    name = options.pop("name", "test")
    return Job(Work(work, name), FedAvg(), None, who, 0, **options), Population(task, RamMemory(task.clients), 0)


def train(cohort):
    return sgd(cohort, start=cohort.initial, epochs=1)


def models(outcomes):
    """The head of each client's model, by client."""
    return {
        int(client): done.result["head.weight"][row].clone()
        for done in outcomes
        if isinstance(done, Done)
        for row, client in enumerate(done.clients)
    }


# -- strategies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["auto", "loop", "threads", "whole"])
def test_a_strategy_is_a_word(text):
    assert parse_strategy(text) == (text, None)


def test_a_chunk_has_a_size():
    assert parse_strategy("chunk:16") == ("chunk", 16)


@pytest.mark.parametrize("text", ["", "chunk", "chunk:", "chunk:0", "chunk:-1", "chunk:x", "fast", "whole:2"])
def test_a_wrong_strategy_says_what_there_is(text):
    with pytest.raises(
        EngineError, match="`strategy` must be auto, loop, threads, whole, chunk:N or threads:N with N at least 1. Got"
    ):
        LocalEngine(strategy=text)


def test_a_plan_in_the_words_of_a_log_is_that_plan(make_task, monkeypatch):
    monkeypatch.setattr(LocalEngine, "_measure", lambda *_: pytest.fail("something was measured"))
    plan = Plan("chunk", 2, "traced", graph=True, one_core=True, precision="bf16")
    engine = LocalEngine(strategy=str(plan), precision="bf16", device="cpu")
    job = job_of(engine.place(make_task()), train, name="local")
    assert len(list(engine.run(*job))) == 2  # chunks
    assert [*engine.plans.values()] == [plan]


def test_the_programs_of_a_plan_that_is_spelled_out_are_made_however_short_the_run(make_task):
    engine = LocalEngine(strategy="loop traced", device="cpu")
    task = engine.place(make_task())
    list(engine.run(*job_of(task, train)))
    assert not engine.programs._made  # a few steps would not pay for it
    list(engine.run(*job_of(task, train, name="local")))
    assert engine.programs._made


def test_only_local_work_is_compiled_where_a_plan_says_so(make_task):
    engine = LocalEngine(strategy="loop compiled", device="cpu")
    task = engine.place(make_task())
    for name, mode in (("local", "compiled"), ("evaluate", "traced")):
        (part,) = parts_of(*job_of(task, train, name=name))
        assert engine._calibrate(part).mode == mode


@pytest.mark.parametrize(
    "words", ["auto traced", "loop graph", "loop traced eager", "loop traced fast", "loop traced bf16"]
)
def test_a_plan_that_is_none_says_what_a_plan_is(words):
    with pytest.raises(EngineError, match=f"A plan that is spelled out must be a grouping .* Got '{words}' with"):
        LocalEngine(strategy=words)


def test_a_plan_says_itself_whether_it_is_compiled():
    with pytest.raises(EngineError, match="says itself whether it is compiled. Got 'loop traced' and compile=True"):
        LocalEngine(strategy="loop traced", compile=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(EngineError, match="Device 'cuda' must be present. .*\nhint: use `device=cpu`."):
        LocalEngine(device="cuda")


def test_an_unknown_device_is_refused():
    with pytest.raises(EngineError, match="`device` must be auto, cpu, cuda, cuda:N or mps. Got 'gpu'."):
        LocalEngine(device="gpu")


def test_an_unknown_precision_is_refused():
    with pytest.raises(EngineError, match="`precision` must be fp32, tf32 or bf16. Got 'fp8'."):
        LocalEngine(precision="fp8")


def test_all_strategies_give_the_same_bits_in_float64(make_task):
    task = make_task(dtype=torch.float64)
    reference = models(LocalEngine(strategy="loop").run(*job_of(task, train)))
    assert set(reference) == {0, 1, 2, 3}
    for strategy, groups in (("whole", 1), ("chunk:3", 2), ("threads", 4), ("auto", 1)):
        outcomes = list(LocalEngine(strategy=strategy).run(*job_of(task, train)))
        assert len(outcomes) == groups
        found = models(outcomes)
        assert all(torch.equal(found[client], reference[client]) for client in range(4))


@pytest.mark.parametrize("strategy", ["loop", "threads", "whole", "chunk:2"])
def test_a_forced_strategy_is_kept(make_task, strategy):
    engine = LocalEngine(strategy=strategy)
    list(engine.run(*job_of(make_task(), train)))
    (plan,) = engine.plans.values()
    assert str(plan).startswith(strategy)


def test_the_order_of_clients_does_not_matter(make_task):
    task, engine = make_task(dtype=torch.float64), LocalEngine(strategy="chunk:2")
    forwards, backwards = (
        [done.clients.tolist() for done in engine.run(*job_of(task, train, clients))]
        for clients in ([0, 1, 2, 3], [3, 2, 1, 0])
    )
    assert forwards == backwards == [[2, 3], [0, 1]]  # by falling size: 12, 7, 5, 1
    assert sort_by_size(*parts_of(*job_of(task, train, [1, 3]))).tolist() == [3, 1]


def test_threads_leave_the_number_of_torchs_threads_alone(make_task):
    before = torch.get_num_threads()
    list(LocalEngine(strategy="threads").run(*job_of(make_task(), train)))
    assert torch.get_num_threads() == before


# -- calibration ---------------------------------------------------------------------------------------------------


def test_calibration_chooses_once_and_remembers(make_task, caplog):
    engine, task = LocalEngine(), make_task()
    with caplog.at_level(logging.INFO, "atoll.engine"):
        list(engine.run(*job_of(task, train)))
        first = dict(engine.plans)
        list(engine.run(*job_of(task, train)))
    assert len(first) == 1
    assert engine.plans == first
    assert caplog.text.count("us per client-step") == 1


def test_a_figure_that_decides_nothing_is_measured_once(make_task):
    calls = []

    def counted(*given):
        calls.append(given)
        return train(*given)

    list(LocalEngine().run(*job_of(make_task(), counted)))
    assert len(calls) == 2  # once to measure, and once for good


def test_with_much_work_ahead_more_plans_are_tried(make_task, monkeypatch, caplog):
    monkeypatch.setattr(planning, "WORTH_MEASURING", 0.0)
    engine = LocalEngine(compile=False)
    task = make_task(sizes=(8, 8), dtype=torch.float64)
    with caplog.at_level(logging.INFO, "atoll.engine"):
        found = models(engine.run(*job_of(task, train, calls=1000)))
    assert "whole traced" in caplog.text
    assert not any(plan.mode == "compiled" for plan in engine.plans.values())
    reference = models(LocalEngine(strategy="loop").run(*job_of(task, train)))
    assert all(torch.equal(found[client], reference[client]) for client in found)


def test_measuring_changes_nothing(make_task):
    """Work that has been measured gives what it gives without."""
    task = make_task(shares=(0.6, 0.2, 0.2), dtype=torch.float64)
    engine = LocalEngine(dtype=torch.float64, strategy="whole")
    first, second = (federate(task, Ditto(), rounds=2, engine=engine) for _ in range(2))  # the second measures nothing
    assert torch.equal(first.server["head.weight"], second.server["head.weight"])
    np.testing.assert_array_equal(first.scores(), second.scores())


def large_images():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(("fills", "first"), [(10**9, "whole"), (1, "loop")])
def test_on_a_gpu_a_client_that_fills_it_runs_alone(make_task, monkeypatch, fills, first):
    monkeypatch.setattr(planning, "FILLS_A_GPU", fills)
    engine = LocalEngine()
    engine.device = torch.device("cuda")
    (part,) = parts_of(*job_of(make_task(large_images, shape=(1, 6, 6)), train, usual=4))
    plan = engine._first_plan(part)
    assert plan.strategy == first
    tried = engine._candidates(part, planning.Measured(plan, 1.0, 1.0))
    if first == "loop":
        assert [str(one) for one in tried] == ["loop traced graph channels_last fp32", "loop traced graph fp32"]
        engine.precision = "bf16"
        (only,) = engine._candidates(part, planning.Measured(plan, 1.0, 1.0))
        assert str(only) == "loop traced graph channels_last bf16"
    else:
        assert tried[0].strategy == "whole"


def test_a_plan_that_does_not_fit_into_memory_is_not_chosen(make_task, monkeypatch, caplog):
    monkeypatch.setattr(planning, "WORTH_MEASURING", 0.0)
    measure = LocalEngine._measure

    def cramped(self, plan, job, *calls):
        if plan.vectorised:
            raise torch.OutOfMemoryError("no room for several clients")
        return measure(self, plan, job, *calls)

    monkeypatch.setattr(LocalEngine, "_measure", cramped)
    engine = LocalEngine(compile=False)
    with caplog.at_level(logging.INFO, "atoll.engine"):
        assert len(models(engine.run(*job_of(make_task(), train, calls=1000)))) == 4
    assert "whole traced one_core fp32 needs more memory than there is" in caplog.text
    (plan,) = engine.plans.values()
    assert plan.strategy == "loop"
    with pytest.raises(torch.OutOfMemoryError):
        list(LocalEngine(strategy="whole").run(*job_of(make_task(), train)))


def test_a_plan_under_which_a_step_fails_is_not_chosen_and_the_others_are_still_tried(make_task, monkeypatch, caplog):
    """Gradients of single samples are taken by `vmap`, which does not know the layout that convolutions like."""
    monkeypatch.setattr(planning, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(planning, "MEASURING_SHARE", math.inf)
    engine = LocalEngine(compile=False)
    task = make_task(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)), shape=(3, 6, 6))
    with caplog.at_level(logging.INFO, "atoll.engine"):
        assert federate(task, create("fedavg+dpsgd"), rounds=2, engine=engine).scores().size
    assert "loop traced channels_last fp32 is not possible" in caplog.text
    assert re.search(r"tried .*loop traced fp32 \d", caplog.text)
    assert "nothing was measured" not in caplog.text


# -- steps that cannot be vectorised -------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", ["auto", "loop", "threads"])
def test_a_model_that_branches_on_data_runs_one_client_at_a_time(make_task, caplog, dtype, strategy):
    task = make_task(Branches, dtype=dtype)
    with caplog.at_level(logging.WARNING, "atoll.engine"):
        found = models(LocalEngine(strategy=strategy, dtype=dtype).run(*job_of(task, train)))
    assert set(found) == {0, 1, 2, 3}
    if strategy == "auto" or dtype == torch.float64:
        assert "runs one client at a time, because the step cannot be vectorised" in caplog.text
        assert "data-dependent control flow" in caplog.text


def test_a_forced_whole_cohort_that_cannot_be_is_an_error(make_task):
    engine = LocalEngine(strategy="whole")
    with pytest.raises(
        EngineError, match="This step cannot run for many clients at once: .*\nhint: use `strategy=loop`."
    ):
        list(engine.run(*job_of(make_task(Branches), train)))


def test_clients_that_are_done_are_not_run_again_when_others_cannot_be_vectorised(make_task, monkeypatch):
    """The first chunk succeeds, the second turns out not to be vectorisable."""
    task = make_task(sizes=(8, 8, 4, 4), dtype=torch.float64)

    def work(cohort):
        if 3 in cohort.clients:
            cohort.scan(
                lambda c, b, g: c if b.x.sum() > 0 else c * 1.0, Params.of(n=torch.zeros((), dtype=torch.float64))
            )
        return train(cohort)

    monkeypatch.setattr(planning, "LARGEST_CHUNK", 2)
    outcomes = list(LocalEngine().run(*job_of(task, work)))
    assert sorted(int(client) for done in outcomes for client in done.clients) == [0, 1, 2, 3]


# -- clients that fail ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fragile(FedAvg):
    """Clients 1 and 2 fail from the second round on, or always."""

    always: bool = False
    everybody: bool = False

    def local(self, w, cohort):
        if (self.always or cohort.round > 0) and (self.everybody or {1, 2} & set(cohort.clients.tolist())):
            raise OSError("the battery is empty")
        return super().local(w, cohort)


@pytest.mark.parametrize("strategy", ["auto", "loop", "threads", "whole", "chunk:2"])
@pytest.mark.parametrize("always", [False, True])
def test_a_client_that_fails_is_lost_and_the_others_count(make_task, strategy, always, caplog):
    task = make_task()
    engine = LocalEngine(strategy=strategy, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "atoll"):
        report = federate(task, Fragile(always=always), rounds=2, engine=engine, evaluation="none")
    last = report.history[-1]
    assert (last["asked"], last["replied"], last["lost"]) == (4, 2, {"OSError: the battery is empty": 2})
    assert "lost client(s) [1]: OSError: the battery is empty" in caplog.text
    if always:  # as if only clients 0 and 3 had been asked
        spared = federate(
            task, FedAvg(), rounds=2, engine=engine, evaluation="none", faults=lambda _, c: np.isin(c, [1, 2])
        )
        assert all(torch.equal(report.server[name], spared.server[name]) for name in report.server)


@pytest.mark.parametrize("strategy", ["loop", "threads", "whole"])
def test_if_everybody_fails_it_is_the_methods_fault(make_task, strategy):
    with pytest.raises(OSError, match="the battery is empty"):
        federate(make_task(), Fragile(always=True, everybody=True), rounds=1, engine=LocalEngine(strategy=strategy))


def test_a_reply_that_is_late_is_lost(make_task):
    def slow(cohort):
        if 2 in cohort.clients:
            time.sleep(0.3)
        return train(cohort)

    engine = LocalEngine(strategy="loop", timeout=0.25)
    outcomes = list(engine.run(*job_of(make_task(), slow, name="local")))
    late = [outcome for outcome in outcomes if isinstance(outcome, Lost)]
    assert 2 in [int(client) for outcome in late for client in outcome.clients]
    assert all(outcome.reason.startswith("late: ") and "allowed 0.25 s" in outcome.reason for outcome in late)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("strategy", ["whole", "chunk:2"])
def test_only_slow_clients_of_a_chunk_are_late(make_task, strategy, clock):
    def slow(cohort):
        clock[0] += 1.0 if 2 in cohort.clients else 0.1
        return train(cohort)

    engine = LocalEngine(strategy=strategy, timeout=0.75)
    outcomes = list(engine.run(*job_of(make_task(), slow, name="local")))
    late = [int(client) for outcome in outcomes if isinstance(outcome, Lost) for client in outcome.clients]
    assert late == [2]
    assert sorted(models(outcomes)) == [client for client in range(make_task().clients) if client != 2]


def test_evaluation_has_no_limit(make_task, clock):
    def slow(cohort):
        clock[0] += 1.0
        return train(cohort)

    job = job_of(make_task(), slow, name="evaluate personal")
    outcomes = list(LocalEngine(strategy="whole", timeout=0.25).run(*job))
    assert all(isinstance(outcome, Done) for outcome in outcomes)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan")])
def test_a_timeout_must_be_above_0(timeout):
    with pytest.raises(EngineError, match="`timeout` must be a number of seconds above 0"):
        LocalEngine(timeout=timeout)


@pytest.mark.parametrize("strategy", ["auto", "loop", "threads", "whole"])
def test_a_client_that_calls_exit_is_lost(make_task, strategy):
    def leaves(cohort):
        if 1 in cohort.clients:
            sys.exit(0)
        return train(cohort)

    outcomes = list(LocalEngine(strategy=strategy).run(*job_of(make_task(), leaves)))
    lost = [outcome for outcome in outcomes if isinstance(outcome, Lost)]
    assert [outcome.clients.tolist() for outcome in lost] == [[1]]
    assert "exit code 0" in lost[0].reason


def test_if_everybody_calls_exit_the_program_does_not_end_well(make_task):
    def leaves(cohort):
        sys.exit(0)

    with pytest.raises(RuntimeError, match="exit code 0"):
        list(LocalEngine(strategy="loop").run(*job_of(make_task(), leaves)))


def test_work_that_does_not_fit_in_memory_is_an_error_in_words(make_task):
    def greedy(cohort):
        raise MemoryError("Unable to allocate 9 EiB")

    with pytest.raises(EngineError, match="must fit in memory on cpu. It does not: Unable to allocate 9 EiB"):
        list(LocalEngine(strategy="whole").run(*job_of(make_task(), greedy)))


def test_a_round_in_which_everybody_is_late_leaves_the_server_as_it_is(make_task, caplog):
    task = make_task()
    with caplog.at_level(logging.WARNING, "atoll"):
        report = federate(task, FedAvg(), rounds=1, engine=LocalEngine(timeout=1e-9), evaluation="none")
    assert report.history[0]["replied"] == 0
    assert torch.equal(report.server["head.weight"], task.network.initial["head.weight"])
    assert "no client replied; the server's state stays as it is" in caplog.text


# -- training that diverges ----------------------------------------------------------------------------------------


def test_divergence_names_client_and_round(make_task):
    task = make_task(lr=1e30, sizes=(40, 4))
    with pytest.raises(DivergedError) as error:
        federate(task, FedAvg(epochs=5), rounds=3, evaluation="none")
    assert (error.value.client, error.value.round) == (0, 0)
    assert str(error.value) == (
        "Training must stay finite. In round 0 it did for none of 2 clients; the first is client client 0.\n"
        "hint: lower `lr` or set `clip`; the run can be resumed from its last checkpoint."
    )


@dataclass(frozen=True, kw_only=True)
class Infects(FedAvg):
    """Client 2 sends what is not finite, in one of the places where it can be."""

    place: str = "delta"

    def local(self, w, cohort):
        update = super().local(w, cohort)
        bad = torch.where(cohort.ids == 2, torch.nan, 1.0).to(cohort.lr)
        if self.place == "weight":
            return replace(update, weight=update.weight * bad)
        if self.place == "kept":
            return replace(update, keep=update.send["delta"] * bad)
        if self.place == "loss":
            cohort.observe(**{"loss/own": bad})
            return update
        return replace(update, send={"delta": update.send["delta"] * bad})


@pytest.mark.parametrize("place", ["delta", "weight", "loss", "kept"])
def test_a_reply_that_is_not_finite_is_rejected_and_its_client_named(make_task, place, caplog):
    """The others' run is the one in which that client drops out."""
    task, quiet = make_task(), {"rounds": 2, "evaluation": "none"}
    with caplog.at_level(logging.WARNING, "atoll"):
        report = federate(task, Infects(place=place), **quiet)
    without = federate(task, FedAvg(), faults=lambda _, clients: clients == 2, **quiet)
    assert all(torch.equal(leaf, without.server[name]) for name, leaf in report.server.items())
    assert [line["lost"] for line in report.history] == [{"not finite": 1}] * 2
    assert all(line["replied"] == task.clients - 1 for line in report.history)
    assert f"client {task.client_name(2)} is lost: its training did not stay finite" in caplog.text
    assert not [entry for entry in report.ledger.entries if entry.direction == "up" and 2 in entry.clients]
    kept = report.population.memory.save(round=2)
    assert kept is None or 2 not in kept["clients"]


def test_a_server_that_diverges_is_found_out(make_task):
    @dataclass(frozen=True, kw_only=True)
    class Explodes(FedAvg):
        def aggregate(self, w, replies):
            return super().aggregate(w, replies) * float("inf")

    with pytest.raises(DivergedError, match="The server's state after round 0 of own is not."):
        federate(make_task(), Explodes(), rounds=1)


def test_a_plan_is_a_value():
    assert Plan("whole") == Plan("whole")
    assert len({Plan("whole"), Plan("whole"), Plan("loop")}) == 2


def test_a_resumed_run_goes_on_with_the_plans_it_had(make_task, tmp_path):
    """Plans differ in the last bit of fp32, and which one is fastest is a matter of chance."""
    task, options = make_task(shares=(0.6, 0.2, 0.2)), {"rounds": 4, "eval_every": 1, "folder": tmp_path / "run"}

    def stop(line):
        if line["round"] == 2:
            raise InterruptedError

    first, second, facts = LocalEngine(), LocalEngine(), task.public_facts()
    first.import_plans([{"phase": ["local"], "clients": 4, "plan": asdict(Plan("chunk", 3))}], Ditto(), facts)
    with pytest.raises(InterruptedError):
        federate(task, Ditto(), engine=first, on_round=stop, **options)
    federate(task, Ditto(), engine=second, resume=True, **options)
    chosen = {one["phase"].split()[0]: one["plan"]["chunk"] for one in second.export_plans(Ditto(), facts)}
    assert chosen == {"local": 3, "evaluate": None}
    assert LocalEngine().export_plans(Ditto(), facts) == []


def test_a_forced_strategy_is_not_overruled_by_an_older_plan(make_task):
    task, engine = make_task(), LocalEngine(strategy="loop")
    engine.import_plans(
        [{"phase": ["local"], "clients": 4, "plan": asdict(Plan("whole"))}], Ditto(), task.public_facts()
    )
    assert engine.plans == {}


@pytest.mark.parametrize(("device", "precision", "fills", "said"), [
    ("cuda", "fp32", True, True), ("cuda", "tf32", True, False), ("cuda", "fp32", False, False),
    ("cpu", "fp32", True, False),
])  # fmt: skip
def test_fp32_where_tensor_cores_would_help_is_said(make_task, monkeypatch, caplog, device, precision, fills, said):
    task = make_task()
    monkeypatch.setattr(type(task), "to", lambda self, device, dtype, table=None: self)  # there is no GPU here
    monkeypatch.setattr(planning, "_convolves", lambda task: True)
    monkeypatch.setattr(planning, "_fills_a_gpu", lambda task: fills)
    engine = LocalEngine(device="cpu", precision=precision)
    engine.device = torch.device(device)
    engine.place(task)
    assert ("tensor cores" in caplog.text) == said
