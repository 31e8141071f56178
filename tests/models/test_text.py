import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, Task, Training, federate, models
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.errors import ModelError
from atoll.kernel.network import layout_of
from atoll.kernel.randomness import default_generator, generator


def build(places=6, characters=5, **options):
    with default_generator(0):
        return models.build("char-transformer", (places,), characters, **{"width": 8, "heads": 2, **options})


def texts(n, places=6, characters=5):
    return torch.from_numpy(generator(0, "test texts").integers(characters, size=(n, places)))


def test_published_size():
    assert sum(leaf.numel() for leaf in models.build("char-transformer", (80,), 72).parameters()) == 114_504


def test_classes_come_second_and_forward_is_the_head_of_the_features():
    model, x = build(), texts(3)
    assert model(x).shape == (3, 5, 6)
    assert model.features(x).shape == (3, 6, 8)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert layout_of(model).head == {"head.weight", "head.bias"}


@pytest.mark.parametrize("place", range(6))
def test_a_place_sees_itself_and_what_is_before_it(place):
    """Changing one character changes the logits at its place and at none before."""
    model, x = build().double(), texts(1)
    changed = x.clone()
    changed[0, place] = (x[0, place] + 1) % 5
    moved = (model(x) - model(changed))[0].abs().amax(0) > 0
    assert moved.tolist() == [k >= place for k in range(6)]


def test_the_order_of_earlier_characters_matters():
    model = build().double()
    a, b = model(torch.tensor([[0, 1, 2, 3, 4, 0], [1, 0, 2, 3, 4, 0]]))[:, :, -1]
    assert (a - b).abs().max() > 1e-6


def test_attention_is_that_of_torch():
    model = build(places=4)
    attention = model.body.blocks[0].attention[1]
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(attention.queries_keys_values.weight)
        reference.in_proj_bias.copy_(attention.queries_keys_values.bias)
        reference.out_proj.weight.copy_(attention.out.weight)
        reference.out_proj.bias.copy_(attention.out.bias)
    x = torch.from_numpy(generator(0, "test features").normal(size=(3, 4, 8))).float()
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected = reference(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(attention(x), expected)


def test_images_and_odd_widths_are_refused():
    with pytest.raises(ModelError, match=r"texts of shape \(places,\). Got shape \(3, 32, 32\)"):
        models.build("char-transformer", (3, 32, 32), 10)
    with pytest.raises(ModelError, match="multiple of `heads`. Got 8 and 3."):
        models.build("char-transformer", (6,), 5, width=8, heads=3)


@pytest.fixture
def _double():
    """Samples that are whole numbers have no floating point type of their own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
def test_it_learns_to_count_and_runs_for_many_clients_at_once():
    """The next character is the next number; each client begins its texts anywhere."""
    begin = generator(0, "test beginnings").integers(5, size=(4, 40, 1))
    numbers = torch.from_numpy((begin + np.arange(7)) % 5)
    data = {f"role {k}": (own[:, :-1], own[:, 1:]) for k, own in enumerate(numbers)}
    task = Task.of_clients(data, build(layers=1), classes=5, training=Training(lr=0.3, batch_size=10, momentum=0.9))
    whole, loop = (
        federate(task, FedAvg(), rounds=8, engine=LocalEngine(strategy=strategy, dtype=torch.float64))
        for strategy in ("whole", "loop")
    )
    np.testing.assert_allclose(whole.scores(), loop.scores(), rtol=1e-9)
    assert whole.scores().min() > 0.95
