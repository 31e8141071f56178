"""A user's data as tables, from any common form: frames, dicts of arrays, files, torch or Hugging Face data sets."""

from __future__ import annotations

import csv
import io
import re
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

SEPARATORS = (",", ";", "\t", "|")  # of equals, the first counts
LINES_TRIED = 200
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?([eE][+-]?\d+)?")

ONE_TABLE = "a pandas or polars frame, a dict of columns, a pair (x, y), a file or a data set of torch or Hugging Face"


@dataclass(frozen=True)
class Table:
    """Columns of one length. Those of a text file hold its cells, which are parsed for all files together."""

    where: str  # the client or file, for messages
    columns: Mapping[str, Values]
    lines: Sequence[int] | None = None  # of the text file, one per row

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def place(self, row: int) -> str:
        """Say where a row stands: lines of a text file count from 1, rows of everything else from 0."""
        return f"row {row} of {self.where}" if self.lines is None else f"line {self.lines[row]} of {self.where}"


def holds_tables(source: Any) -> bool:
    """Return whether each client has a table of its own: a file of a folder, a value of a dict, an item of a list."""
    if isinstance(source, str | Path):
        return Path(source).is_dir()
    if isinstance(source, Mapping):
        return not all(_is_column(values) for values in source.values())
    return isinstance(source, list)


def _is_column(values: Any) -> bool:
    series = hasattr(values, "to_numpy") and not hasattr(values, "columns")
    return series or isinstance(values, list | np.ndarray | torch.Tensor)


def tables_by_client(source: Any) -> dict[str, Table]:
    """Return the tables by client; see `holds_tables`."""
    if isinstance(source, str | Path) and not Path(source).is_file():
        pairs: list[tuple[Any, Any]] = [(path.stem, path) for path in list_files(Path(source))]
    elif isinstance(source, Mapping | list):
        pairs = [*(source.items() if isinstance(source, Mapping) else enumerate(source))]
    else:
        raise DataError(
            "`client` must name the column of clients where the data are one table. "
            f"Got {_kind_of(source)} and no `client`.",
            hint="pass client='hospital', or the clients apart: a folder with a file each, or a dict {client: data}.",
        )
    if not pairs:
        raise DataError(f"Data must have at least 1 client. Got an empty {_kind_of(source)}.")
    twice = _find_repeated(str(name) for name, _ in pairs)
    if twice is not None:
        raise DataError(f"Every client must have a name of its own. Got {twice!r} more than once.")
    return {str(name): table_of(data, f"client {str(name)!r}") for name, data in pairs}


def table_of(data: Any, where: str = "the table") -> Table:
    """Return the data of one client, or of all, as a table; a pair is the columns `x` and `y`."""
    if isinstance(data, str | Path):
        return _read_file(Path(data))
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data
        return _make_table(where, {"x": x} if y is None else {"x": x, "y": y})
    if isinstance(data, Mapping):
        return _make_table(where, data)
    if isinstance(data, torch.utils.data.Dataset):
        return _read_torch(where, data)
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return _read_hugging_face(where, data)
    if hasattr(data, "to_numpy") and hasattr(data, "columns"):
        return _read_frame(where, data.columns, data)
    raise DataError(f"Data must be {ONE_TABLE}. Got {_kind_of(data)} for {where}.")


def _kind_of(data: Any) -> str:
    if isinstance(data, str | Path):
        return "folder" if Path(data).is_dir() else "file"
    return type(data).__name__


def _find_repeated(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _make_table(where: str, columns: Mapping[Any, Any]) -> Table:
    table = Table(where, {str(name): _to_array(values) for name, values in columns.items()})
    if any(len(values) != len(table) for values in table.columns.values()):
        sizes = ", ".join(f"{len(values)} of `{name}`" for name, values in table.columns.items())
        raise DataError(f"Columns of {where} must be of the same length. Got {sizes}.")
    return table


def _to_array(values: Any) -> Values:
    """Convert to an array; anything but numbers of one shape becomes an array of objects."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim:
        return values
    if hasattr(values, "to_numpy"):
        return _to_array(values.to_numpy())
    if isinstance(values, list | tuple):
        array = _try_numbers(values)
        return as_objects(values) if array is None else array
    raise DataError(f"A column must be an array, a tensor or a list. Got {_kind_of(values)}.")


def _try_numbers(values: Sequence[Any]) -> Values | None:
    """Convert numbers and equally long lists of them; return None for everything else."""
    if any(isinstance(value, Image) for value in values[:1]):  # which NumPy would take for an array of another form
        return None
    try:
        array = np.array(values)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "biuf" else None


def as_objects(values: Sequence[Any]) -> Values:
    """Return any values as an array of objects with one axis."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # an assignment of all at once would look into lists
        array[index] = value
    return array


# -- data in memory ----------------------------------------------------------------------------------------------------


def _read_frame(where: str, names: Iterable[Any], frame: Any) -> Table:
    """Read a frame of pandas, polars or Arrow; none of them is imported."""
    names = list(names)
    _require_distinct(where, names)
    return _make_table(where, {name: frame[name].to_numpy() for name in names})


def _require_distinct(where: str, names: Iterable[Any]) -> None:
    twice = _find_repeated(map(str, names))
    if twice is not None:
        raise DataError(f"Columns of {where} must have different names. Got {twice!r} more than once.")


def _read_torch(where: str, samples: Any) -> Table:
    if not hasattr(samples, "__len__"):
        raise DataError(
            f"A torch Dataset must have a length and items (x, y). {where} is without a length.",
            hint="collect its samples first: list(dataset).",
        )
    pairs = [samples[index] for index in range(len(samples))]
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"A torch Dataset must give pairs (x, y). Got {_kind_of(pair)} in row {index} of {where}.")
    x, y = ([_to_numpy(value) for value in values] for values in zip(*pairs, strict=True)) if pairs else ([], [])
    return _make_table(where, {"x": x, "y": y})


def _to_numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _read_hugging_face(where: str, dataset: Any) -> Table:
    dataset = dataset.with_format(None)
    columns = {name: dataset[name][:] for name in dataset.column_names}
    for name, feature in dataset.features.items():
        if hasattr(feature, "int2str"):  # numbers that have names; Hugging Face writes -1 for a label it does not know
            columns[name] = [None if label in (None, -1) else feature.int2str(label) for label in columns[name]]
    return _make_table(where, columns)


# -- files -------------------------------------------------------------------------------------------------------------


def list_files(folder: Path) -> list[Path]:
    """List the files of a folder, one per client and all of one kind."""
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


def _read_file(path: Path) -> Table:
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


def _read_csv(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        text = file.read()
    separator = find_separator(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
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
    if separator != ",":
        columns = {name: with_points(column) for name, column in columns.items()}
    return Table(path.name, columns, [line for line, _ in rows])


def find_separator(text: str) -> str:
    """Return what separates the cells of a table of text: the separator that cuts all lines into equally many.

    Of several, the one that gives most cells counts, and a comma where none does.
    """
    head = "".join(text.splitlines(keepends=True)[:LINES_TRIED])
    cells = {}
    for separator in SEPARATORS:
        try:
            sizes = {
                len(row) for row in csv.reader(io.StringIO(head, newline=""), delimiter=separator, strict=True) if row
            }
        except csv.Error:
            sizes = set()
        cells[separator] = sizes.pop() if len(sizes) == 1 else 0
    best = max(cells, key=lambda separator: cells[separator])
    return best if cells[best] > 1 else ","


def with_points(cells: Values) -> Values:
    """Return a column with decimal points where all its numbers have decimal commas, as 1.234,5; else as it is."""
    if not has_decimal_commas(cells):
        return cells
    return as_objects([cell.replace(".", "").replace(",", ".") for cell in cells])


def has_decimal_commas(cells: Iterable[str]) -> bool:
    """Return whether all cells that are filled are numbers with decimal commas, or could be, and some are."""
    filled = [cell for cell in cells if cell]
    return any("," in cell for cell in filled) and all(DECIMAL_COMMA.fullmatch(cell) for cell in filled)


def _read_parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"Parquet files are read with pyarrow, which is not installed. Got {path.name}.",
            hint="pip install 'atoll[frames]'.",
        ) from None
    table = parquet.read_table(path)
    return _read_frame(path.name, table.column_names, table)


def _read_npz(path: Path) -> Table:
    with open_arrays(path) as arrays:
        return _make_table(path.name, dict(arrays))


READERS: dict[str, Callable[[Path], Table]] = {".csv": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}
