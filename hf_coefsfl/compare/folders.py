"""A comparison on disk: a folder for each run, locked by the process that works on it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from .._io import to_json, write_atomically
from ..analysis.staleness import load_probe, summarize_probe
from ..tasks.run import SUMMARY_NAME
from ..trainer.checkpoints import PROBE_NAME
from .grid import Run, Summary

OPTIONS, LOG, LOCK = "options.json", "log.txt", "lock"
_OWN = ("disable_tqdm", "output_dir", "resume_from_checkpoint")  # options that every worker gets
_SUMMARIZED = ("method", "cut", "learning_rate", "seed", "num_rounds")  # options that a summary repeats


class RunFolder:
    """The folder of one run."""

    def __init__(self, runs: Path, run: Run):
        self.path = runs / run.id
        self.run = run
        self.log = self.path / LOG

    def summary(self) -> Summary | None:
        """Return the run's summary, or None if it has not finished. Raise ValueError if it is another run's.

        If the run was probed, `staleness` in it has an entry for each probed round: means over the local updates.
        """
        summary = _read(self.path / SUMMARY_NAME)
        if not isinstance(summary.get("scores"), dict):
            return None
        self.check(summary)
        probe = self.path / PROBE_NAME
        return summary | {"staleness": _probed_rounds(probe)} if probe.is_file() else summary

    def check(self, summary: Summary) -> None:
        """Refuse a folder whose files tell of other options than the run's."""
        expected = json.loads(to_json(self.run.options))
        written = {name: value for name, value in _read(self.path / OPTIONS).items() if name not in _OWN}
        differs = difference(expected, written, summary)
        if differs is not None:
            raise ValueError(
                f"{self.path} holds a run with {differs} as the spec says. Delete the folder, or give another "
                "--runs_dir."
            )

    def wall_seconds(self, summary: Summary) -> float:
        """Return how long the worker took, start-up, evaluation and saving included.

        That is the time between its first file, the options, and its last one, the summary. It is at least what the
        rounds took, also those before an interruption.
        """
        computed = float(summary.get("seconds") or 0)
        try:
            taken = (self.path / SUMMARY_NAME).stat().st_mtime - (self.path / OPTIONS).stat().st_mtime
        except OSError:
            return computed
        return max(computed, taken)

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


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing if it is not there or not complete."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _probed_rounds(path: Path) -> list[dict[str, float]]:
    points = load_probe(path)
    by_round = {step: [p for p in points if p.round == step] for step in sorted({p.round for p in points})}
    return [
        {"round": step} | {name: value for name, value in summarize_probe(found).items() if math.isfinite(value)}
        for step, found in by_round.items()
    ]


def difference(expected: Mapping[str, Any], written: Mapping[str, Any], summary: Summary) -> str | None:
    """Return the first option in which a run on disk is not the expected one, such as "seed=1 instead of 0", or None.

    Args:
        expected: the options of the run, as JSON has them.
        written: those beside its summary.
        summary: its summary, which repeats some of them.
    """
    found = {**written, **{name: summary[name] for name in _SUMMARIZED if name in summary}}
    for name in sorted(found.keys() & (expected.keys() | written.keys())):
        if found[name] != expected.get(name):
            return f"{name}={found[name]!r} instead of {expected.get(name)!r}"
    return None
