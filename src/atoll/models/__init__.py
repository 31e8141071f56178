"""Small reference networks with a declared body and head."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.kernel.errors import ModelError, unknown
from atoll.models.cnn import FedFSACNN, LeNet, PFedHNCNN, PFLlibCNN, SimpleCNN, TutorialCNN
from atoll.models.linear import Linear
from atoll.models.mlp import MLP
from atoll.models.recommender import ItemFactors, MatrixFactorisation, NeuralItems
from atoll.models.resnet import ResNet18
from atoll.models.split import BodyAndHead
from atoll.models.tabular import Tabular
from atoll.models.text import CharTransformer
from atoll.models.windows import GRU, CNN1d

__all__ = [
    "GRU", "MLP", "BodyAndHead", "CNN1d", "CharTransformer", "FedFSACNN", "ItemFactors", "LeNet", "Linear",
    "MatrixFactorisation", "NeuralItems", "PFLlibCNN", "PFedHNCNN", "ResNet18", "SimpleCNN", "Tabular", "TutorialCNN",
    "build", "names", "purposes", "takes",
]  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A model that has a name."""

    build: Callable[..., BodyAndHead]
    purpose: str

    @property
    def options(self) -> list[str]:
        """What can be chosen beside the shape of the samples and the number of classes."""
        return [option for option in inspect.signature(self.build).parameters if option not in ("shape", "classes")]


MODELS = {
    "mlp": Known(MLP, "samples of any shape, as one row of numbers; mlp:64,32 gives the widths"),
    "tabular": Known(Tabular, "rows of a table, categories by learnt vectors; tabular:64,64 gives the widths"),
    "cnn1d": Known(CNN1d, "windows over time (channels, length), patterns anywhere in them; cnn1d:32,64"),
    "gru": Known(GRU, "windows over time (channels, length), read in order; gru:64"),
    "cnn": Known(PFLlibCNN, "images from 16x16; the CNN of PFLlib and of FedAvg's paper"),
    "simple-cnn": Known(SimpleCNN, "images from 6x6; the CNN of pfl-research, with dropout"),
    "lenet": Known(LeNet, "images from 16x16; the small CNN of NIID-Bench"),
    "pfedhn-cnn": Known(PFedHNCNN, "images from 16x16; the CNN of pFedHN and of FEDORA's code"),
    "tutorial-cnn": Known(TutorialCNN, "images from 16x16; a tutorial's CNN for MNIST, with dropout"),
    "fedfsa-cnn": Known(FedFSACNN, "images from 16x16; the CNN of FedFSA"),
    "resnet18": Known(ResNet18, "images, many samples, a GPU; with BatchNorm"),
    "resnet18-gn": Known(partial(ResNet18, norm="group"), "the same with GroupNorm, which suits unequal clients"),
    "linear": Known(Linear, "samples of any shape; a convex problem"),
    "char-transformer": Known(CharTransformer, "texts: the next character at every place"),
    "item-factors": Known(ItemFactors, "recommendation: scores of all items, p . q + b, with the user's own p"),
    "neural-items": Known(
        NeuralItems, "recommendation: scores of all items by a network of p and q, with the user's own p"
    ),
    "matrix-factorisation": Known(MatrixFactorisation, "ratings: a vector per item, and the user's own"),
}
WIDE = [name for name, known in MODELS.items() if "hidden" in known.options]  # `name:64` gives widths


def names() -> list[str]:
    """Return the names of the models that `build` knows."""
    return list(MODELS)


def purposes() -> dict[str, str]:
    """Return what each model is for."""
    return {name: known.purpose for name, known in MODELS.items()}


def takes(name: str, option: str) -> bool:
    """Return whether a model, with or without widths after its name, has an option."""
    known = MODELS.get(name.partition(":")[0])
    return known is not None and option in known.options


def build(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> BodyAndHead:
    """Build a freshly initialised model for samples of `shape` (without the batch axis).

    After a colon stand the widths of hidden layers: `mlp:64,32`. Initial values are drawn from torch's default
    generator, as `nn.Module`s do.
    """
    name, colon, widths = name.partition(":")
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if colon:
        options |= {"hidden": _widths(name, widths)}
    shape = tuple(shape)
    if not shape or min(shape) < 1 or classes < 1:
        raise ModelError(f"A model needs positive sizes. Got shape {shape} and {classes} classes.")
    known = MODELS[name].options
    for option in options:
        if option not in known:
            raise ModelError(
                f"Model {name!r} has no option {option!r}.",
                hint=f"its options are: {', '.join(known)}." if known else "it has no options.",
            )
    return MODELS[name].build(shape, classes, **options)


def _widths(name: str, text: str) -> tuple[int, ...]:
    """Parse the widths of hidden layers, as `64,32`."""
    parts = text.split(",")
    if name not in WIDE or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ModelError(
            f"A colon must be followed by the widths of hidden layers, which {', '.join(WIDE[:-1])} and {WIDE[-1]} "
            f"take. Got '{name}:{text}'.",
            hint="for example mlp:64 or mlp:64,32.",
        )
    return tuple(map(int, parts))
