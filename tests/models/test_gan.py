"""Adversaries, where something is known of them: a critic that cannot tell, and the best one between two points."""

import math

import pytest
import torch

from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.models.gan import CRITIC, adversaries, critic_loss, critic_of, generator_loss
from atoll.models.vae import SPREAD, decode, decoder_of, sample

SIZE, CLASSES, LATENT = 2, 3, 4
LIKE = torch.zeros((), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 1])


def drawn() -> tuple[Params, torch.Tensor, torch.Tensor]:
    draw = generator(0, "gan")
    gan = adversaries(SIZE, CLASSES, 5, LATENT, draw=draw, like=LIKE)
    numbers = torch.from_numpy(draw.normal(size=(4, SIZE + LATENT)))
    return gan, numbers[:, :SIZE], numbers[:, SIZE:]


def blind(gan: Params) -> Params:
    """The same with a critic that answers nothing."""
    return gan | critic_of(gan).map(torch.zeros_like)


def test_a_critic_that_cannot_tell_costs_twice_the_logarithm_of_two() -> None:
    gan, x, e = drawn()
    assert critic_loss(blind(gan), x, Y, e).tolist() == pytest.approx([2 * math.log(2)] * 4)
    assert generator_loss(blind(gan), Y, e).tolist() == pytest.approx([math.log(2)] * 4)


def test_it_teaches_the_generator_nothing() -> None:
    gan, _, e = drawn()
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in blind(gan).items()}
    generator_loss(Params(leaves), Y, e).mean().backward()
    assert all(not leaf.grad.any() for name, leaf in leaves.items() if not name.startswith(CRITIC))


def test_losses_by_hand() -> None:
    gan, x, e = drawn()
    hidden = {name.removeprefix(CRITIC): leaf for name, leaf in critic_of(gan).items()}

    def logits(samples: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat([samples, torch.nn.functional.one_hot(Y, CLASSES).double()], 1)
        first = torch.relu(inputs @ hidden["hidden.weight"].T + hidden["hidden.bias"])
        return first @ hidden["out.weight"].T + hidden["out.bias"]

    made = logits(decode(decoder_of(gan), Y, e)).log_softmax(1)
    expected = -logits(x).log_softmax(1)[:, 0] - made[:, 1]
    torch.testing.assert_close(critic_loss(gan, x, Y, e), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(generator_loss(gan, Y, e), -made[:, 0], rtol=0, atol=1e-12)


def test_a_generator_has_no_spread_of_its_own() -> None:
    gan, x, e = drawn()
    assert SPREAD not in gan
    assert torch.equal(sample(decoder_of(gan), Y, e, x), decode(decoder_of(gan), Y, e))
