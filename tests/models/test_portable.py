import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from atoll.kernel.network import Network, Variant
from atoll.kernel.portable import ColumnConv2d, KeyedDropout, MaskedBatchNorm, TiledMaxPool2d, portable
from atoll.kernel.randomness import Keys

NORMS = [
    (nn.BatchNorm1d, (6, 3)),
    (nn.BatchNorm1d, (6, 3, 5)),
    (nn.BatchNorm2d, (6, 3, 4, 5)),
    (nn.BatchNorm3d, (2, 3, 2, 4, 2)),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# -- BatchNorm -----------------------------------------------------------------------------------------------------


def gradients(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * weight).sum().backward()
    return y.detach(), x.grad, [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize(("kind", "shape"), NORMS)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_batchnorm_is_torchs_in_training_and_evaluation(kind, shape, options):
    theirs = kind(3, **options).double()
    ours = portable(theirs)
    assert type(ours) is MaskedBatchNorm
    for seed in range(2):
        for found, expected in zip(
            gradients(ours, normal(*shape, seed=seed)), gradients(theirs, normal(*shape, seed=seed)), strict=True
        ):
            assert all(map(close, found, expected)) if isinstance(found, list) else close(found, expected)
        ours.zero_grad(), theirs.zero_grad()
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():
        assert close(buffers[name].double(), buffer.double())
        assert buffers[name].dtype == buffer.dtype
    assert close(ours.eval()(normal(*shape)), theirs.eval()(normal(*shape)))


@pytest.mark.parametrize("padded", [0, 2])
def test_gradients_of_batchnorm_and_theirs_in_turn_are_torchs(padded):
    x, away, layer = normal(6, 3, 4, 4), normal(6, 3, 4, 4, seed=1), nn.BatchNorm2d(3).double()
    padding, mask = torch.full((padded, 3, 4, 4), 7.0, dtype=torch.float64), (torch.arange(6 + padded) < 6).double()

    def ours(values):
        module = portable(layer).train()
        state = {**dict(module.named_parameters()), **dict(module.named_buffers()), "_mask": mask}
        return (functional_call(module, state, (torch.cat([values, padding]),))[:6].sin() * away).sum()

    def theirs(values):
        return (F.batch_norm(values, None, None, layer.weight, layer.bias, training=True).sin() * away).sum()

    def bend(function):
        return grad(lambda values: (grad(function)(values) * away).sum())

    assert close(grad(ours)(x), grad(theirs)(x))
    assert close(bend(ours)(x), bend(theirs)(x), 1e-11)
    each = torch.stack([x, 2 * x + away])
    assert close(vmap(bend(ours))(each), torch.stack([bend(theirs)(one) for one in each]), 1e-11)


@pytest.mark.parametrize(("kind", "shape"), NORMS)
def test_padded_samples_do_not_touch_the_statistics(kind, shape):
    theirs = kind(3).double()
    ours = portable(theirs)
    samples = shape[0]
    ours._mask = torch.tensor([1.0] * samples + [0.0] * 2, dtype=torch.float64)
    x = torch.cat([normal(*shape), 1000 * normal(2, *shape[1:], seed=1)])
    assert close(ours(x)[:samples], theirs(x[:samples]))
    assert close(ours.running_mean, theirs.running_mean)
    assert close(ours.running_var, theirs.running_var)


def test_padded_samples_get_no_gradient():
    ours = portable(nn.BatchNorm1d(3).double())
    ours._mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    x = normal(4, 3).requires_grad_()
    (ours(x)[:3] ** 3).sum().backward()
    assert x.grad[3].abs().max().item() == 0


def test_one_sample_is_normalised_to_its_bias_and_does_not_crash():
    ours = portable(nn.BatchNorm1d(3).double())
    y = ours(normal(1, 3))
    assert y.abs().max() < 1e-12  # (x - mean) = 0 to rounding, and the bias is 0
    assert torch.isfinite(ours.running_var).all()
    assert close(ours.running_var, torch.full((3,), 0.9, dtype=torch.float64))  # 0.9 * 1 + 0.1 * 0


def test_statistics_are_computed_in_fp32_for_bf16_inputs():
    ours = portable(nn.BatchNorm1d(3))
    x = (normal(64, 3) + 100).to(torch.bfloat16)
    y = ours(x)
    assert y.dtype == torch.bfloat16
    assert ours.running_mean.dtype == torch.float32
    assert close(ours.running_mean, 0.1 * x.float().mean(0), 1e-5)


# -- dropout -------------------------------------------------------------------------------------------------------


def dropout(rate=0.3, client=0, layer=1, channels=False):
    made = KeyedDropout(rate, layer, channels=channels)
    keys = Keys.of(torch.tensor([client]), 0, "dropout")
    made._key_low, made._key_high = keys.low[0], keys.high[0]
    return made


def test_dropout_keeps_the_mean_and_the_share():
    y = dropout(0.3)(torch.ones(100_000))
    # Each element is 0 or 1/0.7; the mean of n of them deviates by sqrt(0.3 / 0.7 / n).
    assert abs(y.mean().item() - 1) < 5 * (0.3 / 0.7 / 100_000) ** 0.5
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}


def test_dropout_of_nothing_of_everything_and_in_evaluation():
    x = normal(20)
    assert torch.equal(dropout(0.0)(x), x)
    assert torch.equal(dropout(1.0)(x), torch.zeros_like(x))
    assert torch.equal(dropout(0.5).eval()(x), x)


def test_masks_differ_by_client_layer_and_call():
    x = torch.ones(1000)
    layer = dropout()
    first, second = layer(x), layer(x)
    masks = [first, second, dropout(client=1)(x), dropout(layer=2)(x)]
    for number, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:number])
    assert torch.equal(dropout()(x), first)


def test_a_mask_is_the_same_alone_and_in_a_cohort():
    layer = KeyedDropout(0.5, 1, channels=False)
    keys, x = Keys.of(torch.arange(3), 0, "dropout"), torch.ones(3, 50)

    def one(x, low, high):
        layer.calls = 0
        return functional_call(layer, {"_key_low": low, "_key_high": high}, (x,))

    together = vmap(one)(x, keys.low, keys.high)
    for client in range(3):
        assert torch.equal(together[client], one(x[client], keys.low[client], keys.high[client]))
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d])
def test_channel_dropout_drops_whole_channels(kind):
    (layer,) = portable(nn.Sequential(kind(0.5)))
    x = torch.ones(8, 16, 3, 3) if kind is nn.Dropout2d else torch.ones(8, 16, 3)
    per_channel = layer(x).flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert set(per_channel.unique().tolist()) == {0.0, 2.0}


def test_one_dropout_layer_used_twice_draws_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x), self.drop(x)

    first, second = portable(Twice())(torch.ones(100))
    assert not torch.equal(first, second)


def test_one_dropout_layer_in_two_places_becomes_two():
    shared = nn.Dropout(0.5)
    first, second = portable(nn.Sequential(shared, shared))
    assert first is not second
    assert not torch.equal(first(torch.ones(100)), second(torch.ones(100)))


# -- convolution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3}, {"kernel_size": 5, "padding": 2}, {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3), "stride": (3, 1), "padding": (1, 0)}, {"kernel_size": 1, "bias": False},
    ],
)  # fmt: skip
def test_a_convolution_by_columns_is_torchs_with_its_gradients(options):
    theirs = nn.Conv2d(3, 4, **options).double()
    ours = portable(nn.Sequential(theirs), columns=True)[0]
    assert type(ours) is ColumnConv2d
    found, expected = gradients(ours, normal(2, 3, 9, 10)), gradients(theirs, normal(2, 3, 9, 10))
    assert close(found[0], expected[0])
    assert close(found[1], expected[1])
    assert all(map(close, found[2], expected[2]))


def test_a_convolution_by_columns_can_be_differentiated_twice_and_for_many_clients():
    """As methods do that differentiate their own steps: a gradient of a gradient, under vmap."""
    theirs = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    ours = portable(nn.Sequential(theirs), columns=True)[0]

    def curvature(layer):
        def loss(weight, x):
            state = {"weight": weight, "bias": layer.bias.detach()}
            return torch.func.functional_call(layer, state, (x,)).pow(3).sum()

        def norm(weight, x):
            first = torch.func.grad(loss, argnums=(0, 1))(weight, x)
            return sum(part.square().sum() for part in first)

        many = torch.func.vmap(torch.func.grad(norm, argnums=(0, 1)))
        return many(normal(4, *theirs.weight.shape), normal(4, 2, 2, 7, 6))

    assert all(map(close, curvature(ours), curvature(theirs)))


@pytest.mark.parametrize(
    "options", [{"groups": 3}, {"dilation": 2}, {"padding": "same"}, {"padding_mode": "circular", "padding": 1}]
)
def test_convolutions_that_are_not_plain_stay_torchs(options):
    assert type(portable(nn.Sequential(nn.Conv2d(3, 3, 3, **options)), columns=True)[0]) is nn.Conv2d


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": (3, 2), "stride": (3, 2)}, {"kernel_size": 1}])
def test_pooling_by_tiles_is_torchs_with_its_gradients(options):
    theirs = nn.MaxPool2d(**options)
    ours = portable(nn.Sequential(theirs), columns=True)[0]
    assert type(ours) is TiledMaxPool2d
    x = normal(2, 3, 9, 11).round()  # whole numbers: many are equal, and the first of them has the gradient
    x[0, 0, 0, 0] = x[1, 2, 5, 5] = float("nan")
    found, expected = gradients(ours, x), gradients(theirs, x)
    assert torch.equal(found[0].nan_to_num(1e9), expected[0].nan_to_num(1e9))
    assert torch.equal(found[1].nan_to_num(1e9), expected[1].nan_to_num(1e9))


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}]
)
def test_pooling_that_is_not_by_tiles_stays_torchs(options):
    assert type(portable(nn.Sequential(nn.MaxPool2d(2, **options)), columns=True)[0]) is nn.MaxPool2d


# -- whole networks ------------------------------------------------------------------------------------------------


def test_the_original_is_left_alone():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
    portable(module, columns=True)
    assert [type(part) for part in module] == [nn.Conv2d, nn.BatchNorm2d, nn.Dropout]
    assert set(module.state_dict()) == set(portable(module).state_dict())


def test_all_variants_compute_the_same_function():
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )
    network, x = Network(module), normal(5, 1, 6, 6).float()

    def outputs(**options):
        variant = Variant(train=True, **options)
        return network.module(variant)(variant, network.initial, x, None, None)[0]

    plain = outputs()
    assert close(outputs(columns=True), plain, 1e-5)
    assert close(outputs(channels_last=True), plain, 1e-5)
    half = outputs(precision="bf16")
    assert half.dtype == torch.float32
    assert not torch.equal(half, plain)
    assert close(half, plain, 0.05)  # bf16 has 8 bits: 2^-8 = 0.004 per operation, of numbers of order 1


def test_master_weights_and_statistics_stay_in_fp32():
    network, x = Network(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))), normal(5, 4).float()
    variant = Variant(train=True, precision="bf16")
    _, after = network.module(variant)(variant, network.initial, x, None, None)
    assert {leaf.dtype for leaf in after.values()} == {torch.float32, torch.int64}
