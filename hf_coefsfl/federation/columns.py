"""Reading one column of a dataset without its rows: labels, tokens, the headers of images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Image
from numpy.typing import NDArray

_CHUNK = 10_000  # rows that are read together
_TOKENS = "input_ids"


@dataclass(frozen=True)
class Values:
    """The entries of some rows, one after the other.

    Attributes:
        flat: the entries; of strings and the like only the first.
        rows: the row of each entry.
        widths: the entries of each row; None: a row is one entry, not a list.
        missing: the first row with an empty entry; then there are no others here.
    """

    flat: NDArray[Any]
    rows: NDArray[np.int64]
    widths: NDArray[np.int64] | None = None
    missing: int | None = None


def column_names(data: Any) -> list[str]:
    """Return the columns that can be read by themselves: those of a `datasets.Dataset` or of a list of dicts."""
    if hasattr(data, "column_names") and hasattr(data, "select_columns") and hasattr(data, "__len__"):
        return list(data.column_names)
    listed = isinstance(data, (list, tuple)) and len(data) > 0 and isinstance(data[0], Mapping)
    return list(data[0]) if listed else []


def _single(value: Any) -> pa.Array | None:
    """Return a column of one entry; None for what Arrow does not take, which a batch may show."""
    try:
        return pa.array([value])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def chunks(data: Any, name: str) -> Iterator[tuple[int, Values]]:
    """Yield the entries of a column, with the number of the first row; nothing for what is not numbers or strings."""
    if isinstance(data, (list, tuple)):
        for start in range(0, len(data), _CHUNK):
            rows = [_plain(row.get(name)) for row in data[start : start + _CHUNK]]
            try:
                arrays = {start: pa.array(rows)}
            except (pa.ArrowInvalid, pa.ArrowTypeError):  # of several types
                arrays = {start + i: array for i, value in enumerate(rows) if (array := _single(value)) is not None}
            yield from _known(arrays)
        return
    # The table itself is read a hundred times faster than a dataset, but does not know of selected rows.
    column = data.data.column(name) if getattr(data, "_indices", True) is None else None
    if column is None:
        selected = data.select_columns([name]).with_format("arrow")  # without the user's format or transform
    for start in range(0, len(data), _CHUNK):
        part = selected[start : start + _CHUNK][name] if column is None else column[start : start + _CHUNK]
        yield from _known({start: part.combine_chunks()})


def row_lengths(data: Any) -> NDArray[np.int64]:
    """Return how many tokens each row has."""
    names = column_names(data)
    read = [values for _, values in chunks(data, _TOKENS)] if _TOKENS in names else []
    widths = [part.widths for part in read if part.missing is None and part.widths is not None]
    if not widths or sum(map(len, widths)) != len(data):
        raise ValueError(
            f"train_sampling_strategy='group_by_length' needs a list of tokens in each row, in a column {_TOKENS!r}. "
            f"The training data has {', '.join(names) or 'no columns to read'}."
        )
    return np.concatenate(widths)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _known(arrays: Mapping[int, Any]) -> Iterator[tuple[int, Values]]:
    found = ((start, _values(array)) for start, array in arrays.items())
    return ((start, values) for start, values in found if values is not None)


def _values(array: Any) -> Values | None:
    """Return the entries of an array, or of an array of lists; None: it holds something else."""
    rows, widths = np.arange(len(array)), None
    for nested in (False, True):
        if array.null_count:
            empty = np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False))[0]
            return Values(np.empty(0), rows[:0], widths, int(rows[empty]))
        if nested or not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            break
        widths = pc.list_value_length(array).to_numpy().astype(np.int64)
        rows, array = np.repeat(rows, widths), pc.list_flatten(array)
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return Values(array.to_numpy(zero_copy_only=False), rows, widths)
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return None
    first = np.empty(min(len(array), 1), dtype=object)  # strings, dates: one is enough to say so
    first[:] = array[:1].to_pylist()
    return Values(first, rows[:1], widths)


def unreadable_image(data: Any, name: str) -> tuple[int, Exception] | None:
    """Return the first row whose image is missing or has no header of an image; pixels are not decoded."""
    import PIL.Image

    stored = data.select_columns([name]).cast_column(name, Image(decode=False)).with_format("arrow")
    for start in range(0, len(data), _CHUNK):
        for row, image in enumerate(stored[start : start + _CHUNK][name], start):
            try:
                content = image["bytes"]
                source: Any = io.BytesIO(content.as_buffer()) if content.is_valid else image["path"].as_py()
                PIL.Image.open(source).close()
            except Exception as error:
                return row, error
    return None
