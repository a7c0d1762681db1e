"""Writes all files that a comparison reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..._io import write_atomically
from ...analysis.plots import can_plot
from ...analysis.timing import Network
from ..grid import Cell, Summary
from ..results import gather, results_json, write_parquet
from ..runner import Failure
from ..spec import Spec
from .html import make_html
from .more_tables import more_tables
from .plots import write_plots
from .table_formats import latex, markdown
from .tables import make_tables


def write_report(
    spec: Spec,
    cells: Sequence[Cell],
    root: Path,
    finished: Mapping[str, Summary],
    failures: Sequence[Failure] = (),
    *,
    plots: bool = True,
    link: Network | None = None,
) -> str:
    """Write results.json, results.parquet, table.md, table.tex, report.html and plots/; return the tables as Markdown.

    Args:
        spec: the comparison.
        cells: its settings.
        root: where to write.
        finished: the summaries of the finished runs, by id.
        failures: the runs that failed in this call.
        link: a client's connection, for the seconds of a table of one task.
        plots: whether to draw the plots (about a second each); without Matplotlib they are skipped.
    """
    results = gather(spec, cells, finished)
    tables = make_tables(results, link)
    text = "\n".join(markdown(table) for table in tables)
    if more := more_tables(results, spec.baselines):
        text += "\n" + more
    write_atomically(root / "results.json", results_json(spec, results))
    write_parquet(results, root / "results.parquet")
    write_atomically(root / "table.md", f"# {spec.title}\n\n{text}")
    packages = "% needs \\usepackage{booktabs,multirow,xcolor}\n"
    write_atomically(root / "table.tex", packages + "\n".join(latex(table) for table in tables))
    write_atomically(root / "report.html", make_html(spec, results, failures, link))
    if plots and can_plot():
        write_plots(results, root / "plots")
    return text
