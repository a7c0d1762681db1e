"""An archive of finished runs: one small file that stands for their folders and can be kept in a repository."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import pyarrow
from filelock import FileLock
from pyarrow import parquet

from .._io import finite, write_atomically
from .folders import difference
from .grid import Run, Summary

_COLUMNS = ("run", "task", "options", "summary")  # all texts; the last two are JSON


class _Entry(NamedTuple):
    task: str
    options: dict[str, Any]
    summary: dict[str, Any]


class Archive:
    """A Parquet file with a row for each finished run: its id, task, options and summary.

    Several comparisons may add to it at the same time. A run that is in it stays as it is. Absolute paths are cut to
    their last part: they tell of a machine.
    """

    def __init__(self, path: Path):
        self.path = path
        self._version: tuple[int, ...] | None = None  # of the file that was read last
        self._known: dict[str, _Entry] = {}

    def summary(self, run: Run) -> Summary | None:
        """Return a run's summary, or None if it is not here. Raise ValueError if it is another run's."""
        entry = self._entries().get(run.id)
        if entry is None:
            return None
        expected = {"task": run.task, **_public(run.options)}
        differs = difference(expected, {"task": entry.task, **entry.options}, entry.summary)
        if differs is not None:
            raise ValueError(f"{self.path} holds {run.id} with {differs} as the spec says. Give another --archive.")
        return entry.summary

    def add(self, finished: Iterable[tuple[Run, Summary]]) -> None:
        """Add the runs that are not here. The file is replaced as a whole, by one process at a time."""
        given = {run.id: _Entry(run.task, _public(run.options), _public(summary)) for run, summary in finished}
        if given.keys() <= self._entries().keys():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            entries = given | self._entries()  # as another process may have left them
            rows = [(name, e.task, _text(e.options), _text(e.summary)) for name, e in sorted(entries.items())]
            columns = [pyarrow.array(column, pyarrow.string()) for column in zip(*rows, strict=True)]
            buffer = io.BytesIO()
            parquet.write_table(
                pyarrow.table(columns, names=_COLUMNS),
                buffer,
                compression="zstd",
                compression_level=12,
                use_dictionary=False,  # every text occurs once
                write_statistics=False,  # which would repeat the longest of them
            )
            write_atomically(self.path, buffer.getvalue())

    def _entries(self) -> dict[str, _Entry]:
        """Return what the file holds now, by the ids of the runs; nothing if it is not there yet."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return {}
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if version != self._version:
            self._known, self._version = self._read(), version
        return self._known

    def _read(self) -> dict[str, _Entry]:
        try:
            try:
                table = parquet.read_table(pyarrow.BufferReader(self.path.read_bytes()))
            except pyarrow.ArrowException as error:
                raise ValueError("it is not a Parquet file, or a damaged one") from error
            if table.column_names != list(_COLUMNS):
                raise ValueError(f"its columns are {', '.join(table.column_names)}, not {', '.join(_COLUMNS)}")
            rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
            entries = {run: _Entry(task, json.loads(options), json.loads(text)) for run, task, options, text in rows}
            for run, entry in entries.items():
                if not isinstance(entry.options, dict) or not isinstance(entry.summary.get("scores"), dict):
                    raise ValueError(f"{run} has no options or no scores")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is not an archive of runs: {error}. Give another --archive, or restore this one."
            ) from error
        return entries


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _public(content: Any) -> Any:
    """Return content as JSON has it, with the last part of absolute paths."""
    return _cut_paths(json.loads(_text(finite(content))))


def _cut_paths(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _cut_paths(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_cut_paths(value) for value in content]
    if isinstance(content, str) and (content.startswith(("/", "~")) or PureWindowsPath(content).is_absolute()):
        return PureWindowsPath(content).name or content
    return content
