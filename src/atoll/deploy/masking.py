"""Sums under masks where clients are at sites: three more exchanges around a round's work.

    masks keys      each client makes keys of its own for this round; the coordinator passes the public ones on
    masks shares    each client seals shares of its secrets for all others; the coordinator passes them on
    local           the round's work; what leaves a site are words under masks
    masks unmask    who is in the sum is told once; clients give the shares that remove its masks, and nobody's own

With `neighbours` a site derives the ring of a round itself, from the seed of its terms and the session: its clients
take keys and shares of their own neighbours, and of nobody else.

The coordinator sees public keys, sealed shares, masked words, and shares of seeds (of who is in the sum) or of keys (of
who is gone); never both of one client. Secrets lie at the site while a round lasts, and are forgotten then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.deploy.messages import Message
from atoll.deploy.terms import Terms
from atoll.kernel.errors import DeployError, PrivacyError
from atoll.kernel.params import Stack, Tree
from atoll.protect.masks import (
    KEY_BYTES,
    LEAST_CLIENTS,
    SHARE_BYTES,
    Around,
    MaskingClient,
    Words,
    default_threshold,
    masks_left,
    neighbours_of,
    threshold_among,
)
from atoll.protect.secure import Secure
from atoll.protect.stages import Sent
from atoll.records.files import read_record, write_record
from atoll.records.schema import Record

Clients = NDArray[np.int64]
STEPS = ("masks keys", "masks shares", "local", "masks unmask")
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16
Keys = dict[int, tuple[bytes, bytes]]
Sealed = dict[int, dict[int, bytes]]  # by sender and holder
Shares = dict[int, tuple[dict[int, int], dict[int, int]]]  # by who helps: of seeds, of keys


@dataclass(frozen=True)
class Step:
    """Where a round is in the protocol, as every job of it says."""

    name: str  # one of STEPS
    session: int  # the number of the exchange in which keys were asked for: no other use of masks has it
    threshold: int  # how many clients must stay to the end


def read_step(written: Mapping[str, Any]) -> Step:
    """Read the step of a job."""
    step = Step(str(written["name"]), int(written["session"]), int(written["threshold"]))
    if step.name not in STEPS or step.session < 0 or step.threshold < 1:
        raise ValueError(f"there is no such step: {step}")
    return step


def read_neighbours(about: Mapping[str, Any]) -> int:
    """Read with how many others clients have masks; older coordinators do not say it, and mean all."""
    return Secure("masks", neighbours=int(about.get("neighbours", 0))).neighbours  # raises for what cannot be


def require_hidden(terms: Terms, neighbours: int = 0) -> None:
    """Raise unless a site's clients can hide among those of others, and no site has the shares to uncover them."""
    if len(terms.sites) < LEAST_CLIENTS:
        raise DeployError(
            f"A sum under masks must be of at least {LEAST_CLIENTS} sites: of two, each knows the other's part. There "
            f"are {len(terms.sites)}."
        )
    name, largest = max(((name, len(place.clients)) for name, place in terms.sites.items()), key=lambda one: one[1])
    if largest >= default_threshold(terms.clients):
        raise DeployError(
            "No site must have more than two thirds of all clients: it would hold enough shares to unmask the others. "
            f"{name} has {largest} of {terms.clients}.",
            hint="let its clients be one, or federate without masks.",
        )
    least = threshold_among(neighbours, default_threshold(terms.clients))
    if largest >= least:
        raise DeployError(
            f"No site must have {least} clients or more: with {neighbours} neighbours it could hold enough shares to "
            f"unmask a client of another one. {name} has {largest}.",
            hint="take more `neighbours`, or leave them out: masks with all others.",
        )


# -- bytes as tensors ------------------------------------------------------------------------------------------------
def _numbers(some: Iterable[int]) -> Tensor:
    return torch.tensor(list(some), dtype=torch.int64)


def _to_bytes(rows: Sequence[bytes], width: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(rows), dtype=np.uint8).copy().reshape(len(rows), width))


def _from_bytes(rows: Tensor, count: int, width: int) -> list[bytes]:
    if rows.dtype != torch.uint8 or tuple(rows.shape) != (count, width):
        raise ValueError(f"expected {count} rows of {width} bytes, got {tuple(rows.shape)}")
    return [row.tobytes() for row in rows.cpu().numpy()]


def write_keys(keys: Mapping[int, tuple[bytes, bytes]]) -> Tree:
    """Return public keys as a message holds them."""
    return {"clients": _numbers(keys), "keys": _to_bytes([a + b for a, b in keys.values()], 2 * KEY_BYTES)}


def read_keys(tree: Tree) -> Keys:
    """Read public keys."""
    clients = [int(one) for one in tree["clients"]]
    rows = _from_bytes(tree["keys"], len(clients), 2 * KEY_BYTES)
    return {who: (row[:KEY_BYTES], row[KEY_BYTES:]) for who, row in zip(clients, rows, strict=True)}


def relay_keys(keys: Keys, around: Around, clients: Sequence[int]) -> Tree:
    """Return the keys of the neighbours of some clients, and who is in the ring, so their site can tell the same."""
    near = sorted({who for one in clients if one in around for who in around[one]})
    return {**write_keys({who: keys[who] for who in near}), "ring": _numbers(around)}


def read_ring(tree: Tree) -> list[int]:
    """Read who is in the ring of a round; nobody if all have masks with all."""
    return [int(one) for one in tree["ring"]] if "ring" in tree else []


def write_sealed(sealed: Mapping[int, Mapping[int, bytes]]) -> Tree:
    """Return sealed shares as a message holds them."""
    rows = [(who, other, row) for who, some in sealed.items() for other, row in some.items()]
    return {
        "from": _numbers(who for who, _, _ in rows), "to": _numbers(other for _, other, _ in rows),
        "sealed": _to_bytes([row for _, _, row in rows], SEALED_BYTES),
    }  # fmt: skip


def read_sealed(tree: Tree) -> Sealed:
    """Read sealed shares."""
    senders, holders = ([int(one) for one in tree[name]] for name in ("from", "to"))
    found: Sealed = {}
    for who, other, row in zip(senders, holders, _from_bytes(tree["sealed"], len(senders), SEALED_BYTES), strict=True):
        found.setdefault(who, {})[other] = row
    return found


def _write_shares(shares: Shares) -> Tree:
    def rows(place: int) -> Tensor:
        found = [
            share.to_bytes(SHARE_BYTES, "big") for both in shares.values() for _, share in sorted(both[place].items())
        ]
        return _to_bytes(found, SHARE_BYTES)

    return {"clients": _numbers(shares), "seeds": rows(0), "keys": rows(1)}


def read_shares(tree: Tree, there: Sequence[int], gone: Sequence[int], around: Around) -> Shares:
    """Read the shares that clients give: of their neighbours who are in the sum, and of those who are gone."""
    clients = [int(one) for one in tree["clients"]]

    def rows(name: str, of: Sequence[int]) -> list[dict[int, int]]:
        held = [sorted(around[who].intersection(of)) for who in clients]
        found = iter(_from_bytes(tree[name], sum(map(len, held)), SHARE_BYTES))
        return [{other: int.from_bytes(next(found), "big") for other in some} for some in held]

    both = zip(rows("seeds", there), rows("keys", gone), strict=True)
    return dict(zip(clients, both, strict=True))


# -- at a site -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False, kw_only=True)
class Secrets(Record):
    """What a site remembers while a round under masks lasts."""

    session: int
    threshold: int  # of all clients that were asked
    clients: list[int]
    secret: dict[str, str]  # by client
    steps: dict[str, str] = field(default_factory=dict)  # the job of each step that was answered
    public: dict[str, str] = field(default_factory=dict)  # the keys of all clients of the round, or of neighbours
    ring: list[int] = field(default_factory=list)  # all clients of the round, if it has a ring of neighbours
    sealed: dict[str, dict[str, str]] = field(default_factory=dict)  # by holder here, and sender


class SiteMasks:
    """A site in the protocol. Each step is done once, in order, and only for the job that asked first."""

    def __init__(self, folder: Path, *, seed: int, neighbours: int, clients: int) -> None:
        self._path, self._seed, self._neighbours = folder / "masks.json", seed, neighbours
        self._everybody = clients  # how many there are in the federation

    def answer(self, message: Message, step: Step, clients: Sequence[int], relay: Tree) -> Tree:
        """Do a step without work: return keys, sealed shares, or shares that unmask the sum."""
        with message.guarding():
            secrets = self._begin(message, step, clients)
            try:
                if step.name == "masks keys":
                    return write_keys({one.number: one.publish_keys() for one in self._clients(secrets)})
                if step.name == "masks shares":
                    return self._share(message, secrets, relay)
                return self._unmask(message, secrets, relay)
            except PrivacyError as error:
                raise message.refuse(str(error).splitlines()[0].rstrip(".")) from error

    def prepare(self, message: Message, step: Step, clients: Sequence[int], relay: Tree) -> Mapping[int, MaskingClient]:
        """Return the clients that will mask their words, with the shares of others that they hold now."""
        with message.guarding():
            secrets = self._begin(message, step, clients)
            sealed: dict[str, dict[str, str]] = {str(who): {} for who in secrets.clients}
            for sender, some in read_sealed(relay).items():
                for holder, row in some.items():
                    if holder in secrets.clients and sender != holder:
                        sealed[str(holder)][str(sender)] = row.hex()
            secrets = self._write(replace(secrets, sealed=sealed))
            try:
                return {one.number: one for one in self._open(secrets)}
            except PrivacyError as error:
                raise message.refuse(str(error).splitlines()[0].rstrip(".")) from error

    def forget(self) -> None:
        """Forget the secrets of a round."""
        self._path.unlink(missing_ok=True)

    def _begin(self, message: Message, step: Step, clients: Sequence[int]) -> Secrets:
        """Return what is known before a step; raise unless it is the next one, or the same job again."""
        known = read_record(self._path, Secrets) if self._path.exists() else None
        if step.name == STEPS[0] and (known is None or known.session < step.session):
            if step.session != message.header.number:
                raise message.refuse("its keys must be of this exchange, and of no other one")
            fresh = {str(who): MaskingClient(who, step.session, step.threshold).secret.hex() for who in clients}
            known = Secrets(session=step.session, threshold=step.threshold, clients=[*clients], secret=fresh)
        if known is None or (known.session, known.threshold) != (step.session, step.threshold):
            raise message.refuse("this site made no keys for it: it came too late, or has answered it already")
        before = STEPS[: STEPS.index(step.name)]
        if [*known.steps] != [*before] and known.steps.get(step.name) != message.digest:
            raise message.refuse(f"each step of a sum under masks is done once, in order. This is {step.name}")
        return self._write(replace(known, steps={**known.steps, step.name: message.digest}))

    def _share(self, message: Message, secrets: Secrets, relay: Tree) -> Tree:
        keys, ring = read_keys(relay), read_ring(relay)
        if max(len(keys), len(ring)) > 100_000:
            raise message.refuse("it names too many clients")
        if len({*ring}) < len(ring) or not all(0 <= who < self._everybody for who in (*ring, *keys)):
            raise message.refuse("it must name clients of the federation, each once")
        if len(ring or keys) < secrets.threshold:
            raise message.refuse(f"at least {secrets.threshold} clients must be in a round. {len(ring or keys)} are")
        public = {str(who): (a + b).hex() for who, (a, b) in keys.items()}
        secrets = self._write(replace(secrets, public=public, ring=ring))
        return write_sealed({one.number: one.send_shares(near) for one, near in self._meet(secrets)})

    def _unmask(self, message: Message, secrets: Secrets, relay: Tree) -> Tree:
        there, gone = ([int(one) for one in relay[name]] for name in ("there", "gone"))
        others = {int(sender) for some in secrets.sealed.values() for sender in some} | {*secrets.clients}
        asked = {*there, *gone}
        if not (asked == others or (secrets.ring and others <= asked <= {*secrets.ring})):
            raise message.refuse("each client whose shares are here must be either in the sum or gone")
        return _write_shares({one.number: one.help_unmask(there, gone) for one in self._open(secrets)})

    def _clients(self, secrets: Secrets) -> list[MaskingClient]:
        threshold = threshold_among(self._neighbours, secrets.threshold)
        return [
            MaskingClient(
                who, secrets.session, threshold, bytes.fromhex(secrets.secret[str(who)]), least=secrets.threshold
            )
            for who in secrets.clients
        ]

    def _meet(self, secrets: Secrets) -> list[tuple[MaskingClient, Keys]]:
        """Return the clients, each with the keys of its neighbours."""
        keys = {int(who): (bytes.fromhex(both[:64]), bytes.fromhex(both[64:])) for who, both in secrets.public.items()}
        around = neighbours_of(secrets.ring or keys, self._neighbours, self._seed, secrets.session)
        for who in secrets.clients:
            if who not in around or not around[who] <= keys.keys():
                raise PrivacyError(f"The keys of client {who} and of all its neighbours must be there.")
        return [(one, {who: keys[who] for who in sorted(around[one.number])}) for one in self._clients(secrets)]

    def _open(self, secrets: Secrets) -> list[MaskingClient]:
        """Return the clients with the shares that they hold."""
        made = []
        for one, near in self._meet(secrets):
            made.append(one)
            one.send_shares(near)  # its own shares are the same again
            one.take_shares({int(who): bytes.fromhex(row) for who, row in secrets.sealed[str(one.number)].items()})
        return made

    def _write(self, secrets: Secrets) -> Secrets:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        write_record(self._path, secrets)
        self._path.chmod(0o600)
        return secrets


def mask_rows(sent: Sent, clients: Sequence[int], masking: Mapping[int, MaskingClient]) -> Sent:
    """Return what some clients send with every word under their masks."""
    rows, sizes = _join(sent)
    masked = np.stack([masking[who].mask(row) for who, row in zip(clients, rows, strict=True)])
    return sent._replace(fields=_split(torch.from_numpy(masked), sent, sizes))


def _join(sent: Sent) -> tuple[Words, list[int]]:
    """Return all words of all fields, a row per client, and how many each field has."""
    parts = [sent.fields[name]["masked"] for name in sorted(sent.fields)]
    return torch.cat(parts, dim=1).cpu().numpy(), [part.shape[1] for part in parts]


def _split(rows: Tensor, sent: Sent, sizes: Sequence[int]) -> dict[str, Stack]:
    parts = dict(zip(sorted(sent.fields), torch.split(rows, list(sizes), dim=1), strict=True))
    return {name: Stack.of(masked=parts[name]) for name in sent.fields}


# -- at the coordinator ----------------------------------------------------------------------------------------------
def add_up_masked(sent: Sequence[Sent]) -> tuple[Words, list[int]]:
    """Return the sum of masked words of all clients, and how many each field has."""
    total, sizes = None, list[int]()
    for one in sent:
        rows, sizes = _join(one)
        for row in rows:
            total = row.copy() if total is None else total + row
    assert total is not None
    return total, sizes


def unmask(
    total: Words, like: Sent, sizes: Sequence[int], keys: Keys, shares: Shares, gone: Iterable[int], there: Clients,
    step: Step, around: Around, threshold: int,
) -> Sent:  # fmt: skip
    """Return the sum of what clients sent, without masks, in one row; raise SumLost if a neighbourhood gave too few."""
    left = masks_left(shares, keys, there.tolist(), gone, step.session, len(total), around, threshold)
    row = torch.from_numpy(total - left)[None]
    return like._replace(fields=_split(row, like, sizes), weight=None, summed=True)
