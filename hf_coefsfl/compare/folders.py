"""A comparison on disk: a folder for each run, locked by the process that works on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from .._io import to_json, write_atomically
from ..tasks.run import SUMMARY_NAME
from .grid import Run, Summary

OPTIONS, LOG, LOCK = "options.json", "log.txt", "lock"


class RunFolder:
    """The folder of one run."""

    def __init__(self, runs: Path, run: Run):
        self.path = runs / run.id
        self.run = run
        self.log = self.path / LOG

    def summary(self) -> Summary | None:
        """Return the run's summary, or None if it has not finished."""
        try:
            summary: Any = json.loads((self.path / SUMMARY_NAME).read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and isinstance(summary.get("scores"), dict) else None

    def hold(self) -> int | None:
        """Lock the folder and return the descriptor of the lock, or None if a running process has it.

        The worker inherits the descriptor and holds the lock until it ends, even if the comparison that
        started it was killed. The next comparison then waits for the worker instead of repeating its run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        held = False
        try:
            held = lock_descriptor(lock, blocking=False)
        finally:
            if not held:
                os.close(lock)
        return lock if held else None

    def write_options(self) -> Path:
        """Write the options that the worker reads, and return the path of the file."""
        path = self.path / OPTIONS
        options = {"disable_tqdm": True, **self.run.options}  # a progress bar would fill the log
        options |= {"output_dir": str(self.path), "resume_from_checkpoint": "last"}
        write_atomically(path, to_json(options))
        return path

    def last_lines(self, count: int = 5) -> list[str]:
        """Return the last lines of the log without empty ones. Of a progress bar, only its last state counts."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return []
        return [line.rsplit("\r", 1)[-1] for line in text[-20_000:].split("\n") if line.strip()][-count:]


def finished_runs(folder: Path, runs: Iterable[Run]) -> dict[str, Summary]:
    """Return the summaries of the runs that have finished, by id."""
    summaries = {run.id: RunFolder(folder, run).summary() for run in runs}
    return {run_id: summary for run_id, summary in summaries.items() if summary is not None}
