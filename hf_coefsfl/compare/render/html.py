"""The report as one self-contained HTML file: sortable tables, curves, settings and every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader

from ..._io import finite
from ...analysis.timing import Network
from ..grid import Summary, total
from ..results import Result, mean_curve, staleness
from ..runner import Failure
from ..spec import Spec
from .plots import PROBED, by_place, place_name
from .tables import make_tables, was_counted


def make_html(
    spec: Spec, results: Sequence[Result], failures: Sequence[Failure] = (), link: Network | None = None
) -> str:
    """Return the page."""
    finished = {run.id for result in results for run, _ in result.tried}
    planned = total([result.cell for result in results])
    labels, rows = _runs(results)
    environment = Environment(
        loader=PackageLoader("hf_coefsfl.compare", "render"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["show"] = lambda value, cell: cell.show(value)
    return environment.get_template("report_template.html").render(
        title=spec.title,
        state=f"{len(finished)} of {planned} runs finished, {datetime.now().astimezone():%d %B %Y, %H:%M %Z}",
        failures=failures,
        tables=make_tables(results, link),
        counted=was_counted(results),
        any_runs=any(result.runs for result in results),
        settings=_settings(results),
        run_labels=labels,
        runs=rows,
        data=finite(chart_data(results)),
    )


def chart_data(results: Sequence[Result]) -> dict[str, Any]:
    """Return the data of the charts."""
    order = list(dict.fromkeys(result.cell.variant.name for result in results))
    charts = []
    for place, found in by_place(results).items():
        for score in dict.fromkeys(s for r in found for s in r.scores):
            lines = {r.cell.variant.name: mean_curve(r, score) for r in found}
            charts.append({"name": place_name(place), "y": score, "lines": {k: v for k, v in lines.items() if v}})
        probed = {r.cell.variant.name: staleness(r) for r in found}
        for key, label in PROBED.items():
            lines = {
                name: [(int(p["round"]), None, p[key]) for p in points if key in p]  # type: ignore[misc]
                for name, points in probed.items()
            }
            charts.append({"name": place_name(place), "y": label, "lines": {k: v for k, v in lines.items() if v}})
    return {"methods": order, "charts": [chart for chart in charts if chart["lines"]]}


def _settings(results: Sequence[Result]) -> dict[str, Mapping[str, Any]]:
    """Return the options that all runs share, those of each task, model and split, and those of rows, by heading."""
    trained = [result for result in results if result.cell.refused is None]
    if not trained:
        return {}
    options = [{**result.cell.spec.options, **result.cell.split.options} for result in trained]
    common = {k: v for k, v in options[0].items() if all(k in other and other[k] == v for other in options)}
    rates = sorted({rate for result in results for rate in result.cell.spec.learning_rates})
    seeds = sorted({seed for result in results for seed in result.cell.spec.seeds})
    variants = [result.cell.variant for result in trained]
    own_settings = {v.name: [f"{k}={x}" for k, x in v.settings.items()] for v in variants if v.settings}
    blocks: dict[str, Mapping[str, Any]] = {
        "All other runs" if own_settings else "All runs": {
            "learning rates": [f"{rate:g}" for rate in rates],
            "seeds": seeds,
            **common,
        }
    }
    for result, own in zip(trained, options, strict=True):
        name = f"{result.title}, {result.cell.spec.model}, {result.cell.split.name}"
        blocks[name] = {k: v for k, v in own.items() if k not in common}
    blocks["Options of methods"] = {v.name: [f"{k}={x}" for k, x in v.kwargs.items()] for v in variants if v.kwargs}
    blocks["Rows with settings of their own"] = own_settings
    blocks["Versions"] = next((s["versions"] for r in results for _, s in r.tried if s.get("versions")), {})
    return blocks


def _runs(results: Sequence[Result]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the headings that tell the finished runs apart, and a row for each run."""
    settings = [(r.title, r.cell.spec.model, r.cell.split.name, str(r.cell.cut)) for r in results]
    varies = [len(set(column)) > 1 for column in zip(*settings, strict=True)]  # shared values are in the settings
    headings = ("Task", "Model", "Split", "Cut")
    rows: dict[str, dict[str, Any]] = {}
    for result, setting in zip(results, settings, strict=True):
        chosen = {run.id for run, _ in result.runs}
        labels = [*(text for text, shown in zip(setting, varies, strict=True) if shown), result.cell.variant.name]
        for run, summary in result.tried:
            row = {"id": run.id, "chosen": run.id in chosen, "labels": labels, "options": run.options}
            rows[run.id] = row | {"summary": summary} | _scores(summary)
    return [*(h for h, shown in zip(headings, varies, strict=True) if shown), "Method"], list(rows.values())


def _scores(summary: Summary) -> dict[str, Any]:
    """Return the final scores as text, the first of them as a number, and its curve."""
    scores = {name: None if value is None or value != value else value for name, value in summary["scores"].items()}
    texts = {name: "diverged" if value is None else f"{value:.1f}" for name, value in scores.items()}
    first = next(iter(scores.values()), None)
    curve = [next(iter(point["scores"].values()), None) for point in summary.get("curve") or ()]
    return {
        "scores": ", ".join(f"{name} {text}" if len(texts) > 1 else text for name, text in texts.items()),
        "first": "" if first is None else first,
        "curve": _sparkline([float(value) for value in curve if value is not None and value == value]),
    }


def _sparkline(values: Sequence[float]) -> dict[str, str] | None:
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    scale = 16 / (high - low) if high > low else 0.0
    points = [f"{2 + 76 * i / (len(values) - 1):.1f},{18 - (v - low) * scale:.1f}" for i, v in enumerate(values)]
    return {"points": " ".join(points), "label": f"from {values[0]:.1f} to {values[-1]:.1f}"}
