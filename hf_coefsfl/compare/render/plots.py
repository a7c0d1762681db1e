"""Plots of a comparison: scores over rounds, MiB and the server's work, and the staleness of the gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...analysis.plots import plot_lines, plot_runs
from ..results import CurvePoint, Result, mean_curve, staleness

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
    """Draw each group of `by_place` into `folder` and return the files."""
    written = []
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
