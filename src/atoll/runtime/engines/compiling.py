"""Compiling traced operations, once for all steps that are the same but for the order of their inputs.

Compiling takes long and tracing does not, so the operations themselves say what is the same: the step of FedPer, which
keeps its head before its body, is that of FedAvg. Torch keeps what it has compiled in a folder of its own, where other
processes find it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from atoll.kernel.fingerprints import content
from atoll.runtime.engines.products import COPY, add_products, take_out_products
from atoll.runtime.engines.work import Leaves


class Compiler:
    """Compiles traced operations and finds again what it has compiled."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Callable[..., Any], list[int]]] = {}
        self._all_kept = True

    @property
    def count(self) -> int:
        """How many programs were compiled."""
        return len(self._made)

    @property
    def kept_in(self) -> str | None:
        """The folder in which torch keeps what was compiled; None if it could not keep all of it."""
        if not self._made or not self._all_kept:
            return None
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds to import, but is here by now

        return str(cache_dir())

    def __call__(self, graph: GraphModule, inputs: Leaves) -> Callable[..., Any]:
        """Return compiled operations that take these inputs."""
        order = order_of_use(graph)
        described = [(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) for leaf in inputs]
        key = (operations(graph, order), *(described[position] for position in order), torch.get_num_threads())
        if key not in self._made:
            self._made[key] = (self._compile(graph, inputs), order)
        run, theirs = self._made[key]
        if order == theirs:
            return run
        mine = dict(zip(theirs, order, strict=True))
        places = [mine[position] for position in range(len(order))]
        return lambda *values: run(*(values[place] for place in places))

    def _compile(self, graph: GraphModule, inputs: Leaves) -> Callable[..., Any]:
        kept, self._all_kept = self._all_kept, False  # in case that it fails
        before = _count_kept()
        weights = take_out_products(graph)
        run = add_products(_compile_for(graph, inputs), weights)
        run(*inputs)
        found, passed_by = (now - then for now, then in zip(_count_kept(), before, strict=True))
        self._all_kept = kept and found > 0 and not passed_by
        return run


def order_of_use(graph: GraphModule) -> list[int]:
    """Return the positions of the inputs in the order in which the operations first read them; unread ones are last."""
    inputs = {node: position for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    read = (one for node in graph.graph.nodes for one in node.all_input_nodes if one in inputs)
    return [inputs[node] for node in dict.fromkeys([*read, *inputs])]


def operations(graph: GraphModule, order: list[int]) -> str:
    """Digest what operations compute of inputs in this order, wherever each stands in the list.

    Only inputs may be written to, and only at the end, which is how steps are traced. Otherwise the text decides.
    """
    known: dict[Node, str] = {}
    inputs = graph.graph.find_nodes(op="placeholder")
    for number, position in enumerate(order):
        known[inputs[position]] = f"input {number}"
    written = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            known[node] = content(getattr(graph, node.target))
            continue
        arguments = map_arg((node.args, node.kwargs), lambda one: f"%{known[one]}")
        known[node] = hashlib.sha256(f"{node.target} {arguments}".encode()).hexdigest()
        if node.op == "output" or _writes(node):
            written.append(node)
    if not _only_at_the_end(graph, written):
        constants = sorted(known[node] for node in graph.graph.nodes if node.op == "get_attr")
        return hashlib.sha256(f"{graph.code} {order} {constants}".encode()).hexdigest()
    return hashlib.sha256(repr(sorted(known[node] for node in written)).encode()).hexdigest()


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _only_at_the_end(graph: GraphModule, written: list[Node]) -> bool:
    """Return whether operations only write computed values to inputs, after all else."""
    nodes, inputs = list(graph.graph.nodes), set(graph.graph.find_nodes(op="placeholder"))
    copies = written[:-1]
    return nodes[len(nodes) - len(written) :] == written and all(
        node.target is COPY and node.args[0] in inputs and (node.args[1] is node.args[0] or node.args[1] not in inputs)
        for node in copies
    )


def _compile_for(graph: GraphModule, inputs: Leaves) -> Callable[..., Any]:
    """Compile operations for inputs of these shapes.

    Torch's public `compile` would look at every call whether the inputs still have these shapes, which takes a tenth
    of a small step; programs are kept by shape. Without a context for shapes, torch would not keep what it compiles; in
    that context it would take the sizes of real inputs for symbols, so it gets examples whose sizes are numbers.
    """
    from torch._inductor import compile as compile_operations  # takes seconds to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = FakeTensorMode(allow_fallback_kernels=True, shape_env=ShapeEnv())
    examples: list[Any] = [shapes.from_tensor(leaf, static_shapes=True) for leaf in inputs]
    with tracing(TracingContext(shapes)):
        compiled: Callable[..., Any] = compile_operations(graph, examples)
    return compiled


def _count_kept() -> tuple[int, int]:
    """Return how many programs torch looked for among those it keeps, and how many it could not keep."""
    from torch._dynamo.utils import counters  # takes seconds to import

    inductor, before_it = counters["inductor"], counters["aot_autograd"]
    found = inductor["fxgraph_cache_hit"] + inductor["fxgraph_cache_miss"]
    return found, inductor["fxgraph_cache_bypass"] + before_it["autograd_cache_bypass"]
