"""Steps that come to the same operations are compiled once, whatever the order of their inputs."""

import numpy as np
import pytest
import torch
import torch._inductor.config
from marks import needs_compiler
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

from atoll import LocalEngine, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.kernel.params import Params, flatten
from atoll.runtime.engines.compiling import Compiler, operations, order_of_use
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.running import TracedProgram


def step(w, b, x):
    """A step that overwrites w and b."""
    loss = (x @ w + b).relu()
    new_w, new_b = w - 0.1 * loss.sum(), b - 0.2 * loss.mean()
    w.copy_(new_w)
    b.copy_(new_b)


def other_order(b, x, w):
    """The same step: other places, other names, and b is computed and written first."""
    result = (x @ w + b).relu()
    moved_b = b - 0.2 * result.mean()
    moved_w = w - 0.1 * result.sum()
    b.copy_(moved_b)
    w.copy_(moved_w)


def inputs(names):
    draw = torch.Generator().manual_seed(0)
    made = {"w": torch.randn(4, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    made["x"] = torch.randn(5, 4, generator=draw)
    return [made[name].clone() for name in names]


def trace(function, names):
    return make_fx(function)(*inputs(names))


def digest(function, names="wbx"):
    graph = trace(function, names)
    return operations(graph, order_of_use(graph))


def test_inputs_are_numbered_as_they_are_read():
    assert order_of_use(trace(step, "wbx")) == [2, 0, 1]
    assert order_of_use(trace(other_order, "bxw")) == [1, 2, 0]
    assert order_of_use(trace(lambda w, b, x: x + 1, "wbx")) == [2, 0, 1]  # what is not read comes last


def with_constant(values):
    constant = torch.tensor(values)

    def add(w, b, x):
        b.copy_(b + constant)

    return add


def test_what_differs_counts():
    def other_rate(w, b, x):
        loss = (x @ w + b).relu()
        w.copy_(w - 0.3 * loss.sum())
        b.copy_(b - 0.2 * loss.mean())

    def writes_elsewhere(w, b, x):
        loss = (x @ w + b).relu()
        w.copy_((b - 0.2 * loss.mean()).expand(4, 3))
        b.copy_((w - 0.1 * loss.sum())[0])

    def returns(w, b, x):
        return (x @ w + b).relu()

    plain = digest(step)
    assert digest(step) == plain
    found = [digest(one) for one in (other_rate, writes_elsewhere, returns, *map(with_constant, ([1.0], [2.0])))]
    assert len({plain, *found}) == 1 + len(found)
    assert digest(with_constant([1.0])) == digest(with_constant([1.0]))


def test_operations_that_write_on_the_way_are_compared_by_their_text():
    """The order of writing and reading is then part of what they compute."""

    def writes_first(w, b, x):
        b.add_(1.0)
        w.copy_(w + b)

    def reads_first(w, b, x):
        w.copy_(w + b)
        b.add_(1.0)

    assert digest(writes_first) != digest(reads_first)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, when it is imported
@pytest.mark.slow
def test_a_program_is_shared_by_the_same_step_with_its_inputs_in_another_order():
    compiler = Compiler()
    first = compiler(trace(step, "wbx"), inputs("wbx"))
    second = compiler(trace(other_order, "bxw"), inputs("bxw"))
    assert compiler.count == 1
    w, b, x = inputs("wbx")
    first(w, b, x)
    other_b, x, other_w = inputs("bxw")
    second(other_b, x, other_w)
    assert torch.equal(w, other_w)
    assert torch.equal(b, other_b)
    expected = inputs("wbx")
    step(*expected)
    torch.testing.assert_close([w, b], expected[:2])


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_a_program_knows_the_sizes_of_its_inputs(monkeypatch):
    """catches: sizes that are symbols, with which a batch of images is copied twice, by divisions."""
    written = []
    monkeypatch.setattr(GraphLowering, "save_output_code", written.append)
    x, rows = torch.randn(50, 1, 28, 28), torch.arange(10)
    with torch._inductor.config.patch(force_disable_caches=True):
        run = Compiler()(make_fx(lambda x, rows: [x[rows].reshape(10, 784).relu()])(x, rows), [x, rows])
    assert torch.equal(run(x, rows)[0], x[:10].reshape(10, 784).relu())
    assert written
    assert "ks0" not in written[0]


def test_the_steps_of_fedper_are_those_of_fedavg(make_task, monkeypatch):
    """Its heads are its clients' own, and the step is found all the same; traced operations stand for compiled ones."""
    monkeypatch.setattr(Compiler, "_compile", lambda self, graph, inputs: graph)
    engine = LocalEngine(strategy="whole compiled", device="cpu", dtype=torch.float64, remember=False)
    task = make_task(shares=(0.6, 0.2, 0.2), dtype=torch.float64)
    federate(task, FedAvg(), rounds=2, engine=engine)
    compiled = engine.programs.compiler.count
    shared = federate(task, FedPer(), rounds=2, engine=engine)
    assert engine.programs.compiler.count == compiled == 1
    assert sum(mode == "compiled" for mode, _ in engine.programs._made) == 1
    plain = LocalEngine(strategy="whole eager", device="cpu", dtype=torch.float64)
    expected = federate(task, FedPer(), rounds=2, engine=plain)
    np.testing.assert_array_equal(shared.scores(), expected.scores())
    assert all(
        torch.equal(one, other)
        for one, other in zip(*(flatten(run.server)[0] for run in (shared, expected)), strict=True)
    )


# -- values that move within the carry ---------------------------------------------------------------------------------


def remember_last(carry, batch, given):
    return Params({"w": carry["w"] + 1.0, "before": carry["w"]}, carry.layout)


def swap(carry, batch, given):
    return Params({"w": carry["before"], "before": carry["w"]}, carry.layout)


@needs_compiler
@pytest.mark.parametrize("step", [remember_last, swap])
def test_a_value_that_moves_within_the_carry_is_read_before_it_is_overwritten(make_task, make_cohort, step):
    task, start = make_task(dtype=torch.float64), Params.of(w=3.0, before=5.0)
    eager, compiled = (
        make_cohort(task, Plan("whole", mode=mode)).scan(step, start, epochs=1) for mode in ("eager", "compiled")
    )
    assert all(torch.equal(compiled[name], leaf) for name, leaf in eager.items())


def test_a_program_in_place_is_one_only_if_no_value_moves(make_task, make_cohort):
    made = []
    for step, in_place in ((remember_last, False), (swap, False), (lambda carry, batch, given: carry * 2.0, True)):
        programs = Programs()
        programs._make = lambda mode, graph, work, example: (
            made.append(TracedProgram(work, example, compile=None, in_place=True)) or made[-1]
        )
        make_cohort(make_task(), Plan("whole", mode="traced"), programs=programs).scan(
            step, Params.of(w=3.0, before=5.0), epochs=1
        )
        assert made[-1].in_place == in_place


def test_compiling_begins_where_the_step_begins(make_task, make_cohort):
    """Tracing a step in place runs it, and a second time it might write beyond an end."""
    given = []

    def note(graph, inputs):
        given.extend(leaf.clone() for leaf in inputs[:2])
        return graph

    programs = Programs()
    programs._make = lambda mode, graph, work, example: TracedProgram(work, example, compile=note, in_place=True)
    make_cohort(make_task(), Plan("whole", mode="traced"), programs=programs).scan(
        lambda carry, batch, given: carry * 2.0, Params.of(w=3.0, before=5.0), epochs=1
    )
    assert [leaf.unique().item() for leaf in given] == [3.0, 5.0]
