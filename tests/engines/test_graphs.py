"""Which CUDA graphs are kept. Capturing one needs a GPU (benchmarks/device_check.py), keeping them does not."""

import pytest
import torch

from atoll.engines import programs
from atoll.engines.programs import EagerProgram, Programs


class Captured:
    """Stands for a graph: remembers what it was captured with."""

    def __init__(self, program, work, example, pool):
        if program == "cannot be captured":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.program, self.data, self.pool = program, work.x, pool


class Data:
    def __init__(self):
        self.x, self.y = torch.zeros(3), torch.zeros(3)


@pytest.fixture
def made(monkeypatch):
    pools = iter(range(100))
    monkeypatch.setattr(programs, "GraphProgram", Captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    return Programs()


def test_a_graph_is_captured_once_for_the_data_it_reads(made):
    data = Data()
    first = made._capture("step", "program", data, ())
    assert made._capture("step", "program", data, ()) is first
    assert made._capture("another step", "program", data, ()).pool == first.pool


def test_other_data_need_another_graph_and_let_the_old_ones_go(made):
    first, second = Data(), Data()
    old = made._capture("step", "program", first, ())
    new = made._capture("step", "program", second, ())
    assert new.data is second.x
    assert list(made._graphs.values()) == [new]
    # The scratch memory of graphs that are gone must not be used again: CUDA has given it up with them.
    assert new.pool != old.pool


def test_what_cannot_be_captured_stays_eager_and_is_not_tried_again(made, caplog):
    data = Data()
    program = made._capture("step", "cannot be captured", data, ())
    assert isinstance(program, EagerProgram)
    assert made._capture("step", "cannot be captured", data, ()) is program
    assert caplog.messages == [
        "step stays eager: it cannot be captured as a CUDA graph (operation not permitted when stream is capturing)"
    ]
