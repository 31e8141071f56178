"""A `Task` is all there is to learn from: samples dealt to clients, split inside each, and a network."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.data.batches import Split
from atoll.data.building import (
    Model,
    adapt_to_data,
    are_amounts,
    build_network,
    can_fold,
    check_samples,
    choose_model,
    deal_networks,
    describe_owners,
    owners_of,
    report_leaks,
    require_tested,
    scale_samples,
    split_clients,
    take_out,
)
from atoll.data.datasets import Dataset
from atoll.data.devices import Devices
from atoll.data.duplicates import digests, duplicates
from atoll.data.own import OwnData
from atoll.data.partition import Natural, Partition, Shifted
from atoll.data.preprocessing import Preprocessing, Scaling, plain_scaling
from atoll.data.ratings import FEWEST, list_interactions, read_columns
from atoll.data.schema import Schema
from atoll.data.splits import MOST_FOLDED, SHARES, SMALL_CLIENT, Cut, Shares, cut_splits
from atoll.data.statistics import Statistics, statistics
from atoll.kernel.batch import Augment, check_outputs
from atoll.kernel.errors import TaskError, describe_given, require_keywords
from atoll.kernel.fingerprints import content
from atoll.kernel.html import html_table
from atoll.kernel.network import Network
from atoll.kernel.objective import PerSample, accuracy, cross_entropy
from atoll.kernel.params import Layout
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts, Training

if TYPE_CHECKING:
    from atoll.data.typed import GivenReading, GivenTraining

__all__ = ["Model", "Task", "Training"]

MOST_LISTED = 10  # clients in a notebook
LARGEST_USUAL = 30.0  # standard deviations; what is larger was not scaled, or is a spike
MOST_DESCRIBED = 20_000  # clients whose samples are made to describe them

Change = TypeVar("Change", bound=Callable[..., "Task"])


def repeat_after_cut(change: Change) -> Change:
    """Make the same change again once the samples are cut another way."""

    @functools.wraps(change)
    def changed(task: Task, *args: Any, **kwargs: Any) -> Task:
        found, recut = change(task, *args, **kwargs), task.recut
        return found if recut is None else replace(found, recut=lambda cut: change(recut(cut), *args, **kwargs))

    return cast(Change, changed)


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """Clients with data, and the network they train. Build one with `Task.build`, `Task.own` or `Task.of_clients`."""

    name: str
    x: Tensor
    y: Tensor
    splits: Mapping[str, Split]
    network: Network  # of all clients; where they have different ones, the first
    classes: int | None
    training: Training = field(default_factory=Training)
    names: tuple[str, ...] | None = None  # of the clients; their numbers by default
    central: tuple[Tensor, Tensor] | None = None  # a test set of the server's own
    public: tuple[Tensor, Tensor] | None = None  # samples that everybody may see, taken before the others were dealt
    groups: NDArray[np.int64] | None = None  # the planted group of each client, where the truth is known
    augment: Augment | None = None  # how training samples are changed each time they are seen
    networks: tuple[Network, ...] = ()  # the architectures, where clients have different ones
    architecture: NDArray[np.int64] | None = None  # which of the networks each client has
    unseen: Task | None = None  # clients that take no part, but are welcomed and evaluated after the last round
    facts: Mapping[str, Any] = field(default_factory=dict)  # how it was made, for the run's configuration
    recommends: bool = False  # whether classes are items, of which those that a client knows are no candidates
    devices: Devices | None = None  # how fast clients are, what they can hold, how long they last; None: no limits
    scaling: Scaling | None = None  # how raw samples of own data became numbers, client by client
    cut: Cut | None = None  # how each client's samples were cut, where no rule says it
    recut: Callable[[Cut], Task] | None = None  # builds the same task with its samples cut another way

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise TaskError("A task must have at least 1 client. Got 0.")
        empty = np.flatnonzero(np.diff(self.splits["train"].offsets) == 0)
        if len(empty):
            raise TaskError(
                f"Every client must have at least 1 training sample. {len(empty)} of {self.clients} have none, "
                f"the first is client {self.client_name(int(empty[0]))}.",
                hint="leave these clients out, or raise the partition's `min_samples`.",
            )
        if self.augment is not None:
            self.augment.check(tuple(self.x.shape[1:]))
        self._check_architecture()
        for network in self.networks or (self.network,):
            self._check_outputs(network)

    def __repr__(self) -> str:
        models = " or ".join(f"{one.name} ({one.parameters:,} parameters)" for one in self.networks or (self.network,))
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        shape = "x".join(map(str, self.x.shape[1:])) or "1"
        return f"<Task {self.name}: {self.clients:,} clients, samples of shape {shape}, {kind}, {models}>"

    def _repr_html_(self) -> str:
        """Show in a notebook what clients have: of many, the largest and the smallest."""
        sizes = {split: self.splits[split].sizes(np.arange(self.clients)) for split in self.splits}
        order = np.argsort(-sizes["train"], kind="stable")
        ends = [*order[: MOST_LISTED // 2], *order[-MOST_LISTED // 2 :]]
        listed = order if self.clients <= MOST_LISTED else ends
        rows = [[self.client_name(int(one)), *(f"{of[one]:,}" for of in sizes.values())] for one in listed]
        left_out = self.clients - len(listed)
        note = f"{self.statistics.sentence} Statistics are of training samples."
        if left_out:
            rows.insert(MOST_LISTED // 2, [f"{left_out:,} clients between", *["…"] * len(sizes)])
        return str(
            html_table(["client", *(f"{split} samples" for split in sizes)], rows, title=str(self)[1:-1], note=note)
        )

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.splits["train"].offsets) - 1

    def client_name(self, client: int) -> str:
        """Return the name of the client in messages and reports."""
        return str(client) if self.names is None else self.names[client]

    def preprocessing(self, client: int) -> Preprocessing:
        """Return how raw samples of a client become the network's input, and its outputs class names.

        Samples of a data set of the catalogue are numbers already: they stay as they are, and classes have numbers.
        """
        if self.scaling is None:
            shape, whole = tuple(self.x.shape[1:]), not self.x.is_floating_point()
            return plain_scaling(shape, whole=whole, classes=self.classes).of_client(0)
        return self.scaling.of_client(client)

    def explain_scale(self) -> str:
        """Say which numbers are so large that training with the usual step size diverges; nothing if none are."""
        found = []
        if self.x.is_floating_point() and self.x.numel():
            large = self.x.abs().reshape(len(self.x), -1).max(dim=0).values
            worst = int(large.argmax())
            if float(large[worst]) > LARGEST_USUAL:
                columns = () if self.scaling is None else self.scaling.schema.columns
                which = f" (`{columns[worst]}`)" if columns else ""
                found.append(f"samples reach {float(large[worst]):.3g}{which}")
        if self.classes is None and self.y.numel() and float(self.y.abs().max()) > LARGEST_USUAL:
            found.append(f"targets reach {float(self.y.abs().max()):.3g}")
        return " and ".join(found)

    @cached_property
    def by_architecture(self) -> tuple[Task, ...]:
        """The task as the clients of each architecture see it: with their network."""
        if self.architecture is None:
            return (self,)
        return tuple(replace(self, network=network, architecture=None) for network in self.networks)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the models, by architecture."""
        return tuple(network.layout for network in self.networks or (self.network,))

    @property
    def own_architecture(self) -> int:
        """The number of `network` among the architectures."""
        return self.networks.index(self.network) if self.networks else 0

    def to(self, device: torch.device, dtype: torch.dtype, table: tuple[Tensor, Tensor, int] | None = None) -> Task:
        """Return the same task with its tensors on `device`, floating point ones in `dtype`.

        Where the samples and targets are there already, `table` holds them, with the row at which they begin.
        """

        def move(values: Tensor) -> Tensor:
            return values.to(device, dtype if values.is_floating_point() else None)

        def move_both(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            return None if pair is None else (move(pair[0]), move(pair[1]))

        networks = tuple(network.to(device, dtype) for network in self.networks)
        x, y, first = table or (move(self.x), move(self.y), 0)
        here = replace(
            self,
            x=x,
            y=y,
            splits=self._move_splits(device, first),
            network=networks[0] if networks else self.network.to(device, dtype),
            networks=networks,
            central=move_both(self.central),
            public=move_both(self.public),
            recut=None,
        )
        return here if self.unseen is None else replace(here, unseen=self.unseen._share_tensors(here, first))

    def _move_splits(self, device: torch.device, first: int) -> dict[str, Split]:
        """Return who owns which samples, on a device, where they begin at row `first`."""
        return {name: split.to(device, first) for name, split in self.splits.items()}

    def _share_tensors(self, seen: Task, first: int) -> Task:
        """Return these clients with the samples and the network of `seen`, so no tensor is there twice."""
        splits = self._move_splits(seen.x.device, first)
        return replace(self, x=seen.x, y=seen.y, splits=splits, network=seen.network, networks=seen.networks)

    @repeat_after_cut
    def with_training(self, **changes: Unpack[GivenTraining]) -> Task:
        """Return the same task whose clients take their steps differently: `task.with_training(lr=0.05)`."""
        unseen = None if self.unseen is None else self.unseen.with_training(**changes)
        return replace(self, training=replace(self.training, **changes), unseen=unseen)

    @repeat_after_cut
    def hold_out(self, share: float, seed: int = 0) -> Task:
        """Hold out a share of the clients: they become the `unseen` ones of the others' task."""
        if not 0 <= share < 1:
            raise TaskError(f"The share of unseen clients must be in [0, 1). Got {share!r}.")
        if share == 0:
            return self
        size = max(1, round(share * self.clients))
        if size >= self.clients:
            raise TaskError(
                f"Some clients must be left to train. {size} of {self.clients} would be unseen.",
                hint="lower `unseen`, or raise `clients`.",
            )
        drawn = generator(seed, "unseen").permutation(self.clients)
        new, old = np.sort(drawn[:size]), np.sort(drawn[size:])
        return replace(self.of(old), unseen=self.of(new))

    @repeat_after_cut
    def of(self, clients: NDArray[np.int64]) -> Task:
        """Return the task of some clients only."""
        return replace(
            self,
            splits={name: split.of(clients) for name, split in self.splits.items()},
            names=None if self.names is None else tuple(self.names[k] for k in clients),
            groups=None if self.groups is None else self.groups[clients],
            architecture=None if self.architecture is None else self.architecture[clients],
            devices=None if self.devices is None else self.devices.of(clients),
            scaling=None if self.scaling is None else self.scaling.of(clients),
        )

    def public_facts(self, seed: int = 0) -> Facts:
        """Return what everybody may know of this task, and the seed of all draws."""
        everybody = np.arange(self.clients)
        return Facts(
            name=self.name, clients=self.clients, network=self.network, training=self.training, classes=self.classes,
            sample=self.x.new_zeros(self.x.shape[1:]), target=self.y.new_zeros(self.y.shape[1:]), seed=seed,
            largest={name: int(split.sizes(everybody).max(initial=0)) for name, split in self.splits.items()},
            has_public=self.public is not None, networks=self.networks, architecture=self.architecture,
            recommends=self.recommends, speed=None if self.devices is None else self.devices.speed,
        )  # fmt: skip

    @repeat_after_cut
    def with_devices(self, devices: Devices | Path | str) -> Task:
        """Return the same task on these devices, or those of a CSV file: unequal speed, memory and energy.

        A client with too little memory has the largest network that it can hold.
        """
        if not isinstance(devices, Devices):
            devices = Devices.read(devices, self.clients, self.names)
        chosen = devices.deal(self.networks or (self.network,), self.names)
        unequal = self.architecture is not None and np.isfinite(devices.memory).any()
        return replace(self, devices=devices, architecture=chosen if unequal else self.architecture)

    def public_for(self, who: str) -> tuple[Tensor, Tensor]:
        """Return the public samples; raise if there are none, which `who` needs."""
        self.public_facts().require_public(who)
        assert self.public is not None
        return self.public

    @repeat_after_cut
    def with_public(self, x: Any, y: Any) -> Task:
        """Return the same task with public samples of yours; none may be a client's or the server's."""
        if not self.splits["train"].stored:
            raise TaskError(
                f"Public samples are compared with those of all clients. {self.name} makes its samples when they are "
                "needed, and has never all of them.",
                hint="take a task whose samples are stored, or a method that needs no public data.",
            )
        samples, targets = torch.as_tensor(x).to(self.x), torch.as_tensor(y).to(self.y)
        if not len(samples):
            raise TaskError("Public data must be at least 1 sample. Got 0.")
        check_samples("Public data", samples, targets, tuple(self.x.shape[1:]), self.classes)
        tasks = [self] if self.unseen is None else [self, self.unseen]
        dealt = torch.zeros(len(self.x), dtype=torch.bool, device=self.x.device)
        dealt[torch.cat([split.order for task in tasks for split in task.splits.values()])] = True
        theirs = {"clients'": self.x[dealt]} | ({"in the server's test set": self.central[0]} if self.central else {})
        for whose, others in theirs.items():
            found = duplicates(samples, others)
            if found:
                raise TaskError(
                    f"Public samples must not be private or test samples. {len(found)} of {len(samples)} are "
                    f"{whose}, the first is number {found[0]}.",
                    hint="leave them out; or Task.build(public=0.1) takes public samples before the others are dealt.",
                )
        digest = hashlib.blake2b(b"".join(digests(samples)), digest_size=8).hexdigest()
        public = f"{len(samples)} samples, {digest}"
        return replace(self, public=(samples, targets), facts={**self.facts, "public": public})

    @property
    def wants_folds(self) -> bool:
        """Whether one cut says little, so a comparison cuts clients' samples several times: they have few of them."""
        if self.recut is None or self.cut != Cut():
            return False
        sizes = sum(split.sizes(np.arange(self.clients)) for split in self.splits.values())
        return int(np.sum(sizes)) <= MOST_FOLDED and float(np.median(sizes)) <= SMALL_CLIENT

    @property
    def samples(self) -> str:
        """A digest of all samples and targets of the clients, of who has them, and of how they are split."""
        splits = [(name, *split.digest) for name, split in self.splits.items()]
        return _digest(content(self.x), content(self.y), splits)

    @property
    def fingerprint(self) -> str:
        """A digest of all samples and targets, those of the server too, of who has them, and of how they are split."""
        of_the_server = [None if pair is None else [*map(content, pair)] for pair in (self.central, self.public)]
        more = [] if self.devices is None else [self.devices.digest]  # older runs know nothing of devices
        return _digest(self.samples, of_the_server, None if self.unseen is None else self.unseen.samples, *more)[:16]

    @cached_property
    def statistics(self) -> Statistics:
        """The statistics of the clients' training data; only sizes of data elsewhere, or of very many not stored."""
        train, everybody = self.splits["train"], np.arange(self.clients)
        if not train.here or (not train.stored and self.clients > MOST_DESCRIBED):
            return Statistics(samples=train.sizes(everybody), names=None if train.here else self.names)
        x, y, held, _ = train.hold(self.x, self.y, everybody)
        parts = np.split(held.order.cpu().numpy(), held.offsets[1:-1])
        features = x.cpu().numpy() if x.is_floating_point() else None
        found = statistics(y.cpu().numpy(), parts, self.classes, features, self.groups, self.names)
        return found if self.devices is None else replace(found, speed=self.devices.speed)

    @classmethod
    def build(
        cls,
        dataset: Dataset,
        partition: Partition,
        *,
        clients: int | None = None,
        model: Model | Sequence[Model] | None = None,
        seed: int = 0,
        partition_seed: int | None = None,
        training: Training | None = None,
        shares: Shares = SHARES,
        central: float = 0.0,
        public: float = 0.0,
        augment: Augment | None = None,
        facts: Mapping[str, Any] | None = None,
        first: int = 0,
        cut: Cut | None = None,
    ) -> Task:
        """Deal a data set to clients and split each client's samples into train, val and test.

        `partition_seed` decides who gets what; `seed` decides the model's initial values. Samples of a client are split
        at random by `shares`, or as the `cut` says. The shares `central` and
        `public` of all samples are taken before the rest is dealt: for a test set of the server's own (where the data
        set brings none), and for what everybody may see. Only a natural partition needs no number of `clients`. Several
        models are dealt in turn: client k has number k modulo how many there are. At a site, `first` is the number of
        its first client in the federation, so its samples are split as in a simulation of all.
        """
        deal, cut, whole = seed if partition_seed is None else partition_seed, cut or Cut(shares), dataset
        partition = adapt_to_data(partition, dataset)
        taken = {"central": central, "public": public}
        dataset, held = take_out(dataset, taken, deal, least=dataset.least if partition.reads == "owners" else 0)
        read = owners_of(dataset) if partition.reads == "owners" else dataset.y.numpy()
        parts = partition.split(read, clients, generator(deal, "partition"))
        names, groups = describe_owners(partition, dataset, parts)
        x, y, dealt = dataset.x, dataset.y, parts
        if isinstance(partition, Shifted):
            x, y, parts = partition.apply(x, y, parts, generator(deal, "shift"))
            groups = partition.groups(len(parts)) if groups is None else groups
        chosen = model or dataset.model or choose_model(tuple(x.shape[1:]))
        several = [chosen] if isinstance(chosen, str) or not isinstance(chosen, Sequence) else chosen
        networks = [build_network(one, dataset, seed) for one in several]
        splits = split_clients(dataset, dealt, parts, y, cut, deal, first)
        if isinstance(dataset, OwnData) and dataset.rule and not cut.folds:
            require_tested(splits, names, None if dataset.rule.given is not None else dataset.rule.group, parts)
        if isinstance(partition, Shifted):
            x, y = partition.spoil(x, y, parts, splits["test"].order, generator(deal, "spoil"))
        if are_amounts(x, networks):
            x, held = x.float(), {name: replace(one, x=one.x.float()) for name, one in held.items()}
        leaks, split_by = report_leaks(dataset, x, splits), str(dataset.facts.get("split_by", ""))

        def recut(another: Cut) -> Task:
            words = {**(facts or {})}
            if "recipe" in words:  # by which a run in a folder is opened again
                words["recipe"] = {**words["recipe"], "folds": another.folds, "number": another.number}
            return cls.build(
                whole, partition, clients=clients, model=model, seed=seed, partition_seed=partition_seed,
                training=training, central=central, public=public, augment=augment, facts=words, first=first,
                cut=another,
            )  # fmt: skip

        x, aside, scaling = scale_samples(dataset, x, splits, dealt, parts, held)
        return cls(
            name=dataset.name,
            x=x,
            y=y,
            splits=splits,
            **deal_networks(networks, len(parts)),
            classes=dataset.classes,
            training=training or Training(),
            names=names,
            central=dataset.central or aside.get("central"),
            public=aside.get("public"),
            groups=groups,
            augment=augment,
            facts={**(facts or {}), **dataset.facts, **cut.facts(split_by), **leaks, "source": dataset.source},
            scaling=scaling,
            recommends=dataset.recommends,
            cut=cut,
            recut=recut if can_fold(dataset, parts) else None,
        )

    @classmethod
    def own(
        cls,
        source: Any,
        *,
        model: Model | Sequence[Model] | None = None,
        seed: int = 0,
        training: Training | None = None,
        shares: Shares = SHARES,
        central: float = 0.0,
        public: float = 0.0,
        min_samples: int = 2,
        first: int = 0,
        **reading: Unpack[GivenReading],
    ) -> Task:
        """Build a task from your own data: a frame, a dict, a folder of files, torch or Hugging Face data sets.

            Task.own(frame, client="hospital", target="readmitted")
            Task.own("hospitals/", target="readmitted", group="patient", model=net)

        `atoll.data.own.read` says what `source` may be and takes the other arguments; `model` is any `nn.Module`, a
        function that makes one, a name, or a list of these, which clients have in turn. A client with fewer than
        `min_samples` samples is an error. `shares` say how each client's samples are split into train, val and test.
        """
        from atoll.data import own, recipe

        require_keywords("Task.own", reading, cls.own, own.read)
        asked: dict[str, Any] = {"seed": seed, "shares": shares, "central": central, "public": public}
        facts = recipe.describe_own(source, model, {**reading, "min_samples": min_samples}, **asked)
        dataset = own.read(source, min_samples=min_samples, **reading)
        return cls.build(dataset, Natural(), model=model, training=training, facts=facts, first=first, **asked)

    @classmethod
    def ratings(
        cls,
        source: Any,
        *,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        fewest: tuple[int, int] = (FEWEST, FEWEST),
        name: str = "ratings",
        model: Model | None = None,
        seed: int = 0,
        training: Training | None = None,
    ) -> Task:
        """Build a task that recommends items from a table of ratings: a file, a frame or a dict of columns.

            Task.ratings("ratings.csv", user="customer", item="article", time="bought")

        Every user is a client. The last rating of each is for testing, the one before it for validation, so ratings
        need a time. Users and items with fewer than the `fewest` ratings are left out.
        """
        columns = read_columns(source, {"user": user, "item": item, "time": time})
        fields = list_interactions(name, "a table of ratings", *columns, fewest=fewest, level=logging.WARNING)
        dataset = Dataset(**fields)
        return cls.build(dataset, Natural(), model=model, seed=seed, training=training)

    @classmethod
    def of_site(cls, source: Any, schema: Schema, *, name: str | None = None, **words: Any) -> Task:
        """Build the task of one site: its file (or frame, or arrays) read by a schema that all sites share.

            Task.of_site("ulm.csv", Schema.load("schema.json"), model="mlp:64")

        The other arguments are those of `Task.own`, except the ones that the schema answers. Sites with one schema have
        the same inputs, classes and network. Data that do not fit it are refused with the name of the column.
        """
        from atoll.data import own

        answered = sorted({"target", "client", "kind", "features", "categorical", "classes", "standardise"} & {*words})
        if answered:
            raise TaskError(
                f"The schema says what the columns are, so `{answered[0]}` must be left out.", hint="change the schema."
            )
        if schema.standardise == "global":
            raise TaskError(
                "Sites scale their samples alone, so `standardise` of the schema must be client or none. Got global.",
                hint="write the schema again without it, or with standardise none and numbers near 1.",
            )
        return cls.own({name or own.name_of(source): source}, schema=schema, name=name, **words)

    @classmethod
    def of_clients(
        cls,
        data: Mapping[str, tuple[Any, Any]],
        model: nn.Module | Sequence[nn.Module],
        *,
        name: str = "own",
        classes: int | None = None,
        loss: PerSample = cross_entropy,
        score: PerSample = accuracy,
        training: Training | None = None,
        shares: Shares = SHARES,
        seed: int = 0,
    ) -> Task:
        """Build a task from each client's own samples and targets, tensors or arrays.

        `classes` is found from integer targets; floating point values become of the model's type. Several models are
        dealt in turn.
        """
        if not data:
            raise TaskError("A task must have at least 1 client. Got 0.")
        several = [model] if isinstance(model, nn.Module) else model
        dtypes = (leaf.dtype for leaf in several[0].parameters() if leaf.is_floating_point())
        dtype = next(dtypes, torch.get_default_dtype())

        given = {client: (torch.as_tensor(x), torch.as_tensor(y)) for client, (x, y) in data.items()}
        sizes, shape = [len(x) for x, _ in given.values()], tuple(next(iter(given.values()))[0].shape[1:])
        for client, (x, y) in given.items():
            check_samples(f"The data of client {client}", x, y, shape, classes)

        def join(part: int) -> Tensor:
            values = torch.cat([both[part] for both in given.values()])
            return values.to(dtype) if values.is_floating_point() else values

        x, y = join(0), join(1)
        networks = [Network(module=one, loss=loss, score=score) for one in several]
        x = x.to(dtype) if are_amounts(x, networks) else x
        if classes is None and not y.is_floating_point():
            classes = int(y.max()) + 1
        parts = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
        return cls(
            name=name,
            x=x,
            y=y,
            splits=cut_splits(parts, Cut(shares), None, None, seed),
            **deal_networks(networks, len(data)),
            classes=classes,
            training=training or Training(),
            names=tuple(data),
        )

    def _check_architecture(self) -> None:
        """Raise unless every client has one of the networks."""
        if self.architecture is None:
            return
        known, given = range(len(self.networks)), self.architecture
        if given.shape != (self.clients,) or not np.isin(given, known).all():
            raise TaskError(
                f"`architecture` must have the number of a network, 0 to {len(known) - 1}, for each of {self.clients} "
                f"clients. Got {given!r}."
            )

    def _check_outputs(self, network: Network) -> None:
        """Raise unless the network takes the samples and gives one output per class; find out whether it draws.

        A network that was tried on such samples is not tried again.
        """
        fits = self.x.device, self.x.dtype, network.dtype, self.x.shape[1:], self.classes
        if network.fits != fits:
            x, _, split, _ = self.splits["train"].hold(self.x, self.y, np.zeros(1, dtype=np.int64))
            check_outputs(network, x[split.order[:2]], self.classes)
            network.fits = fits


def require_task(given: object) -> None:
    """Raise TaskError unless it is a task; say how to make one of what is like it."""
    if isinstance(given, Task):
        return
    own = "make one: Task.own(...) of your data, or Task.build(...)."
    raise TaskError(
        f"`task` must be a Task. Got {describe_given(given)}.",
        hint="build it first: recipe.build()." if hasattr(given, "build") else own,
    )


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
