"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..paper import PaperValue
from .tables import BEST, SECOND, Column, Table, TableCell


def notes(table: Table) -> Iterator[str]:
    """Yield the notes below the table."""
    yield "Mean and, over several seeds, standard deviation; best and second-best without the reference methods."
    if table.has(lambda cell: cell.score and cell.score.paper):
        yield "In brackets: the paper's figures."
    if table.has(lambda cell: cell.score and cell.score.values and not cell.complete):
        yield "*: not all runs have finished."
    if table.has(lambda cell: cell.refused):
        yield "--: the method is not applicable to the task."


def markdown(table: Table) -> str:
    """Return a table in Markdown, with its caption and notes."""
    head = ["Model", "Method", *(column.label for column in table.columns)]
    lines = [head, ["---", "---", *("---:" for _ in table.columns)]]
    for row in table.rows:
        lines.append([row.model, row.name, *(_markdown_cell(cell) for cell in row.cells)])
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"**{table.caption}**\n\n{text}\n\n{' '.join(notes(table))}\n"


def _markdown_cell(cell: TableCell) -> str:
    if cell.refused is not None:
        return "--"
    if cell.score is None:
        return ""
    text = ""
    if cell.score.mean is not None:
        text = with_deviation(cell, cell.score.mean, cell.score.std)
        text = {BEST: f"**{text}**", SECOND: f"<u>{text}</u>"}.get(cell.mark or "", text)
        text += "" if cell.complete else "\\*"
    if cell.score.paper is not None:
        text += f" [{with_deviation(cell, cell.score.paper.mean, cell.score.paper.std)}]"
    return text.strip()


def with_deviation(cell: TableCell, value: float, std: float | None) -> str:
    """Return "84.5 ± 0.2"."""
    return cell.show(value) + (f" ± {cell.show(std)}" if std is not None else "")


def latex(table: Table) -> str:
    """Return a table in LaTeX. It needs booktabs, multirow and xcolor."""
    width = len(table.columns) + 2
    lines = [
        r"\begin{table}[t]", r"\centering", r"\scriptsize", r"\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_escape(table.caption)}. {_escape(' '.join(notes(table)))}}}",
        rf"\begin{{tabular}}{{l l {' '.join('c' * len(table.columns))}}}", r"\toprule",
    ]  # fmt: skip
    lines += _latex_head(table.columns)
    for model, rows in table.blocks():
        lines.append(r"\midrule")
        for i, row in enumerate(rows):
            if i and rows[i - 1].reference and not row.reference:
                lines.append(rf"\cmidrule(l){{2-{width}}}")
            label = rf"\multirow{{{len(rows)}}}{{*}}{{{_escape(model)}}}" if i == 0 else ""
            lines.append(f"{label} & {_escape(row.name)} & {' & '.join(map(_latex_cell, row.cells))} \\\\")
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


def _latex_cell(cell: TableCell) -> str:
    if cell.refused is not None:
        return "--"
    if cell.score is None:
        return ""
    text = ""
    if cell.score.mean is not None:
        text = _latex_value(cell, cell.score.mean, cell.score.std)
        text = {BEST: rf"\textbf{{{text}}}", SECOND: rf"\underline{{{text}}}"}.get(cell.mark or "", text)
        text += "" if cell.complete else "*"
    paper: PaperValue | None = cell.score.paper
    if paper is not None:
        text += rf" \textcolor{{gray}}{{[{_latex_value(cell, paper.mean, paper.std)}]}}"
    return text.strip()


def _latex_value(cell: TableCell, value: float, std: float | None) -> str:
    return cell.show(value) + (rf"\,{{\tiny$\pm$\,{cell.show(std)}}}" if std is not None else "")


def _escape(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
