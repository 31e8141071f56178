"""An assignment as bytes: what a client far away needs to do its part of a job, and nothing that could be executed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from atoll.compose import from_record, to_record
from atoll.kernel.errors import PayloadError
from atoll.kernel.job import Assignment, Finish, Local, Phase, Prepare
from atoll.kernel.params import Layout
from atoll.runtime import serialise

PHASES: dict[str, Any] = {one.__name__.lower(): one for one in (Local, Prepare, Finish)}


def to_bytes(assignment: Assignment) -> bytes:
    """Write an assignment as one message: safetensors and JSON."""
    phase = type(assignment.phase).__name__.lower()
    if PHASES.get(phase) is not type(assignment.phase):
        raise PayloadError(f"Only {', '.join(PHASES)} are sent to clients. Got {assignment.phase!r}.")
    about = {
        "phase": phase,
        "values": asdict(assignment.phase),  # type: ignore[call-overload]
        "method": to_record(assignment.method),
        "round": assignment.round,
    }
    tree = {
        "broadcast": assignment.broadcast,
        "unicast": assignment.unicast,
        "clients": torch.from_numpy(assignment.clients),
    }
    return serialise.to_bytes(tree, about=json.dumps(about))


def from_bytes(message: bytes, layout: Layout, device: torch.device | str = "cpu") -> Assignment:
    """Read an assignment again; raise PayloadError for anything that is not one."""
    words = serialise.read_about(message)
    try:
        about = json.loads(words)
        phase: Phase = PHASES[about["phase"]](**about["values"])
        method = from_record(about["method"])  # first: its file defines the records that are read next
        tree = serialise.from_bytes(message, layout, device)
        clients = tree["clients"].cpu().numpy()
        return Assignment(phase, method, tree["broadcast"], tree["unicast"], clients, int(about["round"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PayloadError(
            f"An assignment must say its phase, method, round and clients. It does not: {error}"
        ) from error
