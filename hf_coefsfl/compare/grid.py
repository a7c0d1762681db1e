"""The runs of a comparison: the product of the lists of a spec, and which of them come next."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..analysis.staleness import check_probe
from ..config import SplitFedConfig
from ..methods import make_method
from ..protocol.loss import LossSpec
from ..tasks import TASKS
from .spec import Spec, Split, TaskSpec, Variant

Summary = Mapping[str, Any]  # the summary.json of a finished run


@dataclass(frozen=True)
class Run:
    """One training run: a task and all options except the output folder."""

    task: str
    options: dict[str, Any]

    @cached_property
    def id(self) -> str:
        """The name of the run's folder: readable, and different for different options.

        Finished runs are found by it, so it depends on the task and the options only.
        """
        o = self.options
        content = json.dumps([self.task, o], sort_keys=True, default=str)
        split = o.get("partition", "iid")
        if split == "dirichlet":
            split += str(o.get("dirichlet_alpha", ""))
        name = f"{self.task}-{split}-cut{o['cut']}-{o['method']}-lr{o['learning_rate']:g}-seed{o['seed']}"
        readable = re.sub(r"[^a-z0-9_.-]+", "_", name.lower())
        return f"{readable}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Cell:
    """One setting: a task, model, split, cut and method, trained with each learning rate and then with each seed."""

    spec: TaskSpec
    split: Split
    cut: int
    variant: Variant
    refused: str | None  # the reason if the method cannot train for the task

    @cached_property
    def runs(self) -> dict[tuple[float, int], Run]:
        """All runs that the setting may need, by learning rate and seed."""
        pairs = [(rate, seed) for rate in self.spec.learning_rates for seed in self.spec.seeds]
        return {(rate, seed): self._run(rate, seed) for rate, seed in pairs}

    def _run(self, learning_rate: float, seed: int) -> Run:
        options = {**self.spec.options, **self.split.options, **self.variant.settings}
        options |= {"method": self.variant.method, "cut": self.cut, "learning_rate": learning_rate, "seed": seed}
        if self.variant.kwargs:
            options["method_kwargs"] = dict(self.variant.kwargs)
        if options.get("staleness_probe") and not _can_be_probed(self.variant):
            del options["staleness_probe"]
        return Run(self.spec.task, options)

    def first(self) -> list[Run]:
        """Return the runs that choose the learning rate: every rate with the first seed."""
        return [self.runs[rate, self.spec.seeds[0]] for rate in self.spec.learning_rates]

    def later(self, learning_rate: float) -> list[Run]:
        """Return the runs of the other seeds."""
        return [self.runs[learning_rate, seed] for seed in self.spec.seeds[1:]]

    def chosen(self, finished: Mapping[str, Summary]) -> float | None:
        """Return the learning rate with the best final score so far, or None before any run has finished."""
        done = [(score(finished[run.id]), run) for run in self.first() if run.id in finished]
        if not done:
            return None
        return max(done, key=lambda pair: pair[0])[1].options["learning_rate"]  # the first if several are equal

    def results(self, finished: Mapping[str, Summary]) -> list[tuple[Run, Summary]]:
        """Return the finished runs with the chosen learning rate, in the order of the seeds."""
        rate = self.chosen(finished)
        if rate is None:
            return []
        runs = [self.runs[rate, seed] for seed in self.spec.seeds]
        return [(run, finished[run.id]) for run in runs if run.id in finished]

    def is_finished(self, finished: Mapping[str, Summary]) -> bool:
        """Return whether no run is missing."""
        return all(run.id in finished for run in self.first()) and len(self.results(finished)) == len(self.spec.seeds)


def score(summary: Summary) -> float:
    """Return the mean of the final scores, by which learning rates are chosen. Larger is better.

    If less of some scores is better and more of others, only those like the first one count.
    """
    higher = summary.get("higher_is_better", True)
    alike = [value for name, value in summary["scores"].items() if more_is_better(summary, name) == higher]
    values = [float(value) for value in alike if value is not None]
    mean = sum(values) / len(values) if values else math.nan
    if math.isnan(mean):  # a run that diverged ranks last
        return -math.inf
    return mean if higher else -mean


def more_is_better(summary: Summary, name: str) -> bool:
    """Return whether more of a score is better. Before version 0.3, a summary said it of all its scores at once."""
    if "lower_is_better" in summary:
        return name not in summary["lower_is_better"]
    return bool(summary.get("higher_is_better", True))


def expand(spec: Spec) -> list[Cell]:
    """Return the settings of a spec in its order. Raise ValueError if the options of one are not allowed."""
    cells = [
        Cell(task, split, cut, variant, _refusal(task, variant))
        for task in spec.tasks
        for split in task.splits
        for cut in task.cuts
        for variant in task.methods
    ]
    seen: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        key = cell.spec.title or cell.spec.task, cell.spec.model, cell.split.name, cell.cut, cell.variant.name
        if key in seen:
            raise ValueError(
                f"Two settings have the same place in the tables: {', '.join(map(str, key))}. Give each task its "
                "own `model` or `title`."
            )
        seen[key] = cell
    _check_options(cells)
    return cells


def check_files(cells: Sequence[Cell], finished: Mapping[str, Summary]) -> None:
    """Refuse settings whose data or model is a path that does not exist, before the first run.

    Settings whose runs have all finished need neither.
    """
    missing = {}
    for cell in (cell for cell in wanted(cells) if not cell.is_finished(finished)):
        for name in ("dataset_name", "model_name_or_path"):
            value = str(cell.first()[0].options.get(name) or "")
            # An id of the Hub has at most one slash and does not begin with a dot.
            local = value.startswith((".", "/", "~")) or value.count("/") > 1
            if local and not Path(value).exists():
                missing[value] = f"{value} ({name} of {cell.spec.title or cell.spec.task})"
    if missing:
        raise ValueError(
            f"The spec needs files that are not here: {', '.join(missing.values())}. Put them there, or name others. "
            "`coefsfl compare digits` needs none."
        )


def total(cells: Sequence[Cell]) -> int:
    """Return the number of runs. Runs that settings share count once."""
    first = {run.id for cell in wanted(cells) for run in cell.first()}
    later = {(cell.first()[0].id, seed) for cell in wanted(cells) for seed in cell.spec.seeds[1:]}
    return len(first) + len(later)


def wanted(cells: Sequence[Cell]) -> list[Cell]:
    """Return the settings whose method can train for the task."""
    return [cell for cell in cells if cell.refused is None]


def upcoming(cells: Sequence[Cell], finished: Mapping[str, Summary], given_up: Container[str]) -> Iterator[Run]:
    """Yield the runs that are neither finished nor given up and whose options are known by now.

    The first seed of every setting comes first, so that a complete table is there early. The other seeds wait
    for the learning rate.
    """
    open_runs: dict[str, Run] = {}
    for cell in wanted(cells):
        open_runs |= {run.id: run for run in cell.first()}
    for cell in wanted(cells):
        rate = cell.chosen(finished)
        if rate is not None and all(run.id in finished or run.id in given_up for run in cell.first()):
            open_runs |= {run.id: run for run in cell.later(rate)}
    yield from (run for run in open_runs.values() if run.id not in finished and run.id not in given_up)


def _refusal(task: TaskSpec, variant: Variant) -> str | None:
    loss = TASKS[task.task].kind.auto_model.__name__.removeprefix("AutoModel")  # transformers names a loss by its head
    try:
        make_method(variant.method, variant.kwargs).check_loss(LossSpec(loss, 3, ("labels",)))
    except ValueError as error:
        return str(error)
    return None


def _can_be_probed(variant: Variant) -> bool:
    try:
        check_probe(make_method(variant.method, variant.kwargs))
    except ValueError:
        return False
    return True


def _check_options(cells: Sequence[Cell]) -> None:
    """Build each different configuration once, which refuses options that cannot work."""
    fields = SplitFedConfig.__dataclass_fields__
    seen = set()
    for cell in wanted(cells):
        run = cell.first()[0]
        options = {name: value for name, value in run.options.items() if name in fields}
        key = json.dumps({k: v for k, v in options.items() if k != "cut"}, sort_keys=True, default=str)
        if key in seen:
            continue
        seen.add(key)
        try:
            SplitFedConfig(output_dir="unused", **options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{run.id.rpartition('-')[0]}: {error}") from error
