"""Running a comparison: one worker process per run. The only state is what the runs leave on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from .archive import Archive
from .folders import RunFolder
from .grid import Cell, Run, Summary, total, upcoming, wanted

WORKER = (sys.executable, "-m", "hf_coefsfl", "train")  # the command of a run; its task and options file follow
# Seconds between two looks at our workers and at those of others, and for a worker to end when asked.
_POLL, _POLL_OTHERS, _PATIENCE = 0.2, 2.0, 20.0
_REPORT = 1.0  # seconds between two estimates of the time that is left


@dataclass(frozen=True)
class Failure:
    """A run that ended without a summary."""

    run: Run
    status: int
    log: Path
    last_lines: list[str]

    def __str__(self) -> str:
        ended = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        lines = "\n".join(f"    {line}" for line in self.last_lines) or "    (nothing)"
        return f"{self.run.id} ended with {ended} and without a summary. The end of {self.log}:\n{lines}"


@dataclass
class _Worker:
    folder: RunFolder
    process: subprocess.Popen[bytes]
    slot: int
    started: float


class Runner:
    """Runs the missing runs of a comparison.

    Args:
        cells: the settings.
        folder: holds a folder for each run.
        jobs: how many runs at a time.
        archive: of finished runs. Those in it are not run, and new ones are added to it.
        on_finish: called after each finished run, with all of them.
        worker: the command of a worker. Default: `WORKER`.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        folder: Path,
        *,
        jobs: int = 1,
        archive: Archive | None = None,
        on_finish: Callable[[Mapping[str, Summary]], None] | None = None,
        worker: Sequence[str] | None = None,
    ):
        self.cells, self.folder, self.jobs, self.on_finish = cells, folder, jobs, on_finish
        self.command = tuple(worker or WORKER)
        self.archive = archive
        self.finished = load_finished(cells, folder, archive)
        self.failures: dict[str, Failure] = {}
        self.workers: list[_Worker] = []
        self._wall_seconds: dict[str, float] = {}
        self._next_report = 0.0
        self._elsewhere: dict[str, float] = {}  # runs that another process works on, and when to look again

    def run(self) -> list[Failure]:
        """Run until nothing is missing, and return the failures. If it is interrupted, it ends its workers."""
        previous = _interrupt_on_termination()
        planned = total(self.cells)
        with tqdm(total=planned, initial=len(self.finished), file=sys.stderr, unit="run", disable=None) as bar:
            bar.bar_format = "{n_fmt}/{total_fmt} runs |{bar:20}| {elapsed}{postfix}"
            try:
                self._archive(
                    *(run for cell in wanted(self.cells) for run in cell.runs.values() if run.id in self.finished)
                )
                self._report(bar)
                while self._step(bar):
                    time.sleep(_POLL)
            finally:
                self._end_workers()
                if previous is not None:
                    signal.signal(signal.SIGTERM, previous)
        return list(self.failures.values())

    def _step(self, bar: Any) -> bool:
        """Collect workers that have ended, fill the free slots, and return whether there is more to do."""
        for worker in [w for w in self.workers if w.process.poll() is not None]:
            self.workers.remove(worker)
            self._ended(worker, bar)
        if len(self.workers) == self.jobs:
            self._report(bar)
            return True
        running = {worker.folder.run.id for worker in self.workers}
        missing = [run for run in upcoming(self.cells, self.finished, self.failures) if run.id not in running]
        for run in missing:
            if len(self.workers) < self.jobs and time.monotonic() >= self._elsewhere.get(run.id, 0.0):
                self._start(RunFolder(self.folder, run), bar)
        self._report(bar)
        return bool(missing or self.workers)

    def _start(self, folder: RunFolder, bar: Any) -> None:
        lock = folder.hold()
        if lock is None:
            self._elsewhere[folder.run.id] = time.monotonic() + _POLL_OTHERS
            return
        try:
            summary = _summary(folder, self.archive)  # another process may have finished it meanwhile
            if summary is not None:
                self._finish(folder, summary, bar)
                return
            slot = min(set(range(self.jobs)) - {worker.slot for worker in self.workers})
            options = folder.write_options()
            with folder.log.open("ab") as log:
                process = subprocess.Popen(
                    [*self.command, folder.run.task, str(options)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=worker_environment(self.jobs, slot),
                    pass_fds=(lock,) if os.name == "posix" else (),
                )
        finally:
            os.close(lock)  # the worker's own copy keeps the lock
        self.workers.append(_Worker(folder, process, slot, time.monotonic()))

    def _ended(self, worker: _Worker, bar: Any) -> None:
        folder, status = worker.folder, worker.process.returncode
        summary = folder.summary()
        if summary is None:
            failure = Failure(folder.run, status, folder.log, folder.last_lines())
            self.failures[folder.run.id] = failure
            tqdm.write(f"Failed: {failure}", file=sys.stderr)
        else:
            self._finish(folder, summary, bar)

    def _finish(self, folder: RunFolder, summary: Summary, bar: Any) -> None:
        self.finished[folder.run.id] = summary
        self._archive(folder.run)
        bar.update()
        scores = ", ".join(f"{name} {value:.1f}" for name, value in summary["scores"].items() if value is not None)
        seconds = self._seconds(folder.run, summary)
        left = self.seconds_left()
        then = f", about {timedelta(seconds=round(left))} left" if left and bar.disable else ""
        count = f"{len(self.finished)}/{bar.total}"
        tqdm.write(f"{count} {folder.run.id}: {scores} ({seconds:.0f} s){then}", file=sys.stderr)
        if self.on_finish is not None:
            self.on_finish(self.finished)

    def _archive(self, *runs: Run) -> None:
        if self.archive is not None:
            self.archive.add((run, self.finished[run.id]) for run in runs)

    def _report(self, bar: Any) -> None:
        if bar.disable or time.monotonic() < self._next_report:  # an estimate over many runs takes a while
            return
        self._next_report = time.monotonic() + _REPORT
        left = self.seconds_left()
        parts = [f"about {timedelta(seconds=round(left))} left"] if left else []
        parts += [worker.folder.run.id.rpartition("-")[0] for worker in self.workers]
        if self.failures:
            parts.append(f"{len(self.failures)} failed")
        bar.set_postfix_str("; ".join(parts))

    def seconds_left(self) -> float | None:
        """Estimate the time from the finished runs most like the missing ones; None if no run has finished.

        A run counts from the start of its process to its end.
        """
        by_kind: dict[tuple[str, ...], list[float]] = {}
        for run in {run.id: run for cell in wanted(self.cells) for run in cell.runs.values()}.values():
            if run.id in self.finished:
                method, seconds = run.options["method"], self._seconds(run, self.finished[run.id])
                for kind in ((run.task, method), (method,), ()):
                    by_kind.setdefault(kind, []).append(seconds)
        if not by_kind:
            return None

        def expected(task: str, method: str) -> float:
            return mean(next(by_kind[kind] for kind in ((task, method), (method,), ()) if kind in by_kind))

        work, longest = 0.0, 0.0
        for cell in wanted(self.cells):
            chosen = cell.chosen(self.finished)
            done = [run.id in self.finished for run in cell.first() + (cell.later(chosen) if chosen else [])]
            planned = len(cell.first()) + len(cell.spec.seeds) - 1
            work += (planned - sum(done)) * expected(cell.spec.task, cell.variant.method)
        now = time.monotonic()
        for w in self.workers:
            each = expected(w.folder.run.task, w.folder.run.options["method"])
            spent = min(now - w.started, each)
            work -= spent
            longest = max(longest, each - spent)
        return max(work / self.jobs, longest)  # a run is not shared out

    def _seconds(self, run: Run, summary: Summary) -> float:
        if run.id not in self._wall_seconds:
            self._wall_seconds[run.id] = RunFolder(self.folder, run).wall_seconds(summary)
        return self._wall_seconds[run.id]

    def _end_workers(self) -> None:
        """Ask the workers to end, and kill those that do not."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers.clear()


def load_finished(cells: Sequence[Cell], folder: Path, archive: Archive | None = None) -> dict[str, Summary]:
    """Return the summaries of all finished runs of the settings, by id: of the archive, and of folders otherwise."""

    def finished(runs: Iterable[Run]) -> dict[str, Summary]:
        summaries = {run.id: _summary(RunFolder(folder, run), archive) for run in runs}
        return {run_id: summary for run_id, summary in summaries.items() if summary is not None}

    first = finished(run for cell in wanted(cells) for run in cell.first())
    rates = [(cell, cell.chosen(first)) for cell in wanted(cells)]
    return first | finished(run for cell, rate in rates if rate is not None for run in cell.later(rate))


def _summary(folder: RunFolder, archive: Archive | None) -> Summary | None:
    archived = archive.summary(folder.run) if archive is not None else None
    return folder.summary() if archived is None else archived


def worker_environment(jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of a worker: its share of the cores, and one of the GPUs."""
    environment = {"TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [d for d in visible.split(",") if d] if visible is not None else _gpus()
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return environment


def _gpus() -> list[str]:
    return [str(i) for i in range(torch.cuda.device_count())]


def _interrupt_on_termination() -> Any:
    """Let SIGTERM end a comparison as Ctrl-C does. Return the previous handler, or None outside the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        return signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        return None
