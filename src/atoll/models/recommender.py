"""Matrix factorisation (Koren, Bell and Volinsky, 2009), split so a client is a user.

    rating(user, item) = p . q_item + b_item + b_user

The items' vectors q and biases are the body; the user's vector p and bias are the head. A method that shares the body
and keeps the head, such as FedPer, is federated matrix factorisation: no user's vector is ever sent.

Where items are ranked and nothing is rated, a network scores all of them at once.
"""

from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead

MOVIETWEETINGS_ITEMS = 10506
FIRST = 0.1  # standard deviation of the first entries of items' vectors
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


class Table(nn.Module):
    """A vector and a bias for every item; each sample is given all rows, because any item may be recommended."""

    def __init__(self, items: int, rank: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(items, rank) * FIRST)
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, x: Tensor) -> Tensor:
        """Return all rows, once for each sample."""
        rows = torch.cat([self.vector, self.bias[:, None]], dim=1)
        return rows.expand(len(x), *rows.shape)


class Taste(nn.Module):
    """The user's vector p: an item with the row (q, b) scores p . q + b."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(rank))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores of the items with these rows."""
        return rows[..., :-1] @ self.vector + rows[..., -1]


class NeuralTaste(nn.Module):
    """The user's vector p, and a network for all users: an item with the row (q, b) scores MLP([p; q]) + b."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.user = Vector(rank)
        widths = (2 * rank, 2 * rank, rank, max(rank // 2, 1))
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores of the items with these rows."""
        q, first = rows[..., :-1], cast("nn.Linear", self.network[0])
        of_user, of_items = torch.split(first.weight, q.shape[-1], dim=1)  # what p adds is the same for all items
        scores: Tensor = self.network[1:](linear(q, of_items, of_user @ self.user.vector + first.bias))
        return scores[..., 0] + rows[..., -1]


class Vector(nn.Module):
    """A vector that begins at 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(rank))


class ItemFactors(BodyAndHead):
    """Scores all items for a user, p . q_i + b_i: the table of items is the body, the user's vector p the head.

    With p = 0, where every user begins, items are ranked by their biases, the same for all.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, rank: int = 16) -> None:
        super().__init__(Table(classes, rank), Taste(rank))


class NeuralItems(BodyAndHead):
    """Scores all items for a user, MLP([p; q_i]) + b_i; only the user's vector p is private."""

    head_modules: ClassVar[tuple[str, ...]] = ("head.user",)

    def __init__(self, shape: tuple[int, ...], classes: int, rank: int = 16) -> None:
        super().__init__(Table(classes, rank), NeuralTaste(rank))


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
