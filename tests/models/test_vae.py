"""A conditional autoencoder, where everything is known: a linear decoder with Gaussian noise.

x = a e + c_y + sigma n has the marginal N(c_y, a a^T + sigma^2 I) and the posterior N(m, s^2) of e, with
m = a^T (x - c_y) / (sigma^2 + a^T a) and s^2 = sigma^2 / (sigma^2 + a^T a).
"""

import math

import pytest
import torch
from torch import Tensor

from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.models.vae import SMALLEST, autoencoder, decoder_of, negative_bound, sample

SIZE, CLASSES = 3, 2
A = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
C = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
SIGMA = 0.7
TOTAL = SIGMA**2 + float(A @ A)
X = torch.linspace(-2, 2, 4 * SIZE, dtype=torch.float64).reshape(4, SIZE)
Y = torch.tensor([0, 1, 1, 0])


def linear(matrix: Tensor, constant: Tensor) -> dict[str, Tensor]:
    """A perceptron that is linear: t = relu(t) - relu(-t)."""
    inputs = matrix.shape[1]
    eye = torch.eye(inputs, dtype=torch.float64)
    return {
        "hidden.weight": torch.cat([eye, -eye]),
        "hidden.bias": torch.zeros(2 * inputs, dtype=torch.float64),
        "out.weight": torch.cat([matrix, -matrix], 1),
        "out.bias": constant,
    }


def exact(posterior_mean: float = 1.0) -> Params:
    """The decoder above with the encoder of its posterior, or with a mean that is off by a factor."""
    to_mean = posterior_mean * torch.cat([A, -(C @ A)]) / TOTAL
    matrix = torch.stack([to_mean, torch.zeros_like(to_mean)])
    encoder = linear(matrix, torch.tensor([0.0, math.log(SIGMA**2 / TOTAL)], dtype=torch.float64))
    decoder = linear(torch.cat([A[:, None], C.T], 1), torch.zeros(SIZE, dtype=torch.float64))
    values = {f"encoder.{name}": leaf for name, leaf in encoder.items()}
    values |= {f"decoder.{name}": leaf for name, leaf in decoder.items()}
    return Params({**values, "decoder.log_sigma": torch.tensor(math.log(SIGMA), dtype=torch.float64)})


def expected_bound(vae: Params) -> Tensor:
    """Over the noise: the bound is quadratic in it, so that +1 and -1 stand for a standard normal."""
    one = torch.ones(len(X), 1, dtype=torch.float64)
    return (negative_bound(vae, X, Y, one) + negative_bound(vae, X, Y, -one)) / 2


def evidence() -> Tensor:
    covariance = torch.outer(A, A) + SIGMA**2 * torch.eye(SIZE, dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(C[Y], covariance)
    return -marginal.log_prob(X) - 0.5 * SIZE * math.log(2 * math.pi)


def test_the_bound_is_the_evidence_at_the_posterior() -> None:
    torch.testing.assert_close(expected_bound(exact()), evidence())


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.5])
def test_any_other_encoder_is_worse(factor: float) -> None:
    assert (expected_bound(exact(factor)) > evidence() + 1e-6).all()


def test_a_prior_elsewhere_is_the_same_model_with_e_moved() -> None:
    """The numbers e and center + e say the same if the encoder adds the center and the decoder takes it away."""
    vae, center = exact(), 2.5
    at = torch.tensor([center, 0.0], dtype=torch.float64)
    moved = vae | Params(
        {
            "encoder.out.bias": vae["encoder.out.bias"] + at,
            "decoder.out.bias": vae["decoder.out.bias"] - center * A,
        }
    )
    noise = torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None]
    torch.testing.assert_close(negative_bound(moved, X, Y, noise, center), negative_bound(vae, X, Y, noise))
    assert (negative_bound(moved, X, Y, noise) > negative_bound(vae, X, Y, noise)).all()


def test_samples_are_those_of_the_model() -> None:
    e, noise = torch.randn(4, 1, dtype=torch.float64), torch.randn(4, SIZE, dtype=torch.float64)
    made = sample(decoder_of(exact()), Y, e, noise)
    torch.testing.assert_close(made, e * A + C[Y] + SIGMA * noise)


def test_the_spread_does_not_fall_for_ever() -> None:
    tiny = exact() | Params.of(**{"decoder.log_sigma": torch.tensor(-50.0, dtype=torch.float64)})
    noise = torch.ones(4, SIZE, dtype=torch.float64)
    e = torch.zeros(4, 1, dtype=torch.float64)
    torch.testing.assert_close(sample(tiny, Y, e, noise), C[Y] + math.exp(SMALLEST))
    assert torch.isfinite(expected_bound(tiny)).all()


def test_the_decoder_is_all_that_sampling_needs() -> None:
    vae = autoencoder(SIZE, CLASSES, 5, 2, draw=generator(0, "test"), like=torch.zeros((), dtype=torch.float64))
    assert all(name.startswith("decoder.") for name in decoder_of(vae))
    assert sample(decoder_of(vae), Y, torch.zeros(4, 2).double(), torch.zeros(4, SIZE).double()).shape == (4, SIZE)
    assert vae["encoder.out.bias"].shape == (4,)  # a mean and a variance for each of two numbers
