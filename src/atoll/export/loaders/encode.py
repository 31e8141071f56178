"""Turns rows of a table into samples, as preprocessing.json says; needs nothing more than Python.

rows = csv.DictReader(open("new.csv"));  samples = torch.tensor(encode(rows))
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def encode(rows: Iterable[Mapping[str, Any]], folder: Path | str = Path(__file__).parent) -> list[list[float]]:
    """Return a list of numbers for every row."""
    features = json.loads((Path(folder) / "preprocessing.json").read_text(encoding="utf-8"))["inputs"]["features"]
    return [[number for one in features for number in numbers(one, row[one["name"]])] for row in rows]


def numbers(feature: Mapping[str, Any], value: Any) -> list[float]:
    """Return the numbers of one column's value."""
    if feature["type"] == "category":
        if str(value) not in feature["categories"]:
            raise ValueError(f"{feature['name']} must be one of {feature['categories']}. Got {value!r}.")
        return [float(str(value) == one) for one in feature["categories"]]
    return [float({"true": 1, "false": 0}.get(str(value).lower(), value))]
