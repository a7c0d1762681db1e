"""A picture of what bytes cost: a score over MiB, a line for each method through its codecs, and the Pareto front."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from .plots import COLOURS, MARKERS, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2  # of panels
_FRONT: dict[str, Any] = {"color": "#999999", "linewidth": 6, "alpha": 0.35}
_ALIKE = 1.01  # up to this ratio bytes count as the same: some methods send a few scalars more
_CHARACTER = 0.015  # of the height of a panel, that one of a label takes
_BESIDE = 1.025  # by what points with the same bytes stand apart


class Point(NamedTuple):
    """A setting: what it sends and what it reaches."""

    label: str
    mib: float
    score: float
    std: float | None = None  # of the score over the seeds


Lines = Mapping[str, Sequence[Point]]  # the points of each method


def pareto_front(points: Sequence[Point], *, higher: bool = True) -> list[Point]:
    """Return the points that no other beats, by their means, fewest bytes first.

    A point beats another if it has a better score with as few bytes, or the same score with fewer. Bytes that differ by
    a percent count as the same.

    Args:
        points: the settings.
        higher: whether more of the score is better.
    """
    sign = 1 if higher else -1

    def beats(one: Point, other: Point) -> bool:
        better, fewer = sign * (one.score - other.score), one.mib * _ALIKE < other.mib
        return fewer if better == 0 else better > 0 and one.mib <= other.mib * _ALIKE

    front = [point for point in points if not any(beats(other, point) for other in points)]
    return sorted(front, key=lambda point: point.mib)


def plot_tradeoff(
    panels: Mapping[str, Lines],
    path: str | os.PathLike[str] | None = None,
    *,
    metric: str = "accuracy (%)",
    lower_is_better: Sequence[str] = (),
    title: str | None = None,
) -> Figure:
    """Draw a panel for each place: the score over MiB, logarithmic, with the standard deviation over the seeds.

    Methods have colours, and points with the same bytes stand side by side. Codecs have markers. A broad line joins the
    points of the Pareto front, whose codecs are named.

    Args:
        panels: for each place the points of each method.
        path: the file to write; None writes none.
        metric: the label of the vertical axes.
        lower_is_better: the places with a score of which less is better.
        title: a heading over the panels.
    """
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(5.4 * columns, 3.7 * rows + 0.9)
    methods = dict(
        zip(dict.fromkeys(name for lines in panels.values() for name in lines), cycle(COLOURS), strict=False)
    )
    labels = dict.fromkeys(p.label for lines in panels.values() for points in lines.values() for p in points)
    markers = dict(zip(labels, cycle(MARKERS), strict=False))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (place, lines) in zip(grid, panels.items(), strict=False):
        front = pareto_front([p for points in lines.values() for p in points], higher=place not in lower_is_better)
        for i, (name, colour) in enumerate(methods.items()):
            aside = _BESIDE ** (i - (len(methods) - 1) / 2)
            moved = {point: point._replace(mib=point.mib * aside) for point in lines.get(name, ())}
            front = [moved.get(point, point) for point in front]
            _draw(axes, list(moved.values()), colour, markers)
        _draw_front(axes, front)
        axes.set_title(place, fontsize=10)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for i, axes in enumerate(grid[: len(panels)]):
        if i % columns == 0:
            axes.set_ylabel(metric)
        if i + columns >= len(panels):
            axes.set_xlabel("MiB of the exchange, both directions, all clients")
    _legends(figure, methods, markers)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return saved(figure, path)


def _draw(axes: Axes, points: Sequence[Point], colour: str, markers: Mapping[str, str]) -> None:
    ordered = sorted(points, key=lambda point: point.mib)
    axes.plot([p.mib for p in ordered], [p.score for p in ordered], color=colour, linewidth=1.2, alpha=0.6)
    for point in ordered:
        axes.errorbar(point.mib, point.score, yerr=point.std or 0.0, color=colour, elinewidth=0.9, alpha=0.45)
        style: dict[str, Any] = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot([point.mib], [point.score], color=colour, marker=markers[point.label], **style)


def _draw_front(axes: Axes, front: Sequence[Point]) -> None:
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    style: dict[str, Any] = {"zorder": 0, "solid_capstyle": "round", **_FRONT}
    axes.plot([p.mib for p in front], [p.score for p in front], **style)
    for point in {(point.label, point.score): point for point in front}.values():  # a draw is named once
        # If more is better, no point lies to the upper left of one of the front.
        axes.annotate(
            point.label, (point.mib, point.score), xytext=(-2, 5), textcoords="offset points", fontsize=8, ha="right",
            rotation=-45, rotation_mode="anchor", path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.3, y=0.16)
    low, high = axes.get_ylim()
    room = _CHARACTER * max((len(point.label) for point in front), default=0)
    axes.set_ylim(low, high + max(room - 0.1, 0.0) * (high - low))  # of the margin, some is left for labels
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legends(figure: Figure, methods: Mapping[str, str], markers: Mapping[str, str]) -> None:
    """Name the methods above the panels, and the codecs below them."""
    from matplotlib.lines import Line2D

    lines: list[Any] = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in methods.items()]
    lines.append(Line2D([], [], label="Pareto front", **_FRONT))
    codecs: list[Any] = [
        Line2D([], [], color="#444444", marker=marker, linestyle="none", label=label)
        for label, marker in markers.items()
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=5, frameon=False)
    figure.legend(handles=codecs, loc="outside lower center", ncols=4, frameon=False)
