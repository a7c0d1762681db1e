"""Paired differences: the pairs are right, and so are the intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hf_coefsfl.compare.differences import Difference, difference_rows, paired
from hf_coefsfl.compare.grid import expand, total
from hf_coefsfl.compare.render.more_tables import more_tables
from hf_coefsfl.compare.render.plots import by_place
from hf_coefsfl.compare.results import Result, gather
from hf_coefsfl.compare.spec import parse_spec
from tests.support.comparisons import cells_of, content, summary


def results(scores: dict[str, list[float | None]], **changes: object) -> list[Result]:
    """One task, a row for each method, a score for each seed; None: the run is not there."""
    seeds = list(range(max(map(len, scores.values()))))
    spec = parse_spec(content(methods=list(scores), learning_rates=[0.1], seeds=seeds, **changes), "t")
    cells = expand(spec)
    finished = {}
    for cell in cells:
        for seed, value in enumerate(scores[cell.variant.method]):
            if value is not None:
                run = cell.runs[0.1, seed]
                finished[run.id] = summary(value)
    return gather(spec, cells, finished)


def test_differences_are_between_runs_of_the_same_seed() -> None:
    found = {r.cell.variant.method: r for r in results({"vanilla": [70, 60, 50], "reuse": [69, None, 52]})}
    assert paired(found, "reuse", "vanilla") == [-1, 2]
    assert paired(found, "vanilla", "reuse") == [1, -2]
    assert paired(found, "reuse", "coef_d") is None


def test_a_single_pair_has_no_interval() -> None:
    assert difference_rows(by_place(results({"vanilla": [70, 60], "reuse": [69, None]})), "Vanilla SFL") == []


def test_the_interval_is_that_of_the_normal_distribution_for_many_seeds() -> None:
    values = np.random.default_rng(1).normal(2.0, 3.0, 400)
    found = Difference.of([values])
    width = 1.96 * values.std() / 400**0.5
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - width, abs=0.05)
    assert found.high == pytest.approx(values.mean() + width, abs=0.05)


def test_groups_count_alike_however_many_seeds_they_have() -> None:
    found = Difference.of([[0.0, 0.0], [3.0] * 8])
    assert (found.mean, found.low, found.high) == (1.5, 1.5, 1.5)


def test_the_table() -> None:
    found = results({"vanilla": [70, 60, 50], "reuse": [69, 59, 49]})
    text = more_tables(found, ["Vanilla SFL"])
    assert "**Difference to Vanilla SFL**" in text and "-1.0 [-1.0, -1.0]" in text
    assert more_tables(found, []) == ""


def test_learning_rates_of_the_first_seed() -> None:
    cells = cells_of(methods=["vanilla", "reuse"], learning_rates=[0.1, 0.2])
    (vanilla, reuse), values = cells, iter([math.nan, -60.0, 61.0, 40.0])
    runs = [*vanilla.first(), *vanilla.later(0.2)[:1], reuse.first()[0]]
    finished = {run.id: summary(next(values)) for run in runs}
    text = more_tables(gather(parse_spec(content(), "t"), cells, finished), [])
    (row,) = [line for line in text.splitlines() if "Vanilla SFL" in line]
    assert [part.strip() for part in row.strip("|").split("|")] == ["Vanilla SFL", "0.1: diverged, 0.2: -60.0"]
    assert "**Learning rates**" in text and "40.0" not in text  # of which one was tried


def test_places_that_differ_in_the_cut_have_columns_of_their_own() -> None:
    task = {"task": "cifar100", "model": "ViT", "model_name_or_path": "somewhere/vit", "cuts": [1, 2]}
    found = results({"vanilla": [70, 60], "reuse": [69, 59]}, tasks=[task])
    (row,) = difference_rows(by_place(found), "Vanilla SFL")
    assert list(row) == ["Method", "CIFAR-100, cut 1", "CIFAR-100, cut 2", "all"]


def test_a_heading_names_no_more_than_it_needs() -> None:
    """Two tasks with a model each: the task and the split say all. A cell without runs of both stays empty."""
    one = {"task": "cifar100", "model": "ViT", "model_name_or_path": "somewhere/vit", "cut": 1}
    two = {"task": "food101", "model": "ViT-B", "model_name_or_path": "somewhere/b", "cut": 2}
    splits = [{"name": "IID", "partition": "iid"}, {"name": "skewed", "partition": "dirichlet"}]
    found = results({"vanilla": [70, 60], "reuse": [69, 59]}, tasks=[two, one], splits=splits)
    found[0] = replace(found[0], runs=found[0].runs[:1])
    (row,) = difference_rows(by_place(found), "Vanilla SFL")
    assert list(row) == ["Method", "Food-101, IID", "Food-101, skewed", "CIFAR-100, IID", "CIFAR-100, skewed", "all"]
    assert row["Food-101, IID"] == row["all"] == "" and row["Food-101, skewed"] == "-1.0 [-1.0, -1.0]"


def test_rows_with_settings_are_paired_at_every_place() -> None:
    """A row that is trained alike for all splits has one set of runs, and a difference for each split and for all."""
    central = {"method": "vanilla", "name": "Central", "settings": {"num_clients": 1, "partition": "iid"}}
    splits = [{"name": "IID", "partition": "iid"}, {"name": "skewed", "partition": "dirichlet"}]
    lists = {"methods": ["vanilla", central], "splits": splits, "learning_rates": [0.1], "seeds": [0, 1]}
    spec = parse_spec(content(**lists, baselines=["Vanilla SFL"]), "t")
    cells = expand(spec)
    values = {("Vanilla SFL", "IID"): 60.0, ("Vanilla SFL", "skewed"): 50.0}
    finished = {
        run.id: summary(values.get((cell.variant.name, cell.split.name), 65.0) + run.options["seed"])
        for cell in cells
        for run in cell.runs.values()
    }
    assert len(finished) == total(cells) == 3 * 2
    (row,) = difference_rows(by_place(gather(spec, cells, finished)), "Vanilla SFL")
    assert row == {
        "Method": "Central",
        "CIFAR-100, IID": "+5.0 [+5.0, +5.0]",
        "CIFAR-100, skewed": "+15.0 [+15.0, +15.0]",
        "all": "+10.0 [+10.0, +10.0]",
    }


def test_a_baseline_must_be_a_row() -> None:
    with pytest.raises(ValueError, match=r"baselines: no row is called 'Vanila SFL'\. Did you mean Vanilla SFL\?"):
        results({"vanilla": [1.0], "reuse": [1.0]}, baselines=["Vanila SFL"])
