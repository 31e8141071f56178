"""What a client deploys: a model, or a model with something beside it that changes its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from atoll.kernel.batch import Batch
from atoll.kernel.errors import first_line
from atoll.kernel.params import Params, Stack

log = logging.getLogger("atoll.engine")

BESIDE = "beside."  # before the names of what stands beside a model, where all numbers are listed together
MEMBER = "member."  # before the names of an ensemble's leaves, which hold all its models
Answer = Callable[[Params, Params, Batch], Tensor]


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model that answers by another rule than its network: with prototypes, a store of samples, a second head.

    `answer(model, beside, batch)` is a pure function of one client's values; it returns one row of logits per sample.
    The batch holds samples only: its targets cannot be read.
    Where no single model answers, as in an ensemble, `model` has no leaves: `Params({}, layout)`.
    """

    model: Params | Stack  # of the task's network
    beside: Params | Stack  # whatever else the rule needs
    answer: Answer

    @property
    def values(self) -> Params | Stack:
        """All its numbers, as those of a model; what stands beside the model is called `beside.NAME`."""
        beside = {f"{BESIDE}{name}": leaf for name, leaf in self.beside.items()}
        return self.model | type(self.beside)(beside, self.model.layout)

    @property
    def bytes(self) -> int:
        """What one client must hold to answer by itself."""
        parts = (self.model, self.beside)
        return sum((leaf[0] if isinstance(part, Stack) else leaf).nbytes for part in parts for leaf in part.values())


Deployed = Params | Stack | Predictor


def predictor_of(deployed: Deployed) -> Predictor:
    """Make a Predictor of what is deployed: a model by itself answers as its network does."""
    return deployed if isinstance(deployed, Predictor) else Predictor(deployed, Params({}), _network)


def _network(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    return batch.outputs(model)


def answer_samples(answer: Answer, model: Params, beside: Params, batch: Batch) -> Tensor:
    """Return the answers to the samples of a batch, without its targets: whatever is judged answers through this."""
    return answer(model, beside, batch.unlabelled)


def answer_one_by_one(answer: Answer, model: Params, beside: Params, batch: Batch) -> Tensor:
    """Return the answers to samples each of which is a batch by itself, so none depends on another."""
    variant = replace(batch.variant, channels_last=False)  # `vmap` knows one layout
    plain = replace(batch, mask=None, raw=None, variant=variant)

    def alone(x: Tensor) -> Tensor:
        return answer_samples(answer, model, beside, replace(plain, x=x[None]))[0]

    try:
        each: Tensor = vmap(alone)(batch.x)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        log.info("answers are given one sample after another, as they cannot be vectorised (%s)", first_line(reason))
        each = torch.stack([alone(x) for x in batch.x])
    return each


def ensemble(members: Stack, beside: Params, answer: Answer) -> Predictor:
    """Let several models answer together; the rule finds them with `members_of(beside)`."""
    together = Params({f"{MEMBER}{name}": leaf for name, leaf in members.items()}, members.layout)
    return Predictor(Params({}, members.layout), together | beside, answer)


def members_of(beside: Params) -> list[Params]:
    """Return the models of an ensemble, one after another."""
    leaves = {name.removeprefix(MEMBER): leaf for name, leaf in beside.items() if name.startswith(MEMBER)}
    count = len(next(iter(leaves.values())))
    return [Params({name: leaf[k] for name, leaf in leaves.items()}, beside.layout) for k in range(count)]
