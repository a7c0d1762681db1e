"""What the finished runs of a comparison amount to: means and deviations, and the files that hold them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from .._io import to_json, write_atomically
from ..analysis.staleness import load_probe, summarize_probe
from ..tasks import TASKS
from ..trainer.trainer import PROBE_NAME
from .folders import RunFolder
from .grid import Cell, Run, Summary
from .paper import PaperValue, paper_value
from .spec import Spec


@dataclass(frozen=True)
class Score:
    """A score of a setting over its seeds, in percent unless it is a perplexity."""

    name: str
    values: tuple[float, ...]  # one a seed, in the order of the seeds
    paper: PaperValue | None

    @property
    def mean(self) -> float | None:
        """Return the mean over the seeds; None without any."""
        return mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Return the standard deviation over the seeds (of the sample: n - 1); None of a single run."""
        if len(self.values) < 2:
            return None
        return stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan


@dataclass(frozen=True)
class Result:
    """One setting and what came out of it."""

    cell: Cell
    runs: tuple[tuple[Run, Summary], ...]  # with the chosen learning rate, in the order of the seeds
    tried: tuple[tuple[Run, Summary], ...]  # all finished runs
    scores: dict[str, Score]

    @property
    def title(self) -> str:
        """Return the label of its column."""
        return self.cell.spec.title or TASKS[self.cell.spec.task].title

    @property
    def learning_rate(self) -> float | None:
        """Return the chosen learning rate, or the best so far."""
        return self.runs[0][0].options["learning_rate"] if self.runs else None

    @property
    def complete(self) -> bool:
        """Return whether all learning rates have been tried and all seeds are there."""
        ids = {run.id for run, _ in self.tried}
        return len(self.runs) == len(self.cell.spec.seeds) and all(run.id in ids for run in self.cell.first())


def gather(spec: Spec, cells: Sequence[Cell], finished: Mapping[str, Summary]) -> list[Result]:
    """Return the result of each setting, also of those without a finished run."""
    names: dict[tuple[str, str | None], dict[str, None]] = {}
    for cell in cells:
        for _, summary in cell.results(finished):
            names.setdefault((cell.spec.task, cell.spec.title), {}).update(dict.fromkeys(summary["scores"]))
    results = []
    for cell in cells:
        runs = cell.results(finished)
        usual = dict.fromkeys(TASKS[cell.spec.task].reported.values())
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
        cell, chosen = result.cell, {run.id for run, _ in result.runs}
        for run, summary in result.tried:
            row = {
                "task": cell.spec.task, "title": result.title, "model": cell.spec.model, "split": cell.split.name,
                "cut": cell.cut, "method": cell.variant.method, "name": cell.variant.name,
                "method_kwargs": json.dumps(cell.variant.kwargs), "learning_rate": run.options["learning_rate"],
                "seed": run.options["seed"], "chosen": run.id in chosen, "run": run.id,
            }  # fmt: skip
            measured = {key: _number(summary.get(key)) for key in ("mib", "seconds")}
            counted = {
                key: summary.get(key) for key in ("transfers", "num_rounds", "client_parameters", "server_parameters")
            }
            for name, value in summary["scores"].items():
                rows.append(row | measured | counted | {"score": name, "value": _number(value)})
    return rows


def mean_curve(result: Result, score: str) -> list[tuple[int, float, float]]:
    """Return (round, MiB, score), the mean over the seeds that evaluated the round."""
    points: dict[int, list[tuple[float, float]]] = {}
    for _, summary in result.runs:
        for point in summary.get("curve") or ():
            value = point["scores"].get(score)
            if value is not None and math.isfinite(value):
                points.setdefault(int(point["round"]), []).append((float(point["mib"]), float(value)))
    return [(step, mean(m for m, _ in found), mean(v for _, v in found)) for step, found in sorted(points.items())]


def staleness(result: Result, folder: Path) -> list[dict[str, float]]:
    """Return what the probe measured, one entry a probed round: means over the local updates and the seeds."""
    by_round: dict[int, list[dict[str, float]]] = {}
    for run, _ in result.runs:
        path = RunFolder(folder, run).path / PROBE_NAME
        if path.is_file():
            points = load_probe(path)
            for step in {point.round for point in points}:
                by_round.setdefault(step, []).append(summarize_probe([p for p in points if p.round == step]))
    return [
        {"round": step} | {k: mean(f[k] for f in found if k in f) for k in sorted({k for f in found for k in f})}
        for step, found in sorted(by_round.items())
    ]


def results_json(spec: Spec, results: Sequence[Result]) -> str:
    """Return everything as JSON: the settings with means and the paper's figures, and the runs with their curves."""
    settings = []
    for result in results:
        cell = result.cell
        entry = {
            "task": cell.spec.task, "title": result.title, "model": cell.spec.model, "split": cell.split.name,
            "cut": cell.cut, "method": cell.variant.method, "name": cell.variant.name,
            "method_kwargs": cell.variant.kwargs, "learning_rate": result.learning_rate,
            "complete": result.complete, "refused": cell.refused, "runs": [run.id for run, _ in result.runs],
            "scores": {name: _score(score) for name, score in result.scores.items()},
        }  # fmt: skip
        settings.append(entry)
    runs = {run.id: {"options": run.options, **summary} for result in results for run, summary in result.tried}
    return to_json({"title": spec.title, "settings": settings, "runs": runs})


def write_parquet(results: Sequence[Result], path: Path) -> None:
    """Write the rows of `run_rows`; without any there is no file."""
    import pyarrow
    from pyarrow import parquet

    rows = run_rows(results)
    if rows:
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        write_atomically(path, buffer.getvalue())


def _score(score: Score) -> dict[str, Any]:
    paper = score.paper and {"mean": score.paper.mean, "std": score.paper.std, "table": score.paper.table}
    return {"mean": score.mean, "std": score.std, "values": score.values, "paper": paper}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
