"""Checksums of data and weights: equal for equal content, in whatever process and however it is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from xxhash import xxh3_128

from ..protocol.seeds import preserved_random_state, set_cpu_random_state
from ..split.quantized import beside_weights, inner_tensors

# Data is read in full up to these sizes, beyond them in rows at equal distances.
_MOST_BYTES, _MOST_ROWS = 256 * 2**20, 100_000
_STEP = 1000  # rows that are hashed at a time


def of_datasets(datasets: Sequence[Any], columns: Collection[str] | None = None) -> str:
    """Return a checksum of the rows of some datasets, of all columns or of those that are named."""
    checksum = xxh3_128()
    for data in datasets:
        checksum.update(f"{len(data)} ".encode() if hasattr(data, "__len__") else b"? ")
        if isinstance(data, Dataset):
            _add_table(checksum, data, columns, _MOST_BYTES // len(datasets))
        elif isinstance(data, (list, tuple)):
            every = max(1, len(data) * len(datasets) // _MOST_ROWS)
            for row in data[::every]:
                _add(checksum, row)
        else:
            checksum.update(type(data).__name__.encode())
            checksum.update(repeatable(partial(_ends, data)).encode())
    return checksum.hexdigest()


def of_weights(model: nn.Module) -> str:
    """Return a checksum of the frozen weights and buffers, and of the names and shapes of those that are trained."""
    unused = [
        f"{name}.original_module." for name, part in model.named_modules() if isinstance(part, ModulesToSaveWrapper)
    ]
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    checksum = xxh3_128()
    for name, tensor in sorted([*model.named_parameters(), *buffers]):
        if name.startswith(tuple(unused)):
            continue  # of the head before it was trained, which may be random
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}".encode())
        if not tensor.requires_grad:
            for part in inner_tensors(tensor):
                _add(checksum, part)
    for name, scale in sorted(beside_weights(model)):
        checksum.update(name.encode())
        _add(checksum, scale)
    return checksum.hexdigest()


def repeatable(make: Callable[[], Any]) -> str:
    """Return a checksum of what a function makes, or "random" if that differs from call to call."""
    found = set()
    with preserved_random_state():
        for _ in range(2):
            set_cpu_random_state(0)
            checksum = xxh3_128()
            try:
                _add(checksum, make())
            except Exception as error:  # training meets it, too, and says what to do about it
                _add(checksum, type(error).__name__)
            found.add(checksum.hexdigest())
    return found.pop() if len(found) == 1 else "random"


def _ends(data: Any) -> list[Any]:
    """Return the first and the last sample of data that is loaded sample by sample, which may take long or fail."""
    return [data[i] for i in sorted({0, len(data) - 1})] if len(data) else []


def _add_table(checksum: Any, data: Dataset, columns: Collection[str] | None, most_bytes: int) -> None:
    names = sorted(name for name in data.column_names if columns is None or name in columns)
    checksum.update(repr(names).encode())
    every = max(1, (data.data.nbytes * len(data) // max(1, data.data.num_rows)) // most_bytes)
    if every > 1:
        data = data.select(range(0, len(data), every))
    selected = data._indices is not None
    table: Any = data.with_format("arrow", columns=names) if selected else data.data.table.select(names)
    rows = np.arange(_STEP)
    for start in range(0, len(table), _STEP):
        part = table[start : start + _STEP] if selected else table.slice(start, _STEP)
        for name in names:
            # Taken by index, equal values have equal bytes, however the table is divided and where it is cut.
            column = _without_folders(part[name].take(pa.array(rows[: len(part)])))
            for chunk in column.chunks:
                checksum.update(pa.record_batch([chunk], [name]).serialize())


def _without_folders(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return files (images, sound) by their bytes, or without any by their names: their folder may be moved."""
    kind = column.type
    if not (pa.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}):
        return column
    content, path = (pc.struct_field(column, name) for name in ("bytes", "path"))
    name = pc.replace_substring_regex(path, pattern=r"^.*[/\\]", replacement="")
    return pa.chunked_array(pc.coalesce(content, name.cast(content.type)).chunks)


def _add(checksum: Any, value: Any) -> None:
    """Add a sample, a batch, or a part of one."""
    if isinstance(value, Tensor):
        checksum.update(f"{tuple(value.shape)} {value.dtype}".encode())
        checksum.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        checksum.update(f"{value.shape} {value.dtype}".encode())
        checksum.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, Mapping):
        for name in value:
            checksum.update(str(name).encode())
            _add(checksum, value[name])
    elif isinstance(value, (list, tuple)) and not (value and isinstance(value[0], Number)):
        checksum.update(f"[{len(value)}".encode())
        for item in value:
            _add(checksum, item)
    elif isinstance(value, (list, tuple, str, bytes, Number, type(None))):
        checksum.update(repr(value).encode())
    elif getattr(getattr(value, "dtype", None), "hasobject", False):  # whose bytes are addresses
        _add(checksum, value.tolist())
    elif hasattr(value, "tobytes"):  # an image
        checksum.update(value.tobytes())
    else:
        checksum.update(type(value).__name__.encode())
