"""Weights to which a product is added at once come to the same values as those updated by a gradient."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from atoll import LocalEngine, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.params import flatten
from atoll.runtime.engines import compiling
from atoll.runtime.engines.products import add_products, take_out_products

CLIENTS, ROWS, INTO, OUT = 3, 4, 5, 2


def step(w, x, back, scale, total):
    """Write a step of gradient descent over w; `total` reads w as it was."""
    new_w = torch.addcmul(w, torch.bmm(back.mT, x), scale)
    new_total = total + w.sum((1, 2))
    w.copy_(new_w)
    total.copy_(new_total)
    return []


def make_inputs(dtype=torch.float32, scale=()):
    draw = torch.Generator().manual_seed(0)
    shapes = [(CLIENTS, OUT, INTO), (CLIENTS, ROWS, INTO), (CLIENTS, ROWS, OUT), scale, (CLIENTS,)]
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


def test_a_product_is_added_to_weights_that_others_read_before():
    plain, ours = make_inputs(), make_inputs()
    graph = make_fx(step)(*make_inputs())
    places = take_out_products(graph)
    assert places == [0]
    assert "addcmul" not in graph.code
    step(*plain)
    assert add_products(graph, places)(*ours) == []
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(ours[0], make_inputs()[0])


def keep_product(w, x, back, scale, total):
    product = torch.bmm(back.mT, x)
    new_w = torch.addcmul(w, product, scale)
    new_total = total + product.sum((1, 2))
    w.copy_(new_w)
    total.copy_(new_total)
    return []


def from_elsewhere(w, x, back, scale, total):
    w.copy_(torch.addcmul(w * 2, torch.bmm(back.mT, x), scale))
    return []


def return_result(w, x, back, scale, total):
    w.copy_(torch.addcmul(w, torch.bmm(back.mT, x), scale))
    return [total + 1]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (step, {"dtype": torch.float64}),  # where bits are compared
        (step, {"scale": (OUT, INTO)}),  # a scale of each weight is not one of a factor
        (keep_product, {}),
        (from_elsewhere, {}),
        (return_result, {}),
    ],
)
def test_other_updates_stay_as_they_are(function, options):
    graph = make_fx(function)(*make_inputs(**options))
    before = graph.code
    assert take_out_products(graph) == []
    assert graph.code == before
    assert add_products(graph, []) is graph


def test_a_run_with_products_agrees_with_one_without(make_task, monkeypatch):
    """Traced operations stand for compiled ones."""
    monkeypatch.setattr(compiling, "_compile_for", lambda graph, inputs: graph)
    monkeypatch.setattr(compiling, "_count_kept", lambda: (0, 0))
    found = []
    monkeypatch.setattr(
        compiling, "take_out_products", lambda graph: found.append(take_out_products(graph)) or found[-1]
    )
    task = make_task(shares=(0.6, 0.2, 0.2))

    def train(plan):
        report = federate(task, FedAvg(), rounds=3, engine=LocalEngine(strategy=plan, device="cpu", remember=False))
        return flatten(report.server)[0]

    with_products = train("whole compiled")
    assert any(found)
    for one, other in zip(with_products, train("whole eager"), strict=True):
        torch.testing.assert_close(one, other)
