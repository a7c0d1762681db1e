"""The report as one self-contained HTML file: sortable tables, curves, settings and every run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..._io import finite
from ..grid import Run, Summary, total
from ..results import Result, mean_curve, staleness
from ..runner import Failure
from ..spec import Spec
from .plots import PROBED, by_place, place_name
from .table_formats import notes, with_deviation
from .tables import Table, TableCell, make_tables


def make_html(spec: Spec, results: Sequence[Result], runs: Path, failures: Sequence[Failure] = ()) -> str:
    """Return the page. `runs` holds the folders of the runs."""
    cells = [result.cell for result in results]
    finished = {run.id for result in results for run, _ in result.tried}
    state = f"{len(finished)} of {total(cells)} runs finished, {datetime.now().astimezone():%d %B %Y, %H:%M %Z}"
    body = "".join(
        [
            f"<h1>{escape(spec.title)}</h1><p class=muted>{escape(state)}</p>",
            _failures(failures),
            *(_table(table) for table in make_tables(results)),
            _charts(results),
            _settings(results),
            _runs(results),
        ]
    )
    data = json.dumps(finite(chart_data(results, runs)), separators=(",", ":"))
    page = files(__package__).joinpath("report_template.html").read_text("utf-8")
    # The data comes first: a title might contain a marker, the data contains no "<".
    filled = {"/*data*/": data.replace("<", "\\u003c"), "<!--body-->": body, "<!--title-->": escape(spec.title)}
    for marker, content in filled.items():
        before, _, after = page.partition(marker)
        page = before + content + after
    return page


def chart_data(results: Sequence[Result], runs: Path) -> dict[str, Any]:
    """Return the data of the charts."""
    order = list(dict.fromkeys(result.cell.variant.name for result in results))
    charts = []
    for place, found in by_place(results).items():
        for score in dict.fromkeys(s for r in found for s in r.scores):
            lines = {r.cell.variant.name: mean_curve(r, score) for r in found}
            charts.append({"name": place_name(place), "y": score, "lines": {k: v for k, v in lines.items() if v}})
        probed = {r.cell.variant.name: staleness(r, runs) for r in found}
        for key, label in PROBED.items():
            lines = {
                name: [(int(p["round"]), None, p[key]) for p in points if key in p]  # type: ignore[misc]
                for name, points in probed.items()
            }
            charts.append({"name": place_name(place), "y": label, "lines": {k: v for k, v in lines.items() if v}})
    return {"methods": order, "charts": [chart for chart in charts if chart["lines"]]}


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return ""
    items = "".join(
        f"<li><code>{escape(f.run.id)}</code><pre>{escape(chr(10).join(f.last_lines))}</pre></li>" for f in failures
    )
    runs = "1 run" if len(failures) == 1 else f"{len(failures)} runs"
    return f"<details class=failed><summary>{runs} failed</summary><ul>{items}</ul></details>"


def _table(table: Table) -> str:
    head = "".join(_heading([*filter(None, column)], "number") for column in table.columns)
    several = len(table.blocks()) > 1  # a single model is named in the caption
    rows = []
    for row in table.rows:
        cells = f"<td>{escape(row.model)}</td>" * several + f"<td class=name>{escape(row.name)}</td>"
        cells += "".join(_cell(cell) for cell in row.cells)
        rows.append(f"<tr{' class=reference' * row.reference}>{cells}</tr>")
    return (
        f"<section><h2>{escape(table.caption)}</h2><div class=scroll><table class=sortable><thead><tr>"
        f"{_heading(['Model']) * several}{_heading(['Method'], 'name')}{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class=muted>{escape(' '.join(notes(table)))} Grey rows "
        "are reference methods. Click a heading to sort.</p></section>"
    )


def _heading(levels: Sequence[str], kind: str = "") -> str:
    *above, last = levels
    over = f"<small>{escape(', '.join(above))}</small><br>" if above else ""
    return f"<th scope=col{f' class={kind}' * bool(kind)}><button type=button>{over}{escape(last)}</button></th>"


def _cell(cell: TableCell) -> str:
    if cell.refused is not None:
        return f'<td class=number title="{escape(cell.refused)}">--</td>'
    if cell.score is None:
        return "<td class=number></td>"
    text, value = "", cell.score.mean
    if value is not None:
        text = escape(with_deviation(cell, value, cell.score.std))
        text = f"<span class={cell.mark}>{text}</span>" if cell.mark else text
        text += "" if cell.complete else "*"
    if cell.score.paper is not None:
        paper = with_deviation(cell, cell.score.paper.mean, cell.score.paper.std)
        text += f"<small class=paper>[{escape(paper)}]</small>"
    seeds = ", ".join(cell.show(v) for v in cell.score.values)
    return f'<td class=number data-value="{"" if value is None else value}" title="by seed: {seeds}">{text}</td>'


def _charts(results: Sequence[Result]) -> str:
    if not any(result.runs for result in results):
        return ""
    return (
        "<section id=curves><h2>Curves</h2><p class=switch>over "
        "<label><input type=radio name=axis value=0 checked> rounds</label> "
        "<label><input type=radio name=axis value=1> MiB across the cut</label></p>"
        "<div id=legend></div><div id=charts></div><noscript>The curves need JavaScript.</noscript></section>"
    )


def _settings(results: Sequence[Result]) -> str:
    """Return the options that all runs share, and those of each task, model and split."""
    runs = [(result, result.cell.first()[0]) for result in results if result.cell.refused is None]
    if not runs:
        return ""
    varied = {"method", "method_kwargs", "learning_rate", "seed", "cut", "staleness_probe"}
    options = [{k: v for k, v in run.options.items() if k not in varied} for _, run in runs]
    common = {k: v for k, v in options[0].items() if all(k in other and other[k] == v for other in options)}
    own: dict[str, Mapping[str, Any]] = {}
    for (result, _), found in zip(runs, options, strict=True):
        name = f"{result.title}, {result.cell.spec.model}, {result.cell.split.name}"
        own[name] = {k: v for k, v in found.items() if k not in common}
    versions: Mapping[str, Any] = next((s["versions"] for r in results for _, s in r.tried if s.get("versions")), {})
    rates = sorted({rate for result in results for rate in result.cell.spec.learning_rates})
    seeds = sorted({seed for result in results for seed in result.cell.spec.seeds})
    shared = {"learning rates": ", ".join(f"{r:g}" for r in rates), "seeds": ", ".join(map(str, seeds)), **common}
    blocks = [_definitions("All runs", shared), *(_definitions(k, v) for k, v in own.items() if v)]
    kwargs = {r.cell.variant.name: r.cell.variant.kwargs for r, _ in runs if r.cell.variant.kwargs}
    shown = {name: ", ".join(f"{k}={v}" for k, v in found.items()) for name, found in kwargs.items()}
    blocks += [_definitions("Options of methods", shown)] if shown else []
    blocks += [_definitions("Versions", versions)] if versions else []
    return f"<section><h2>Settings</h2><div class=settings>{''.join(blocks)}</div></section>"


def _definitions(title: str, entries: Mapping[str, Any]) -> str:
    texts = {k: ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v) for k, v in entries.items()}
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(text)}</dd>" for k, text in texts.items())
    return f"<div><h3>{escape(title)}</h3><dl>{lines}</dl></div>"


def _runs(results: Sequence[Result]) -> str:
    rows: dict[str, str] = {}
    places = [(r.title, r.cell.spec.model, r.cell.split.name, str(r.cell.cut)) for r in results]
    varies = [len(set(column)) > 1 for column in zip(*places, strict=True)]  # shared values are in the settings
    for result, place in zip(results, places, strict=True):
        chosen = {run.id for run, _ in result.runs}
        labels = [*(text for text, shown in zip(place, varies, strict=True) if shown), result.cell.variant.name]
        for run, summary in result.tried:
            kind = "" if run.id in chosen else " class=unchosen"
            cells = "".join(f"<td>{escape(text)}</td>" for text in labels) + _measured(run, summary)
            rows[run.id] = f'<tr{kind} title="{escape(run.id)}">{cells}</tr>'
    if not rows:
        return ""
    named = [name for name, shown in zip(("Task", "Model", "Split", "Cut"), varies, strict=True) if shown]
    heads = "".join(_heading([name]) for name in (*named, "Method"))
    heads += "".join(_heading([name], "number") for name in ("Learning rate", "Seed", "Scores"))
    heads += _heading(["Curve"]) + "".join(_heading([name], "number") for name in ("MiB", "Transfers", "Seconds"))
    return (
        f"<section><h2>Runs</h2><div class=scroll><table class=sortable><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows.values())}</tbody></table></div><p class=muted>Pale runs had a learning rate that "
        "was not chosen. Seconds are of the training alone, on the machine that ran it.</p></section>"
    )


def _measured(run: Run, summary: Summary) -> str:
    """Return the columns of a run, beginning with the learning rate."""
    scores = summary["scores"]
    shown = ", ".join(
        (f"{name} " if len(scores) > 1 else "") + ("diverged" if value is None or value != value else f"{value:.1f}")
        for name, value in scores.items()
    )
    first = next(iter(scores.values()), None)
    curve = [next(iter(point["scores"].values()), None) for point in summary.get("curve") or ()]
    value = "" if first is None or first != first else first
    return (
        _number(run.options["learning_rate"], "g")
        + _number(run.options["seed"], "d")
        + f'<td class=number data-value="{value}">{escape(shown)}</td><td>{_sparkline(curve)}</td>'
        + _number(summary.get("mib"), ",.1f")
        + _number(summary.get("transfers"), ",d")
        + _number(summary.get("seconds"), ",.0f")
    )


def _number(value: Any, spec: str) -> str:
    if value is None:
        return "<td class=number></td>"
    return f'<td class=number data-value="{value}">{value:{spec}}</td>'


def _sparkline(values: Sequence[float | None]) -> str:
    known = [float(v) for v in values if v is not None and v == v]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = 16 / (high - low) if high > low else 0.0
    points = " ".join(f"{2 + 76 * i / (len(known) - 1):.1f},{18 - (v - low) * scale:.1f}" for i, v in enumerate(known))
    label = f"from {known[0]:.1f} to {known[-1]:.1f}"
    return (
        f'<svg class=spark viewBox="0 0 80 20" role=img aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{points}"/></svg>'
    )
