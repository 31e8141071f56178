"""How a task is made of a data set: who owns which samples, which are set aside, and which network clients have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll import models
from atoll.data.batches import Split
from atoll.data.datasets import Dataset
from atoll.data.dealing import group_by_owner
from atoll.data.leaks import find_leaks
from atoll.data.own import OwnData
from atoll.data.partition import Indices, Natural, Partition, Shifted
from atoll.data.preprocessing import Scaling
from atoll.data.splits import (
    HARMLESS,
    Cut,
    cut_by_rule,
    cut_shared_splits,
    cut_splits,
    leave_last_out,
    measure_flattery,
)
from atoll.kernel.batch import Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Network, Variant
from atoll.kernel.randomness import default_generator, generator, number
from atoll.models.tabular import find_categories

log = logging.getLogger("atoll.data")

Model = str | nn.Module | Callable[[], nn.Module]


def check_samples(what: str, x: Tensor, y: Tensor, shape: tuple[int, ...], classes: int | None) -> None:
    """Raise unless samples given by hand are like all others, and each has its target."""
    mine = tuple(x.shape[1:])
    if mine != shape or len(x) != len(y):
        raise TaskError(
            f"{what} must be samples of shape {shape}, and a target for each. Got {len(x)} samples of shape {mine} and "
            f"{len(y)} targets."
        )
    if x.is_floating_point() and not torch.isfinite(x).all():
        wrong = int((~torch.isfinite(x).reshape(len(x), -1).all(1)).nonzero()[0])
        raise TaskError(
            f"{what} must be finite numbers. Sample {wrong} holds others.", hint="fill in or leave out what is missing."
        )
    if len(y) and not y.is_floating_point() and (int(y.min()) < 0 or (classes is not None and int(y.max()) >= classes)):
        top = "" if classes is None else f" to {classes - 1}"
        raise TaskError(
            f"{what} must have classes from 0{top} as targets. Got {int(y.min())} to {int(y.max())}.",
            hint="number the classes from 0" + (", and give `classes` if there are more." if classes else "."),
        )


def choose_model(shape: tuple[int, ...]) -> str:
    """Return the name of the usual network for samples of a shape."""
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def deal_networks(networks: list[Network], clients: int) -> dict[str, Any]:
    """Return the fields of a task that has these networks: client k has number k modulo how many there are."""
    if not 1 <= len(networks) <= clients:
        raise TaskError(
            f"There must be at least 1 model, and at most one per client, {clients}. Got {len(networks)}.",
            hint="a model that no client has cannot be trained.",
        )
    if len(networks) == 1:
        return {"network": networks[0]}
    architecture = np.arange(clients, dtype=np.int64) % len(networks)
    return {"network": networks[0], "networks": tuple(networks), "architecture": architecture}


def build_network(chosen: Model, dataset: Dataset, seed: int) -> Network:
    """Build a network for a data set from a name, a module, or a function that makes one."""
    shape, outputs = tuple(dataset.x.shape[1:]), count_outputs(dataset)
    signature = None
    with default_generator(number(seed, "model")):
        if isinstance(chosen, str):
            categories = find_categories(getattr(dataset, "columns", ()))
            options = {"categories": categories} if models.takes(chosen, "categories") else {}
            module: nn.Module = models.build(chosen, shape, outputs, **options)
            signature = (chosen, shape, outputs, *options.values(), dataset.loss, dataset.metric)
        else:
            module = chosen if isinstance(chosen, nn.Module) else chosen()
    return Network(module, loss=dataset.loss, score=dataset.metric, signature=signature)


def are_amounts(x: Tensor, networks: Sequence[Network]) -> bool:
    """Return whether samples of whole numbers are amounts: networks take them as floats, and not as tokens."""
    if x.is_floating_point() or not len(x):
        return False
    return not all(takes_samples(network, x[:2]) for network in networks) and all(
        takes_samples(network, x[:2].to(network.dtype)) for network in networks
    )


@torch.no_grad()
def takes_samples(network: Network, x: Tensor) -> bool:
    """Return whether the network takes these samples."""
    try:
        Batch(x, x, None, None, network, Variant(train=False)).outputs(network.initial)
    except Exception:  # noqa: BLE001 - a model may fail in any way
        return False
    return True


def count_outputs(dataset: Dataset) -> int:
    """Return how many outputs a network needs: one per class, or one per number that is predicted."""
    return dataset.classes or (1 if dataset.y.ndim == 1 else int(np.prod(dataset.y.shape[1:])))


def has_one_label_each(dataset: Dataset) -> bool:
    """Return whether every sample has one class."""
    return dataset.classes is not None and dataset.y.ndim == 1


def split_clients(
    dataset: Dataset, dealt: list[Indices], parts: list[Indices], y: Tensor, cut: Cut, seed: int, first: int = 0
) -> dict[str, Split]:
    """Cut the samples of each client into train, val and test; the `dealt` samples are now the rows `parts` of `y`."""
    labels = y.numpy() if has_one_label_each(dataset) else None
    if cut.stratify and (labels is None or dataset.recommends or dataset.gap is not None):
        raise TaskError(
            f"`stratify` needs samples of one class each that no time orders. {dataset.name} has others.",
            hint="leave it out: samples are cut as they should be.",
        )
    if cut.folds and (dataset.recommends or dataset.gap is not None):
        raise TaskError(
            f"Folds need samples without an order in time. Those of {dataset.name} have one.", hint="leave out `folds`."
        )
    if dataset.recommends:
        return leave_last_out(parts)
    if isinstance(dataset, OwnData) and dataset.rule:
        if cut.stratify or (cut.folds and not dataset.rule.groups_alone):
            word = "stratify" if cut.stratify else "folds"
            raise TaskError(
                f"Samples are cut {dataset.rule.words}, so `{word}` must be left out.",
                hint="leave out one of them." if cut.stratify else "folds go with `group`, or with no rule at all.",
            )
        return cut_by_rule(dataset.rule, parts, dealt, cut, seed, first)
    if np.bincount(np.concatenate(dealt)).max(initial=0) <= 1:
        if cut.stratify and labels is not None and (found := measure_flattery(parts, labels, cut.shares)) > HARMLESS:
            log.warning(
                "Samples are cut class by class (`stratify`), and clients are small: that flatters personal models by "
                "up to %.2g in Brier score. Without it, samples are cut at random",
                found,
            )
        return cut_splits(parts, cut, labels, dataset.gap, seed, first)
    labels = dataset.y.numpy() if has_one_label_each(dataset) else None
    return cut_shared_splits(parts, dealt, cut, labels, dataset.gap, seed, len(dataset.y))


def require_tested(
    splits: Mapping[str, Split], names: Sequence[str] | None, group: NDArray[np.int64] | None, parts: list[Indices]
) -> None:
    """Raise unless every client has test samples, or none has.

    One whose groups others have as well may be without: a group is on one side for all of them.
    """
    sizes = np.diff(splits["test"].offsets)
    several = [group is not None and len(np.unique(group[part])) > 1 for part in parts]
    empty = np.flatnonzero((sizes == 0) & ~np.array(several, dtype=bool))
    if len(empty) and sizes.any():
        name = empty[0] if names is None else names[int(empty[0])]
        raise TaskError(
            f"Every client must have at least 1 test sample. {len(empty)} of {len(sizes)} have none, the first is "
            f"client {name}.",
            hint="leave these clients out, or give them more samples, groups or times.",
        )


def can_fold(dataset: Dataset, parts: list[Indices]) -> bool:
    """Return whether folds leave every client something to train on: own data that no column or time splits."""
    if not isinstance(dataset, OwnData) or dataset.recommends:
        return False
    if not dataset.rule:
        return min(map(len, parts)) > 1
    group = dataset.rule.group
    return dataset.rule.groups_alone and group is not None and min(len(np.unique(group[part])) for part in parts) > 1


def adapt_to_data(partition: Partition, dataset: Dataset) -> Partition:
    """Let a natural partition keep every client that the data set counts, unless it has a rule of its own."""
    if isinstance(partition, Shifted):
        return replace(partition, partition=adapt_to_data(partition.partition, dataset))
    return partition.of(dataset.least) if isinstance(partition, Natural) else partition


def owners_of(dataset: Dataset) -> NDArray[np.int64]:
    """Return who owns each sample; raise if nobody does."""
    if dataset.owner is None:
        raise TaskError(
            f"A natural partition needs data that belong to somebody. {dataset.name} has no owners.",
            hint="choose another partition; `atoll list partitions` shows them.",
        )
    return dataset.owner


def describe_owners(
    partition: Partition, dataset: Dataset, parts: list[Indices]
) -> tuple[tuple[str, ...] | None, NDArray[np.int64] | None]:
    """Return the clients' names and planted groups, where clients are the owners of the samples."""
    if partition.reads != "owners" or dataset.owner is None:
        return None, None
    owners = np.array([dataset.owner[part[0]] for part in parts], dtype=np.int64)
    names = tuple(dataset.owners[owner] for owner in owners) if dataset.owners else None
    return names, None if dataset.groups is None else dataset.groups[owners]


def take_out(
    dataset: Dataset, shares: Mapping[str, float], seed: int, *, least: int = 0
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return the data set without the held-out shares, and those; of every owner, `least` samples stay."""
    if not any(shares.values()):
        return dataset, {}
    if not (min(shares.values()) >= 0 and sum(shares.values()) < 1):
        raise TaskError(
            f"The shares taken before dealing must be at least 0 and leave something. Got {dict(shares)!r}."
        )
    if shares["central"] and dataset.central is not None:
        raise TaskError(f"{dataset.name} has a central test set already, so `central` must be 0.")
    if isinstance(dataset, OwnData) and dataset.rule:
        raise TaskError(
            f"Samples must be set aside without tearing groups or times apart, so `central` and `public` must be 0 "
            f"where `group`, `order` or `split` is given. Got {dict(shares)!r}.",
            hint="leave rows for the server out of the data, and give public ones with task.with_public(x, y).",
        )
    order = generator(seed, "held out").permutation(len(dataset.y))
    stay = np.zeros(len(order), dtype=bool)  # in that order, the last samples of every owner
    if dataset.owner is not None and least:
        for mine in group_by_owner(dataset.owner[order], int(dataset.owner.max()) + 1):
            stay[mine[-least:]] = True
    order = np.concatenate([order[~stay], order[stay]])
    if round(sum(shares.values()) * len(order)) > (~stay).sum():
        raise TaskError(
            f"Every client must keep {least} of its samples. The shares {dict(shares)!r} of {len(order)} take more.",
            hint="lower `central` or `public`.",
        )
    held, start = {}, 0
    for name, share in shares.items():
        stop = start + round(share * len(order))
        if stop > start:
            held[name] = dataset.take(np.sort(order[start:stop]))
        start = stop
    return dataset.take(np.sort(order[start:])), held


def report_leaks(dataset: Dataset, x: Tensor, splits: Mapping[str, Split]) -> dict[str, str]:
    """Warn where training samples of own data give test samples away; return it for the run's configuration."""
    if not isinstance(dataset, OwnData) or dataset.schema is None:
        return {}
    train, test = (splits[name].order.numpy() for name in ("train", "test"))
    leaks = find_leaks(dataset.schema, x.numpy(), train, test)
    if not leaks:
        return {}
    how = "" if dataset.rule.words else ": split by `group`, or by `order` with a `gap`"
    log.warning("%s Scores will look better than they are%s", leaks.sentence, how)
    return {"leaks": leaks.sentence}


def scale_samples(
    dataset: Dataset, x: Tensor, splits: Mapping[str, Split], dealt: list[Indices], parts: list[Indices],
    aside: Mapping[str, Dataset],
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]], Scaling | None]:  # fmt: skip
    """Standardise own data by the training samples of each client, or of all; return how it was done.

    Samples of the server are scaled as their owner scales its own. Data sets of the catalogue stay as they are, and so
    do tokens. The `dealt` samples are now the rows `parts` of `x`.
    """
    pairs = {name: (one.x, one.y) for name, one in aside.items()}
    if not isinstance(dataset, OwnData) or dataset.schema is None or dataset.owner is None:
        return x, pairs, None
    schema = dataset.schema.holding_amounts() if x.is_floating_point() else replace(dataset.schema, standardise="none")
    train = splits["train"]
    scaling = Scaling.fit(schema, x.numpy(), [train.order[a:b].numpy() for a, b in pairwise(train.offsets)])
    if not x.is_floating_point():
        return x, pairs, scaling
    client_of_row, client_of_owner = np.zeros(len(x), dtype=np.int64), np.zeros(len(dataset.owners), dtype=np.int64)
    for client, (rows, own) in enumerate(zip(parts, dealt, strict=True)):
        client_of_row[rows], client_of_owner[dataset.owner[own]] = client, client
    for name, one in aside.items():
        assert one.owner is not None
        pairs[name] = (scaling.apply(one.x.numpy(), client_of_owner[one.owner]), one.y)
    return scaling.apply(x.numpy(), client_of_row), pairs, scaling
