import logging
from collections import deque

import pytest
import torch
from marks import needs_compiler
from torch import nn

from atoll.kernel.errors import CohortError
from atoll.kernel.params import Params, Stack, stack
from atoll.runtime.engines.measuring import FORCED
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.toolbox.client import proximal, sgd

SIZES = (5, 1, 12, 7)
ALONE = [[2], [3], [0], [1]]
CHUNKS = [[2, 3], [0, 1]]
TOGETHER = [[2, 3, 0, 1]]


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def group_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))


def batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def dropout():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


MODELS = {
    "plain": (plain, 0.0),
    "group norm": (group_norm, 0.0),
    "dropout": (dropout, 0.0),
    "batch norm": (batch_norm, 1e-8),
}


def trained(task, make_cohort, plan, groups, **options):
    """Every client's model after two epochs with everything switched on, in groups of clients."""
    w, found = task.network.initial, {}
    for clients in groups:
        cohort = make_cohort(task, plan, clients, **options)
        v = sgd(cohort, start=w, epochs=2, penalty=proximal(0.1, center=w))
        found |= {client: v.client(row) for row, client in enumerate(clients)}
    return stack(found[client] for client in sorted(found))


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


RULE = {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}


@pytest.mark.parametrize("name", MODELS)
def test_every_grouping_gives_the_same_bits_eager_and_traced(make_task, make_cohort, name):
    model, tolerance = MODELS[name]
    task = make_task(model, sizes=SIZES, dtype=torch.float64, **RULE)
    reference = trained(task, make_cohort, Plan("loop"), ALONE)
    assert distance(reference, stack([task.network.initial] * 4)) > 0.01
    programs = Programs()
    for mode in ("eager", "traced"):
        for strategy, groups in (("whole", TOGETHER), ("whole", [[0, 1, 2, 3]]), ("chunk", CHUNKS), ("loop", ALONE)):
            found = trained(task, make_cohort, Plan(strategy, mode=mode), groups, programs=programs)
            assert distance(found, reference) <= tolerance, (mode, strategy)


@pytest.mark.parametrize("name", MODELS)
def test_plain_autograd_agrees_to_rounding(make_task, make_cohort, name):
    task = make_task(MODELS[name][0], sizes=SIZES, dtype=torch.float64, **RULE)
    whole = trained(task, make_cohort, Plan("whole"), TOGETHER)
    assert distance(trained(task, make_cohort, Plan("loop", plain=True), ALONE), whole) < 1e-8


def test_training_is_torchs(make_task, make_cohort):
    # One client, one epoch, batches of 4 in the table's order, against torch.optim.SGD.
    task = make_task(plain, sizes=(10,), dtype=torch.float64, **RULE)
    cohort = make_cohort(task)
    found = sgd(cohort, start=task.network.initial, epochs=1).client(0)
    blank = Params.of(seen=torch.zeros(12, dtype=torch.float64))
    seen = cohort.scan(lambda c, batch, _: Params.of(seen=torch.cat([c["seen"][4:], batch.x[:, 0]])), blank)["seen"][0]
    order = [int((task.x[:, 0] == value).nonzero()[0]) for value in seen]
    module = plain().double()
    module.load_state_dict(dict(task.network.initial))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in (order[:4], order[4:8], order[8:10]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(task.x[batch]), task.y[batch]).backward()
        for parameter in module.parameters():  # weight decay joins before clipping, as in `sgd`
            parameter.grad += 0.01 * parameter.detach()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in module.state_dict().items())


@needs_compiler
def test_a_compiled_program_agrees_to_rounding(make_task, make_cohort):
    task = make_task(dropout, sizes=(6, 6), dtype=torch.float64)
    programs = Programs()
    found = trained(task, make_cohort, Plan("whole", mode="compiled"), [[0, 1]], programs=programs)
    assert [type(program).__name__ for program in programs._made.values()] == ["TracedProgram"]
    assert distance(found, trained(task, make_cohort, Plan("whole"), [[0, 1]])) < 1e-12


@needs_compiler
@pytest.mark.slow
def test_a_compiled_convolution_by_columns_agrees_to_rounding(make_task, make_cohort):
    def convolution():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))

    task = make_task(convolution, sizes=SIZES, shape=(1, 4, 4), dtype=torch.float64)
    plan = Plan("whole", mode="compiled", columns=True)
    found = trained(task, make_cohort, plan, TOGETHER)
    assert distance(found, trained(task, make_cohort, Plan("loop"), ALONE)) < 1e-8


# -- rows ----------------------------------------------------------------------------------------------------------


def first_feature(carry, batch, given):
    return Params.of(sum=carry["sum"] + batch.total(batch.x[:, 0]) * given["scale"]["s"])


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_rows_come_back_in_the_order_of_the_clients(make_task, make_cohort, mode):
    """Whatever the order of sizes in a split, and with a client that has nothing there."""
    task = make_task(sizes=(3, 20, 1, 9), shares=(0.4, 0.3, 0.3), dtype=torch.float64)
    clients = [3, 0, 2, 1]
    scale = Stack.of(s=torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64))
    cohort = make_cohort(task, Plan("whole", mode=mode), clients, splits={"train", "val", "test"})
    for split, data in task.splits.items():
        start = Params.of(sum=torch.zeros((), dtype=torch.float64))
        found = cohort.scan(first_feature, start, given={"scale": scale}, split=split, batch_size=2)
        own = [data.order[data.offsets[client] : data.offsets[client + 1]] for client in clients]
        expected = [task.x[mine, 0].sum().item() * 10**row for row, mine in enumerate(own)]
        assert found["sum"].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_carry_per_client_starts_each_from_its_own(make_task, make_cohort):
    cohort = make_cohort(make_task(dtype=torch.float64))
    start = Stack.of(n=torch.tensor([0.0, 10.0, 20.0, 30.0], dtype=torch.float64))
    found = cohort.scan(lambda carry, batch, given: Params.of(n=carry["n"] + 1), start)
    assert found["n"].tolist() == [2.0, 11.0, 23.0, 32.0]  # 5, 1, 12 and 7 samples in batches of 4


def test_inputs_are_not_changed(make_task, make_cohort):
    task = make_task(batch_norm, sizes=(4, 8, 4, 4), dtype=torch.float64)
    programs = Programs()
    for plan in (Plan("whole"), Plan("whole", mode="traced"), Plan("loop", plain=True)):
        for start in (task.network.initial, stack([task.network.initial] * 4)):
            before = {name: leaf.clone() for name, leaf in start.items()}
            clients = [0] if plan.strategy == "loop" else None
            rows = start.rows(slice(0, 1)) if clients and isinstance(start, Stack) else start
            sgd(make_cohort(task, plan, clients, programs=programs), start=rows, epochs=1)
            assert all(torch.equal(start[name], before[name]) for name in start)


def test_streams_and_rounds_shuffle_anew(make_task, make_cohort):
    task = make_task(sizes=(12,), dtype=torch.float64)
    w = task.network.initial
    models = [
        sgd(make_cohort(task, round=round, seed=seed), start=w, epochs=1, stream=stream)["head.weight"]
        for round, seed, stream in ((0, 0, "main"), (1, 0, "main"), (0, 1, "main"), (0, 0, "tune"))
    ]
    assert all(not torch.equal(models[0], other) for other in models[1:])


# -- what a step may return and capture ----------------------------------------------------------------------------


def scan(make_task, make_cohort, step, plan=None, **options):
    cohort = make_cohort(make_task(dtype=torch.float64), plan or Plan("whole"))
    return cohort.scan(step, Params.of(n=torch.zeros((), dtype=torch.float64)), **options)


@pytest.mark.parametrize("mode", ["eager", "traced"])
@pytest.mark.parametrize(
    ("after", "text"),
    [
        (lambda c: {"n": c}, r"\(names or nesting differ\).\ngiven:    Params\(n\)\nreturned: {n: Params\(n\)}"),
        (lambda c: Params.of(m=c["n"]), r"given:    Params\(n\)\nreturned: Params\(m\)"),
        (lambda c: Params.of(n=c["n"].float()), "Leaf 0 was .* torch.float64, now it is .* torch.float32"),
        (lambda c: Params.of(n=c["n"].expand(2)), r"Leaf 0 was \(\) torch.float64, now it is \(2,\) torch.float64"),
        (lambda c: Stack.of(n=c["n"]), r"\(a step captured a Stack\)"),
    ],
)  # fmt: skip
def test_a_step_must_return_what_it_was_given(make_task, make_cohort, mode, after, text):
    with pytest.raises(CohortError, match=text):
        scan(make_task, make_cohort, lambda carry, batch, given: after(carry), Plan("whole", mode=mode))


def test_a_captured_tensor_is_right_and_stays_eager(make_task, make_cohort, caplog):
    plan, found = Plan("whole", mode="traced"), []
    with caplog.at_level(logging.INFO, "atoll.engine"):
        for value in (1.0, 100.0):
            amount = torch.tensor(value, dtype=torch.float64)
            found.append(
                scan(make_task, make_cohort, lambda c, b, g, a=amount: Params.of(n=c["n"] + a), plan)["n"].tolist()
            )
    assert found == [[2.0, 1.0, 3.0, 2.0], [200.0, 100.0, 300.0, 200.0]]
    assert "stays eager: it captures a Tensor; pass it in `given`" in caplog.text


def test_a_number_that_changes_between_rounds_is_never_stale(make_task, make_cohort):
    task, programs = make_task(dtype=torch.float64), Programs()

    def added(amount):
        def step(carry, batch, given):
            return Params.of(n=carry["n"] + amount)

        cohort = make_cohort(task, Plan("whole", mode="traced"), programs=programs)
        return cohort.scan(step, Params.of(n=torch.zeros((), dtype=torch.float64)))["n"].tolist()

    assert added(1.0) == [2.0, 1.0, 3.0, 2.0]
    made = len(programs._made)
    assert made > 0
    assert added(0.5) == [1.0, 0.5, 1.5, 1.0]
    assert len(programs._made) == 2 * made
    assert added(1.0) == [2.0, 1.0, 3.0, 2.0]
    assert len(programs._made) == 2 * made  # the first ones again


def test_a_number_in_given_is_never_stale(make_task, make_cohort):
    plan = Plan("whole", mode="traced")
    for lam in (1.0, 0.5):
        found = scan(make_task, make_cohort, lambda c, b, g: Params.of(n=c["n"] + g["lam"]), plan, given={"lam": lam})
        assert found["n"].tolist() == [2 * lam, lam, 3 * lam, 2 * lam]


def test_a_program_runs_on_the_data_of_its_scan(make_task, make_cohort):
    """Two tasks with one network: programs are shared, samples are not."""
    from dataclasses import replace

    task, programs = make_task(dtype=torch.float64), Programs()
    doubled = replace(task, x=2 * task.x)
    sums = []
    for one in (task, doubled):
        cohort = make_cohort(one, Plan("whole", mode="traced"), programs=programs)
        start, scale = Params.of(sum=torch.zeros((), dtype=torch.float64)), Params.of(s=torch.tensor(1.0))
        sums.append(cohort.scan(first_feature, start, given={"scale": scale})["sum"])
    assert torch.allclose(sums[1], 2 * sums[0], atol=1e-12)


def test_few_calls_do_not_pay_for_a_program(make_task, make_cohort):
    task = make_task(sizes=(8, 8), dtype=torch.float64)
    for calls, made in ((19, 0), (20, 1)):  # two steps each: 38 and 40 calls; tracing pays from 40
        programs = Programs()
        cohort = make_cohort(task, Plan("whole", mode="traced"), programs=programs, calls=calls)
        sgd(cohort, start=task.network.initial, epochs=1)
        assert len(programs._made) == made


def test_a_program_that_exists_is_used_however_few_calls_remain(make_task, make_cohort):
    task, programs, runs = make_task(sizes=(8, 8), dtype=torch.float64), Programs(), []
    for calls in (FORCED, 1, 1):
        cohort = make_cohort(task, Plan("whole", mode="traced"), programs=programs, calls=calls)
        cohort.scan(counted, Params.of(n=torch.zeros((), dtype=torch.float64)))
        runs.append(len(PYTHON_RUNS))
    assert runs[0] == runs[1] == runs[2]  # once traced, the step's Python does not run again


PYTHON_RUNS: deque[int] = deque()  # into which no fingerprint looks


def counted(carry, batch, given):
    PYTHON_RUNS.append(1)
    return Params.of(n=carry["n"] + 1.0)


def test_several_streams_give_one_batch_of_each(make_task, make_cohort):
    # Weighing by the number of the step, so that the order of batches shows.
    task = make_task(dtype=torch.float64)

    def read(carry, batch, given):
        parts = batch if isinstance(batch, tuple) else (batch,)
        sums = torch.stack([part.total(part.x.sum(1)) for part in parts])
        return Params.of(sums=carry["sums"] * 2 + sums)

    def seen(stream, plan):
        start = Params.of(sums=torch.zeros(1 if isinstance(stream, str) else len(stream)))
        return make_cohort(task, plan, seed=1).scan(read, start, epochs=2, stream=stream)["sums"]

    for plan in (Plan(), Plan(mode="traced")):
        together = seen(("main", "other"), plan)
        alone = torch.cat([seen("main", plan), seen("other", plan)], 1)
        assert torch.equal(together, alone)
        assert (together[:, 0] != together[:, 1]).tolist() == [True, False, True, True]  # the second has one sample
