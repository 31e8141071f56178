"""Traced operations that write their result over an operand that is read for the last time.

On small batches a step passes over all weights several times, and memory for new results costs more than the
arithmetic: the system hands it out page by page, and it drives everything else from the cache. No bit changes: it is
the same operation, with another place for its result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

ATEN = torch.ops.aten

# Operations that compute each number of the result from one place of their operands; what writes it, and how that
# calls the place.
WRITING: dict[Any, tuple[Any, str]] = {
    ATEN.add.Tensor: (ATEN.add.out, "out"),
    ATEN.addcdiv.default: (ATEN.addcdiv.out, "out"),
    ATEN.addcmul.default: (ATEN.addcmul.out, "out"),
    ATEN.div.Tensor: (ATEN.div.out, "out"),
    ATEN.exp.default: (ATEN.exp.out, "out"),
    ATEN.lerp.Scalar: (ATEN.lerp.Scalar_out, "out"),
    ATEN.lerp.Tensor: (ATEN.lerp.Tensor_out, "out"),
    ATEN.mul.Tensor: (ATEN.mul.out, "out"),
    ATEN.neg.default: (ATEN.neg.out, "out"),
    ATEN.reciprocal.default: (ATEN.reciprocal.out, "out"),
    ATEN.relu.default: (ATEN.relu.out, "out"),
    ATEN.rsqrt.default: (ATEN.rsqrt.out, "out"),
    ATEN.sigmoid.default: (ATEN.sigmoid.out, "out"),
    ATEN.sqrt.default: (ATEN.sqrt.out, "out"),
    ATEN.sub.Tensor: (ATEN.sub.out, "out"),
    ATEN.tanh.default: (ATEN.tanh.out, "out"),
    ATEN.threshold_backward.default: (ATEN.threshold_backward.grad_input, "grad_input"),
    ATEN.where.self: (ATEN.where.self_out, "out"),
}
WRITTEN = frozenset(write for write, _ in WRITING.values())
UNDECLARED_VIEWS = frozenset([ATEN._unsafe_view.default])


def overwrite_operands(graph: GraphModule, owned: int) -> None:
    """Let operations write over operands that nobody reads afterwards; the first `owned` inputs may be among these."""
    nodes = list(graph.graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    last = _find_last_reads(nodes, position)
    ours = {node for node in nodes if node.op == "call_function" and not _find_shared(node)}
    ours |= set(graph.graph.find_nodes(op="placeholder")[:owned])
    for node in nodes:
        if node.target not in WRITING:
            continue
        for place in node.all_input_nodes:
            owner = _find_owner(place)
            if owner in ours and last[owner] == position[node] and _has_place_for_all(owner, place, node):
                break
        else:
            continue
        write, keyword = WRITING[node.target]
        with graph.graph.inserting_before(node):
            written = graph.graph.call_function(write, node.args, {**node.kwargs, keyword: place})
        written.meta, position[written], last[written] = node.meta, position[node], last[node]
        ours.add(written)
        node.replace_all_uses_with(written)
        graph.graph.erase_node(node)
    _keep_apart(graph, ours)
    graph.recompile()


def _keep_apart(graph: GraphModule, ours: set[Node]) -> None:
    """Copy results that share memory with another one, or with what is not ours: the next call may overwrite them."""
    output, owners = graph.graph.output_node(), set[Node]()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for number, result in enumerate(results):
        owner = _find_owner(result)
        if owner in owners or owner not in ours:
            with graph.graph.inserting_before(output):
                results[number] = graph.graph.call_function(ATEN.clone.default, (result,))
        owners.add(owner)
    output.args = (results,)


def _find_shared(node: Node) -> Sequence[Node]:
    """Return the values whose memory a value may share: those of which it may be a view."""
    if node.op != "call_function":
        return [] if node.op in ("placeholder", "get_attr") else node.all_input_nodes
    if node.target is operator.getitem:  # one of several results
        return _find_shared(node.all_input_nodes[0])
    if node.target in WRITTEN:  # the operand that was overwritten is this value now, and no other
        return []
    schema = getattr(node.target, "_schema", None)
    new = schema is not None and not any(one.alias_info for one in schema.returns)
    return [] if new and node.target not in UNDECLARED_VIEWS else node.all_input_nodes


def _find_last_reads(nodes: list[Node], position: dict[Node, int]) -> dict[Node, int]:
    """Return where each value is last read, by itself or in a view of it."""
    last: dict[Node, int] = {}
    for node in reversed(nodes):
        reads = [max(position[user], last[user] if node in _find_shared(user) else 0) for user in node.users]
        last[node] = max(reads, default=position[node])
    return last


def _find_owner(node: Node) -> Node:
    """Return the value that a view is of."""
    while shared := _find_shared(node):
        node = shared[0]
    return node


def _has_place_for_all(owner: Node, place: Node, node: Node) -> bool:
    """Return whether `place`, all of its owner, is laid out as the result, and no other operand reads it otherwise."""
    whole, operand, result = (one.meta.get("val") for one in (owner, place, node))
    if not (isinstance(whole, Tensor) and isinstance(operand, Tensor) and isinstance(result, Tensor)):
        return False
    others = [one for one in node.all_input_nodes if one is not place]
    return (
        (operand.shape, operand.stride(), operand.dtype) == (result.shape, result.stride(), result.dtype)
        and whole.numel() == result.numel()
        and not any(_find_owner(one) is owner for one in others)
    )
