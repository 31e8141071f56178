"""The stages of the channel where clients are elsewhere: written into a job, done at the site, checked on arrival."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.deploy.messages import Message
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError
from atoll.kernel.params import Layout
from atoll.kernel.wrapper import title_of
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.compression import COMPRESSIONS
from atoll.protect.local_level import LocalNoise
from atoll.protect.promise import EqualWeights
from atoll.protect.secure import WEIGHT, Encode
from atoll.protect.shares import NoiseInShares, RoundedClip
from atoll.protect.stages import Clip, Form, Place, Sent, Stage, joint_norms, read_through

Clients = NDArray[np.int64]
STAGES: dict[str, type[Stage]] = {
    one.__name__: one
    for one in (Clip, EqualWeights, Encode, LocalNoise, RoundedClip, NoiseInShares, *COMPRESSIONS.values())
}  # what sites may be asked to do to their messages
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SLACK = 1e-5  # by which a norm may be above the one that it was cut to: rounding


def write_stages(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Write stages down: their names and values."""
    for stage in stages:
        if STAGES.get(type(stage).__name__) is not type(stage):
            raise DeployError(f"{stage!r} cannot be done at sites.", hint=f"they can do {', '.join(STAGES)}.")
    return [{"stage": type(stage).__name__, "values": _write_values(stage)} for stage in stages]


def _write_values(stage: Stage) -> dict[str, Any]:
    found = asdict(stage)  # type: ignore[call-overload]
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}


def read_stages(written: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    """Make the stages that were written down."""
    return tuple(STAGES[one["stage"]](**one["values"]) for one in written)


def count_noisy(stages: Sequence[Stage]) -> bool:
    """Return whether a site adds noise that was found for a number of messages: it must not send more."""
    return any(isinstance(stage, LocalNoise | NoiseInShares) for stage in stages)


def require_for_sites(settings: Settings, method: Algorithm) -> None:
    """Raise for a protection that holds in a simulation, and would be a lie where clients are at sites."""
    if settings.attack != "none":
        raise DeployError(f"Attacks are played in simulations. Sites are asked for none. Got {settings.attack!r}.")
    if "+dpsgd" in title_of(method):
        raise DeployError(
            "The noise of +dpsgd follows from the federation's seed, which everybody there knows, so it would protect "
            "no sample.",
            hint="protect messages instead: dp='local:epsilon=50', or dp='client:epsilon=8' with secure='masks'.",
        )
    if settings.secure.startswith("sums"):
        raise DeployError(
            "Without masks a server reads every encoded message by itself: at sites that hides nothing.",
            hint="use secure='masks'.",
        )
    if settings.secure.startswith("ckks"):
        raise DeployError("Encrypted sums are simulated: sites have no key together.", hint="use secure='masks'.")
    privacy = settings.privacy
    if isinstance(privacy, ClientPrivacy) and privacy.quantile is not None:
        raise DeployError(
            "A clip that adapts is simulated: sites cut their messages to a norm that does not change.",
            hint="give a number: clip=1.",
        )
    if privacy is not None and isinstance(settings.cohort, str):
        raise DeployError(
            f"Sites can tell who is asked, by the seed that all of them know, so nothing is gained by chance. Got "
            f"cohort={settings.cohort!r}.",
            hint="ask all clients in every round.",
        )


def digest_protection(stages: Sequence[Stage], *, masked: bool, neighbours: int = 0) -> str:
    """Return what the protection of messages is known by."""
    found = [write_stages(stages), masked, *([neighbours] if neighbours else [])]  # without: as sites know it already
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def write_forms(forms: Mapping[str, Form]) -> dict[str, Any]:
    """Write down what packed fields were."""
    return {
        name: {
            "shapes": {leaf: list(shape) for leaf, shape in form.shapes.items()},
            "dtype": str(form.dtype).removeprefix("torch."), "model": form.layout is not None,
            "order": list(form.order),
        }
        for name, form in forms.items()
    }  # fmt: skip


def read_forms(message: Message, written: Mapping[str, Any], layout: Layout, largest: int) -> dict[str, Form]:
    """Read what packed fields were; raise if one would need more than `largest` bytes once it is unpacked."""
    forms = {
        str(name): Form(
            {str(leaf): torch.Size(map(int, shape)) for leaf, shape in one["shapes"].items()}, DTYPES[one["dtype"]],
            layout if one["model"] else None, tuple(map(str, one["order"])),
        )
        for name, one in written.items()
    }  # fmt: skip
    for name, form in forms.items():
        if any(size < 0 for shape in form.shapes.values() for size in shape) or 8 * form.size > largest:
            raise message.refuse(f"{name} must have at most {largest:,} bytes once it is unpacked. It says {form.size}")
    return forms


def require_passed(message: Message, sent: Sent, stages: Sequence[Stage], place: Place) -> Sent:
    """Return what the server reads in what a site sent; raise RefusedError unless it has passed all stages."""
    names = sent.fields.keys() - ({WEIGHT} if any(isinstance(stage, Encode) for stage in stages) else set())
    undeclared = sorted(names - place.kinds.keys())
    if undeclared:
        raise message.refuse(f"it holds {', '.join(undeclared)}, which the method does not send")
    with message.guarding():
        read = read_through(stages, sent, place)
    for stage in stages:
        if isinstance(stage, Clip) and not any(isinstance(one, Encode) for one in stages):
            norms = joint_norms(sent.fields)
            if norms.ndim and bool((norms > stage.norm * (1 + SLACK)).any()):
                raise message.refuse(f"it must be cut to norm {stage.norm:g}. It has norm {float(norms.max()):g}")
    if any(stage.hides_weight for stage in stages) and sent.weight is not None:
        raise message.refuse("it must not tell a weight")
    return read
