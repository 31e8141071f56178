"""Loads the model of this folder; needs PyTorch only.  model, classes = load();  model(samples) -> probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def load(folder: Path | str = Path(__file__).parent) -> tuple[Callable[[Any], Any], list[str] | None]:
    """Return the model, and the names of its classes."""
    program = torch.export.load(Path(folder) / "model.pt2").module()
    classes = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["output"]["classes"]
    return program, classes
