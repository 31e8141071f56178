"""A network for rows of a table: numbers as they are, categories by learnt vectors."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from atoll.kernel.errors import ModelError
from atoll.models.split import BodyAndHead

WIDEST = 16  # numbers that a category is embedded in, at most


class Columns(nn.Module):
    """Embed the categories of a row, each of which is given by as many columns as it has values.

    One of these columns is 1 and the others are 0, so a matrix product picks a learnt vector. A value that was never
    seen is 0 in all of them, and its vector is 0.
    """

    def __init__(self, columns: int, categories: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.categories = tuple((first, last) for first, last in categories)
        taken = {place for first, last in categories for place in range(first, last)}
        self.numbers = tuple(place for place in range(columns) if place not in taken)
        widths = [min(WIDEST, (last - first + 1) // 2) for first, last in categories]
        self.vectors = nn.ParameterList(
            torch.randn(last - first, width) for (first, last), width in zip(categories, widths, strict=True)
        )
        self.width = len(self.numbers) + sum(widths)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers of rows [n, columns], and after them the vectors of their categories."""
        parts = [x[:, list(self.numbers)]]
        parts += [x[:, first:last] @ v for (first, last), v in zip(self.categories, self.vectors, strict=True)]
        return torch.cat(parts, 1)


class Tabular(BodyAndHead):
    """Embedded categories beside numbers, then linear layers with ReLU.

    `categories` are the places, from first to before last, of the columns that stand for one category together.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        hidden: Sequence[int] = (64, 64),
        categories: Sequence[tuple[int, int]] = (),
    ) -> None:
        if len(shape) != 1:
            raise ModelError(
                f"Tabular must be given rows of shape (columns,). Got shape {shape}.",
                hint="use the model `cnn1d` or `gru` for windows, `cnn` for images, or `mlp`, which takes any shape.",
            )
        columns = Columns(shape[0], categories)
        layers: list[nn.Module] = [columns]
        for wide, narrow in pairwise([columns.width, *hidden]):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(nn.Sequential(*layers), nn.Linear(hidden[-1], classes))


def find_categories(columns: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return where categories stand among columns that are named `age`, `sex=F`, `sex=M`."""
    found: dict[str, list[int]] = {}
    for place, column in enumerate(columns):
        name, equals, _ = column.partition("=")
        if equals:
            found.setdefault(name, []).append(place)
    return tuple((places[0], places[-1] + 1) for places in found.values())
