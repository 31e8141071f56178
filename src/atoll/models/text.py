"""A small causal transformer that predicts the next character (Vaswani et al., 2017; pre-norm).

Attention is written out, not taken from `nn.MultiheadAttention`, so the model runs for many clients at once
and is traced like any other.
"""

import torch
from torch import Tensor, nn

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead


class CausalAttention(nn.Module):
    """Every place looks at itself and at the places before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over [n, places, width]; the shape stays."""
        samples, places, width = x.shape
        q, k, v = (
            part.reshape(samples, places, self.heads, width // self.heads).transpose(1, 2)
            for part in self.queries_keys_values(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        place = torch.arange(places, device=x.device)
        scores = scores.masked_fill(place > place[:, None], float("-inf"))
        mixed = scores.softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, places, width))
        return out


class Block(nn.Module):
    """Attention, then two layers at every place; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), CausalAttention(width, heads))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to [n, places, width]; the shape stays."""
        x = x + self.attention(x)
        out: Tensor = x + self.feed_forward(x)
        return out


class Reader(nn.Module):
    """A body that maps characters and their places to features [n, places, width]."""

    def __init__(self, characters: int, places: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.randn(places, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.character.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the features of the characters [n, places]."""
        features: Tensor = self.blocks(self.character(characters) + self.place)
        return features


class PerPlace(nn.Linear):
    """A linear layer at every place; classes come second, as losses want them."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name nn.Linear gives it
        """Map [n, places, width] to logits [n, classes, places]."""
        return super().forward(input).transpose(1, 2)


class CharTransformer(BodyAndHead):
    """A model of characters [n, places], numbers below `classes`, that gives logits of the next, [n, classes, places].

    114,504 parameters for 80 places and 72 characters.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        if len(shape) != 1:
            raise ModelError(
                f"CharTransformer must be given texts of shape (places,). Got shape {shape}.",
                hint="use the model `mlp` or `cnn` for other data.",
            )
        if width % heads:
            raise ModelError(f"`width` of CharTransformer must be a multiple of `heads`. Got {width} and {heads}.")
        super().__init__(Reader(classes, shape[0], width, heads, layers), PerPlace(width, classes))
