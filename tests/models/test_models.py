import pytest
import torch
from torch import nn

from atoll import models
from atoll.kernel.errors import ModelError, UnknownName

IMAGE_MODELS = [
    ("mlp", (1, 8, 8)),
    ("mlp", (6, 128)),
    ("linear", (6, 128)),
    ("cnn", (1, 28, 28)),
    ("cnn", (3, 32, 32)),
    ("cnn", (1, 16, 20)),
    ("simple-cnn", (3, 32, 32)),
    ("simple-cnn", (1, 8, 8)),
    ("fedfsa-cnn", (1, 28, 28)),
    ("fedfsa-cnn", (3, 32, 32)),
    ("pfedhn-cnn", (3, 32, 32)),
    ("tutorial-cnn", (1, 28, 28)),
    ("resnet18", (3, 32, 32)),
    ("resnet18-gn", (1, 28, 28)),
]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (1, 28, 28), 785 * 128 + 129 * 128 + 129 * 10),
        ("cnn", (1, 28, 28), 582_026),
        ("cnn", (3, 32, 32), 878_538),
        ("simple-cnn", (3, 32, 32), 1_626_442),
        ("fedfsa-cnn", (1, 28, 28), 1_258_798),  # their 1.259 M
        ("fedfsa-cnn", (3, 32, 32), 2_806_602),  # their 2.807 M
        ("lenet", (3, 32, 32), 62_006),
        ("pfedhn-cnn", (3, 32, 32), 76 * 16 + 401 * 32 + 801 * 120 + 121 * 84 + 85 * 10),
        ("tutorial-cnn", (1, 28, 28), 26 * 10 + 251 * 20 + 321 * 10),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet18-gn", (3, 32, 32), 11_173_962),
    ],
)
def test_published_parameter_counts(name, shape, parameters):
    assert size(models.build(name, shape, 10)) == parameters


@pytest.mark.parametrize(("name", "shape"), IMAGE_MODELS)
def test_forward_is_the_head_of_the_features(name, shape):
    model = models.build(name, shape, 7).eval()
    x = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).view(2, *shape)
    features = model.features(x)
    assert features.shape == (2, model.head.in_features)
    assert model(x).shape == (2, 7)
    assert torch.equal(model(x), model.head(features))


FOR_OTHERS = (
    "char-transformer", "matrix-factorisation", "item-factors", "neural-items", "tabular", "cnn1d", "gru",
)  # fmt: skip
FOR_IMAGES = [name for name in models.names() if name not in FOR_OTHERS]


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_head_modules_name_the_last_linear_layer(name):
    model = models.build(name, (3, 32, 32), 10)
    assert type(model).head_modules == ("head",)
    assert isinstance(model.get_submodule("head"), nn.Linear)
    head = [key for key in model.state_dict() if key.startswith("head.")]
    assert head == ["head.weight", "head.bias"]


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_inputs_and_activations_are_not_overwritten(name):
    model = models.build(name, (3, 32, 32), 10)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


def test_options_reach_the_model():
    assert size(models.build("mlp", (4,), 3, hidden=(5,))) == 5 * 5 + 6 * 3
    assert size(models.build("mlp", (4,), 3, hidden=())) == 5 * 3


def test_widths_stand_after_a_colon():
    assert size(models.build("mlp:5", (4,), 3)) == 5 * 5 + 6 * 3
    assert size(models.build("mlp:5,2", (4,), 3)) == 5 * 5 + 6 * 2 + 3 * 3


@pytest.mark.parametrize("name", ["mlp:", "mlp:0", "mlp:5,", "mlp:-1", "mlp:5.5", "cnn:5"])
def test_widths_that_are_none_are_refused(name):
    with pytest.raises(ModelError) as error:
        models.build(name, (1, 28, 28), 3)
    assert str(error.value) == (
        "A colon must be followed by the widths of hidden layers, which mlp, tabular, cnn1d and gru take. "
        f"Got '{name}'.\n"
        "hint: for example mlp:64 or mlp:64,32."
    )


def test_group_norm_leaves_no_buffers():
    assert list(models.build("resnet18-gn", (3, 32, 32), 10).buffers()) == []
    assert list(models.build("resnet18", (3, 32, 32), 10).buffers()) != []


def test_simple_cnn_starts_as_pfl_research_does():
    model = models.build("simple-cnn", (3, 32, 32), 10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            # Xavier's bound is sqrt(6 / (fan_in + fan_out)); many draws come close to it.
            area = module.weight[0, 0].numel()
            bound = (6 / (area * (module.weight.shape[0] + module.weight.shape[1]))) ** 0.5
            assert 0.95 * bound < module.weight.abs().max() <= bound
            assert not module.bias.any()


def test_small_images_do_not_fit_the_cnn():
    with pytest.raises(ModelError) as caught:
        models.build("cnn", (1, 8, 8), 10)
    assert str(caught.value) == (
        "PFLlibCNN must be given images of shape (channels, height, width), at least 16x16. "
        "Got shape (1, 8, 8).\nhint: use the model `mlp`, which takes any shape."
    )


@pytest.mark.parametrize("name", ["cnn", "simple-cnn", "resnet18", "resnet18-gn"])
def test_vectors_are_not_images(name):
    with pytest.raises(ModelError, match=r"Got shape \(64,\)"):
        models.build(name, (64,), 10)


def test_unknown_model():
    with pytest.raises(UnknownName) as caught:
        models.build("resnet8", (3, 32, 32), 10)
    assert str(caught.value).startswith("Unknown model 'resnet8'. Did you mean: resnet18")
    assert "\nAvailable: char-transformer, cnn, " in str(caught.value)


def test_unknown_option():
    with pytest.raises(ModelError) as caught:
        models.build("mlp", (4,), 3, hiden=(5,))
    assert str(caught.value) == "Model 'mlp' has no option 'hiden'.\nhint: its options are: hidden."
    with pytest.raises(ModelError, match="hint: it has no options."):
        models.build("cnn", (1, 28, 28), 3, hidden=(5,))


def test_bad_sizes_and_norms():
    with pytest.raises(ModelError, match=r"Got shape \(3, 0, 4\) and 10 classes"):
        models.build("mlp", (3, 0, 4), 10)
    with pytest.raises(ModelError, match="must be 'batch' or 'group'. Got 'layer' instead."):
        models.build("resnet18", (3, 32, 32), 10, norm="layer")
