"""Operations that write over what is read for the last time: the same bits, less memory, and nobody else's values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.randomness import generator
from atoll.runtime.engines.overwriting import WRITTEN, overwrite_operands

OWNED = 2  # inputs that may be overwritten
Values = list[Tensor]

OPERATIONS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda a, b, c: a + b,
    lambda a, b, c: a - b * 0.5,
    lambda a, b, c: torch.lerp(a, b, 0.3),
    lambda a, b, c: torch.addcmul(a, b, c, value=0.1),
    lambda a, b, c: torch.relu(a),
    lambda a, b, c: -a,
    lambda a, b, c: a * a,
    lambda a, b, c: a.t(),
    lambda a, b, c: a.reshape(2, 8).reshape(4, 4),
    lambda a, b, c: a[1].expand(4, 4) + b,
    lambda a, b, c: torch.sqrt(a.abs() + 1),
    lambda a, b, c: torch.where(a > 0, b, c.tanh()),
    lambda a, b, c: (-a.abs()).exp() + b.sigmoid(),
    lambda a, b, c: a @ b,
    lambda a, b, c: a,
    lambda a, b, c: a.sum(0, keepdim=True) / (b.square() + 1),
    lambda a, b, c: a.t().contiguous().t(),
    lambda a, b, c: torch.cat(torch.unbind(a)[:2]).reshape(2, 4).repeat(2, 1) + b,
)


def draw_program(seed: int) -> Callable[..., Values]:
    """A program of random operations on random values, with two results."""
    dice = generator(seed, "program")
    lines = [(OPERATIONS[dice.integers(len(OPERATIONS))], dice.random(3)) for _ in range(dice.integers(2, 15))]
    ends = dice.random(2)

    def run(*inputs: Tensor) -> Values:
        known = list(inputs)
        for operation, places in lines:
            known.append(operation(*(known[int(place * len(known))] for place in places)))
        results = known[OWNED:]
        return [results[-1 - int(end * min(4, len(results)))] for end in ends]

    return run


def trace(program: Callable[..., Values], inputs: Values) -> GraphModule:
    return make_fx(program, tracing_mode="fake")(*inputs)


def draw_inputs() -> Values:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(4)]


def count_writes(graph: GraphModule) -> int:
    return sum(node.target in WRITTEN for node in graph.graph.nodes)


@pytest.mark.parametrize("group", range(20))
def test_random_programs_give_the_same_bits_step_after_step(group: int) -> None:
    """catches: a value that is overwritten and read again, a view of it too, and two results in one place."""
    written = 0
    for seed in range(10 * group, 10 * group + 10):
        program, inputs = draw_program(seed), draw_inputs()
        graph = trace(program, inputs)
        overwrite_operands(graph, OWNED)
        written += count_writes(graph)
        expected, found, others = inputs[:OWNED], [one.clone() for one in inputs[:OWNED]], inputs[OWNED:]
        for _ in range(3):
            expected = [one.clone() for one in program(*expected, *others)]
            found = [one.contiguous() for one in graph(*found, *others)]  # as the engine does: a program has one layout
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), seed
        assert all(torch.equal(one, other) for one, other in zip(others, draw_inputs()[OWNED:], strict=True)), seed
    assert written > 0


def test_a_step_of_sgd_is_written_over_the_model_that_it_began_with() -> None:
    def step(w: Tensor, velocity: Tensor, g: Tensor) -> Values:
        velocity = velocity * 0.9 + g
        return [w - velocity * 0.1, velocity]

    inputs = draw_inputs()[:3]
    graph = trace(step, inputs)
    overwrite_operands(graph, OWNED)
    w, velocity = graph(*inputs)
    assert (w.data_ptr(), velocity.data_ptr()) == (inputs[0].data_ptr(), inputs[1].data_ptr())
    assert torch.equal(inputs[2], draw_inputs()[2])


def test_what_is_not_owned_is_not_overwritten() -> None:
    inputs = draw_inputs()[:2]
    graph = trace(lambda a, b: [a + b, a * b], inputs)
    overwrite_operands(graph, 0)
    assert count_writes(graph) == 0
    graph(*inputs)
    assert all(torch.equal(one, other) for one, other in zip(inputs, draw_inputs(), strict=False))
