"""Networks for windows and tables: what they compute, and that all engines compute the same."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, Task, Training, federate, models
from atoll.kernel.errors import ModelError
from atoll.kernel.network import layout_of
from atoll.kernel.randomness import default_generator, generator
from atoll.models.tabular import find_categories
from atoll.models.windows import GRULayer

SHAPES = {"cnn1d:4,6": (3, 8), "gru:5,4": (3, 8), "tabular:6": (7,)}


def build(name, **options):
    with default_generator(0):
        return models.build(name, SHAPES[name], 4, **options).double()


def samples(n, shape):
    return torch.from_numpy(generator(0, "test windows").normal(size=(n, *shape)))


@pytest.mark.parametrize(("name", "parameters"), [("cnn1d", 11_686), ("gru", 14_214)])
def test_sizes_are_as_stated(name, parameters):
    assert sum(leaf.numel() for leaf in models.build(name, (6, 128), 6).parameters()) == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_the_head_of_the_features(name):
    model, x = build(name), samples(3, SHAPES[name])
    assert model(x).shape == (3, 4)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert layout_of(model).head == {"head.weight", "head.bias"}
    assert not layout_of(model).batchnorm


def test_the_recurrence_is_that_of_torch():
    ours, theirs, x = GRULayer(3, 5).double(), nn.GRU(3, 5, batch_first=True).double(), samples(2, (9, 3))
    with torch.no_grad():
        for mine, other in (("inputs", "ih"), ("states", "hh")):
            for leaf in ("weight", "bias"):
                getattr(theirs, f"{leaf}_{other}_l0").copy_(getattr(getattr(ours, mine), leaf))
    assert torch.allclose(ours(x), theirs(x)[0], atol=1e-12)


def test_a_category_is_a_learnt_vector_and_an_unknown_one_is_none():
    model = build("tabular:6", categories=((1, 4), (5, 7)))
    columns = model.body[0]
    assert columns.numbers == (0, 4)
    x = torch.tensor([[0.5, 0, 1, 0, 2.0, 1, 0], [0.5, 0, 0, 0, 2.0, 1, 0]], dtype=torch.float64)
    out = columns(x)
    first, second = columns.vectors
    assert torch.equal(out[0], torch.cat([x[0, [0, 4]], first[1], second[0]]))
    assert torch.equal(out[1, 2 : 2 + first.shape[1]], torch.zeros(first.shape[1], dtype=torch.float64))


def test_the_columns_of_a_category_are_found_by_their_names():
    assert find_categories(("age", "sex=F", "sex=M", "height", "ward=a")) == ((1, 3), (4, 5))
    assert find_categories(()) == ()


def test_a_table_with_categories_trains_with_embeddings():
    pandas = pytest.importorskip("pandas")
    draw = generator(0, "test table")
    n = 60
    kind = draw.integers(3, size=n)
    frame = pandas.DataFrame({
        "site": np.repeat(["a", "b"], n // 2), "size": draw.normal(size=n), "kind": np.array(["x", "y", "z"])[kind],
        "label": np.where(kind == 1, "yes", "no"),
    })  # fmt: skip
    task = Task.own(frame, client="site", target="label", model="tabular:8", training=Training(lr=0.3))
    columns = next(one for one in task.network.submodules() if type(one).__name__ == "Columns")
    assert [len(vectors) for vectors in columns.vectors] == [3]
    report = federate(task, "fedavg", rounds=5)
    assert report.scores().min() > 0.9


@pytest.mark.parametrize("name", SHAPES)
def test_every_strategy_trains_the_same_model(name):
    x = samples(30, SHAPES[name])
    y = torch.arange(30) % 4
    data = {"a": (x[:18], y[:18]), "b": (x[18:], y[18:])}
    task = Task.of_clients(data, build(name), classes=4, training=Training(batch_size=4))
    ends = [
        federate(task, "ditto", rounds=2, engine=LocalEngine(strategy=strategy, dtype=torch.float64)).server
        for strategy in ("loop", "whole")
    ]
    for leaf in ends[0]:
        assert torch.allclose(ends[0][leaf], ends[1][leaf], atol=1e-10)


@pytest.mark.parametrize(
    ("name", "shape", "must"),
    [
        ("cnn1d", (6,), "CNN1d must be given windows of shape (channels, length), at least 4 long. Got shape (6,)."),
        ("cnn1d:8,8,8", (6, 7), "at least 8 long. Got shape (6, 7)."),
        ("gru", (1, 8, 8), "GRU must be given windows of shape (channels, length), at least 1 long."),
        ("tabular", (6, 128), "Tabular must be given rows of shape (columns,). Got shape (6, 128)."),
    ],
)
def test_samples_of_another_shape_are_refused(name, shape, must):
    with pytest.raises(ModelError) as caught:
        models.build(name, shape, 3)
    assert must in str(caught.value)


def test_every_model_says_what_it_is_for():
    assert models.purposes().keys() == {*models.names()}
    assert all(len(purpose) > 20 for purpose in models.purposes().values())
