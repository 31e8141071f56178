"""The formats of an exported model: each writes files, and loads them again as other programs will.

safetensors   weights.safetensors and program.pt2: the numbers, and what is computed with them
pt2           model.pt2: both in one file of torch.export
onnx          model.onnx: for ONNX Runtime and others
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from atoll.export.model import ClientModel, Rule, Weights
from atoll.kernel.errors import ModelError, first_line
from atoll.kernel.network import Variant

Run = Callable[[Tensor], Tensor]
LOADER = "load.py"
EXAMPLES = 2  # samples that a model is traced with; it then takes any number


@dataclass(frozen=True)
class Format:
    """A way to write a model: how it is written, and how what was written is loaded."""

    name: str
    write: Callable[[ClientModel, Path, bool], None]  # with `int8`
    load: Callable[[Path], Run]
    needs: str  # what a program needs that loads it
    shrinks: str  # what becomes of weights in 8 bits

    @property
    def loader(self) -> str:
        """The program that goes with the files."""
        return resources.files("atoll.export").joinpath("loaders", f"load_{self.name}.py").read_text()


class Function(nn.Module):
    """A rule as a module that holds no weights: they are given with the samples."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, weights: Weights, x: Tensor) -> Tensor:
        """Return what the rule answers with these weights."""
        return self.rule(weights, x)


def example_of(model: ClientModel) -> Tensor:
    """Return a few samples of zeros, for which the network is made ready: its copies cannot be made while traced."""
    model.rule.network.prepare(Variant(train=False))
    return model.sample.new_zeros((EXAMPLES, *model.sample.shape))


def trace(module: nn.Module, given: tuple[Any, ...], shapes: tuple[Any, ...]) -> ExportedProgram:
    """Return a module as a program of torch.export; raise ModelError if it cannot be one."""
    try:
        with quietly():
            return torch.export.export(module.eval(), given, dynamic_shapes=shapes)
    except Exception as error:  # a model may fail in any way
        raise ModelError(
            f"To be exported, a model must be one graph of tensor operations for any number of samples. This one is "
            f"not: {first_line(error)}",
            hint="replace what depends on values or on a fixed number of samples (`if`, `.item()`, a written-out "
            "batch size) by tensor operations such as torch.where.",
        ) from error


def program_of(model: ClientModel) -> ExportedProgram:
    """Return a model with its weights as a program of torch.export."""
    return trace(model, (example_of(model),), ({0: Dim.DYNAMIC},))


# -- safetensors -------------------------------------------------------------------------------------------------------
def write_safetensors(model: ClientModel, folder: Path, int8: bool) -> None:
    """Write the weights, and the program that takes them."""
    model = model.in_int8() if int8 else model
    weights = {name: leaf.contiguous() for name, leaf in sorted(model.weights.items())}  # programs count on the order
    still = {name: dict.fromkeys(range(leaf.ndim)) for name, leaf in weights.items()}
    program = trace(Function(model.rule), (weights, example_of(model)), (still, {0: Dim.DYNAMIC}))
    safetensors.torch.save_file(weights, folder / "weights.safetensors")
    save_program(program, folder / "program.pt2")


def load_safetensors(folder: Path) -> Run:
    """Load the program and its weights."""
    weights = dict(sorted(safetensors.torch.load_file(folder / "weights.safetensors").items()))
    program = torch.export.load(folder / "program.pt2").module()
    return lambda x: program(weights, x)


# -- pt2 ---------------------------------------------------------------------------------------------------------------
def write_pt2(model: ClientModel, folder: Path, int8: bool) -> None:
    """Write one file of torch.export."""
    save_program(program_of(model.in_int8() if int8 else model), folder / "model.pt2")


def load_pt2(folder: Path) -> Run:
    """Load the program."""
    return torch.export.load(folder / "model.pt2").module()


def save_program(program: ExportedProgram, path: Path) -> None:
    """Write a program without the samples that it was traced with."""
    program.example_inputs = None
    with quietly():
        torch.export.save(program, path)


# -- onnx --------------------------------------------------------------------------------------------------------------
def write_onnx(model: ClientModel, folder: Path, int8: bool) -> None:
    """Write a model of ONNX; in 8 bits, matrix products and convolutions of whole numbers."""
    _require_onnx()
    program, path = program_of(model), folder / "model.onnx"
    try:
        with quietly():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["samples"], output_names=["answers"]
            )
            assert made is not None
            made.save(path)
    except Exception as error:  # the exporter may fail in any way
        raise _explain(error, program) from error
    if int8:
        quantise_onnx(path)


def quantise_onnx(path: Path) -> None:
    """Replace a model by one whose matrix products and convolutions compute with 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = onnx.load(str(path))
    del whole.graph.value_info[:]  # shapes inside, which the exporter wrote and new operations contradict
    with quietly():
        quantize_dynamic(whole, str(path), weight_type=QuantType.QInt8)
    kinds = {node.op_type for node in onnx.load(str(path)).graph.node}
    if not kinds & {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "DequantizeLinear"}:
        raise ModelError(
            "In 8 bits, a model must have matrix products or convolutions with fixed weights. ONNX Runtime found none "
            f"among {', '.join(sorted(kinds))}.",
            hint="export it without `int8`, or with `format=safetensors`, which stores weights in 8 bits.",
        )


def load_onnx(folder: Path) -> Run:
    """Load a model into ONNX Runtime."""
    _require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"samples": x.numpy()})[0])


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"To write ONNX, onnx, onnxscript and onnxruntime must be installed. There is no {error.name}.",
            hint="pip install 'atoll[export]', or choose `format=safetensors`, which needs nothing more.",
        ) from error


def _explain(error: Exception, program: ExportedProgram) -> ModelError:
    """Say which operation ONNX does not know, and where the model uses it."""
    text = ""
    cause: BaseException | None = error
    while cause is not None:
        text += f"{cause}\n"
        cause = cause.__cause__ or cause.__context__
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", text)
    if missing is None:
        return ModelError(
            f"ONNX must be able to express the model. Its exporter failed: {first_line(error)}",
            hint="choose `format=safetensors` or `format=pt2`, which take everything that torch.export does.",
        )
    # What is missing may be a part that an operation of the model was taken apart into, with a similar name.
    short = missing[1].rpartition(".")[2].strip("_")
    users = [node for node in program.graph.nodes if node.op == "call_function" and short in str(node.target)]
    name = str(users[0].target).rpartition(".")[0] if users else missing[1]
    line = _own_line(users[0].meta.get("stack_trace") or "") if users else ""
    return ModelError(
        f"ONNX has no operation for {name}, which this model uses{line}.",
        hint="replace this layer by others, or choose `format=safetensors` or `format=pt2`, which take it as it is.",
    )


def _own_line(trace_text: str) -> str:
    """Return the last line of a stack that is not torch's own, as it is shown."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', trace_text)
    own = [one for one in lines if "/torch/" not in one[0] and "/atoll/kernel/" not in one[0]]
    if not own:
        return ""
    file, number, code = own[-1]
    return f" in line {number} of {Path(file).name}: `{code.strip()}`"


@contextmanager
def quietly() -> Iterator[None]:
    """Keep what exporters say about themselves to themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "root", "onnxscript", "onnx_ir")]
    loggers.append(logging.getLogger())
    before = [one.level for one in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for one, level in zip(loggers, before, strict=True):
                one.setLevel(level)


FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("safetensors", write_safetensors, load_safetensors, "PyTorch", "stored in 8 bits"),
        Format("pt2", write_pt2, load_pt2, "PyTorch", "stored in 8 bits"),
        Format("onnx", write_onnx, load_onnx, "ONNX Runtime and NumPy", "multiplied in 8 bits"),
    )
}
