"""Clients that attack: `sign-flip:0.2` lets a fifth of all clients send the opposite of what honest ones send.

Who attacks is drawn once, by the seed. Attackers of the wire replace their whole reply after everything that honest
clients do to theirs (clipping, compression), and before anything that the server does. They know all honest replies of
the round: the strongest form of each attack. Attackers of the data train as everybody does, on samples they changed.
Only honest clients are scored.

References: Baruch et al., NeurIPS 2019 (ALIE); Xie et al., UAI 2020 (inner product); Shejwalkar and Houmansadr, NDSS
2021 (min-max); Karimireddy et al., ICLR 2022 (mimic); Bagdasaryan et al., AISTATS 2020 (replacement, backdoor); Li et
al., ICML 2021 (the attacks A1 to A3 on Ditto).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from atoll.data.batches import Split
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm, Arrival
from atoll.kernel.errors import DataError, HyperparameterError, unknown
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.wrapper import title_of
from atoll.protect.vectors import Fields, floating_leaves, gram, reduce_leaves, squared_distances, stack_arrivals

Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Attack:
    """Base of all attacks."""

    share: float = 0.2  # of all clients

    name: ClassVar[str]
    on_data: ClassVar[bool] = False  # attackers change their samples, not their replies

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise HyperparameterError(f"The share of attackers must be a float in (0, 1). Got {self.share!r}.")

    def draw_attackers(self, clients: int, seed: int) -> Clients:
        """Draw who attacks: the share of all clients, at least one and not all."""
        count = min(max(1, round(self.share * clients)), clients - 1)
        return np.sort(generator(seed, "attackers").choice(clients, count, replace=False)).astype(np.int64)

    def forge(self, arrivals: Sequence[Arrival], attackers: Clients, *, seed: int, round: int) -> list[Arrival]:
        """Return the replies of a round after the attackers among them replaced theirs."""
        if not any(any(True for _ in floating_leaves(one.fields)) for one in arrivals):
            return list(arrivals)  # a method that sends nothing leaves nothing to attack
        forms = [_shapes_of(one) for one in arrivals]
        if len({*forms}) > 1:  # of different architectures: attackers copy from replies that are like theirs
            apart: dict[int, Arrival] = {}
            for form in dict.fromkeys(forms):
                places = [place for place, its in enumerate(forms) if its == form]
                some = self.forge([arrivals[place] for place in places], attackers, seed=seed, round=round)
                apart |= dict(zip(places, some, strict=True))
            return [apart[place] for place in range(len(arrivals))]
        hostile = [np.isin(one.clients, attackers) for one in arrivals]
        if not any(map(np.any, hostile)) or all(map(np.all, hostile)):
            return list(arrivals)  # nobody attacks, or nobody is there to learn from
        honest = stack_arrivals([one.only(~bad) for one, bad in zip(arrivals, hostile, strict=True) if not bad.all()])
        count, bad_ones = sum(len(one.clients) for one in arrivals), int(sum(map(np.sum, hostile)))
        forged = []
        for one, bad in zip(arrivals, hostile, strict=True):
            if not bad.any():
                forged.append(one)
                continue
            scene = Scene(honest, one.only(bad), count, bad_ones, seed, round)
            made = self.replies(scene)
            place = torch.full((len(bad),), -1, dtype=torch.long)
            place[torch.from_numpy(bad)] = torch.arange(int(bad.sum()))
            forged.append(
                one._replace(fields={name: _put(value, made[name], place) for name, value in one.fields.items()})
            )
        return forged

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return what the attackers send, a row for each of them."""
        return dict(scene.own.fields)

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise where attackers cannot change samples of this task, or replies of this method, as they would."""
        if self.on_data and not all(split.stored for split in task.splits.values()):
            raise DataError(
                "Samples that an attacker changes must be stored. Those of this task are made when asked for."
            )
        if not self.on_data and "rows" in algorithm.sends.values():
            raise DataError(
                f"The attack {self.name} makes one reply of many, place by place. Clients of {title_of(algorithm)} "
                "send rows of their own choice, which have no places in common.",
                hint="take an attack on samples, such as label-flip.",
            )

    def poison(self, task: Task, attackers: Clients, seed: int) -> Task:
        """Return the task with the attackers' samples as they changed them."""
        return task


@dataclass(frozen=True)
class Scene:
    """What attackers see in a round."""

    honest: Fields  # all honest replies, a row per client
    own: Arrival  # what the attackers would send if they were honest
    replies: int  # of the round, K
    hostile: int  # attackers among them, F
    seed: int
    round: int

    def repeat(self, sent: dict[str, Params]) -> dict[str, Stack]:
        """Return the same reply for every attacker."""
        count = len(self.own.clients)
        return {
            name: Stack({leaf: row.expand(count, *row.shape) for leaf, row in value.items()}, value.layout)
            for name, value in sent.items()
        }

    def mean(self) -> dict[str, Params]:
        """Return the mean of the honest replies."""
        return reduce_leaves(self.honest, lambda rows: rows.mean(0))

    def draw_normal(self, like: Tensor, what: str) -> Tensor:
        """Draw normal numbers in the shape of a leaf, for each attacker by itself: the same however they arrive."""
        draws = [generator(self.seed, "attack", self.round, what, client) for client in self.own.clients.tolist()]
        return torch.from_numpy(np.stack([one.standard_normal(tuple(like.shape[1:])) for one in draws])).to(like)


def _shapes_of(arrival: Arrival) -> frozenset[tuple[str, str, torch.Size]]:
    return frozenset(
        (name, leaf, rows.shape[1:]) for name, value in arrival.fields.items() for leaf, rows in value.items()
    )


def _put(honest: Stack, forged: Stack, place: Tensor) -> Stack:
    """Return a field with the forged rows where `place` names one."""
    leaves = {}
    for name, leaf in honest.items():
        where = place.to(leaf.device)
        leaves[name] = leaf.clone()
        leaves[name][where >= 0] = forged[name].to(leaf.dtype)[where[where >= 0]]
    return Stack(leaves, honest.layout)


@dataclass(frozen=True)
class SignFlip(Attack):
    """Attackers send minus FACTOR times the honest mean."""

    factor: float = 1.0
    name: ClassVar[str] = "sign-flip"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return the opposite of the honest mean."""
        return scene.repeat({name: value * -self.factor for name, value in scene.mean().items()})


@dataclass(frozen=True)
class InnerProduct(SignFlip):
    """Attackers send a little of the opposite of the honest mean, so its length shrinks and no reply stands out."""

    factor: float = 0.1
    name: ClassVar[str] = "ipm"


@dataclass(frozen=True)
class Gaussian(Attack):
    """Attackers send normal numbers; as large as their own honest reply has them, or of STD."""

    std: float = 0.0  # 0: the standard deviation of the own reply
    name: ClassVar[str] = "gaussian"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return noise."""
        own = torch.cat([leaf.double() for leaf in floating_leaves(scene.own.fields)], dim=1)
        spread = own.std(dim=1) if not self.std else torch.full((len(own),), self.std, dtype=own.dtype)

        def draw(name: str, leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            size = spread.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1))
            return size * scene.draw_normal(leaf, name)

        return {
            field: Stack({name: draw(f"{field} {name}", leaf) for name, leaf in value.items()}, value.layout)
            for field, value in scene.own.fields.items()
        }


@dataclass(frozen=True)
class Scaling(Attack):
    """Attackers send their own reply, FACTOR times as large: by default as often as clients reply (replacement).

    With RANDOM they train on random labels, as in the attack A3 on Ditto.
    """

    factor: float = 0.0  # 0: the number of replies in the round
    random: bool = False
    name: ClassVar[str] = "scaling"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return the own replies, enlarged."""
        return {name: value * (self.factor or float(scene.replies)) for name, value in scene.own.fields.items()}

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise where labels cannot be changed, if attackers do so."""
        super().check(task, algorithm)
        if self.random:
            LabelFlip(self.share, random=True).check(task, algorithm)

    def poison(self, task: Task, attackers: Clients, seed: int) -> Task:
        """Return the task with random labels where attackers train on them."""
        return LabelFlip(self.share, random=True).poison(task, attackers, seed) if self.random else task


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """ALIE: attackers move away from the honest mean by FACTOR standard deviations, as far as a majority hides them."""

    factor: float = 0.0  # 0: the largest that a majority of honest replies covers
    name: ClassVar[str] = "alie"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return the mean less some standard deviations."""
        factor = self.factor or hidden_deviations(scene.replies, scene.hostile)
        return scene.repeat(reduce_leaves(scene.honest, lambda rows: rows.mean(0) - factor * _spread(rows)))


def hidden_deviations(replies: int, hostile: int) -> float:
    """Return how many standard deviations from the mean attackers are covered by honest replies."""
    covered = (replies - replies // 2 - 1) / max(replies - hostile, 1)
    return max(0.0, float(ndtri(min(covered, 1 - 1e-9))))


def _spread(rows: Tensor) -> Tensor:
    return rows.std(dim=0) if len(rows) > 1 else torch.zeros_like(rows[0])


@dataclass(frozen=True)
class MinMax(Attack):
    """Attackers move from the honest mean against its spread, as far as no honest reply is nearer to all others."""

    name: ClassVar[str] = "min-max"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return the mean less as many standard deviations as stay within the largest honest distance."""
        leaves = list(floating_leaves(scene.honest))
        widest = squared_distances(gram(leaves)).max()
        # |mean - g s - x_i|^2 = |mean - x_i|^2 - 2 g s.(mean - x_i) + g^2 |s|^2
        offsets = [rows.double().mean(0) - rows.double() for rows in leaves]
        spreads = [_spread(rows.double()) for rows in leaves]
        nulls = sum((off.square().sum(1) for off in offsets), start=torch.zeros(()))
        ones = sum((off @ s for off, s in zip(offsets, spreads, strict=True)), start=torch.zeros(()))
        twos = sum((s.square().sum() for s in spreads), start=torch.zeros(()))
        low, high = 0.0, 100.0
        for _ in range(40):
            middle = (low + high) / 2
            fits = (nulls - 2 * middle * ones + middle**2 * twos).max() <= widest
            low, high = (middle, high) if fits else (low, middle)
        return scene.repeat(reduce_leaves(scene.honest, lambda rows: rows.mean(0) - low * _spread(rows)))


@dataclass(frozen=True)
class Mimic(Attack):
    """All attackers copy one honest reply: the one furthest along the direction in which honest replies differ most."""

    name: ClassVar[str] = "mimic"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return copies of one honest reply."""
        products = gram(floating_leaves(scene.honest))
        centre = products - products.mean(0, keepdim=True) - products.mean(1, keepdim=True) + products.mean()
        chosen = int(torch.linalg.eigh(centre).eigenvectors[:, -1].abs().argmax())
        return scene.repeat({name: value.client(chosen) for name, value in scene.honest.items()})


@dataclass(frozen=True)
class FreeRider(Attack):
    """Attackers do not work: they send that nothing changed."""

    name: ClassVar[str] = "free-rider"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return zeros."""
        return {name: value.map(torch.zeros_like) for name, value in scene.own.fields.items()}


@dataclass(frozen=True)
class NotFinite(Attack):
    """Attackers send what is not a number."""

    name: ClassVar[str] = "not-finite"

    def replies(self, scene: Scene) -> dict[str, Stack]:
        """Return what is not a number."""
        return {name: value * math.nan for name, value in scene.own.fields.items()}


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Attackers train on wrong labels: class C - 1 - y for class y; or, with RANDOM, on random ones."""

    random: bool = False
    name: ClassVar[str] = "label-flip"
    on_data: ClassVar[bool] = True

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise unless the task has classes."""
        super().check(task, algorithm)
        _require_classes(self, task)

    def poison(self, task: Task, attackers: Clients, seed: int) -> Task:
        """Return the task with the attackers' labels changed."""
        classes = _require_classes(self, task)

        def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            drawn = generator(seed, "attack", "labels").integers(classes, size=tuple(y.shape))
            return x, torch.from_numpy(drawn).to(y) if self.random else classes - 1 - y

        return _change_samples(task, attackers, change)


@dataclass(frozen=True)
class Backdoor(Attack):
    """Attackers teach a trigger: AMOUNT of their samples get a bright corner and the class TARGET."""

    amount: float = 0.5
    target: int = 0
    size: int = 3
    name: ClassVar[str] = "backdoor"
    on_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.amount <= 1 or self.size < 1 or self.target < 0:
            raise HyperparameterError(
                "A backdoor must have an amount in (0, 1], a size of at least 1 and a target of at least 0. Got "
                f"amount={self.amount!r}, size={self.size!r}, target={self.target!r}."
            )

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise unless samples have one class each, of which the target is one."""
        super().check(task, algorithm)
        classes = _require_classes(self, task)
        if task.y.ndim > 1:
            raise DataError(
                f"For the attack {self.name}, samples must have one class each. Those of {task.name} have one at every "
                "place.",
                hint="take another attack, such as label-flip.",
            )
        if self.target >= classes:
            raise HyperparameterError(
                f"The target of a backdoor must be a class, 0 to {classes - 1}. Got {self.target}."
            )

    def poison(self, task: Task, attackers: Clients, seed: int) -> Task:
        """Return the task with the trigger in some of the attackers' samples."""

        def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            drawn = generator(seed, "attack", "backdoor").random(len(y)) < self.amount
            chosen = torch.from_numpy(drawn).to(y.device)
            shown = torch.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), self.trigger(x, float(task.x.max())), x)
            return shown, torch.where(chosen, self.target, y)

        return _change_samples(task, attackers, change)

    def show_trigger(self, task: Task) -> Task:
        """Return the task whose test samples are those of other classes, with the trigger, and the target as label.

        A client's score on it is how often the backdoor works there.
        """
        split = task.splits["test"]
        others = (task.y[split.order] != self.target).cpu().numpy()
        owner = np.repeat(np.arange(task.clients), np.diff(split.offsets))[others]
        rows = split.order[torch.from_numpy(others)]
        sizes = np.bincount(owner, minlength=task.clients)
        order = torch.arange(len(task.x), len(task.x) + len(rows)).to(split.order)
        shown = Split(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
        x = torch.cat([task.x, self.trigger(task.x[rows], float(task.x.max()))])
        y = torch.cat([task.y, torch.full_like(task.y[rows], self.target)])
        return replace(task, x=x, y=y, splits={**task.splits, "test": shown})

    def trigger(self, x: Tensor, bright: float) -> Tensor:
        """Return samples with the trigger: a bright square in the last corner of images, else the last numbers."""
        x = x.clone()
        if x.ndim >= 3:
            x[..., -self.size :, -self.size :] = bright
        else:
            x[..., -self.size :] = bright
        return x


def _require_classes(attack: Attack, task: Task) -> int:
    if task.classes is None:
        raise DataError(f"For the attack {attack.name}, a task must have classes. This one has none.")
    return task.classes


def _change_samples(task: Task, clients: Clients, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Task:
    """Return the task where these clients train and validate on changed copies of their samples.

    They are copies because partitions may share samples between clients.
    """
    splits, x, y = dict(task.splits), task.x, task.y
    for name in ("train", "val"):
        split = splits[name]
        places = np.concatenate([np.arange(split.offsets[k], split.offsets[k + 1]) for k in clients])
        rows = split.order[torch.from_numpy(places)]
        new_x, new_y = change(task.x[rows], task.y[rows])
        order = split.order.clone()
        order[torch.from_numpy(places)] = torch.arange(len(x), len(x) + len(rows)).to(order)
        splits[name] = replace(split, order=order)
        x, y = torch.cat([x, new_x]), torch.cat([y, new_y])
    return replace(task, x=x, y=y, splits=splits)


ATTACKS: dict[str, type[Attack]] = {
    one.name: one
    for one in (
        SignFlip, InnerProduct, Gaussian, Scaling, LittleIsEnough, MinMax, Mimic, FreeRider, NotFinite, LabelFlip,
        Backdoor,
    )
}  # fmt: skip


def parse_attack(words: str) -> Attack | None:
    """Parse an attack from words: `sign-flip`, `sign-flip:0.2`, `alie:share=0.2,factor=1.5`; None for `none`."""
    if words == "none":
        return None
    name, _, rest = words.partition(":")
    if name not in ATTACKS:
        raise unknown("attack", name, [*ATTACKS, "none"])
    kind = ATTACKS[name]
    known: dict[str, Any] = {one.name: type(one.default) for one in fields_of(kind)}
    values: dict[str, Any] = {}
    for number, pair in enumerate(filter(None, rest.split(","))):
        key, given, value = pair.partition("=")
        if not given:
            if number:
                raise HyperparameterError(f"Values of an attack must be written name=value. Got {pair!r}.")
            key, value = "share", pair
        if key not in known:
            raise unknown(f"value of the attack {name}", key, known)
        try:
            values[key] = value.lower() in ("true", "1", "yes") if known[key] is bool else known[key](value)
        except ValueError:
            raise HyperparameterError(
                f"The value {key} of the attack {name} must be a {known[key].__name__}. Got {value!r}."
            ) from None
    return kind(**values)
