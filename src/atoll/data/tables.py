"""A user's data as tables, whatever they come in: frames, dicts of arrays, files, torch or Hugging Face data sets."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from atoll.data.files import open_arrays
from atoll.kernel.errors import DataError

Values = NDArray[Any]

ONE_TABLE = "a pandas or polars frame, a dict of columns, a pair (x, y), a file or a data set of torch or Hugging Face"


@dataclass(frozen=True)
class Table:
    """Columns of one length. Those of a text file hold its cells; what these mean is found from all files together."""

    where: str  # the client or file, for messages
    columns: Mapping[str, Values]
    lines: Sequence[int] | None = None  # of the text file, one per row

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def place(self, row: int) -> str:
        """Where a row stands: lines of a text file count from 1, rows of everything else from 0."""
        return f"row {row} of {self.where}" if self.lines is None else f"line {self.lines[row]} of {self.where}"


def holds_tables(source: Any) -> bool:
    """Whether the clients are apart, as the files of a folder, the values of a dict or the items of a list."""
    if isinstance(source, str | Path):
        return Path(source).is_dir()
    if isinstance(source, Mapping):
        return not all(_is_column(values) for values in source.values())
    return isinstance(source, list)


def _is_column(values: Any) -> bool:
    series = hasattr(values, "to_numpy") and not hasattr(values, "columns")
    return series or isinstance(values, list | np.ndarray | torch.Tensor)


def one_per_client(source: Any) -> dict[str, Table]:
    """The tables by client; see `holds_tables`."""
    if isinstance(source, str | Path) and not Path(source).is_file():
        pairs: list[tuple[Any, Any]] = [(path.stem, path) for path in _files(Path(source))]
    elif isinstance(source, Mapping | list):
        pairs = [*(source.items() if isinstance(source, Mapping) else enumerate(source))]
    else:
        raise DataError(
            "`client` must name the column that says whose a row is, where the data are one table. "
            f"Got {_kind_of(source)} and no `client`.",
            hint="pass client='hospital', or the clients apart: a folder with a file each, or a dict {client: data}.",
        )
    if not pairs:
        raise DataError(f"Data must have at least 1 client. Got an empty {_kind_of(source)}.")
    twice = _repeated(str(name) for name, _ in pairs)
    if twice is not None:
        raise DataError(f"Every client must have a name of its own. Got {twice!r} more than once.")
    return {str(name): table_of(data, f"client {str(name)!r}") for name, data in pairs}


def table_of(data: Any, where: str = "the table") -> Table:
    """One client's data, or everybody's in one, as a table. A pair is the columns `x` and `y`."""
    if isinstance(data, str | Path):
        return _file(Path(data))
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data
        return _table(where, {"x": x} if y is None else {"x": x, "y": y})
    if isinstance(data, Mapping):
        return _table(where, data)
    if isinstance(data, torch.utils.data.Dataset):
        return _torch_table(where, data)
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return _hugging_face_table(where, data)
    if hasattr(data, "to_numpy") and hasattr(data, "columns"):
        return _frame_table(where, data.columns, data)
    raise DataError(f"Data must be {ONE_TABLE}. Got {_kind_of(data)} for {where}.")


def _kind_of(data: Any) -> str:
    if isinstance(data, str | Path):
        return "folder" if Path(data).is_dir() else "file"
    return type(data).__name__


def _repeated(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _table(where: str, columns: Mapping[Any, Any]) -> Table:
    table = Table(where, {str(name): _array(values) for name, values in columns.items()})
    if any(len(values) != len(table) for values in table.columns.values()):
        sizes = ", ".join(f"{len(values)} of `{name}`" for name, values in table.columns.items())
        raise DataError(f"Columns of {where} must be of the same length. Got {sizes}.")
    return table


def _array(values: Any) -> Values:
    """As an array; what is not all numbers of one shape as an array of objects."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim:
        return values
    if hasattr(values, "to_numpy"):
        return _array(values.to_numpy())
    if isinstance(values, list | tuple):
        array = _numbers(values)
        return as_objects(values) if array is None else array
    raise DataError(f"A column must be an array, a tensor or a list. Got {_kind_of(values)}.")


def _numbers(values: Sequence[Any]) -> Values | None:
    """Numbers and equally long lists of them; None for everything else."""
    if any(isinstance(value, Image) for value in values[:1]):  # which NumPy would take for an array of another form
        return None
    try:
        array = np.array(values)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "biuf" else None


def as_objects(values: Sequence[Any]) -> Values:
    """Any values as an array of objects with one axis."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # an assignment of all at once would look into lists
        array[index] = value
    return array


# -- data in memory ----------------------------------------------------------------------------------------------------


def _frame_table(where: str, names: Iterable[Any], frame: Any) -> Table:
    """Of pandas, polars and Arrow, none of which is imported."""
    names = list(names)
    _require_distinct(where, names)
    return _table(where, {name: frame[name].to_numpy() for name in names})


def _require_distinct(where: str, names: Iterable[Any]) -> None:
    twice = _repeated(map(str, names))
    if twice is not None:
        raise DataError(f"Columns of {where} must have different names. Got {twice!r} more than once.")


def _torch_table(where: str, samples: Any) -> Table:
    if not hasattr(samples, "__len__"):
        raise DataError(
            f"A torch Dataset must have a length and items (x, y). {where} is without a length.",
            hint="collect its samples first: list(dataset).",
        )
    pairs = [samples[index] for index in range(len(samples))]
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"A torch Dataset must give pairs (x, y). Got {_kind_of(pair)} in row {index} of {where}.")
    x, y = ([_plain(value) for value in values] for values in zip(*pairs, strict=True)) if pairs else ([], [])
    return _table(where, {"x": x, "y": y})


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _hugging_face_table(where: str, dataset: Any) -> Table:
    dataset = dataset.with_format(None)
    columns = {name: dataset[name][:] for name in dataset.column_names}
    for name, feature in dataset.features.items():
        if hasattr(feature, "int2str"):  # numbers that have names; Hugging Face writes -1 for a label it does not know
            columns[name] = [None if label in (None, -1) else feature.int2str(label) for label in columns[name]]
    return _table(where, columns)


# -- files -------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    """The files of a folder, one per client and all of one kind."""
    if not folder.is_dir():
        raise DataError(f"Data must be in a folder or file that exists. There is no {folder}.")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        if path.suffix.lower() not in READERS or path.is_dir():
            raise DataError(
                f"A folder must hold one {', '.join(READERS)} file per client and nothing else. "
                f"{folder} also holds {path.name}.",
                hint="move it elsewhere.",
            )
    kinds = {path.suffix.lower(): path.name for path in paths}
    if len(kinds) > 1:
        raise DataError(f"The files of a folder must be of one kind. Got {' and '.join(kinds.values())} in {folder}.")
    return paths


def _file(path: Path) -> Table:
    if path.suffix.lower() not in READERS:
        raise DataError(f"A file must end in {', '.join(READERS)}. Got {path.name}.")
    try:
        return READERS[path.suffix.lower()](path)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text. {error}.", hint="save it as UTF-8.") from error
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} could not be read: {error}") from error


def _csv(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    if not numbered:
        raise DataError(f"A CSV file must begin with the names of its columns. {path.name} is empty.")
    (_, header), *rows = numbered
    _require_distinct(path.name, header)
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"Every line must have as many cells as the first. Line {line} of {path.name} has {len(row)}, "
                f"the first {len(header)}.",
                hint="cells are separated by commas; put one that holds a comma between double quotes.",
            )
    cells = np.array([row for _, row in rows], dtype=object).reshape(len(rows), len(header))
    columns = {name: cells[:, column] for column, name in enumerate(header)}
    return Table(path.name, columns, [line for line, _ in rows])


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"Parquet files are read with pyarrow, which is not installed. Got {path.name}.",
            hint="pip install 'atoll[frames]'.",
        ) from None
    table = parquet.read_table(path)
    return _frame_table(path.name, table.column_names, table)


def _npz(path: Path) -> Table:
    with open_arrays(path) as arrays:
        return _table(path.name, dict(arrays))


READERS: dict[str, Callable[[Path], Table]] = {".csv": _csv, ".parquet": _parquet, ".npz": _npz}
