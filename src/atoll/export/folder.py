"""A folder with one client's model: its files, what was measured of them, and a manifest that says what it is.

manifest.json        method, client, score on validation, classes, licence of the data, checksums
preprocessing.json   columns, categories, mean and spread: the model scales by itself
load.py              a loader that knows nothing of Atoll
encode.py            of tables: rows of text to numbers
weights.safetensors and program.pt2, or model.pt2, or model.onnx
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.data.preprocessing import Preprocessing
from atoll.export.formats import FORMATS, LOADER, Format, Run
from atoll.export.model import ClientModel, number_samples
from atoll.kernel.errors import ModelError, RunError, unknown
from atoll.metrics.measures import Measure, take_figure
from atoll.runtime.files import require_no_link

FORM = "atoll-model-1"  # what a manifest says it is
MANIFEST = "manifest.json"
TOLERANCE = 1e-4  # by which answers of the files may differ from those of the model
TIMES = 20  # answers to one sample that are timed
MOST = 256  # samples that are compared


@dataclass(frozen=True)
class Measured:
    """What was measured of the files of a model."""

    bytes: int
    milliseconds: float  # for one sample, the median of some
    score: float | None  # on the client's validation samples; None without any
    difference: float  # of its answers from the model's, at most, on samples of the client


@dataclass(frozen=True, eq=False)
class Exported:
    """A model that was written: where, and what was measured; in 8 bits, also `before`."""

    client: str
    folder: Path
    manifest: Mapping[str, Any]
    made: Measured
    before: Measured | None = None

    @property
    def loses(self) -> bool:
        """Whether 8 bits made the score worse."""
        if self.before is None or self.before.score is None or self.made.score is None:
            return False
        sign = 1 if self.manifest["score"]["higher_is_better"] else -1
        return sign * (self.made.score - self.before.score) < -1e-9


@dataclass(frozen=True, eq=False)
class WrittenModel:
    """A model that was read from its folder: raw samples in, probabilities or numbers out."""

    run: Run
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    shape: tuple[int, ...]  # of a sample
    kind: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> WrittenModel:
        """Read the model of a folder; raise ModelError if its files are not those of its manifest.

        A program of torch.export is loaded: read folders of your own, or of people whom you trust.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if {name: _digest(folder / name) for name in manifest["files"]} != manifest["files"]:
                raise ModelError(f"The files of a model must be those of its manifest. Those in {folder} have changed.")
            (_, *shape), classes = manifest["input"]["shape"], manifest["output"]["classes"]
            kind = getattr(torch, manifest["input"]["type"])
            found = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
            run = find_format(manifest["format"]).load(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder} must hold a model that was exported. It cannot be read: {error}.") from error
        return cls(run, Preprocessing.of_json(found), None if classes is None else tuple(classes), tuple(shape), kind)

    @torch.no_grad()
    def answer(self, raw: Any) -> Tensor:
        """Return the probabilities of the classes for raw samples, or the numbers that are predicted."""
        return self.run(number_samples(self.preprocessing, raw, self.shape, self.kind))


@dataclass(frozen=True, eq=False)
class Judging:
    """The samples of a client that its files are tried on: some to compare answers, validation samples to score."""

    measure: Measure
    some: Tensor
    x: Tensor
    y: Tensor

    def try_files(self, model: ClientModel, folder: Path, run: Run) -> Measured:
        """Measure what was written to a folder."""
        with torch.no_grad():
            difference = float((run(self.some) - model.eval()(self.some)).abs().max())
            one, seconds = self.some[:1], []
            for _ in range(TIMES):
                began = time.perf_counter()
                run(one)
                seconds.append(time.perf_counter() - began)
            score = self.score(run(self.x), classes=model.rule.classes) if len(self.x) else None
        size = sum(file.stat().st_size for file in folder.iterdir())
        return Measured(size, 1000 * statistics.median(seconds), score, difference)

    def score(self, answers: Tensor, *, classes: bool) -> float | None:
        """Return the score of answers to the validation samples; None where it does not exist."""
        tiny = torch.finfo(answers.dtype).tiny
        outputs = answers.clamp(min=tiny).log() if classes else answers
        if self.measure.figure is None or self.measure.keep is None:
            assert self.measure.per_sample is not None
            found = float(self.measure.per_sample(outputs, self.y).double().mean())
        else:
            targets = self.y.reshape(len(self.y), -1)
            kept = self.measure.keep(outputs, targets).double().numpy()
            found = take_figure(self.measure.figure, kept, targets.double().numpy())
        return None if math.isnan(found) else found


def find_format(name: str) -> Format:
    """Return a format by its name."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]


def export_model(
    model: ClientModel, folder: Path, form: Format, judging: Judging, facts: Mapping[str, Any], *, int8: bool = False
) -> Exported:
    """Write a model, load it again and try it; return what was measured.

    Raises ModelError if the files answer differently than the model does.
    """
    before = None
    with replacing_folder(folder) as scratch:
        if int8:
            with tempfile.TemporaryDirectory() as apart:
                before = _write(model, Path(apart), form, judging, int8=False)
        made = _write(model, scratch, form, judging, int8=int8)
        if made.difference > TOLERANCE and not int8:
            raise ModelError(
                f"What is written as {form.name} must answer as the model does, to {TOLERANCE:g}. On the client's own "
                f"samples it differs by {made.difference:g}.",
                hint="choose another `format`, and report the model.",
            )
        written = {file.name: _digest(file) for file in sorted(scratch.iterdir())}
        names = [LOADER] + (["encode.py"] if model.preprocessing.schema.array is None else [])
        loaders = resources.files("atoll.export").joinpath("loaders")
        texts = [form.loader, loaders.joinpath("encode.py").read_text(encoding="utf-8")]
        for name, text in zip(names, texts, strict=False):
            (scratch / name).write_text(text, encoding="utf-8")
        _write_json(scratch / "preprocessing.json", model.preprocessing.as_json())
        manifest = _describe(model, form, judging, facts, made, before, written)
        _write_json(scratch / MANIFEST, manifest)
    return Exported(str(facts["client"]["name"]), folder, manifest, made, before)


def _write(model: ClientModel, folder: Path, form: Format, judging: Judging, *, int8: bool) -> Measured:
    form.write(model, folder, int8)
    return judging.try_files(model, folder, form.load(folder))


def _describe(
    model: ClientModel, form: Format, judging: Judging, facts: Mapping[str, Any], made: Measured,
    before: Measured | None, files: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    kind = str(model.sample.dtype).removeprefix("torch.")
    score = {**judging.measure.facts, "split": "validation", "samples": len(judging.x), "value": made.score}
    return {
        "form": FORM,
        "format": form.name,
        "needs": form.needs,
        **facts,
        "model": {"kind": model.kind, "numbers": sum(leaf.numel() for leaf in model.weights.values())},
        "input": {
            "shape": ["samples", *model.sample.shape], "type": kind,
            "columns": list(model.preprocessing.schema.columns), "scaled": "by the model",
        },
        "output": {
            "is": "probabilities" if model.rule.classes else "numbers",
            "classes": None if model.classes is None else list(model.classes),
        },
        "score": score,
        "measured": asdict(made),
        **({} if before is None else {"int8": {"weights": form.shrinks, "before": asdict(before)}}),
        "files": files,
    }  # fmt: skip


def _digest(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of another one once it is full: nobody ever sees half a model.

    Raises RunError where there is a folder that holds anything else than a model.
    """
    require_no_link(folder)
    if folder.exists() and (not folder.is_dir() or ([*folder.iterdir()] and not (folder / MANIFEST).is_file())):
        raise RunError(
            f"A model must be written to a folder of its own. {folder} holds something else.",
            hint="choose another folder: `out`.",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise RunError(f"A model's folder must be one that can be written. {folder}: {error.strerror}.") from error
    try:
        scratch.chmod(0o755)
        yield scratch
        if folder.exists():
            shutil.rmtree(folder)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
