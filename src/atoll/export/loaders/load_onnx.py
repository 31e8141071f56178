"""Loads the model of this folder; needs ONNX Runtime only.  model, classes = load();  model(array) -> probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime


def load(folder: Path | str = Path(__file__).parent) -> tuple[Callable[[Any], Any], list[str] | None]:
    """Return the model, and the names of its classes."""
    session = onnxruntime.InferenceSession(Path(folder) / "model.onnx", providers=["CPUExecutionProvider"])
    classes = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["output"]["classes"]
    return (lambda samples: session.run(None, {"samples": samples})[0]), classes
