"""A conditional generative adversarial network on Params: a generator x = D(y, e) with e ~ N(0, I), and its critic C.

    min over C  -E log C(real | x, y) - E log C(made | D(y, e), y),      min over D  -E log C(real | D(y, e), y)

Goodfellow et al. "Generative Adversarial Nets." NeurIPS 2014, with the generator's loss that does not saturate;
conditional on a class: Mirza, Osindero. "Conditional Generative Adversarial Nets." 2014.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.objective import cross_entropy
from atoll.kernel.params import Params
from atoll.models.generator import conditional_perceptron, generate
from atoll.models.vae import DECODER, decode, select

CRITIC = "critic."
REAL, MADE = 0, 1  # the two classes of a critic


def adversaries(
    size: int, classes: int, hidden: int, latent: int, *, draw: np.random.Generator, like: Tensor
) -> Params:
    """Draw a critic and a generator of samples of `size` numbers, from `latent` numbers; both know the class."""
    critic = conditional_perceptron(size, classes, hidden, 2, draw=draw, like=like)
    generator = conditional_perceptron(latent, classes, hidden, size, draw=draw, like=like)
    values = {CRITIC + name: leaf for name, leaf in critic.items()}
    return Params(values | {DECODER + name: leaf for name, leaf in generator.items()})


def critic_loss(gan: Params, x: Tensor, y: Tensor, latent: Tensor) -> Tensor:
    """Return how badly the critic tells each sample from a made one; 2 log 2 for one that cannot."""
    return _doubt(gan, x, y, REAL) + _doubt(gan, decode(gan, y, latent), y, MADE)


def generator_loss(gan: Params, y: Tensor, latent: Tensor) -> Tensor:
    """Return how clearly the critic sees that each made sample is one."""
    return _doubt(gan, decode(gan, y, latent), y, REAL)


def critic_of(gan: Params) -> Params:
    """Return the critic alone."""
    return gan.only(name for name in gan if name.startswith(CRITIC))


def _doubt(gan: Params, x: Tensor, y: Tensor, claim: int) -> Tensor:
    """Return how little the critic believes a claim about every sample."""
    return cross_entropy(generate(select(gan, CRITIC), x, y), torch.full_like(y, claim))
