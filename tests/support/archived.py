"""Tables of the documentation's pages, and what the archive of finished runs has for their cells."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hf_coefsfl.compare import Archive, expand, load_finished, load_spec
from hf_coefsfl.compare.results import Result, gather
from tests.support.paths import ROOT

Table = dict[str, dict[str, str]]  # row, column: text; the corner under "", ""


def tables(page: str) -> list[Table]:
    """Return the tables of a page, without bold type."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        line = line.strip()
        if line.startswith("|"):
            found[-1].append([part.strip().replace("**", "") for part in re.split(r"(?<!\\)\|", line[1:-1])])
        elif found[-1]:
            found.append([])
    return [
        {row[0]: dict(zip(lines[0][1:], row[1:], strict=True)) for row in lines[2:]} | {"": {"": lines[0][0]}}
        for lines in found
        if lines
    ]


@cache
def tables_of(page: str) -> list[Table]:
    return tables((ROOT / page).read_text())


def named(page: str, corner: str) -> Table:
    """The table of a page with this text in its corner, without the corner."""
    (found,) = [table for table in tables_of(page) if table[""][""] == corner]
    return {row: cells for row, cells in found.items() if row}


@cache
def results(spec: str) -> dict[tuple[str, str], Result]:
    """The archive's results of a spec, by column and row."""
    loaded = load_spec(ROOT / "recipes" / spec)
    cells = expand(loaded)
    finished = load_finished(cells, Path("no_folder_of_runs"), Archive(ROOT / "recipes/study/runs.parquet"))
    return {
        (f"{r.title.replace(' (part)', ' part')}, {r.cell.split.name}", r.cell.variant.name): r
        for r in gather(loaded, cells, finished)
    }
