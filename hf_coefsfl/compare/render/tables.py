"""The tables of a comparison in the paper's layout: a row for each method, a column for each task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ...analysis.tables import MIB
from ...analysis.timing import Network
from ...federation.sampling import num_sampled
from ...methods import METHODS
from ..grid import Summary, more_is_better
from ..results import Result, Score, mean_or_none

BEST, SECOND = "best", "second"
WORK = "server GFLOPs"  # the heading of their column


class Column(NamedTuple):
    """The headings over a result. Levels that a table does not need are empty."""

    cut: str
    split: str
    title: str
    score: str

    @property
    def label(self) -> str:
        """Return all levels in one line."""
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class TableCell:
    """One entry: a score, its rank, and whether all of its runs have finished. Without a score it stays empty."""

    score: Score | None = None
    mark: str | None = None
    complete: bool = True
    refused: str | None = None
    decimals: int = 1

    def show(self, value: float) -> str:
        """Return a number as the table shows it."""
        return f"{value:.{self.decimals}f}"

    def with_deviation(self, value: float, std: float | None, pattern: str = " ± {}") -> str:
        """Return "84.5 ± 0.2"."""
        return self.show(value) + (pattern.format(self.show(std)) if std is not None else "")


@dataclass(frozen=True)
class Row:
    """A method with a model."""

    model: str
    name: str
    reference: bool
    cells: tuple[TableCell, ...]


@dataclass(frozen=True)
class Table:
    """Models with the same columns."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    link: Network | None = None  # of its column of seconds, if it has one

    def blocks(self) -> list[tuple[str, list[Row]]]:
        """Return the rows of each model."""
        return [(model, list(rows)) for model, rows in groupby(self.rows, key=lambda row: row.model)]

    def notes(self) -> Iterator[str]:
        """Yield the notes below the table."""
        cells = [cell for row in self.rows for cell in row.cells]
        yield "Mean and, over several seeds, standard deviation; best and second-best without the reference methods."
        if any(cell.score and cell.score.paper for cell in cells):
            yield "In brackets: the paper's figures."
        if any(cell.score and cell.score.values and not cell.complete for cell in cells):
            yield "*: not all runs have finished."
        if any(cell.refused for cell in cells):
            yield "--: the method is not applicable to the task."
        if any(column.score == WORK for column in self.columns):
            yield f"{WORK}: of a whole run, counted on one client a round and scaled to the samples of all."
        if self.link is not None:
            yield (
                f"MiB and transfers of all clients. Seconds: what the transfers of a run take over {self.link}, the "
                "clients of a round at the same time, without computing."
            )


def make_tables(results: Sequence[Result], link: Network | None = None) -> list[Table]:
    """Return a table for each group of models that were trained on the same tasks, splits and cuts.

    If all models have one task, split and cut, the table also shows what crossed the cut, and how long that takes
    over `link`.
    """
    by_model: dict[str, list[Result]] = {}
    for result in results:
        by_model.setdefault(result.cell.spec.model, []).append(result)
    swept = {model: _sweeps_cuts(found) for model, found in by_model.items()}
    groups: dict[tuple[Column, ...], list[str]] = {}
    for model, found in by_model.items():
        columns = sorted(
            {_column(r, name, swept[model]) for r in found for name in r.scores},
            key=lambda column: _order(column, found),
        )
        groups.setdefault(tuple(columns), []).append(model)
    tables = [_table(full, models, by_model, swept) for full, models in groups.items()]
    places = {(result.title, result.cell.split.name, result.cell.cut) for result in results}
    if link is None or len(places) > 1 or len(tables) > 1:
        return tables
    return [_with_traffic(table, results, link) for table in tables]


def _with_traffic(table: Table, results: Sequence[Result], link: Network) -> Table:
    """Return the table with MiB, transfers, seconds and, if it was counted, the server's work: means over the seeds."""
    known = {(r.cell.spec.model, r.cell.variant.name): r for r in results}
    names = ["MiB", "transfers", "seconds"] + [WORK] * was_counted(results)
    rows = []
    for row in table.rows:
        result = known[row.model, row.name]
        values = [_traffic(summary, link) for _, summary in result.runs]
        means = [mean_or_none([run[i] for run in values]) for i in range(len(names))]
        cells = [
            TableCell(
                Score(name, () if value is None else (value,), None),
                complete=result.complete,
                refused=result.cell.refused,
                decimals=0 if name == "transfers" else 1,
            )
            for name, value in zip(names, means, strict=True)
        ]
        rows.append(replace(row, cells=(*row.cells, *cells)))
    columns, caption = list(table.columns), table.caption
    if len(columns) == 1:  # beside others it needs its name, and the caption names the task
        caption = ", ".join(filter(None, (columns[0].title, caption)))
        columns = [Column("", "", "", next(iter(results[0].scores)))]
    columns += [Column("", "", "", name) for name in names]
    return Table(caption, tuple(columns), tuple(rows), link)


def was_counted(results: Sequence[Result]) -> bool:
    """Return whether a finished run counted the server's operations."""
    return any(summary.get("server_gflops") is not None for result in results for _, summary in result.tried)


def _traffic(summary: Summary, link: Network) -> tuple[float, float, float, float | None]:
    """Return the MiB and transfers of a run, the seconds of a round's clients side by side, and the server's GFLOPs."""
    mib, transfers = float(summary["mib"]), float(summary["transfers"])
    clients = num_sampled(summary.get("num_clients", 1), summary.get("participation", 1.0))
    return mib, transfers, link.seconds(mib * MIB / clients, transfers / clients), summary.get("server_gflops")


def _table(
    full: tuple[Column, ...], models: list[str], by_model: dict[str, list[Result]], swept: dict[str, bool]
) -> Table:
    rows: list[Row] = []
    for model in models:
        found = {
            (r.cell.variant.name, _column(r, name, swept[model])): (r, name)
            for r in by_model[model]
            for name in r.scores
        }
        names = dict.fromkeys(r.cell.variant.name for r in by_model[model])
        methods = {r.cell.variant.name: r.cell.variant.method for r in by_model[model]}
        marks = [_marks({name: found[name, c] for name in names if (name, c) in found}) for c in full]
        for name in names:
            cells = [
                _cell(*found[name, c], mark.get(name)) if (name, c) in found else TableCell()
                for c, mark in zip(full, marks, strict=True)
            ]
            rows.append(Row(model, name, METHODS[methods[name]].is_reference, tuple(cells)))
    return Table(_caption(full, models, by_model, swept), _shown(full), tuple(rows))


def _cell(result: Result, name: str, mark: str | None) -> TableCell:
    decimals = 2 if name == "perplexity" else 1
    return TableCell(result.scores[name], mark, result.complete, result.cell.refused, decimals)


def _marks(column: dict[str, tuple[Result, str]]) -> dict[str, str]:
    """Return best and second-best of a column by what is shown, among the methods that are not references."""
    shown: dict[str, float] = {}
    for name, (result, score) in column.items():
        value = result.scores[score].mean
        if value is not None and math.isfinite(value) and not METHODS[result.cell.variant.method].is_reference:
            higher = more_is_better(result.runs[0][1], score)
            shown[name] = float(_cell(result, score, None).show(value)) * (1 if higher else -1)
    return ranks(shown)


def ranks(values: dict[str, float]) -> dict[str, str]:
    """Return the marks of the best and the second-best. If several are best, none is second."""
    if len(values) < 2:
        return {}
    order = sorted(set(values.values()), reverse=True)
    best = [name for name, value in values.items() if value == order[0]]
    second = [name for name, value in values.items() if len(best) == 1 and value == order[1]]
    return dict.fromkeys(best, BEST) | dict.fromkeys(second, SECOND)


# ---- Columns ----


def _sweeps_cuts(results: Sequence[Result]) -> bool:
    cuts: dict[tuple[str, str], set[int]] = {}
    for result in results:
        cuts.setdefault((result.title, result.cell.split.name), set()).add(result.cell.cut)
    return any(len(found) > 1 for found in cuts.values())


def _column(result: Result, score: str, swept: bool) -> Column:
    title, name = result.title, score
    if len(result.scores) == 1 and score == "accuracy":
        name = ""
    elif score.startswith(title):  # MNLI-m stands for itself
        title, name = score, ""
    return Column(f"cut {result.cell.cut}" if swept else "", result.cell.split.name, title, name)


def _order(column: Column, results: Sequence[Result]) -> tuple[int, ...]:
    """Order columns as the spec does, cuts first, then splits, tasks and scores."""
    swept = bool(column.cut)
    keys = [_column(r, name, swept) for r in results for name in r.scores]
    levels = [list(dict.fromkeys(key[level] for key in keys)) for level in range(len(column))]
    return tuple(known.index(value) for known, value in zip(levels, column, strict=True))


def _shown(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Leave out what all columns have in common, but keep the last level that says anything."""
    varies = [len({column[level] for column in columns}) > 1 for level in range(4)]
    keep = [varies[0], varies[1], varies[2] or varies[3] or not any(varies), True]
    return tuple(Column(*(value if k else "" for value, k in zip(column, keep, strict=True))) for column in columns)


def _caption(
    columns: tuple[Column, ...], models: list[str], by_model: dict[str, list[Result]], swept: dict[str, bool]
) -> str:
    shown = _shown(columns)
    parts = [columns[0].title] if not any(c.title for c in shown) else []
    for model in models:
        cuts = sorted({r.cell.cut for r in by_model[model]})
        parts.append(model if swept[model] else f"{model} cut after block {', '.join(map(str, cuts))}")
    parts += [columns[0].split] if len({c.split for c in columns}) == 1 else []
    return ", ".join(parts)
