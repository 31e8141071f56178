import numpy as np
import pytest
import torch

from atoll import LocalEngine, Task, Training, federate, models
from atoll.algorithms.fedper import FedPer
from atoll.kernel.errors import ModelError
from atoll.kernel.network import layout_of
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.randomness import default_generator, generator


def build(**options):
    with default_generator(0):
        return models.build("matrix-factorisation", (1,), 1, **{"items": 7, "rank": 3, **options})


def test_it_is_the_formula_of_matrix_factorisation():
    model = build().double()
    with torch.no_grad():
        model.body.bias.weight.copy_(torch.arange(7.0)[:, None])
    items = torch.tensor([[4], [0], [4]])
    q, b = model.body.vector.weight, model.body.bias.weight[:, 0]
    p, user = model.head.vector, model.head.bias
    expected = torch.stack([p @ q[i] + b[i] + user for i in (4, 0, 4)])
    torch.testing.assert_close(model(items), expected)
    torch.testing.assert_close(model.head(model.features(items)), expected)


def test_the_user_is_the_head_and_the_items_are_the_body():
    layout = layout_of(build())
    assert layout.head == {"head.vector", "head.bias"}
    assert set(layout.kinds) - layout.head == {"body.vector.weight", "body.bias.weight"}


def test_predictions_begin_at_the_middle_of_the_scale():
    assert build()(torch.arange(7)[:, None]).detach() == pytest.approx(5.0, abs=0.1)
    assert build(middle=3.0)(torch.arange(7)[:, None]).detach() == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize(("shape", "classes"), [((2,), 1), ((1,), 10), ((1, 28, 28), 10)])
def test_other_data_are_refused(shape, classes):
    with pytest.raises(ModelError, match="one item number per sample"):
        models.build("matrix-factorisation", shape, classes)


@pytest.fixture
def _double():
    """Samples that are whole numbers have no floating point type of their own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
def test_fedper_learns_ratings_of_users_who_agree_on_items_and_differ_in_taste():
    """Users share the items' biases and differ in their own: what one learns of an item helps the others."""
    draw = generator(0, "test ratings")
    quality, mood = draw.normal(size=7), draw.normal(size=5)
    data = {}
    for user in range(5):
        items = draw.integers(7, size=(24, 1))
        data[f"user {user}"] = (torch.from_numpy(items), torch.from_numpy(5 + quality[items[:, 0]] + mood[user]))
    task = Task.of_clients(
        data, build(), loss=squared_error, score=absolute_error, training=Training(lr=0.1, batch_size=4)
    )
    whole, loop = (
        federate(task, FedPer(), rounds=15, engine=LocalEngine(strategy=strategy, dtype=torch.float64))
        for strategy in ("whole", "loop")
    )
    assert "head.vector" not in whole.server
    np.testing.assert_allclose(whole.scores(), loop.scores(), rtol=1e-9)
    assert whole.scores().max() < 0.3  # without the items it would be near 0.8
