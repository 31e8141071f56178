"""The blocks of a network: which leaves belong to which, what each of them says, and training above some of them.

A block is a layer of the body with all that follows up to the next one, or what the model declares in `block_starts`
(ResNet-18: the stem and four stages); the last block is the head. A split s divides the L blocks: the first s are the
base, the others lie above it. With s = 0 everything lies above, with s = L nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import ModelError
from atoll.kernel.params import Stack
from atoll.kernel.task import Facts
from atoll.models.split import BodyAndHead

NORMS = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm


@dataclass(frozen=True)
class Blocks:
    """The blocks of one network, the head last."""

    leaves: tuple[frozenset[str], ...]
    widths: tuple[int, ...]  # how many numbers each says about a sample

    def __len__(self) -> int:
        return len(self.leaves)

    def below(self, split: int) -> frozenset[str]:
        """Return the leaves of the base."""
        return frozenset[str]().union(*self.leaves[:split])

    def above(self, split: int) -> frozenset[str]:
        """Return all other leaves."""
        return frozenset[str]().union(*self.leaves[split:])

    def split_by_block(self, said: Tensor) -> tuple[Tensor, ...]:
        """Split the outputs of all blocks, or anything with as many numbers on its last axis, by block."""
        return torch.split(said, list(self.widths), dim=-1)


class BlockFeatures(BodyAndHead):
    """The same network, whose `features` are what every block says, averaged over places, the head last."""

    def __init__(self, network: nn.Module) -> None:
        body, head = getattr(network, "body", None), getattr(network, "head", None)
        if not isinstance(body, nn.Sequential | nn.Flatten) or not isinstance(head, nn.Module):
            raise ModelError(
                "To have blocks, a network must be a `body`, an nn.Sequential, and a `head`. Got a "
                f"{type(network).__name__} whose body is a {type(body).__name__}.",
                hint="build it as atoll.models.BodyAndHead(nn.Sequential(...), head).",
            )
        super().__init__(body, head)
        starts = getattr(network, "block_starts", None) or _layers(body)
        ends = [*starts[1:], len([*body.children()])]
        self.groups = list(zip(starts, ends, strict=False))

    def each(self, x: Tensor) -> list[Tensor]:
        """Return the output of every block, one row per sample."""
        said = []
        for start, end in self.groups:
            for part in [*self.body.children()][start:end]:
                x = part(x)
            said.append(x if x.ndim == 2 else x.flatten(2).mean(2))
        return [*said, self.head(x if self.groups else self.body(x))]

    def features(self, x: Tensor) -> Tensor:
        """Return the outputs of all blocks in one row per sample."""
        return torch.cat(self.each(x), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network answers."""
        return self.each(x)[-1]


def _layers(body: nn.Module) -> tuple[int, ...]:
    """Return where the layers of a body begin; a norm belongs to the layer before it, a Flatten to the next."""
    parts = [*body.children()]
    layers = [n for n, part in enumerate(parts) if any(True for _ in part.parameters()) and not isinstance(part, NORMS)]
    return (0, *(n - isinstance(parts[n - 1], nn.Flatten) for n in layers[1:])) if layers else ()


def blocks_of(task: Facts) -> Blocks:
    """Find the blocks of a task's network, and how wide each is, by a sample of zeros."""
    network = BlockFeatures(deepcopy(next(iter(task.network.submodules())))).eval()
    names = [name for name, _ in network.body.named_children()]
    places = [*(tuple(f"body.{name}." for name in names[start:end]) for start, end in network.groups), ("head.",)]
    leaves = tuple(frozenset(leaf for leaf in task.network.initial if leaf.startswith(place)) for place in places)
    with torch.no_grad():
        widths = tuple(one.shape[1] for one in network.each(task.sample[None]))
    return Blocks(leaves, widths)


class HeldBelow(BodyAndHead):
    """The same network, whose first blocks always work as when deployed: BatchNorm there follows no batch."""

    def __init__(self, network: nn.Module, split: int) -> None:
        blocks = BlockFeatures(network)
        super().__init__(blocks.body, blocks.head)
        self.split, ends = split, [end for _, end in blocks.groups]
        self.parts = ([0, *ends, len([*self.body.children()])])[split]
        self.all = split > len(ends)

    def train(self, mode: bool = True) -> HeldBelow:
        """Train what lies above the split."""
        super().train(mode)
        for part in [*[*self.body.children()][: self.parts], *([self.head] if self.all else [])]:
            part.train(False)
        return self

    def extra_repr(self) -> str:
        """Name the split, which tells it from the same network with another one."""
        return f"split={self.split}"


def with_block_features(cohort: Cohort) -> Cohort:
    """Return the same clients with a network whose features are the outputs of all its blocks."""
    return cohort.with_network(cohort.task.network.through(BlockFeatures))


def bench_with_block_features(bench: Workbench) -> Workbench:
    """Return the same workbench with such a network."""
    return bench.with_network(bench.network.through(BlockFeatures))


def train_above(
    cohort: Cohort,
    blocks: Blocks,
    start: Stack,
    splits: Tensor,
    train: Callable[[Cohort, Stack, frozenset[str]], Stack],
) -> Stack:
    """Call `train(cohort, start, leaves)` for the leaves above each client's own split; keep the base bit for bit.

    Clients with the same split train together. The base works as when deployed.
    """
    network, after, notes = cohort.task.network, start, dict[str, Tensor]()
    for split in torch.unique(splits).tolist():
        rows = (splits == split).nonzero().flatten()
        some = replace(cohort, clients=cohort.clients[rows.cpu().numpy()], received=None, notes={})
        if split:
            some = some.with_network(network.through(HeldBelow, split))
        if split < len(blocks):
            trained = train(some, start.rows(rows), blocks.above(split))
            after = Stack({name: leaf.index_copy(0, rows, trained[name]) for name, leaf in after.items()}, start.layout)
        for name, value in some.notes.items():  # of clients that train nothing: 0
            notes[name] = notes.get(name, value.new_zeros(len(cohort))).index_copy(0, rows, value)
    cohort.observe(**notes)
    return after
