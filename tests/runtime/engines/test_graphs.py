"""Which CUDA graphs are kept, and that they are given what they must read.

Capturing one needs a GPU (benchmarks/device_check.py). Here a graph notes the calls of its program, and replays them.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from atoll import LocalEngine, federate
from atoll.compose import create
from atoll.kernel.params import flatten
from atoll.kernel.randomness import generator
from atoll.runtime.engines import programs
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import GraphProgram, Programs
from atoll.runtime.engines.running import TracedProgram


class Captured:
    """Stands for a graph: remembers what it was captured with."""

    def __init__(self, program, work, example, pool, *, own_data):
        if program == "cannot be captured":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.program, self.data, self.pool, self.own_data = program, work.x, pool, own_data


class Data:
    def __init__(self):
        self.x, self.y = torch.zeros(3), torch.zeros(3)


CLIENTS, SERVER = Plan("loop", graph=True), Plan("loop", graph=True, own_data=True)


@pytest.fixture
def made(monkeypatch):
    pools = iter(range(100))
    monkeypatch.setattr(programs, "GraphProgram", Captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    return Programs()


def test_a_graph_is_captured_once_for_the_data_it_reads(made):
    data = Data()
    first = made._capture("step", "program", data, (), CLIENTS)
    assert not first.own_data
    assert made._capture("step", "program", data, (), CLIENTS) is first
    assert made._capture("another step", "program", data, (), CLIENTS).pool == first.pool


def test_other_data_need_another_graph_and_let_the_old_ones_go(made):
    first, second = Data(), Data()
    old = made._capture("step", "program", first, (), CLIENTS)
    new = made._capture("step", "program", second, (), CLIENTS)
    assert new.data is second.x
    assert list(made._of_clients.captured.values()) == [new]
    # The scratch memory of graphs that are gone must not be used again: CUDA has given it up with them.
    assert new.pool != old.pool


def test_a_server_has_one_graph_for_all_rounds_beside_those_of_the_clients(made):
    clients = Data()
    theirs = made._capture("step", "program", clients, (), CLIENTS)
    mine = made._capture("step", "program", Data(), (), SERVER)
    assert mine.own_data
    assert mine.pool != theirs.pool
    assert made._capture("step", "program", Data(), (), SERVER) is mine
    assert made._capture("step", "program", clients, (), CLIENTS) is theirs


def test_what_cannot_be_captured_runs_without_and_is_not_tried_again(made, caplog):
    data = Data()
    program = made._capture("step", "cannot be captured", data, (), CLIENTS)
    assert program == "cannot be captured"
    assert made._capture("step", "cannot be captured", data, (), CLIENTS) is program
    reason = "operation not permitted when stream is capturing"
    assert caplog.messages == [f"step cannot be captured as a CUDA graph and runs without one ({reason})"]


class Noted:
    """A graph that notes what is called while it is captured; arguments are its own tensors, as a real one's are."""

    def __init__(self):
        self.calls = []

    def replay(self):
        for program, arguments in self.calls:
            CALL(program, *arguments)


CALL = TracedProgram.call


@pytest.fixture
def pretended(monkeypatch):
    """Tensors pretend to be on a GPU; returns how many graphs were captured and how many scans were begun."""
    capturing, counts = [], {"captured": 0, "begun": 0}

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        capturing.append(graph)
        counts["captured"] += 1
        yield
        capturing.pop()

    def noted(self, work, carry, *rest):
        for graph in capturing:
            graph.calls.append((self, (work, carry, *rest)))
        return CALL(self, work, carry, *rest)

    begin = GraphProgram.begin

    def begun(self, *arguments):
        counts["begun"] += 1
        return begin(self, *arguments)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(programs, "on_gpu", lambda x: True)
    monkeypatch.setattr(TracedProgram, "call", noted)
    monkeypatch.setattr(GraphProgram, "begin", begun)
    for name, value in {
        "graph_pool_handle": object, "CUDAGraph": Noted, "graph": capture, "Stream": lambda: stream,
        "current_stream": lambda: stream, "stream": lambda stream: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return counts


@pytest.mark.parametrize("method", ["fedavg", "feddf:server_epochs=2,server_batch=4", "fedgen:server_steps=3"])
def test_a_run_in_graphs_is_the_run_without(make_task, request, method):
    """Servers have other samples in every round, which their graphs must be given."""
    draw = generator(0, "public")
    task = make_task(sizes=(6, 9, 5), dtype=torch.float64)
    task = task.with_public(draw.normal(size=(9, *task.x.shape[1:])), draw.integers(3, size=9))

    def after():
        engine = LocalEngine(device="cpu", dtype=torch.float64, strategy="whole traced graph")
        return flatten(federate(task, create(method), rounds=4, engine=engine, evaluation="none").server)[0]

    without, counts = after(), request.getfixturevalue("pretended")
    assert all(map(torch.equal, after(), without))
    # Captured: the clients' steps, for one width, and the server's; FedGen's clients have others once there is a
    # generator, and count their labels. Begun: the clients in each of four rounds, ...
    expected = {"fedavg": (1, 4), "feddf": (1 + 1, 4 + 8), "fedgen": (1 + 1 + 1 + 1, 4 + 4 + 4)}
    assert (counts["captured"], counts["begun"]) == expected[method.partition(":")[0]]
