"""Changes to a client's samples after dealing, so clients differ in more than their labels and sizes.

Written after a partition: `iid+rotation:4`. Where a shift has groups, client k is in group k modulo their number, and
group 0 stays as it is. A shift reaches all samples of a client, train and test alike, but not the server's test set;
one that spoils labels spares the clients' tests, too, so what they score is the truth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from atoll.data.words import Word, parse_word
from atoll.kernel.errors import PartitionError

IndexArray = NDArray[np.int64]


class Shift(Protocol):
    """A change of samples that depends on whose they are."""

    spares_tests: ClassVar[bool]  # whether a client's test samples stay as they are

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift; `owner` is the client of each row. The inputs do not change."""
        ...

    def groups(self, clients: int) -> IndexArray | None:
        """Return the planted group of each client; None where the shift has no groups."""
        ...


class _InGroups:
    """Client k is in group k modulo `count`."""

    spares_tests: ClassVar[bool] = False
    count: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise PartitionError(
                f"`count` of {type(self).__name__} must be at least 2 groups. Got {self.count!r} instead."
            )

    def groups(self, clients: int) -> IndexArray:
        """Return the planted group of each client."""
        if clients < self.count:
            raise PartitionError(
                f"{self} must have at least one client in each group. Got {clients} clients.",
                hint="ask for more clients or fewer groups.",
            )
        return np.arange(clients) % self.count

    def _groups_of(self, owner: IndexArray, clients: int) -> Tensor:
        return torch.from_numpy(self.groups(clients)[owner])

    def _change_groups(
        self, x: Tensor, owner: IndexArray, clients: int, change: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Return `x` with the rows of every group but the first changed."""
        of_rows, x = self._groups_of(owner, clients), x.clone()
        for group in range(1, self.count):
            x[of_rows == group] = change(x[of_rows == group], group)
        return x


@dataclass(frozen=True)
class Rotation(_InGroups):
    """Images of group g are turned counter-clockwise by 360 g / `count` degrees.

    Quarter turns move pixels; other angles interpolate bilinearly, and the corners repeat the edge.
    """

    count: int

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        _require_images(self, x)
        height, width = x.shape[-2:]
        if height != width and self.count % 4 == 0:
            raise PartitionError(
                f"{self} must have square images to turn by 90 degrees. Got {height} x {width}.",
                hint="use rotation:2.",
            )
        return self._change_groups(x, owner, clients, lambda rows, group: turn(rows, 360 * group / self.count)), y


class _Graded:
    """The level of a client grows evenly, from 0 at the first one to the given one at the last."""

    spares_tests: ClassVar[bool] = False

    def groups(self, clients: int) -> None:
        """Return None: every client has a level of its own."""
        return


@dataclass(frozen=True)
class Noise(_Graded):
    """Gaussian noise whose standard deviation grows from 0 at the first client to `sigma` at the last.

    Client k of K has sigma * k / (K - 1), the rule of NIID-Bench's code; there pixels are in 0 .. 1 and noise is
    drawn anew in every epoch, here it is drawn once and `sigma` is in the units of the samples as they are.
    """

    sigma: float

    def __post_init__(self) -> None:
        _require_positive(self, "sigma")

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        _require_floats(self, x)
        level = self.sigma * torch.from_numpy(owner).to(x.dtype) / max(clients - 1, 1)
        drawn = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x.dtype)
        return x + drawn.mul_(_broadcast_rows(level, x)), y


@dataclass(frozen=True)
class Missing(_Graded):
    """Values are missing, each with a probability that grows from 0 at the first client to `share` at the last.

    A missing value reads 0: the mean of a standardised column, grey in an image.
    """

    share: float

    def __post_init__(self) -> None:
        _require_share(self, "share")

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        _require_floats(self, x)
        level = self.share * torch.from_numpy(owner) / max(clients - 1, 1)
        drawn = torch.from_numpy(rng.random(tuple(x.shape), dtype=np.float32))
        return x.masked_fill(drawn < _broadcast_rows(level, x), 0), y


@dataclass(frozen=True)
class WrongLabels(_Graded):
    """Labels are wrong, each with a probability that grows from 0 at the first client to `share` at the last.

    A wrong label is one of the other classes, all equally likely. Train and val have wrong labels; test has not.
    """

    share: float
    spares_tests: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_share(self, "share")

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        classes = _count_classes(self, y)
        if classes < 2:
            raise PartitionError(f"{self} must have at least 2 classes, or no label can be wrong. Got {classes}.")
        wrong = torch.from_numpy(rng.random(len(y)) < self.share * owner / max(clients - 1, 1))
        other = (y + torch.from_numpy(rng.integers(1, classes, size=len(y)))) % classes
        return x, torch.where(wrong, other, y)


@dataclass(frozen=True)
class Colour(_InGroups):
    """Images of group g have their channels moved on by g places and multiplied by gains ~ U(0.5, 1.5).

    Grey images only have their contrast changed, by one gain per group.
    """

    count: int

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        _require_images(self, x)
        gains = torch.from_numpy(rng.uniform(0.5, 1.5, size=(self.count, x.shape[1], 1, 1))).to(x.dtype)
        return self._change_groups(
            x, owner, clients, lambda rows, group: rows.roll(group, dims=1).mul_(gains[group])
        ), y


@dataclass(frozen=True)
class Feature(_InGroups):
    """Samples of class c in group g are moved by an offset of their own: the same class looks different elsewhere.

    Offsets have normal entries, of standard deviation `scale` times that of all samples' entries.
    """

    scale: float
    count: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "scale")

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        _require_floats(self, x)
        classes = _count_classes(self, y)
        offsets = rng.standard_normal((self.count, classes, *x.shape[1:])) * (self.scale * float(x.std()))
        offsets[0] = 0
        return x + torch.from_numpy(offsets).to(x.dtype)[self._groups_of(owner, clients), y], y


@dataclass(frozen=True)
class Concept(_InGroups):
    """Class c is called c + g modulo the number of classes in group g: the same samples, other labels."""

    count: int

    def apply(
        self, x: Tensor, y: Tensor, owner: IndexArray, clients: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shift."""
        classes = _count_classes(self, y)
        if classes < self.count:
            raise PartitionError(
                f"{self} must have as many classes as groups, or two groups agree. Got {classes} classes.",
                hint="ask for fewer groups.",
            )
        return x, (y + self._groups_of(owner, clients)) % classes


def turn(images: Tensor, degrees: float, background: float | None = None) -> Tensor:
    """Turn images [n, C, H, W] counter-clockwise; corners take the background, or repeat the edge without one."""
    quarters, rest = divmod(degrees, 90)
    if rest == 0:
        return images.rot90(int(quarters), dims=(-2, -1))
    angle, (height, width) = math.radians(degrees), images.shape[-2:]
    cos, sin = math.cos(angle), math.sin(angle)
    # where each pixel comes from, in coordinates from -1 to 1 along both sides
    back = images.new_tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = affine_grid(back.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    if background is None:
        return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return grid_sample(images - background, grid, mode="bilinear", align_corners=False) + background


# -- in words ----------------------------------------------------------------------------------------------------------

_GROUPS = "its number of groups, an int of at least 2"
_SHARE = "its share, a float in (0, 1]"

WORDS: dict[str, Word[Shift]] = {
    "rotation": Word(
        "rotation:G",
        "images of G groups of clients turned by 360/G degrees",
        Rotation,
        _GROUPS,
        "iid+rotation:4",
        (int,),
    ),
    "noise": Word(
        "noise:SIGMA",
        "Gaussian noise, from none at the first client to SIGMA at the last",
        Noise,
        "its sigma, a float in (0, inf)",
        "iid+noise:0.1",
        (float,),
    ),
    "missing": Word(
        "missing:SHARE",
        "values missing, from none at the first client to SHARE of them at the last",
        Missing,
        _SHARE,
        "iid+missing:0.3",
        (float,),
    ),
    "label-noise": Word(
        "label-noise:SHARE",
        "wrong labels in train and val, from none at the first client to SHARE of them at the last",
        WrongLabels,
        _SHARE,
        "iid+label-noise:0.4",
        (float,),
    ),
    "colour": Word(
        "colour:G", "channels swapped and scaled in G groups of clients", Colour, _GROUPS, "iid+colour:4", (int,)
    ),
    "feature": Word(
        "feature:SCALE[:G]",
        "each class moved by an offset of its own in each of G groups (4)",
        Feature,
        "its scale, a float in (0, inf), and if wanted by the number of groups, an int of at least 2",
        "iid+feature:1",
        (float, int),
    ),
    "concept": Word("concept:G", "classes renamed in G groups of clients", Concept, _GROUPS, "iid+concept:4", (int,)),
}


def parse(text: str) -> Shift:
    """Parse a shift written as `rotation:4`."""
    return parse_word("shift", text, WORDS)


# -- what must hold ----------------------------------------------------------------------------------------------------


def _broadcast_rows(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.ndim - 1))


def _count_classes(shift: Shift, y: Tensor) -> int:
    if y.ndim != 1 or y.is_floating_point():
        raise PartitionError(
            f"{shift} must have one class per sample. Got targets of type {y.dtype} and shape {tuple(y.shape)}.",
            hint="use rotation, noise, missing or colour.",
        )
    return int(y.max()) + 1


def _require_images(shift: Shift, x: Tensor) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise PartitionError(
            f"{shift} must have images, floats [n, C, H, W]. Got {x.dtype} of shape {tuple(x.shape)}.",
            hint="use noise, missing, feature or concept.",
        )


def _require_floats(shift: Shift, x: Tensor) -> None:
    if not x.is_floating_point():
        raise PartitionError(f"{shift} must have samples of floats. Got {x.dtype}.", hint="use concept or label-noise.")


def _require_share(shift: Any, field: str) -> None:
    value = getattr(shift, field)
    if not 0 < value <= 1:
        name = type(shift).__name__
        raise PartitionError(f"`{field}` of {name} must be a float in (0, 1]. Got {value!r} instead.")


def _require_positive(shift: Any, field: str) -> None:
    value = getattr(shift, field)
    if not (math.isfinite(value) and value > 0):
        name = type(shift).__name__
        raise PartitionError(f"`{field}` of {name} must be a float in (0, inf). Got {value!r} instead.")
