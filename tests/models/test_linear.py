import torch

from atoll import models


def test_it_is_one_linear_layer_and_all_head():
    model = models.build("linear", (2, 3), 4)
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    x = torch.randn(5, 2, 3)
    assert torch.equal(model(x), x.flatten(1) @ model.head.weight.T + model.head.bias)
    assert model.features(x).shape == (5, 6)
