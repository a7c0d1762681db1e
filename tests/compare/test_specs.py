"""Specs of comparisons: what is refused, the ids of runs, and the recipes of the paper."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_coefsfl._recipes import find_spec, specs
from hf_coefsfl.cli import main
from hf_coefsfl.compare import check_files, expand, load_spec, parse_spec, total
from hf_coefsfl.compare.grid import upcoming
from hf_coefsfl.compare.paper import paper_results, paper_tables, paper_value
from tests.support.comparisons import cells_of, content
from tests.support.paths import ROOT

# ---- Specs ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": ["reuse"]}, "the spec has no key 'method'. Allowed: title, settings, tasks"),
        ({"methods": []}, "methods must be a list with at least one entry"),
        ({"methods": ["magic"]}, "unknown method 'magic'. Choose one of:.*coef_j"),
        ({"methods": ["reuse", "reuse"]}, "holds 'Gradient reuse .w/o comp..' twice"),
        (
            {"methods": [{"method": "coef_d", "method_kwargs": {"lambda": 1}}]},
            "no option 'lambda'.*compensation",
        ),
        (
            {"methods": [{"method": "reuse", "name": "one", "settings": {"num_round": 3}}]},
            "methods: settings of one gives 'num_round', which is not an option",
        ),
        ({"methods": [{"method": "reuse", "settings": {"seed": 3}}]}, "gives 'seed', which is set by seeds"),
        ({"methods": [{"method": "reuse", "settings": {"max_length": 9}}]}, "gives 'max_length', which is not an op"),
        ({"methods": [{"method": "reuse", "settings": {"num_rounds": 0}}]}, "num_rounds=0 must be"),
        ({"methods": [{"method": "reuse", "settings": ["iid"]}]}, "must be a mapping"),
        ({"tasks": [{"task": "mnist"}]}, "unknown task 'mnist'. Choose one of:.*cifar100"),
        (
            {"tasks": [{"task": "mnli", "doc_stridee": 3, "cut": 1}]},
            "gives 'doc_stridee', which is not an option",
        ),
        ({"tasks": {"task": "mnli"}}, "tasks must be a list"),
        ({"settings": {"learning_rate": 0.1}}, "gives 'learning_rate', which is set by learning_rates"),
        ({"settings": {"hub_token": "hf_secret"}}, "gives 'hub_token', which is set by nothing"),
        ({"settings": {"push_to_hub": True}}, "gives 'push_to_hub', which is set by nothing"),
        ({"settings": {"cut": 3}}, "gives 'cut', which is set by cut or cuts"),
        ({"settings": {"max_length": 64}}, r"tasks\[0\] .cifar100. gives 'max_length', which is not an option"),
        ({"splits": [{"name": "IID", "stride": 3}]}, "splits gives 'stride', which is not an option"),
        ({"settings": {"num_rounds": 0}}, "num_rounds=0 must be a whole number of at least 1"),
        ({"settings": {"participation": 2}}, "participation=2"),
        ({"settings": ["num_rounds"]}, "settings must be a mapping"),
        ({"learning_rates": ["1e-4"]}, "got '1e-4' .str.. YAML reads 1e-4 as text"),
        ({"learning_rates": [0.0]}, "numbers above 0, got 0.0"),
        ({"seeds": [0, 0]}, "holds 0 twice"),
        ({"seeds": [0.5]}, "whole numbers of at least 0, got 0.5"),
        ({"splits": [{"name": "IID", "partition": "idd"}]}, "partition='idd' is not allowed"),
        ({"paper_tables": ["main"]}, "there is no 'main'. Choose from: main_iid"),
        ({"tasks": 2 * [{"task": "mnli", "model": "a", "cut": 1}]}, "the same place in the tables: mnli, a, IID, 1"),
    ],
)
def test_bad_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cells_of(**changes)


def test_bad_files_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("tasks: [")
    for name, message in (("none.yaml", "cannot be read: it does not exist"), ("broken.yaml", "is not valid YAML")):
        with pytest.raises(SystemExit) as left:
            main(["compare", str(tmp_path / name)])
        assert left.value.code == 2 and message in capsys.readouterr().err


def test_specs_are_found_by_name_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ROOT / "recipes/compare/tiny.yaml"
    for name in ("tiny", "tiny.yaml", "compare/tiny", "recipes/compare/tiny.yaml"):
        assert find_spec(name) == tiny
    for name in ("tinny", "paper/tiny", "tiny.json", str(tmp_path / "tiny.yaml")):
        with pytest.raises(ValueError, match=r"Did you mean tiny.*one of the specs .*tiny.*, iid"):
            find_spec(name)
    (tmp_path / "tiny").mkdir()
    assert find_spec("tiny") == tiny
    (tmp_path / "tiny.yaml").touch()
    assert find_spec("tiny.yaml") == Path("tiny.yaml")  # the file that is there, not the package's
    folders = [ROOT / "recipes" / folder for folder in ("compare", "paper", "study")]
    files = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    assert set(specs()) == files and load_spec("iid").name == "iid"


def test_ids_depend_on_the_options_alone() -> None:
    """The literal id must never change: finished runs are found by it."""
    run = cells_of()[0].first()[0]
    assert run.id == "cifar100-iid-cut2-reuse-lr0.1-seed0-f48918fb"
    relabelled = [{**content()["tasks"][0], "model": "other label", "title": "other"}]
    assert cells_of(tasks=relabelled, title="t")[0].first()[0].id == run.id
    assert cells_of(settings={"num_rounds": 5, "warmup_rounds": 1})[0].first()[0].id != run.id


def test_a_tasks_own_lists_replace_the_specs() -> None:
    own = {
        "task": "mnli",
        "model": "b",
        "cuts": [1, 3],
        "learning_rates": [0.3],
        "method_options": {"coef_d": {"compensation_factor": 7}},
    }
    cells = cells_of(tasks=[content()["tasks"][0], own], cut=2)
    assert [cell.cut for cell in cells] == [2, 2, 1, 1, 3, 3]
    assert total(cells) == 2 * (2 + 2) + 4 * (1 + 2)
    assert cells[3].first()[0].options["method_kwargs"] == {"compensation_factor": 7}
    assert "method_kwargs" not in cells[1].first()[0].options


def test_the_settings_of_a_row_win() -> None:
    central = {"method": "vanilla", "name": "Central", "settings": {"num_clients": 1, "partition": "iid"}}
    skewed = {"name": "skewed", "partition": "dirichlet", "dirichlet_alpha": 0.3, "num_clients": 9}
    splits = [{"name": "IID", "partition": "iid"}, skewed]
    usual = cells_of(splits=splits, methods=["reuse", "vanilla"])
    cells = cells_of(splits=splits, methods=["reuse", central])
    assert [cell.runs for cell in cells[::2]] == [cell.runs for cell in usual[::2]]  # and so their ids
    for cell in cells[1::2]:
        options = cell.first()[0].options
        assert {name: options[name] for name in central["settings"]} == central["settings"]
        assert options["num_rounds"] == 4 and options["method"] == "vanilla"
    assert cells[3].first()[0].options["dirichlet_alpha"] == 0.3  # of the split: it is not given by the row
    assert cells[1].first()[0].id not in {run.id for cell in usual for run in cell.runs.values()}
    plain = {"method": "vanilla", "name": "Central", "settings": None}
    assert [c.runs for c in cells_of(splits=splits, methods=["reuse", plain])] == [c.runs for c in usual]


def test_lists_within_the_methods_are_taken_apart() -> None:
    central = {"method": "vanilla", "name": "Central", "settings": {"num_clients": 1}}
    flat, nested = cells_of(methods=["reuse", "coef_d", central]), cells_of(methods=[["reuse", ["coef_d"]], central])
    assert [cell.runs for cell in nested] == [cell.runs for cell in flat]
    with pytest.raises(ValueError, match="holds 'CoeF-D' twice"):
        cells_of(methods=[["reuse", "coef_d"], "coef_d"])


def test_files_of_a_row_are_looked_for_too() -> None:
    row = {"method": "reuse", "settings": {"model_name_or_path": "./nowhere/vit"}}
    cells = cells_of(methods=[row])
    with pytest.raises(ValueError, match=r"not here: \./nowhere/vit"):
        check_files(cells, {})
    check_files(cells, {run.id: {"scores": {"accuracy": 1.0}} for cell in cells for run in cell.runs.values()})


def test_what_cannot_be_probed_or_trained() -> None:
    reuse, slopes = cells_of(settings={"staleness_probe": 2}, methods=["reuse", "mu_splitfed"])
    assert reuse.first()[0].options["staleness_probe"] == 2
    assert "staleness_probe" not in slopes.first()[0].options
    cells = cells_of(tasks=[{"task": "squad_v2", "cut": 1}], methods=["reuse", "gas"])
    assert [cell.refused is None for cell in cells] == [True, False]
    assert total(cells) == 4 and not [run for run in upcoming(cells, {}, ()) if run.options["method"] == "gas"]


# ---- The paper ----


@pytest.mark.parametrize(
    ("name", "settings", "runs"),
    [
        ("iid", 12 * 9, (12 * 9 - 2) * 5),  # GAS does not apply to SQuAD, which two models have
        ("non_iid", 5 * 9, 5 * 9 * 5),
        ("cut_sweep", (5 + 4) * 9, 9 * 9 * 5),
        ("auxiliary_sweep", (3 + 1) * 2 * 10, 80 * 5),
        ("hessian", 3 * 2 * 3, 18 * 5),
    ],
)
def test_the_papers_recipes(name: str, settings: int, runs: int) -> None:
    """Each has the runs worked out by hand, and every entry of its tables is found beside one of them."""
    spec = load_spec(ROOT / f"recipes/paper/{name}.yaml")
    cells = expand(spec)
    assert (len(cells), total(cells)) == (settings, runs)
    entries = [entry for entry in paper_results()["results"] if entry["table"] in spec.paper_tables]
    found = Counter(
        (value.table, entry["task"], entry["score"], entry["model"], value.mean)
        for cell in cells
        for entry in entries
        if (entry["task"], entry["model"], entry["cut"], entry["split"])
        == (cell.spec.task, cell.spec.model, cell.cut, cell.split.name)
        and (value := paper_value(cell, entry["score"], spec.paper_tables)) is not None
    )
    told = Counter(
        (entry["table"], entry["task"], entry["score"], entry["model"], value[0])
        for entry in entries
        for value in entry["values"].values()
        if value is not None
    )
    assert told == found


def test_every_table_of_the_paper_has_a_recipe() -> None:
    tables = [t for path in ROOT.glob("recipes/paper/*.yaml") for t in load_spec(path).paper_tables]
    assert sorted(tables) == sorted(paper_tables())


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/[cs]*/*.yaml")), ids=lambda path: path.stem)
def test_the_small_recipes_are_allowed(path: Path) -> None:
    assert total(expand(load_spec(path))) > 0


def test_codecs_are_compared_with_the_studys_runs() -> None:
    """The rows without a codec are runs of the study, so that they are not trained again."""
    study, codecs = (
        [cell for cell in expand(load_spec(name)) if cell.spec.task != "digits"] for name in ("study", "codecs")
    )
    known = {run.id for cell in study for run in cell.runs.values()}
    float32 = [run.id in known for cell in codecs for run in cell.runs.values()]
    few_bits, others = 3 * 2 * 5 * 3, 3 * 8 * 3  # tasks, splits, methods, seeds; tasks, rows of the IID split, seeds
    assert sum(float32) == few_bits and len(float32) == 2 * few_bits + others


def test_the_spec_of_the_page() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/comparing.md").read_text(), flags=re.DOTALL)
    assert total(expand(parse_spec(yaml.safe_load(block), "page"))) == 2 * 2 * 3 * (3 + 2)
