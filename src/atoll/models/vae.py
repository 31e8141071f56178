"""A conditional variational autoencoder on Params: p(x | y, e) = N(D(y, e), sigma^2) with e ~ N(0, I).

Kingma, Welling. "Auto-Encoding Variational Bayes." ICLR 2014; conditional on a class: Sohn, Lee, Yan. "Learning
Structured Output Representation using Deep Conditional Generative Models." NeurIPS 2015.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

from atoll.kernel.params import Params, Stack
from atoll.models.generator import conditional_perceptron, generate

P = TypeVar("P", Params, Stack)
DECODER, ENCODER, SPREAD = "decoder.", "encoder.", "decoder.log_sigma"
SMALLEST = -4.0  # log sigma: a client with a single sample would let it fall for ever


def autoencoder(
    size: int, classes: int, hidden: int, latent: int, *, draw: np.random.Generator, like: Tensor
) -> Params:
    """Draw encoder and decoder for samples of `size` numbers, with `latent` numbers between them."""
    encoder = conditional_perceptron(size, classes, hidden, 2 * latent, draw=draw, like=like)
    decoder = conditional_perceptron(latent, classes, hidden, size, draw=draw, like=like)
    values = {ENCODER + name: leaf for name, leaf in encoder.items()}
    values |= {DECODER + name: leaf for name, leaf in decoder.items()}
    return Params({**values, SPREAD: like.new_zeros(())})


def negative_bound(vae: Params, x: Tensor, y: Tensor, noise: Tensor, center: float = 0.0) -> Tensor:
    """Return the negative evidence lower bound of every sample, up to a constant; `noise` draws e.

    The prior of e is N(center, I).
    """
    mean, log_variance = generate(select(vae, ENCODER), x, y).chunk(2, 1)
    made = generate(select(vae, DECODER), mean + (0.5 * log_variance).exp() * noise, y)
    log_sigma = vae[SPREAD].clamp(min=SMALLEST)
    likelihood = 0.5 * ((x - made).square() * (-2 * log_sigma).exp()).sum(1) + x.shape[1] * log_sigma
    return likelihood + 0.5 * ((mean - center).square() + log_variance.exp() - 1 - log_variance).sum(1)


def decode(decoder: Params, y: Tensor, latent: Tensor) -> Tensor:
    """Return D(y, e): the mean of the samples for every class in y and row of e."""
    return generate(select(decoder, DECODER), latent, y)


def sample(decoder: Params, y: Tensor, latent: Tensor, noise: Tensor) -> Tensor:
    """Draw a sample for every class in y, from standard normal numbers: e, and the spread around D(y, e), if any."""
    made = decode(decoder, y, latent)
    return made + decoder[SPREAD].clamp(min=SMALLEST).exp() * noise if SPREAD in decoder else made


def decoder_of(vae: P) -> P:
    """Return the decoder alone, which is enough to draw samples."""
    return vae.only(name for name in vae if name.startswith(DECODER))


def select(values: Params, prefix: str) -> Params:
    """Return the leaves whose names begin so, under the rest of their names."""
    return Params({name.removeprefix(prefix): leaf for name, leaf in values.items() if name.startswith(prefix)})
