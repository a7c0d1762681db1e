"""Plots of a comparison: scores over rounds and over MiB, and the staleness of the gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...analysis.plots import plot_lines, plot_runs
from ..results import Result, mean_curve, staleness

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
                plot_runs(curves, path, metric=label, title=place_name(place), shares=False)
                written.append(path)
        probed = {r.cell.variant.name: points for r in found if (points := staleness(r))}
        if probed:
            path = folder / f"{name}-staleness.png"
            folder.mkdir(parents=True, exist_ok=True)
            plot_lines(_panels(probed), path, title=f"Staleness: {place_name(place)}")
            written.append(path)
    return written


def _panels(
    probed: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    return {
        label: {name: [(p["round"], p[key]) for p in points if key in p] for name, points in probed.items()}
        for key, label in PROBED.items()
    }
