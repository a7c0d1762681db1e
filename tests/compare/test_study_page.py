"""docs/results.md has the figures of the archive: what `coefsfl compare study --report_only` prints."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from hf_coefsfl.compare import Archive, expand, load_finished, load_spec
from hf_coefsfl.compare.differences import Difference, paired
from hf_coefsfl.compare.results import Result, gather
from tests.support.paths import ROOT

Table = dict[str, dict[str, str]]  # row, column: text


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
def page() -> list[Table]:
    return tables((ROOT / "docs/results.md").read_text())


@cache
def results(path: str = "recipes/study/study.yaml") -> dict[tuple[str, str], Result]:
    """The archive's results of a spec, by column and row."""
    spec = load_spec(ROOT / path)
    cells = expand(spec)
    finished = load_finished(cells, Path("no_folder_of_runs"), Archive(ROOT / "recipes/study/runs.parquet"))
    return {
        (f"{r.title.replace(' (part)', ' part')}, {r.cell.split.name}", r.cell.variant.name): r
        for r in gather(spec, cells, finished)
    }


def accuracy(result: Result | None, seeds: int) -> str:
    values = result.scores["accuracy"].values if result else ()
    if not values or result is None:
        return ""
    score = result.scores["accuracy"]
    spread = "" if score.std is None else f" ± {score.std:.1f}"
    return f"{score.mean:.1f}{spread}" + f" ({len(values)})" * (len(values) != seeds)


def difference(column: str, row: str, baseline: str) -> str:
    values = paired({name: r for (c, name), r in results().items() if c == column}, row, baseline)
    return str(Difference.of([values])).replace("-", "−") if values else ""


def test_scores_are_those_of_the_archive() -> None:
    table = next(t for t in page() if "Digits, IID (8)" in t.get("Vanilla SFL", {}))
    assert {"Vanilla SFL", "CoeF-W", "CoeF-P", "CoeF-D", "CoeF-J"} <= table.keys()
    wrong = {}
    for row, cells in table.items():
        for heading, text in cells.items():
            if row:
                column, seeds = heading.removesuffix(")").rsplit(" (", 1)
                expected = accuracy(results().get((column, row)), int(seeds))
                if text != expected:
                    wrong[row, column] = f"{text!r}, the archive has {expected!r}"
    assert not wrong


@pytest.mark.parametrize(
    ("named", "baseline"), [("to vanilla", "Vanilla SFL"), ("to CoeF-J", "CoeF-J"), ("to CoeF-D", "CoeF-D")]
)
def test_differences_are_those_of_the_archive(named: str, baseline: str) -> None:
    table = next(t for t in page() if t[""][""] == named)
    wrong = {}
    for row, cells in table.items():
        for column, text in cells.items():
            if row and text != difference(column, row, baseline):
                wrong[row, column] = f"{text!r}, the archive has {difference(column, row, baseline)!r}"
    assert len(table) > 1 and not wrong


def test_the_answers_of_squad_are_those_of_the_archive() -> None:
    table = next(t for t in page() if "first seed" in t.get("CoeF-W", {}))
    wrong = {}
    for row, cells in table.items():
        if row:
            name = {"Gradient reuse": "Gradient reuse (w/o comp.)"}.get(row, row)
            scores = results()["SQuAD (answerable), IID", name].scores
            pairs = list(zip(scores["EM"].values, scores["F1"].values, strict=True))
            expected = [f"{exact:.1f}, {f1:.1f}" for exact, f1 in pairs] + [""] * (3 - len(pairs))
            mean = f"{scores['EM'].mean:.1f}, {scores['F1'].mean:.1f}" if len(pairs) > 1 else ""
            shown = [cells[heading] for heading in ("mean", "first seed", "second", "third")]
            if shown != [mean, *expected]:
                wrong[row] = f"{shown}, the archive has {[mean, *expected]}"
    assert len(table) > 5 and not wrong


RATES = (3e-4, 1e-3, 3e-3)
TRIED = "3e-4 / 1e-3 / 3e-3"


def tried(result: Result | None) -> str:
    """The first seed's score with each learning rate."""
    runs = result.tried if result is not None else ()
    first = {r.options["learning_rate"]: next(iter(s["scores"].values())) for r, s in runs if r.options["seed"] == 0}
    return " / ".join(f"{first[rate]:.1f}" if rate in first else "–" for rate in RATES) if first else ""


def test_learning_rates_are_those_of_the_archive() -> None:
    found = [table for table in page() if table[""][""] == TRIED]
    wrong, shown = {}, set()
    for table in found:
        for row, cells in table.items():
            for column, text in cells.items():
                if row:
                    shown.add((column, row))
                    expected = tried(results().get((column, row)))
                    if text != expected:
                        wrong[row, column] = f"{text!r}, the archive has {expected!r}"
    assert not wrong
    compared = next(t for t in page() if "Digits, IID (8)" in t.get("Vanilla SFL", {}))
    rows = set(compared) - {"", "Central LoRA", *(row for row in compared if row.endswith(", walk"))}
    assert {row for _, row in shown} >= rows
    assert len({column for column, _ in shown}) == 9


def test_scores_at_the_plateau_are_those_of_the_archive() -> None:
    table = next(t for t in page() if "IID, 90 rounds" in t.get("Vanilla SFL", {}))
    found = results("recipes/compare/plateau.yaml")
    for row, cells in table.items():
        if row:
            for split in ("IID", "non-IID"):
                result = found.get((f"Digits, to the plateau, {split}", row))
                assert cells[f"{split}, 90 rounds"] == accuracy(result, 8), (row, split)
