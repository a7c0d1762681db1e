"""Means and deviations over the finished runs of a comparison, and the files that hold them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from .._io import to_json, write_atomically
from ..analysis.tables import MIB
from ..federation.sampling import num_sampled
from ..protocol.adapters import AS_THEY_ARE
from ..tasks import TASKS
from .grid import Cell, Run, Summary
from .paper import PaperValue, paper_value
from .spec import Spec


@dataclass(frozen=True)
class Score:
    """A score of a setting over its seeds, in percent unless it is a perplexity."""

    name: str
    values: tuple[float, ...]  # one per seed, in the order of the seeds
    paper: PaperValue | None

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None if there are none."""
        return mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The standard deviation over the seeds (of the sample: n - 1); None for a single run."""
        if len(self.values) < 2:
            return None
        return stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan


@dataclass(frozen=True)
class Result:
    """One setting and its finished runs."""

    cell: Cell
    runs: tuple[tuple[Run, Summary], ...]  # with the chosen learning rate, in the order of the seeds
    tried: tuple[tuple[Run, Summary], ...]  # all finished runs
    scores: dict[str, Score]

    @property
    def title(self) -> str:
        """The label of its column."""
        spec = self.cell.spec
        names = (spec.options.get(name) for name in ("dataset_name", "dataset_config_name"))
        return spec.title or TASKS[spec.task].title_of(*names)

    @property
    def learning_rate(self) -> float | None:
        """The chosen learning rate, or the best so far."""
        return self.runs[0][0].options["learning_rate"] if self.runs else None

    @property
    def complete(self) -> bool:
        """Whether all learning rates have been tried and all seeds have finished."""
        ids = {run.id for run, _ in self.tried}
        return len(self.runs) == len(self.cell.spec.seeds) and all(run.id in ids for run in self.cell.first())

    @property
    def description(self) -> dict[str, Any]:
        """The setting as it stands in the files."""
        spec, variant = self.cell.spec, self.cell.variant
        return {
            "task": spec.task, "title": self.title, "model": spec.model, "split": self.cell.split.name,
            "cut": self.cell.cut, "method": variant.method, "name": variant.name, "method_kwargs": variant.kwargs,
        }  # fmt: skip


def gather(spec: Spec, cells: Sequence[Cell], finished: Mapping[str, Summary]) -> list[Result]:
    """Return the result of each setting, including settings without a finished run."""
    names: dict[tuple[str, str | None], dict[str, None]] = {}
    for cell in cells:
        for _, summary in cell.results(finished):
            names.setdefault((cell.spec.task, cell.spec.title), {}).update(dict.fromkeys(summary["scores"]))
    results = []
    for cell in cells:
        runs = cell.results(finished)
        usual = dict.fromkeys(cell.first()[0].options.get("metrics") or TASKS[cell.spec.task].scores)
        scores = {}
        for name in names.get((cell.spec.task, cell.spec.title), usual):
            values = [summary["scores"].get(name) for _, summary in runs]
            known = tuple(float(value) for value in values if value is not None)
            scores[name] = Score(name, known, paper_value(cell, name, spec.paper_tables))
        tried = [(run, finished[run.id]) for run in cell.first() if run.id in finished]
        seen = {run.id for run, _ in tried}
        results.append(Result(cell, tuple(runs), tuple(tried + [r for r in runs if r[0].id not in seen]), scores))
    return results


def run_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one flat row for each finished run and score."""
    rows = []
    for result in results:
        chosen = {run.id for run, _ in result.runs}
        setting = result.description | {"method_kwargs": json.dumps(result.cell.variant.kwargs)}
        for run, summary in result.tried:
            row = setting | {key: run.options[key] for key in ("learning_rate", "seed")}
            row |= {"chosen": run.id in chosen, "run": run.id}
            measured = {key: _number(summary.get(key)) for key in ("mib", "seconds", "server_gflops")}
            measured["exchange_mib"] = exchange_mib(summary)
            counted = {
                key: summary.get(key) for key in ("transfers", "num_rounds", "client_parameters", "server_parameters")
            }
            for name, value in summary["scores"].items():
                rows.append(row | measured | counted | {"score": name, "value": _number(value)})
    return rows


class CurvePoint(NamedTuple):
    """An evaluated round: means over the seeds that evaluated it. MiB and GFLOPs are of all rounds until then."""

    round: int
    mib: float
    score: float
    server_gflops: float | None  # None if a seed did not count them


def mean_curve(result: Result, score: str) -> list[CurvePoint]:
    """Return the points of a score over the rounds."""
    points: dict[int, list[Mapping[str, Any]]] = {}
    for _, summary in result.runs:
        for point in summary.get("curve") or ():
            value = point["scores"].get(score)
            if value is not None and math.isfinite(value):
                points.setdefault(int(point["round"]), []).append(point)
    return [
        CurvePoint(
            step,
            mean(float(point["mib"]) for point in seeds),
            mean(float(point["scores"][score]) for point in seeds),
            mean_or_none([point.get("server_gflops") for point in seeds]),
        )
        for step, seeds in sorted(points.items())
    ]


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no values or one is missing."""
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def exchange_mib(summary: Summary) -> float | None:
    """Return the MiB of a run without its adapters; None if it cannot be known.

    The summaries of older runs have the MiB of all only. Adapters in float32 are taken off by their number.
    """
    if summary.get("exchange_mib") is not None:
        return float(summary["exchange_mib"])
    if summary.get("adapter_codec", AS_THEY_ARE) != AS_THEY_ARE or "client_parameters" not in summary:
        return None
    clients = num_sampled(summary["num_clients"], summary["participation"])
    both_ways = 2 * 4 * summary["client_parameters"]
    return float(summary["mib"]) - both_ways * clients * summary["num_rounds"] / MIB


def staleness(result: Result) -> list[dict[str, float]]:
    """Return what the probe measured, one entry per probed round: means over the local updates and the seeds."""
    by_round: dict[int, list[Mapping[str, float]]] = {}
    for _, summary in result.runs:
        for entry in summary.get("staleness", ()):
            by_round.setdefault(entry["round"], []).append(entry)
    return [
        {k: mean(s[k] for s in seeds if k in s) for k in sorted({k for s in seeds for k in s})}
        for _, seeds in sorted(by_round.items())
    ]


def results_json(spec: Spec, results: Sequence[Result]) -> str:
    """Return everything as JSON: settings with means and the paper's figures, and runs with their curves."""
    settings = [
        result.description
        | {"learning_rate": result.learning_rate, "complete": result.complete, "refused": result.cell.refused}
        | {"runs": [run.id for run, _ in result.runs]}
        | {"scores": {name: _score(score) for name, score in result.scores.items()}}
        for result in results
    ]
    runs = {run.id: {"options": run.options, **summary} for result in results for run, summary in result.tried}
    return to_json({"title": spec.title, "settings": settings, "runs": runs})


def write_parquet(results: Sequence[Result], path: Path) -> None:
    """Write the rows of `run_rows`, if any; without rows no file is written."""
    import pyarrow
    from pyarrow import parquet

    rows = run_rows(results)
    if rows:
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        write_atomically(path, buffer.getvalue())


def _score(score: Score) -> dict[str, Any]:
    return {"mean": score.mean, "std": score.std, "values": score.values, "paper": score.paper and asdict(score.paper)}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
