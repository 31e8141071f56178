"""Loads the model of this folder; needs PyTorch only.  model, classes = load();  model(samples) -> probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KINDS = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I8": torch.int8, "BOOL": torch.bool}


def load(folder: Path | str = Path(__file__).parent) -> tuple[Callable[[Any], Any], list[str] | None]:
    """Return the model, and the names of its classes."""
    data = bytearray((Path(folder) / "weights.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    listed = {name: one for name, one in json.loads(data[8:start]).items() if name != "__metadata__"}
    weights = {}
    for name, one in sorted(listed.items()):
        first, last = (start + place for place in one["data_offsets"])
        weights[name] = torch.frombuffer(data[first:last], dtype=KINDS[one["dtype"]]).reshape(one["shape"])
    program = torch.export.load(Path(folder) / "program.pt2").module()
    classes = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["output"]["classes"]
    return (lambda samples: program(weights, samples)), classes
