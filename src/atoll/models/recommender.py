"""Matrix factorisation (Koren, Bell and Volinsky, 2009), split so a client is a user.

    rating(user, item) = p . q_item + b_item + b_user

The items' vectors q and biases are the body; the user's vector p and bias are the head. A method that shares the body
and keeps the head, such as FedPer, is federated matrix factorisation: no user's vector is ever sent.
"""

import torch
from torch import Tensor, nn

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead

MOVIETWEETINGS_ITEMS = 10506
SMALL = 0.05  # first entries of vectors: the biases are learnt first


class Items(nn.Module):
    """A vector and a bias for every item, in one row."""

    def __init__(self, items: int, rank: int) -> None:
        super().__init__()
        self.vector = nn.Embedding(items, rank)
        self.bias = nn.Embedding(items, 1)
        nn.init.normal_(self.vector.weight, std=SMALL)
        nn.init.zeros_(self.bias.weight)

    def forward(self, items: Tensor) -> Tensor:
        """Return the rows of items [n, 1]."""
        return torch.cat([self.vector(items[:, 0]), self.bias(items[:, 0])], dim=1)


class User(nn.Module):
    """The user's vector and bias."""

    def __init__(self, rank: int, middle: float) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(rank) * SMALL)
        self.bias = nn.Parameter(torch.tensor(middle))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the ratings of the items with these rows."""
        return rows[:, :-1] @ self.vector + rows[:, -1] + self.bias


class MatrixFactorisation(BodyAndHead):
    """A model that maps item numbers [n, 1] to ratings [n].

    `items` is how many there are and `middle` the middle of the scale, where predictions begin: by default those of
    MovieTweetings.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        items: int = MOVIETWEETINGS_ITEMS,
        rank: int = 16,
        middle: float = 5.0,
    ) -> None:
        if shape != (1,) or classes != 1:
            raise ModelError(
                f"MatrixFactorisation must be given one item number per sample and predict one rating. "
                f"Got samples of shape {shape} and {classes} outputs.",
                hint="use it with ratings, such as `movietweetings`.",
            )
        super().__init__(Items(items, rank), User(rank, middle))
