"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from .tables import BEST, SECOND, Column, Table, TableCell


class _Style(NamedTuple):
    """How an entry is written: patterns, each with a place for the text."""

    deviation: str
    best: str
    second: str
    incomplete: str
    paper: str

    def entry(self, cell: TableCell) -> str:
        if cell.refused is not None:
            return "--"
        if cell.score is None:
            return ""
        text, paper = "", cell.score.paper
        if cell.score.mean is not None:
            text = cell.with_deviation(cell.score.mean, cell.score.std, self.deviation)
            text = {BEST: self.best, SECOND: self.second}.get(cell.mark or "", "{}").format(text)
            text += "" if cell.complete else self.incomplete
        if paper is not None:
            text += self.paper.format(cell.with_deviation(paper.mean, paper.std, self.deviation))
        return text.strip()


_MARKDOWN = _Style(" ± {}", "**{}**", "<u>{}</u>", "\\*", " [{}]")
_LATEX = _Style(r"\,{{\tiny$\pm$\,{}}}", r"\textbf{{{}}}", r"\underline{{{}}}", "*", r" \textcolor{{gray}}{{[{}]}}")


def markdown(table: Table) -> str:
    """Return a table in Markdown, with its caption and notes."""
    head = ["Model", "Method", *(column.label for column in table.columns)]
    lines = [head, ["---", "---", *("---:" for _ in table.columns)]]
    for row in table.rows:
        lines.append([row.model, row.name, *map(_MARKDOWN.entry, row.cells)])
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"**{table.caption}**\n\n{text}\n\n{' '.join(table.notes())}\n"


def latex(table: Table) -> str:
    """Return a table in LaTeX. It needs booktabs, multirow and xcolor."""
    width = len(table.columns) + 2
    lines = [
        r"\begin{table}[t]", r"\centering", r"\scriptsize", r"\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_escape(table.caption)}. {_escape(' '.join(table.notes()))}}}",
        rf"\begin{{tabular}}{{l l {' '.join('c' * len(table.columns))}}}", r"\toprule",
    ]  # fmt: skip
    lines += _latex_head(table.columns)
    for model, rows in table.blocks():
        lines.append(r"\midrule")
        for i, row in enumerate(rows):
            if i and rows[i - 1].reference and not row.reference:
                lines.append(rf"\cmidrule(l){{2-{width}}}")
            label = rf"\multirow{{{len(rows)}}}{{*}}{{{_escape(model)}}}" if i == 0 else ""
            lines.append(f"{label} & {_escape(row.name)} & {' & '.join(map(_LATEX.entry, row.cells))} \\\\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex_head(columns: tuple[Column, ...]) -> list[str]:
    """Return a header line for each level in use. Equal neighbours share one heading."""
    levels = [level for level in range(4) if any(column[level] for column in columns)]
    lines = []
    for level in levels:
        cells, rules, at = [], [], 3
        for (_, value), group in groupby(columns, key=lambda column: (column[:level], column[level])):
            span = len(list(group))
            heading = rf"\textbf{{{_escape(value)}}}" if value else ""
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{heading}}}" if span > 1 else heading)
            if span > 1 and value:
                rules.append(rf"\cmidrule(lr){{{at}-{at + span - 1}}}")
            at += span
        left = r"\textbf{Model} & \textbf{Method}" if level == levels[-1] else " & "
        lines.append(f"{left} & {' & '.join(cells)} \\\\")
        lines += [" ".join(rules)] if rules and level != levels[-1] else []
    return lines


def _escape(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
