"""Plots of a comparison: scores over rounds, MiB, the server's work and codecs, and the staleness of gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...analysis.plots import plot_lines, plot_runs
from ...analysis.tradeoff import Lines, Point, plot_tradeoff
from ..codecs import codec_name, families, has_all_seeds
from ..differences import headings
from ..grid import more_is_better
from ..results import CurvePoint, Result, exchange_mib, mean_curve, mean_or_none, staleness

PROBED = {
    "probe_used_cosine": "cosine with vanilla's gradient",
    "probe_used_error": "error relative to vanilla's gradient",
}


def by_place(results: Sequence[Result]) -> dict[tuple[str, str, str, int], list[Result]]:
    """Group the results by task, model, split and cut, so that a group differs in the method only."""
    places: dict[tuple[str, str, str, int], list[Result]] = {}
    for result in results:
        key = result.title, result.cell.spec.model, result.cell.split.name, result.cell.cut
        places.setdefault(key, []).append(result)
    return places


def place_name(place: tuple[str, str, str, int]) -> str:
    """Return the heading of a group of `by_place`."""
    title, model, split, cut = place
    return f"{title}, {model}, {split}, cut {cut}"


def write_plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw each group of `by_place` into `folder`, and the codecs of all groups; return the files."""
    written = _write_codecs(results, folder)
    for place, found in by_place(results).items():
        name = re.sub(r"[^a-z0-9]+", "-", place_name(place).lower()).strip("-")
        for score in dict.fromkeys(s for result in found for s in result.scores):
            curves = {r.cell.variant.name: curve for r in found if (curve := mean_curve(r, score))}
            if curves:
                folder.mkdir(parents=True, exist_ok=True)
                suffix = "" if score == "accuracy" else f"-{score.lower()}"
                path = folder / f"{name}{suffix}.png"
                label = score if score == "perplexity" else f"{score} (%)"
                plot_runs(
                    {name: [point[:3] for point in curve] for name, curve in curves.items()},
                    path,
                    metric=label,
                    title=place_name(place),
                    shares=False,
                    server_gflops=_work(curves),
                )
                written.append(path)
        probed = {r.cell.variant.name: points for r in found if (points := staleness(r))}
        if probed:
            path = folder / f"{name}-staleness.png"
            folder.mkdir(parents=True, exist_ok=True)
            plot_lines(_panels(probed), path, title=f"Staleness: {place_name(place)}")
            written.append(path)
    return written


def _write_codecs(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the first score over the MiB of the exchange if rows differ in their codecs only."""
    places = by_place(results)
    columns = headings(list(places))
    panels: dict[str, Lines] = {}
    lower: list[str] = []
    scores: dict[str, None] = {}
    for place, found in places.items():
        lines = {family[0].cell.variant.name: _points(family) for family in families(found)}
        panels[columns[place]] = {name: points for name, points in lines.items() if len(points) > 1}
        if panels[columns[place]]:
            summary = next(summary for result in found for _, summary in result.runs)
            score = next(iter(summary["scores"]))
            scores[score] = None
            lower += [] if more_is_better(summary, score) else [columns[place]]
    panels = {place: lines for place, lines in panels.items() if lines}
    if not panels:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "codecs.png"
    label = ", ".join(score if score == "perplexity" else f"{score} (%)" for score in scores)
    plot_tradeoff(panels, path, metric=label, lower_is_better=lower)
    return [path]


def _points(family: Sequence[Result]) -> list[Point]:
    """Return what each row of a family sends and reaches, without rows that lack seeds of the one in float32."""
    points = []
    for result in (r for r in family if has_all_seeds(r, family[0])):
        mib = mean_or_none([exchange_mib(summary) for _, summary in result.runs])
        score = next(iter(result.scores.values()))
        if mib and score.mean is not None and math.isfinite(score.mean):
            points.append(Point(codec_name(result, family[0]), mib, score.mean, score.std))
    return points


def _work(curves: Mapping[str, Sequence[CurvePoint]]) -> dict[str, list[float]]:
    """Return the server's GFLOPs at the points of each curve, without curves that lack some."""
    work = {name: [p.server_gflops for p in curve if p.server_gflops is not None] for name, curve in curves.items()}
    return {name: found for name, found in work.items() if len(found) == len(curves[name])}


def _panels(
    probed: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    return {
        label: {name: [(p["round"], p[key]) for p in points if key in p] for name, points in probed.items()}
        for key, label in PROBED.items()
    }
