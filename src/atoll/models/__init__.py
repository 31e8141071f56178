"""Small reference networks with a declared body and head."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.kernel.errors import ModelError, unknown
from atoll.models.cnn import FedFSACNN, LeNet, PFLlibCNN, SimpleCNN
from atoll.models.linear import Linear
from atoll.models.mlp import MLP
from atoll.models.recommender import MatrixFactorisation
from atoll.models.resnet import ResNet18
from atoll.models.split import BodyAndHead
from atoll.models.text import CharTransformer

__all__ = [
    "MLP", "BodyAndHead", "CharTransformer", "FedFSACNN", "LeNet", "Linear", "MatrixFactorisation", "PFLlibCNN",
    "ResNet18", "SimpleCNN", "build", "names",
]  # fmt: skip

BUILDERS: dict[str, Callable[..., BodyAndHead]] = {
    "mlp": MLP,
    "cnn": PFLlibCNN,
    "simple-cnn": SimpleCNN,
    "lenet": LeNet,
    "fedfsa-cnn": FedFSACNN,
    "resnet18": ResNet18,
    "resnet18-gn": partial(ResNet18, norm="group"),
    "linear": Linear,
    "char-transformer": CharTransformer,
    "matrix-factorisation": MatrixFactorisation,
}


def names() -> list[str]:
    """Return the names of the models that `build` knows."""
    return list(BUILDERS)


def build(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> BodyAndHead:
    """Build a freshly initialised model for samples of `shape` (without the batch axis).

    After a colon stand the widths of an MLP's hidden layers: `mlp:64,32`. Initial values are drawn from torch's default
    generator, as `nn.Module`s do.
    """
    name, colon, widths = name.partition(":")
    if name not in BUILDERS:
        raise unknown("model", name, BUILDERS)
    if colon:
        options |= {"hidden": _widths(name, widths)}
    builder = BUILDERS[name]
    shape = tuple(shape)
    if not shape or min(shape) < 1 or classes < 1:
        raise ModelError(f"A model needs positive sizes. Got shape {shape} and {classes} classes.")
    known = [option for option in inspect.signature(builder).parameters if option not in ("shape", "classes")]
    for option in options:
        if option not in known:
            raise ModelError(
                f"Model {name!r} has no option {option!r}.",
                hint=f"its options are: {', '.join(known)}." if known else "it has no options.",
            )
    return builder(shape, classes, **options)


def _widths(name: str, text: str) -> tuple[int, ...]:
    """Parse the widths of hidden layers, as `64,32`."""
    parts = text.split(",")
    if name != "mlp" or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ModelError(
            f"A colon must be followed by the widths of hidden layers, which only `mlp` takes. Got '{name}:{text}'.",
            hint="for example mlp:64 or mlp:64,32.",
        )
    return tuple(map(int, parts))
