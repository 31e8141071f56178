"""One client's model as an `nn.Module`: raw samples in, probabilities or numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.data.preprocessing import Preprocessing
from atoll.kernel.batch import HIDDEN, Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Layout, Params
from atoll.kernel.predictor import BESIDE, Answer, Predictor
from atoll.kernel.task import Facts

CPU = torch.device("cpu")
MEAN, STD = "scaling.mean", "scaling.std"  # what samples are scaled by
INT8, SCALE = ".int8", ".scale"  # after the name of a leaf that is stored in 8 bits
FEWEST = 256  # numbers that a leaf must have to be stored in 8 bits
Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Rule:
    """How a client answers, as a function of its weights and of samples."""

    answer: Answer
    network: Network
    layout: Layout | None
    beside_layout: Layout | None
    classes: bool  # whether answers are probabilities

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the probabilities of the classes, or the numbers that are predicted."""
        leaves = unpack(weights)
        if MEAN in leaves:
            x = (x - leaves.pop(MEAN)) / leaves.pop(STD)
        model = {name: leaf for name, leaf in leaves.items() if not name.startswith(BESIDE)}
        beside = {name.removeprefix(BESIDE): leaf for name, leaf in leaves.items() if name.startswith(BESIDE)}
        batch = Batch(x, HIDDEN, None, None, self.network, Variant(train=False))
        outputs = self.answer(Params(model, self.layout), Params(beside, self.beside_layout), batch)
        return outputs.softmax(1) if self.classes else outputs


class ClientModel(nn.Module):
    """What one client deploys. `model(x)` gives probabilities (or numbers), `model.predict(raw)` the names of classes.

    `x` are samples as numbers, not scaled: the model does that. `classes` are the names, in the order of the
    probabilities; None where numbers are predicted.
    """

    def __init__(self, rule: Rule, weights: Mapping[str, Tensor], sample: Tensor, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.rule, self.preprocessing = rule, preprocessing
        self.sample = sample  # zeros in the shape and the type of a sample
        self._names = [*weights]
        for place, leaf in enumerate(weights.values()):
            self.register_buffer(f"leaf{place}", leaf)

    @classmethod
    def of(cls, predictor: Predictor, network: Network, task: Facts, preprocessing: Preprocessing) -> ClientModel:
        """Make the module of one client's predictor, on the CPU and in fp32."""
        model, beside = predictor.model, predictor.beside
        rule = Rule(
            predictor.answer, network.to(CPU, torch.float32), model.layout, beside.layout,
            task.classes is not None,
        )  # fmt: skip
        weights = {name: _place(leaf).clone() for name, leaf in predictor.values.items()}
        scales = preprocessing.scales(tuple(task.sample.shape))
        if scales is not None:
            weights |= {name: _place(torch.from_numpy(one)) for name, one in zip((MEAN, STD), scales, strict=True)}
        return cls(rule, weights, _place(task.sample), preprocessing)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the probabilities."""
        if not self.rule.classes:
            return None
        outputs = self.preprocessing.schema.outputs or 0
        return self.preprocessing.classes or tuple(map(str, range(outputs)))

    @property
    def weights(self) -> Weights:
        """All its numbers, by name; what stands beside the network is called `beside.NAME`."""
        return {name: getattr(self, f"leaf{place}") for place, name in enumerate(self._names)}

    @property
    def kind(self) -> str:
        """What it is made of, in words."""
        names = [name for name in self._names if name not in (MEAN, STD)]
        beside = [name.removeprefix(BESIDE) for name in names if name.startswith(BESIDE)]
        if not beside:
            return "a network"
        alone = len(beside) == len(names)
        return "several networks" if alone else f"a network, and beside it {', '.join(_plain(beside))}"

    def forward(self, x: Tensor) -> Tensor:
        """Return one row per sample: the probabilities of the classes, or the numbers that are predicted."""
        return self.rule(self.weights, x)

    def number(self, raw: Any) -> Tensor:
        """Return raw samples as the numbers that the model takes: of a file, a frame, columns by name, or an array."""
        return number_samples(self.preprocessing, raw, tuple(self.sample.shape), self.sample.dtype)

    def unscale(self, x: Tensor) -> Tensor:
        """Return samples of a task, which are scaled, as the numbers that the model takes."""
        x, weights = x.to(CPU, self.sample.dtype), self.weights
        return x * weights[STD] + weights[MEAN] if MEAN in weights else x

    @torch.no_grad()
    def answer(self, raw: Any) -> Tensor:
        """Return the probabilities of the classes for raw samples, or the numbers that are predicted."""
        answers: Tensor = self.eval()(self.number(raw))
        return answers

    def predict(self, raw: Any) -> list[Any]:
        """Return the name of each sample's most probable class, or the number that is predicted."""
        answers = self.answer(raw)
        return answers.tolist() if self.classes is None else name_classes(answers, self.classes)

    def in_int8(self) -> ClientModel:
        """Return the same model with its large weights in 8 bits; it computes with what they stand for."""
        return ClientModel(self.rule, pack(self.weights), self.sample, self.preprocessing)


def number_samples(preprocessing: Preprocessing, raw: Any, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Return raw samples as numbers of one kind, each of a shape; they are not scaled."""
    if isinstance(raw, np.ndarray | Tensor) and tuple(raw.shape[1:]) == shape:
        return torch.as_tensor(raw).to(CPU, kind)
    if preprocessing.schema.array is None and isinstance(raw, np.ndarray | Tensor):
        raise TaskError(
            f"Samples must have the shape (samples, {', '.join(map(str, shape))}). Got {tuple(raw.shape)}.",
            hint="one sample alone needs a first axis, too: x[None].",
        )
    return torch.from_numpy(np.ascontiguousarray(preprocessing.number(raw))).to(CPU, kind)


def name_classes(probabilities: Tensor, classes: Sequence[str]) -> list[Any]:
    """Return the names of the most probable classes; a list per sample where there is one per place."""

    def name(found: Any) -> Any:
        return [name(one) for one in found] if isinstance(found, list) else classes[found]

    named: list[Any] = name(probabilities.argmax(1).tolist())
    return named


def pack(weights: Mapping[str, Tensor]) -> Weights:
    """Store large matrices in 8 bits: each row as whole numbers from -127 to 127, and what one of them is worth."""
    packed: Weights = {}
    for name, leaf in weights.items():
        if not leaf.is_floating_point() or leaf.ndim < 2 or leaf.numel() < FEWEST or name in (MEAN, STD):
            packed[name] = leaf
            continue
        # Filters of a convolution are rows: all axes but the first, or the first two of an ensemble.
        rows = leaf.flatten(2 if name.startswith(f"{BESIDE}member.") and leaf.ndim > 2 else 1)
        scale = rows.abs().amax(-1).clamp(min=torch.finfo(leaf.dtype).tiny) / 127
        scale = scale.reshape(*scale.shape, *[1] * (leaf.ndim - scale.ndim))
        packed[name + INT8], packed[name + SCALE] = (leaf / scale).round().to(torch.int8), scale
    return packed


def unpack(weights: Mapping[str, Tensor]) -> Weights:
    """Return all leaves as numbers, those in 8 bits as what they stand for."""
    found: Weights = {}
    for name, leaf in weights.items():
        if name.endswith(INT8):
            found[name.removesuffix(INT8)] = leaf * weights[name.removesuffix(INT8) + SCALE]
        elif not name.endswith(SCALE):
            found[name] = leaf
    return found


def _place(leaf: Tensor) -> Tensor:
    return leaf.detach().to(CPU, torch.float32 if leaf.is_floating_point() else None)


def _plain(names: Sequence[str]) -> list[str]:
    """Return the first words of dotted names, each once."""
    return [*dict.fromkeys(name.split(".")[0] for name in names)]
