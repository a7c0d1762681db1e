"""Pictures: a metric over rounds, MiB and the server's work, and the samples of each client and class."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ..federation.partition import Partition
from .tables import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that is too pale for lines. Each
# goes with a marker and a dash, so that curves that lie on each other and black and white prints stay readable.
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "X", "s", "^", "D", "v", "P", "*")
_DASHES = ("solid", "dashed", "dashdot", "dotted")
_LOG_FROM = 5.0  # a spread of the runs' totals from which on a linear axis would squeeze the cheap ones


def new_figure(width: float, height: float, dpi: int = 150) -> Figure:
    """Return an empty figure of its own (no pyplot, no global backend); raise ImportError without Matplotlib.

    A notebook shows it, whether or not pyplot is loaded there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Plots need Matplotlib ({error}): pip install 'hf_coefsfl[plots]'") from error

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=min(dpi, 100))
            return buffer.getvalue()

    return Picture(figsize=(width, height), dpi=dpi, layout="constrained")


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Save a figure, unless `path` is None, and return it."""
    if path is not None:
        figure.savefig(path)
    return figure


@cache
def can_plot() -> bool:
    """Tell whether Matplotlib is installed; log how to install it the first time that a plot is skipped."""
    try:
        new_figure(1, 1)
    except ImportError as error:
        logger.warning("Plots are skipped. %s", error)
        return False
    return True


def accuracy_curve(
    log_history: Sequence[Mapping[str, Any]], metric: str = "eval_accuracy"
) -> list[tuple[int, float, float]]:
    """Return (round, MiB that crossed the cut until then, metric) for each evaluation of a run.

    Args:
        log_history: `trainer.state.log_history`. Its training logs report the bytes of the rounds since the last one;
            with `logging_steps=1`, the default, every evaluation finds those of all rounds before it.
        metric: the name of the metric as evaluation logs it.
    """
    traffic: dict[int, float] = {}  # bytes by the step that logged them; a repeated entry counts once
    for entry in log_history:
        if "bytes_up" in entry:
            traffic[int(entry["step"])] = float(entry["bytes_up"]) + float(entry.get("bytes_down", 0))
    values = {int(entry["step"]): float(entry[metric]) for entry in log_history if metric in entry}
    if not values:
        known = sorted({name for entry in log_history for name in entry if name.startswith("eval_")})
        raise ValueError(
            f"The log history has no {metric!r}. It has: {', '.join(known) or 'no evaluation at all'}. Set "
            "eval_strategy and compute_metrics, or name another metric."
        )
    return [
        (step, sum(sent for logged, sent in traffic.items() if logged <= step) / MIB, values[step])
        for step in sorted(values)
    ]


def plot_runs(
    runs: Mapping[str, Sequence[tuple[int, float, float]]],
    path: str | os.PathLike[str] | None = None,
    *,
    metric: str = "accuracy",
    title: str | None = None,
    shares: bool = True,
    server_gflops: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw the metric over rounds and over MiB, save it (PNG, PDF, ... by the ending of `path`) and return it.

    The axes of MiB and GFLOPs are logarithmic if the runs' totals differ by a factor of five or more.

    Args:
        runs: for each run's name its (round, cumulative MiB, metric), as `accuracy_curve` gives them.
        path: the file to write; None writes none.
        metric: the label of the vertical axis.
        title: a heading over both panels.
        shares: show metrics between 0 and 1 in percent; False if they are in percent already.
        server_gflops: the cumulative GFLOPs of the server at the points of each run, for a third panel; it is drawn
            if there are any, with the runs that have them.
    """
    if not runs or not all(runs.values()):
        empty = [name for name, points in runs.items() if not points]
        raise ValueError(f"There is nothing to draw for {', '.join(empty) or 'no runs'}.")
    costs = {"MiB over the cut, both directions, all clients": {name: [p[1] for p in runs[name]] for name in runs}}
    if server_gflops:
        costs["GFLOPs of the server"] = {name: list(work) for name, work in server_gflops.items()}
    figure = new_figure(5 * (1 + len(costs)), 4.4)
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

    over_rounds, *panels = figure.subplots(1, 1 + len(costs), sharey=True)
    for axes, (label, spent) in zip(panels, costs.items(), strict=True):
        totals = [values[-1] for values in spent.values()]
        axes.set_xlabel(label)
        if 0 < min(totals) * _LOG_FROM <= max(totals):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    styles = zip(cycle(COLOURS), cycle(MARKERS), cycle(_DASHES), strict=False)
    for (name, points), (colour, marker, dash) in zip(runs.items(), styles, strict=False):
        rounds, _, values = zip(*points, strict=True)
        style = {
            "color": colour, "marker": marker, "linestyle": dash, "linewidth": 1.8, "markersize": 6,
            "markeredgecolor": "white", "markeredgewidth": 0.6, "alpha": 0.9,
        }  # fmt: skip
        over_rounds.plot(rounds, values, label=name, **style)
        for axes, spent in zip(panels, costs.values(), strict=True):
            if name in spent:  # an evaluation before the first round has no place on a logarithmic axis
                start = int(axes.get_xscale() == "log" and spent[name][0] <= 0)
                axes.plot(spent[name][start:], values[start:], **style)
    over_rounds.set_xlabel("round")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    over_rounds.set_ylabel(metric)
    if shares and all(0 <= value <= 1 for points in runs.values() for _, _, value in points):
        over_rounds.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (over_rounds, *panels):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(runs), 5), frameon=False, handlelength=3.5)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return saved(figure, path)


def plot_lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: str | os.PathLike[str] | None = None,
    *,
    xlabel: str = "round",
    title: str | None = None,
) -> Figure:
    """Draw a panel for each quantity with the same runs in all of them, save the picture and return it.

    Args:
        panels: for each quantity, the label of its vertical axis, each run's (x, y).
        path: the file to write; None writes none.
        xlabel: the label of the horizontal axes.
        title: a heading over the panels.
    """
    figure = new_figure(5 * len(panels), 4.4)
    from matplotlib.ticker import MaxNLocator

    for first, (axes, (label, runs)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True)
    ):
        styles = zip(cycle(COLOURS), cycle(MARKERS), cycle(_DASHES), strict=False)
        for (name, points), (colour, marker, dash) in zip(runs.items(), styles, strict=False):
            style = {"color": colour, "marker": marker, "linestyle": dash, "linewidth": 1.8, "markersize": 5}
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, label=name if first == 0 else None, **style)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    most = max((len(runs) for runs in panels.values()), default=1)
    columns = 3 if len(panels) == 1 else 5  # as many as are as wide as the panels
    figure.legend(loc="outside lower center", ncols=min(most, columns), frameon=False, handlelength=3.5)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return saved(figure, path)


def plot_partition(
    partition: Partition,
    labels: ArrayLike,
    path: str | os.PathLike[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Draw the rows per client and class, save the picture to `path` (PNG, PDF, ...) and return it.

    `class_names[c]` is the name of the integer class c, as in `ClassLabel.names`.
    """
    classes, counts = partition.counts(labels)
    num_clients, num_classes = counts.shape
    width = float(np.clip(2.4 + 0.32 * num_clients, 6, 16))
    height = float(np.clip(2.4 + 0.30 * num_classes, 4, 10))
    figure = new_figure(width, height)
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, max(height - 2.0, 2.0)])

    sizes = counts.sum(axis=1)
    bars.bar(np.arange(num_clients), sizes, width=0.8 if num_clients <= 60 else 1.0, color="#4c72b0")
    bars.set_ylabel("rows")
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.spines[["top", "right"]].set_visible(False)
    bars.tick_params(axis="x", length=0)
    bars.set_title(
        f"{sizes.sum():,} rows over {num_clients:,} clients: {sizes.min():,} to {sizes.max():,} each, "
        f"median {np.median(sizes):,.0f}",
        fontsize=10,
    )

    shown = np.ma.masked_equal(counts.T, 0)  # an empty cell is white, not merely pale
    scale = PowerNorm(0.5, vmin=0, vmax=counts.max())  # by square root, or one full cell makes all others pale
    image = cells.imshow(shown, aspect="auto", cmap="YlGnBu", norm=scale, interpolation="nearest")
    cells.set_xlabel("client")
    cells.set_ylabel("class")
    names = [_class_name(value, class_names) for value in classes]
    _ticks(cells.xaxis, list(partition.names), room=int(width / 0.32))
    _ticks(cells.yaxis, names, room=int(height / 0.22))
    if max(map(len, partition.names)) > 3:  # as wide as a tick has room for
        cells.tick_params(axis="x", rotation=90)
    if num_clients <= 30 and num_classes <= 25:
        for client, label in np.argwhere(counts):
            count = counts[client, label]
            colour = "white" if scale(count) > 0.6 else "black"
            size = 8 if counts.max() < 1000 else 6
            cells.text(client, label, str(count), ha="center", va="center", color=colour, fontsize=size)
    colourbar = figure.colorbar(image, ax=cells, fraction=0.04, pad=0.01, label="rows of the class")
    colourbar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return saved(figure, path)


def _class_name(value: Any, class_names: Sequence[str] | None) -> str:
    if class_names is not None and not isinstance(value, str) and 0 <= value < len(class_names):
        return str(class_names[int(value)])
    return str(value)


def _ticks(axis: Any, names: list[str], room: int) -> None:
    """Name every place if there is room, else every 2nd, 5th, 10th, ..."""
    steps = (m * 10**e for e in range(12) for m in (1, 2, 5))
    step = next(step for step in steps if len(names) <= step * max(room, 1))
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [name if len(name) <= 20 else name[:19] + "…" for name in (names[p] for p in places)])
