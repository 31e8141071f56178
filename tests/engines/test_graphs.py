"""Which CUDA graphs are kept. Capturing one needs a GPU (benchmarks/device_check.py), keeping them does not."""

import pytest
import torch

from atoll.engines import programs
from atoll.engines.programs import Plan, Programs


class Captured:
    """Stands for a graph: remembers what it was captured with."""

    def __init__(self, program, work, example, pool, *, own_data):
        if program == "cannot be captured":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.program, self.data, self.pool, self.own_data = program, work.x, pool, own_data


class Data:
    def __init__(self):
        self.x, self.y = torch.zeros(3), torch.zeros(3)


CLIENTS, SERVER = Plan("loop", graph=True), Plan("loop", graph=True, plain=True)


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
    assert caplog.messages == [
        "step cannot be captured as a CUDA graph and runs without (operation not permitted when stream is capturing)"
    ]
