"""A comparison on disk: a folder for each run, held by whoever works on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._io import to_json, write_atomically
from ..tasks.run import SUMMARY_NAME
from .grid import Run, Summary

try:
    import fcntl
except ImportError:  # Windows: runs are not held, so a second comparison in the same folder would repeat them
    fcntl = None  # type: ignore[assignment]

OPTIONS, LOG, LOCK = "options.json", "log.txt", "lock"


class RunFolder:
    """The folder of one run, among those of others."""

    def __init__(self, runs: Path, run: Run):
        self.path = runs / run.id
        self.run = run
        self.log = self.path / LOG

    def summary(self) -> Summary | None:
        """Return what the run has said of itself; None as long as it has not finished."""
        try:
            found: Any = json.loads((self.path / SUMMARY_NAME).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("scores"), dict) else None

    def hold(self) -> int | None:
        """Return the descriptor of a lock on the folder; None if a process that still lives has it.

        The worker inherits the descriptor and holds the lock until it ends, also when the comparison that
        started it was killed: the next one waits for it instead of running the same twice.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock

    def write_options(self) -> Path:
        """Write what the worker reads, and return the path."""
        path = self.path / OPTIONS
        options = {"disable_tqdm": True, **self.run.options}  # the log is no place for a progress bar
        options |= {"output_dir": str(self.path), "resume_from_checkpoint": "last"}
        write_atomically(path, to_json(options))
        return path

    def last_lines(self, count: int = 5) -> list[str]:
        """Return the end of the log, without empty lines; of a progress bar, its last state."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return []
        return [line.rsplit("\r", 1)[-1] for line in text[-20_000:].split("\n") if line.strip()][-count:]


def finished_runs(folder: Path, runs: Iterable[Run]) -> dict[str, Summary]:
    """Return the summaries of the runs that have finished, by id."""
    found = {run.id: RunFolder(folder, run).summary() for run in runs}
    return {name: summary for name, summary in found.items() if summary is not None}
