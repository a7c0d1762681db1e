"""docs/results.md has the figures of the archive: what `coefsfl compare NAME --report_only` prints."""

from __future__ import annotations

from statistics import stdev

import pytest

from hf_coefsfl.compare.differences import Difference, paired
from hf_coefsfl.compare.results import Result
from tests.support import archived
from tests.support.archived import Table, results

PAGE = "docs/results.md"
STUDY, MORE, PLATEAU = "study/study.yaml", "study/more.yaml", "compare/plateau.yaml"


def named(corner: str) -> Table:
    return archived.named(PAGE, corner)


def scores(values: tuple[float, ...], std: float | None, seeds: int) -> str:
    """A mean with its deviation, and the number of seeds if it is another than the column's."""
    spread = "" if std is None else f" ± {std:.1f}"
    return f"{sum(values) / len(values):.1f}{spread}" + f" ({len(values)})" * (len(values) != seeds)


def accuracy(result: Result | None, seeds: int) -> str:
    score = result.scores["accuracy"] if result else None
    return scores(score.values, score.std, seeds) if score and score.values else ""


def difference(column: str, row: str, baseline: str) -> str:
    values = paired({name: r for (c, name), r in results(STUDY).items() if c == column}, row, baseline)
    return str(Difference.of([values])).replace("-", "−") if values else ""


@pytest.mark.parametrize(("corner", "spec"), [("the study", STUDY), ("beside the study", MORE)])
def test_scores_are_those_of_the_archive(corner: str, spec: str) -> None:
    wrong, shown = {}, named(corner)
    for row, cells in shown.items():
        for heading, text in cells.items():
            column, seeds = heading.removesuffix(")").rsplit(" (", 1)
            expected = accuracy(results(spec).get((column, row)), int(seeds))
            if text != expected:
                wrong[row, column] = f"{text!r}, the archive has {expected!r}"
    assert not wrong
    if spec == STUDY:
        assert shown.keys() == {row for (column, row) in results(spec) if not column.startswith("SQuAD")}


def test_the_study_is_complete() -> None:
    assert not [place for place, result in results(STUDY).items() if not result.complete]


@pytest.mark.parametrize(
    ("corner", "baseline"), [("to vanilla", "Vanilla SFL"), ("to CoeF-J", "CoeF-J"), ("to CoeF-D", "CoeF-D")]
)
def test_differences_are_those_of_the_archive(corner: str, baseline: str) -> None:
    wrong = {}
    for row, cells in named(corner).items():
        for column, text in cells.items():
            if text != difference(column, row, baseline):
                wrong[row, column] = f"{text!r}, the archive has {difference(column, row, baseline)!r}"
    assert not wrong


def test_the_answers_of_squad_are_those_of_the_archive() -> None:
    wrong = {}
    for row, cells in named("SQuAD").items():
        place = "SQuAD (answerable), IID", {"Gradient reuse": "Gradient reuse (w/o comp.)"}.get(row, row)
        found = (results(STUDY).get(place) or results(MORE)[place]).scores
        pairs = list(zip(found["EM"].values, found["F1"].values, strict=True))
        expected = [f"{exact:.1f}, {f1:.1f}" for exact, f1 in pairs] + [""] * (3 - len(pairs))
        mean = f"{found['EM'].mean:.1f}, {found['F1'].mean:.1f}" if len(pairs) > 1 else ""
        shown = [cells[heading] for heading in ("mean", "first seed", "second", "third")]
        if shown != [mean, *expected]:
            wrong[row] = f"{shown}, the archive has {[mean, *expected]}"
    assert not wrong


def tried(result: Result) -> str:
    """The first seed's first score with each learning rate of the spec."""
    first = {
        run.options["learning_rate"]: next(iter(summary["scores"].values()))
        for run, summary in result.tried
        if run.options["seed"] == result.cell.spec.seeds[0]
    }
    return " / ".join(f"{first[rate]:.1f}" if rate in first else "–" for rate in (3e-4, 1e-3, 3e-3))


def test_learning_rates_are_those_of_the_archive() -> None:
    wrong, shown = {}, set()
    for table in archived.tables_of(PAGE):
        if table[""][""] != "3e-4 / 1e-3 / 3e-3":
            continue
        for row, cells in table.items():
            for column, text in cells.items():
                if row and text:
                    shown.add((column, row))
                    expected = tried(results(STUDY)[column, row])
                    if text != expected:
                        wrong[row, column] = f"{text!r}, the archive has {expected!r}"
    assert not wrong
    assert shown == {place for place in results(STUDY) if not place[0].startswith("SQuAD")}  # one rate, from more.yaml


def after(result: Result, rounds: int, seeds: int) -> str:
    """The accuracy after some rounds, mean and deviation over the seeds."""
    points = [p["scores"]["accuracy"] for _, s in result.runs for p in s["curve"] if p["round"] == rounds]
    assert len(points) == len(result.cell.spec.seeds)
    return scores(tuple(points), stdev(points) if len(points) > 1 else None, seeds)


LONGER = {
    "digits, rounds": ("Digits", 8),
    "20 Newsgroups, rounds": ("20 Newsgroups", 3),
    "CIFAR-100 part, rounds": ("CIFAR-100 part", 3),
}


@pytest.mark.parametrize("corner", LONGER)
def test_scores_of_longer_runs_are_those_of_the_archive(corner: str) -> None:
    wrong, (task, seeds) = {}, LONGER[corner]
    for row, cells in named(corner).items():
        split, rounds = row.split(", ")
        for method, text in cells.items():
            expected = after(results(PLATEAU)[f"{task}, {split}", method], int(rounds), seeds)
            if text != expected:
                wrong[row, method] = f"{text!r}, the archive has {expected!r}"
    assert not wrong


def test_vanillas_scores_of_longer_runs_are_those_of_the_archive() -> None:
    wrong = {}
    for row, cells in named("vanilla SFL, rounds").items():
        for column, text in cells.items():
            expected = after(results(PLATEAU)[column, "Vanilla SFL"], int(row.removeprefix("after ")), 1)
            if text != expected:
                wrong[row, column] = f"{text!r}, the archive has {expected!r}"
    assert not wrong


def test_the_plateau_is_complete() -> None:
    assert not [place for place, result in results(PLATEAU).items() if not result.complete]
