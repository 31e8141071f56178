"""Updates of weights by a product of matrices, taken out of a step so each can be one operation.

The gradient of a layer's weights is the product of what went into the layer and what came back to it. To write it to
memory and read it again takes a CPU longer than to compute it, so the product is added to the weights at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

COPY = torch.ops.aten.copy_.default
PRODUCT = torch.ops.aten.bmm.default
ADD_SCALED = torch.ops.aten.addcmul.default  # how the toolbox takes a step: weights + gradient * -lr
SCALE = torch.ops.aten.mul.Tensor


def take_out_products(graph: GraphModule) -> list[int]:
    """Leave out updates by a product; return the positions of the weights that are left as they were.

    The operations then return two factors for each of them, to be multiplied and added. In float64 they stay as they
    are: the sums would have other bits, and there bits are compared. On a GPU nothing was measured.
    """
    places = {node: position for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    output = graph.graph.output_node()
    copies = graph.graph.find_nodes(op="call_function", target=COPY)
    found = [node for node in copies if _read(node)[0] in places and _is_by_product(node)]
    if output.args[0] or not found:  # only a step that writes to its inputs returns nothing
        return []
    left_as_they_were, factors = list[int](), list[Node]()
    for node in found:
        weights, update = _read(node)
        _, product, scale = _read(update)
        left, right = _read(product)
        with graph.graph.inserting_before(node):
            factors += [graph.graph.call_function(SCALE, (left, scale)), right]
        left_as_they_were.append(places[weights])
        for gone in (node, update, product):
            graph.graph.erase_node(gone)
    output.args = (factors,)
    graph.recompile()
    return left_as_they_were


def add_products(run: Callable[..., Any], places: list[int]) -> Callable[..., Any]:
    """Return operations that run those without products, and then add the products to the weights."""

    def run_all(*values: Tensor) -> list[Tensor]:
        factors = run(*values)
        for number, place in enumerate(places):
            values[place].baddbmm_(factors[2 * number], factors[2 * number + 1])
        return []

    return run_all if places else run


def _read(node: Node) -> tuple[Any, ...]:
    """Return what an operation reads."""
    return node.args


def _is_by_product(copy: Node) -> bool:
    """Return whether weights of float32 numbers on a CPU become themselves plus one scaled product."""
    weights, update = _read(copy)
    if not isinstance(update, Node) or update.target is not ADD_SCALED or update.kwargs or len(update.users) > 1:
        return False
    old, product, scale = _read(update)
    kept = weights.meta["val"]
    return bool(
        old is weights
        and product.target is PRODUCT
        and len(product.users) == 1
        and scale.meta["val"].dim() == 0
        and kept.device.type == "cpu"
        and kept.dtype == torch.float32
        and kept.shape == product.meta["val"].shape
    )
