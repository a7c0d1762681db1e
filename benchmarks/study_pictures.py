"""Draws the study's main rows at all its places: accuracy over MiB and over the server's work, a picture each.

    python benchmarks/study_pictures.py

reads recipes/study and writes docs/study_mib.png and docs/study_server.png. It trains nothing. The server's work is
estimated as `coefsfl compare study --report_only --server_work` does. Points are means over the seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_coefsfl.analysis.plots import COLOURS, MARKERS, new_figure, saved
from hf_coefsfl.compare import Archive, expand, load_finished, load_spec
from hf_coefsfl.compare.budget import with_server_work
from hf_coefsfl.compare.differences import headings
from hf_coefsfl.compare.render.plots import by_place
from hf_coefsfl.compare.results import CurvePoint, Result, gather, mean_curve

ROWS = (
    "Vanilla SFL", "Gradient reuse (w/o comp.)", "CoeF-D", "CoeF-J", "CoeF-W", "AccSFL", "FSL-SAGE", "GAS"
)  # fmt: skip
OURS = "CoeF-W"
GREY = "#999999"
COSTS = {
    "mib": "MiB over the cut, both directions, all clients",
    "server_gflops": "GFLOPs of the server",
}
COLUMNS = 3


def curves(results: list[Result]) -> dict[str, dict[str, list[CurvePoint]]]:
    """Return the points of the rows at each place, by heading and name."""
    places = by_place(results)
    columns = headings(list(places))
    found = {}
    for place, here in places.items():
        by_name = {result.cell.variant.name: result for result in here}
        rows = [by_name[name] for name in ROWS if name in by_name and by_name[name].runs]
        found[columns[place]] = {r.cell.variant.name: mean_curve(r, next(iter(r.scores))) for r in rows}
    return {heading: lines for heading, lines in found.items() if lines}


def draw(places: dict[str, dict[str, list[CurvePoint]]], cost: str, path: Path) -> None:
    """Draw a panel for each place, with the score over one cost."""
    rows = -(-len(places) // COLUMNS)
    figure = new_figure(4.6 * COLUMNS, 3.3 * rows)
    from matplotlib.ticker import LogFormatter

    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    styles = {name: style for name, *style in zip(ROWS, (*COLOURS, GREY), MARKERS, strict=True)}
    shown: dict[str, Any] = {}
    for axes, (heading, lines) in zip(panels, places.items(), strict=False):
        for name, points in lines.items():
            spent = [getattr(point, cost) for point in points]
            if None not in spent:
                colour, marker = styles[name]
                ours = name == OURS
                style = {"color": colour, "marker": marker, "linewidth": 2.4 if ours else 1.4, "markersize": 5}
                (shown[name],) = axes.plot(spent, [point.score for point in points], zorder=2 + ours, **style)
        axes.set_title(heading, fontsize=10)
        axes.set_xscale("log")
        for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            ticks(LogFormatter(minor_thresholds=(1.2, 0.4)))
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(COSTS[cost], fontsize=10)
    figure.supylabel("accuracy, or exact match on SQuAD (%)", fontsize=10)
    names = [name for name in ROWS if name in shown]
    figure.legend([shown[n] for n in names], names, loc="outside upper center", ncols=len(names), frameon=False)
    saved(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("recipes/study"), help="folder of study.yaml, runs.parquet")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of the pictures")
    arguments = parser.parse_args()
    spec = load_spec(arguments.study / "study.yaml")
    cells = [cell for cell in expand(spec) if cell.variant.name in ROWS]
    archive = Archive(arguments.study / "runs.parquet")
    finished, notes = with_server_work(cells, load_finished(cells, Path("no_folder_of_runs"), archive))
    places = curves(gather(spec, cells, finished))
    for cost, name in (("mib", "study_mib.png"), ("server_gflops", "study_server.png")):
        path = arguments.output / name
        draw(places, cost, path)
        print(path)
    print(*notes, sep="\n", end="\n" * bool(notes))


if __name__ == "__main__":
    main()
