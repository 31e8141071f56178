"""Where tuning looks: step sizes in factors of 3, then the values that a method declares with `Search`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.compose import as_method
from atoll.compose.steps import WithStepSize
from atoll.data.task import Task
from atoll.federation.labels import label
from atoll.kernel.algorithm import Algorithm, hyperparameters
from atoll.kernel.hyperparameters import Search
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import with_values

FACTOR = 3.0  # between two step sizes
FINER = (FACTOR**0.5, FACTOR**-0.5, FACTOR**0.25, FACTOR**-0.25, FACTOR**0.75, FACTOR**-0.75)
MOST_DRAWN = 100  # times that values are drawn before what is left of a space counts as empty
LARGEST_PULL = 1.0  # a step that goes all the way to what pulls it; beyond, it overshoots


@dataclass(frozen=True)
class Entry:
    """A method that is tuned: as it was asked for, with what is left open."""

    text: str
    method: Algorithm
    free: Mapping[str, Search]  # hyperparameters by name
    lr: float  # where the search for a step size begins
    fixed: bool  # whether the step size was given

    @classmethod
    def of(cls, asked: Algorithm | str, task: Task) -> Entry:
        """Read what was asked for: values that were given are not tuned."""
        method = as_method(asked)
        text = asked if isinstance(asked, str) else label(method)
        given = {pair.partition("=")[0] for pair in text.partition(":")[2].split(",")}
        fields = {one.name: one for one in hyperparameters(method)}
        free = {name: one.search for name, one in fields.items() if one.search is not None and name not in given}
        if "clusters" in free:  # a cluster of fewer than three clients is hardly one
            few = tuple(number for number in free["clusters"].among if 3 * number <= task.clients)
            free["clusters"] = Search(among=few or (min(free["clusters"].among),))
        lr = task.training.lr if method.step_size is None else method.step_size
        return cls(text, method, free, lr, fixed=method.step_size is not None)

    def at(self, lr: float, **values: object) -> Algorithm:
        """Return the method with a step size and other values."""
        changed = with_values(self.method, **values) if values else self.method
        return changed if self.fixed else WithStepSize(inner=changed, lr=lr)

    def begin_grid(self) -> list[float]:
        """List the step sizes to begin with."""
        return [self.lr] if self.fixed else [shorten(self.lr / FACTOR), self.lr, shorten(self.lr * FACTOR)]

    def list_finer(self, lr: float) -> Iterator[Algorithm]:
        """Yield the method with step sizes between those of the grid, around the best."""
        return iter(()) if self.fixed else (self.at(shorten(lr * factor)) for factor in FINER)

    def draw(self, lr: float, seed: int) -> Iterator[Algorithm]:
        """Yield the method with values that are drawn from where it is to be searched, each once."""
        rng = generator(seed, "search", self.text)
        seen = {self.at(lr)}
        for _ in range(MOST_DRAWN if self.free else 0):
            drawn = self.at(lr, **{name: search.place(float(rng.random())) for name, search in self.free.items()})
            if drawn not in seen and not overshoots(drawn, lr):
                seen.add(drawn)
                yield drawn


def shorten(lr: float) -> float:
    """Return a step size with two digits."""
    return float(f"{lr:.2g}")


def overshoots(method: Algorithm, lr: float) -> bool:
    """Return whether a step would go as far as what pulls it, or further: such values are not tried."""
    return any(pull >= LARGEST_PULL for pull in method.pulls(lr).values())
