"""Promises of privacy in words: `client:epsilon=4,delta=1e-5`, `client:noise=1,clip=adaptive`, `local:epsilon=8`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from atoll.kernel.errors import HyperparameterError, unknown
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.local_level import LocalPrivacy

KINDS: dict[str, type[ClientPrivacy | LocalPrivacy]] = {"client": ClientPrivacy, "local": LocalPrivacy}
FIRST_NORM = 0.1  # of a clip that adapts


def parse_privacy(words: str) -> ClientPrivacy | LocalPrivacy | None:
    """Parse a promise from words; None for `none`."""
    if words == "none":
        return None
    kind, _, rest = words.partition(":")
    if kind not in KINDS:
        raise unknown("kind of privacy", kind, [*KINDS, "none"])
    adapts = KINDS[kind] is ClientPrivacy
    known = {one.name for one in fields(KINDS[kind])} - {"quantile"} | ({"start"} if adapts else set())
    given: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        name, equals, value = pair.partition("=")
        name = "epsilon" if name == "eps" else name
        if name not in known:
            raise unknown("value of privacy", name, known)
        if not equals:
            raise HyperparameterError(f"Values of privacy must be written name=value. Got {pair!r}.")
        given[name] = value
    values: dict[str, Any] = {}
    clip, _, quantile = given.get("clip", "").partition(":")
    if adapts and clip == "adaptive":
        values["quantile"] = _read_number("clip=adaptive", quantile or "0.5")
        given["clip"] = given.pop("start", str(FIRST_NORM))
    elif "start" in given:
        raise HyperparameterError("The value start of privacy goes with clip=adaptive, which begins there.")
    values |= {name: value if name == "public" else _read_number(name, value) for name, value in given.items()}
    return KINDS[kind](**values)


def _read_number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise HyperparameterError(f"The value {name} of privacy must be a number. Got {value!r}.") from None
