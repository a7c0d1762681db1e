"""`coefsfl compare`: specs, the order of runs, worker processes that are killed, tables and the report."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from pyarrow import parquet
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_coefsfl.cli import main
from hf_coefsfl.compare import Cell, Runner, expand, load_spec, parse_spec, runner, total, write_report
from hf_coefsfl.compare.grid import upcoming
from hf_coefsfl.compare.paper import paper_results, paper_tables, paper_value
from hf_coefsfl.compare.render.table_formats import latex, markdown
from hf_coefsfl.compare.render.tables import make_tables, ranks
from hf_coefsfl.compare.results import Score, gather
from hf_coefsfl.compare.runner import worker_environment
from tests.support.comparisons import content, summary
from tests.support.paths import ROOT

# Writes its id to a journal when the work is done, then the summary; FAKE_FAIL names a method that fails.
WORKER = """
import json, os, sys, time
task, path = sys.argv[1:]
o = json.load(open(path))
folder = o["output_dir"]
print("working", o["method"], os.environ["OMP_NUM_THREADS"], flush=True)
time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
if o["method"] == os.environ.get("FAKE_FAIL"):
    sys.exit("the reason of the failure")
score = 100 * o["learning_rate"] + o["seed"] + len(o["method"])
curve = [{"round": 1, "mib": 1.5, "scores": {"accuracy": 1.0}}, {"round": 2, "mib": 3, "scores": {"accuracy": score}}]
with open(os.path.join(os.path.dirname(folder), "journal"), "a") as journal:
    journal.write(os.path.basename(folder) + "\\n")
with open(folder + "/summary.tmp", "w") as file:
    json.dump({"task": task, "method": o["method"], "scores": {"accuracy": score}, "curve": curve, "mib": 3.0,
               "transfers": 4, "seconds": 1.0, "versions": {"torch": "<2>"}}, file)
os.replace(folder + "/summary.tmp", folder + "/summary.json")
"""


def cells_of(**changes: Any) -> list[Cell]:
    return expand(parse_spec(content(**changes), "test"))


@pytest.fixture
def worker(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "worker.py").write_text(WORKER)
    return sys.executable, "-S", str(tmp_path / "worker.py")


@pytest.fixture
def command(tmp_path: Path, worker: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of four runs with the worker above, its report beside the spec."""
    monkeypatch.setattr(runner, "WORKER", worker)
    monkeypatch.setattr(runner, "_POLL", 0.02)
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(content(learning_rates=[0.1], seeds=[0, 1])))
    return ["compare", str(tmp_path / "few.yaml"), "--output_dir", str(tmp_path / "out")]


def journal(folder: Path) -> Counter[str]:
    path = folder / "journal"
    return Counter(path.read_text().split()) if path.exists() else Counter()


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
        ({"tasks": [{"task": "mnist"}]}, "unknown task 'mnist'. Choose one of:.*cifar100"),
        (
            {"tasks": [{"task": "mnli", "doc_stridee": 3, "cut": 1}]},
            "gives 'doc_stridee', which is no option",
        ),
        ({"tasks": {"task": "mnli"}}, "tasks must be a list"),
        ({"settings": {"learning_rate": 0.1}}, "gives 'learning_rate', which is set by learning_rates"),
        ({"settings": {"hub_token": "hf_secret"}}, "gives 'hub_token', which is set by nothing"),
        ({"settings": {"push_to_hub": True}}, "gives 'push_to_hub', which is set by nothing"),
        ({"settings": {"cut": 3}}, "gives 'cut', which is set by cut or cuts"),
        ({"settings": {"max_length": 64}}, r"tasks\[0\] .cifar100. gives 'max_length', which is no option"),
        ({"splits": [{"name": "IID", "stride": 3}]}, "splits gives 'stride', which is no option"),
        ({"settings": {"num_rounds": 0}}, "num_rounds=0 must be a whole number of at least 1"),
        ({"settings": {"participation": 2}}, "participation=2"),
        ({"settings": ["num_rounds"]}, "settings must be a mapping"),
        ({"learning_rates": ["1e-4"]}, "got '1e-4' .str.. YAML reads 1e-4 as text"),
        ({"learning_rates": [0.0]}, "numbers above 0, got 0.0"),
        ({"seeds": [0, 0]}, "holds 0 twice"),
        ({"seeds": [0.5]}, "whole numbers of at least 0, got 0.5"),
        ({"splits": [{"name": "IID", "partition": "idd"}]}, "partition='idd' is not allowed"),
        ({"paper_tables": ["main"]}, "there is no 'main'. Choose of: main_iid"),
        ({"tasks": 2 * [{"task": "mnli", "model": "a", "cut": 1}]}, "the same place in the tables: mnli, a, IID, 1"),
    ],
)
def test_bad_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cells_of(**changes)


def test_bad_files_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("tasks: [")
    for name, message in (("none.yaml", "cannot be read: No such file"), ("broken.yaml", "is no YAML")):
        with pytest.raises(SystemExit) as left:
            main(["compare", str(tmp_path / name)])
        assert left.value.code == 2 and message in capsys.readouterr().err


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


def test_what_cannot_be_probed_or_trained() -> None:
    reuse, vanilla = cells_of(settings={"staleness_probe": 2}, methods=["reuse", "vanilla"])
    assert reuse.first()[0].options["staleness_probe"] == 2
    assert "staleness_probe" not in vanilla.first()[0].options
    cells = cells_of(tasks=[{"task": "squad_v2", "cut": 1}], methods=["reuse", "gas"])
    assert [cell.refused is None for cell in cells] == [True, False]
    assert total(cells) == 4 and not [run for run in upcoming(cells, {}, ()) if run.options["method"] == "gas"]


# ---- The protocol ----


def test_the_learning_rate_is_chosen_on_the_first_seed() -> None:
    cells = cells_of(methods=["reuse"])
    low, high = cells[0].first()

    def order(finished: dict[str, Any], given_up: Sequence[str] = ()) -> list[tuple[float, int]]:
        runs = upcoming(cells, finished, given_up)
        return [(run.options["learning_rate"], run.options["seed"]) for run in runs]

    def done(value: float | None, higher: bool = True) -> dict[str, Any]:
        return {"scores": {"EM": value, "F1": value}, "higher_is_better": higher}

    assert order({}) == [(0.1, 0), (0.2, 0)]
    assert order({low.id: done(50.0)}) == [(0.2, 0)]  # the other seeds wait for both
    assert order({low.id: done(50.0), high.id: done(51.0)}) == [(0.2, 1), (0.2, 2)]
    assert order({low.id: done(50.0), high.id: done(float("nan"))}) == [(0.1, 1), (0.1, 2)]
    assert order({low.id: done(9.0, False), high.id: done(8.0, False)}) == [(0.2, 1), (0.2, 2)]  # perplexities
    assert order({low.id: done(50.0)}, [high.id]) == [(0.1, 1), (0.1, 2)]
    assert order({}, [low.id, high.id]) == []


def test_all_settings_get_their_first_seed_first() -> None:
    cells = cells_of(learning_rates=[0.1])
    finished = {cells[0].first()[0].id: {"scores": {"accuracy": 1.0}}}
    waiting = [(run.options["method"], run.options["seed"]) for run in upcoming(cells, finished, ())]
    assert waiting == [("coef_d", 0), ("reuse", 1), ("reuse", 2)]


def test_settings_with_equal_options_share_their_runs() -> None:
    assert total(cells_of(methods=["acc_sfl", {"method": "acc_sfl", "name": "FC"}])) == 4


# ---- Processes ----


def test_a_comparison_is_run_once(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--dry_run"]) == 0
    assert "4 runs, 0 of them done." in capfd.readouterr().out and not (tmp_path / "out").exists()
    assert main([*command, "--jobs", "2"]) == 0
    assert len(journal(tmp_path / "out/runs")) == 4
    table = capfd.readouterr().out
    assert main(command) == 0  # nothing is left to do
    assert main([*command, "--report_only"]) == 0
    assert capfd.readouterr().out == 2 * table
    assert set(journal(tmp_path / "out/runs").values()) == {1}
    assert main([*command, "--dry_run"]) == 0
    assert "4 runs, 4 of them done." in capfd.readouterr().out


def test_a_failure_is_told_and_tried_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "coef_d")
    with pytest.raises(SystemExit) as left:
        main(command)
    captured = capfd.readouterr()
    assert left.value.code == 1
    assert "1 runs failed" in captured.err and "    the reason of the failure\n" in captured.err
    assert "| Gradient reuse (w/o comp.) | 15.5 ± 0.7 |" in captured.out  # 100 * 0.1 + (0 or 1) + 5 letters
    assert "the reason of the failure" in (tmp_path / "out/report.html").read_text()
    monkeypatch.delenv("FAKE_FAIL")
    assert main(command) == 0
    assert len(journal(tmp_path / "out/runs")) == 4 and set(journal(tmp_path / "out/runs").values()) == {1}
    assert "the reason" not in (tmp_path / "out/report.html").read_text()


def compare(folder: Path, worker: tuple[str, ...], seconds: str) -> None:
    """Run a comparison of 16 runs in a process group of its own."""
    os.setsid()
    os.environ["FAKE_SECONDS"] = seconds
    runner._POLL, runner._POLL_OTHERS = 0.005, 0.05
    cells = cells_of(tasks=[{"task": "cifar100", "model": "ViT"}], cuts=[1, 2])
    Runner(cells, folder, jobs=2, worker=worker).run()


def started(folder: Path, worker: tuple[str, ...], seconds: str = "0.03") -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=compare, args=(folder, worker, seconds))
    process.start()
    return process


def test_killed_at_any_point_it_finishes_every_run_once(tmp_path: Path, worker: tuple[str, ...]) -> None:
    """What a kill leaves half done is done again; what had left its summary is not."""
    draw, finished_before, hit_in_the_middle = random.Random(0), Counter[str](), False
    for _ in range(6):
        process = started(tmp_path / "runs", worker)
        time.sleep(draw.uniform(0.05, 0.3))
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        done = {path.parent.name for path in tmp_path.glob("runs/*/summary.json")}
        hit_in_the_middle |= len(done) < 16
        assert all(journal(tmp_path / "runs")[name] == count for name, count in finished_before.items())
        finished_before = Counter({name: journal(tmp_path / "runs")[name] for name in done})
    process = started(tmp_path / "runs", worker)
    process.join(60)
    assert process.exitcode == 0
    after = journal(tmp_path / "runs")
    assert all(after[name] == count for name, count in finished_before.items())
    assert len(after) == 16 == len(list(tmp_path.glob("runs/*/summary.json")))  # 4 settings, 2 rates + 2 seeds
    assert hit_in_the_middle


def test_a_worker_that_survives_is_waited_for(tmp_path: Path, worker: tuple[str, ...]) -> None:
    first = started(tmp_path / "runs", worker, "0.6")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("runs/*/log.txt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(first.pid or 0, signal.SIGKILL)  # not its workers
    first.join()
    second = started(tmp_path / "runs", worker, "0")
    second.join(60)
    assert second.exitcode == 0
    assert len(journal(tmp_path / "runs")) == 16 and set(journal(tmp_path / "runs").values()) == {1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_workers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    code = f"""
import glob, os, time
while len(glob.glob({str(tmp_path / "out/runs/*/log.txt")!r})) < 2:
    time.sleep(0.05)
time.sleep(0.3)
os.kill({os.getpid()}, {int(number)})
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", code]), pytest.raises(SystemExit) as left:
            main([*command, "--jobs", "2"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 130
    assert "0 of 4 runs are done. The same command goes on" in capfd.readouterr().err
    assert len(list(tmp_path.glob("out/runs/*/log.txt"))) == 2 and not journal(tmp_path / "out/runs")
    monkeypatch.delenv("FAKE_SECONDS")
    assert main(command) == 0


def test_the_cores_and_gpus_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [worker_environment(3, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "6", "4"]
    assert worker_environment(3, 0)["OMP_NUM_THREADS"] == "2"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(runner, "_gpus", lambda: ["0", "1"])
    assert worker_environment(2, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environment(3, 0)["OMP_NUM_THREADS"] == "5"


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


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/compare/*.yaml")), ids=lambda path: path.stem)
def test_the_small_recipes_are_allowed(path: Path) -> None:
    assert total(expand(load_spec(path))) > 0


def test_the_spec_of_the_page() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/comparing.md").read_text(), flags=re.DOTALL)
    assert total(expand(parse_spec(yaml.safe_load(block), "page"))) == 2 * 2 * 3 * (3 + 2)


def papers_cell(**changes: Any) -> Cell:
    task = {"task": "cifar100", "model": "ViT-Tiny", "model_name_or_path": "WinKawaks/vit-tiny-patch16-224", "cut": 4}
    spec = {"settings": {}, "tasks": [task | changes], "methods": ["coef_d"], "learning_rates": [1e-3], "seeds": [0]}
    return expand(parse_spec(spec, "test"))[0]


def test_the_papers_value_stands_beside_the_papers_setting_only() -> None:
    value = paper_value(papers_cell(), "accuracy")
    assert value is not None and (value.mean, value.std) == (84.5, 0.2)
    assert paper_value(papers_cell(model_name_or_path="copies/vit-tiny-patch16-224"), "accuracy") == value
    skewed = {"partition": "dirichlet", "dirichlet_alpha": 0.1}
    other = paper_value(papers_cell(**skewed), "accuracy")
    assert other is not None and other.mean == 67.3
    single = paper_value(papers_cell(**skewed), "accuracy", ["approx"])
    assert single is not None and (single.mean, single.std) == (69.1, None)
    for change in (
        {"num_rounds": 10}, {"participation": 0.2}, {"num_clients": 20}, {"cut": 3}, {"max_train_samples": 500},
        {"model_name_or_path": "vit-micro"}, {"dataset_name": "cifar100_small"}, {"learning_rates": [1e-2]},
        {"methods": [{"method": "coef_d", "method_kwargs": {"compensation_factor": 1.0}}]}, {"model": "vit"},
        {"partition": "dirichlet", "dirichlet_alpha": 0.5}, {"head": "lora"}, {"lora_rank": 8},
    ):  # fmt: skip
        assert paper_value(papers_cell(**change), "accuracy") is None, change


# ---- Tables and report ----


def test_best_and_second_best() -> None:
    assert ranks({"a": 1.0, "b": 3.0, "c": 2.0}) == {"b": "best", "c": "second"}
    assert ranks({"a": 3.0, "b": 3.0, "c": 2.0}) == {"a": "best", "b": "best"}
    assert ranks({"a": 3.0, "b": 2.0, "c": 2.0}) == {"a": "best", "b": "second", "c": "second"}
    assert ranks({"a": 3.0}) == {}


def test_the_papers_own_figures_give_the_papers_own_marks() -> None:
    """Fed to the main table as results of one seed; the marks below were read off the paper."""
    spec = load_spec(ROOT / "recipes/paper/iid.yaml")
    cells = expand(spec)
    finished: dict[str, Any] = {}
    for cell in cells:
        entries = [e for e in paper_results()["results"] if e["table"] == "main_iid" and e["model"] == cell.spec.model]
        scores = {e["score"]: e["values"][cell.variant.method] for e in entries if e["task"] == cell.spec.task}
        if all(scores.values()):
            values = {name: value[0] for name, value in scores.items()}
            finished[cell.first()[0].id] = summary(*values.values(), names=list(values))
    vision, language = make_tables(gather(spec, cells, finished))
    assert [c.label for c in vision.columns] == ["CIFAR-100", "Food-101", "Tiny-ImageNet"]
    assert [c.label for c in language.columns] == [
        "20 Newsgroups", "MNLI-m", "MNLI-mm", "SQuAD v2.0, EM", "SQuAD v2.0, F1",
    ]  # fmt: skip
    marks = {
        (row.model, row.name): "".join((cell.mark or "-")[0] for cell in row.cells)
        for row in (*vision.rows, *language.rows)
    }
    assert {key: value for key, value in marks.items() if value.strip("-")} == {
        ("ViT-Tiny", "CoeF-D"): "bsb", ("ViT-Tiny", "CoeF-J"): "sbs",
        ("ViT-Base", "CoeF-D"): "bbb", ("ViT-Base", "CoeF-J"): "sbs",
        ("DistilRoBERTa", "CoeF-D"): "sssss", ("DistilRoBERTa", "CoeF-J"): "bbbbb",
        ("RoBERTa", "CoeF-D"): "sbsss", ("RoBERTa", "CoeF-J"): "bbbbb",
    }  # fmt: skip
    text = latex(language)
    assert r"\multicolumn{2}{c}{\textbf{SQuAD v2.0}}" in text and r"\cmidrule(lr){6-7}" in text
    gas = next(line for line in text.splitlines() if line.startswith(" & GAS"))
    assert gas.endswith(r"& -- & -- \\") and r"38.9* \textcolor{gray}{[38.9\,{\tiny$\pm$\,2.5}]}" in gas
    assert r"\underline{79.7}*" in text and r"\cmidrule(l){2-7}" in text
    compile_latex(text)


def compile_latex(table: str) -> None:
    """Check the structure: every row of the body has the same number of columns, every group is closed."""
    begin = re.search(r"\\begin\{tabular\}\{([^}]*)\}", table)
    assert begin is not None
    for line in table.splitlines():
        if line.endswith(r"\\"):
            spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            cells = len(re.findall(r"(?<!\\)&", line)) + 1
            assert cells + sum(n - 1 for n in spans) == len(begin[1].split())
        assert line.count("{") - line.count(r"\{") == line.count("}") - line.count(r"\}")
    if shutil.which("pdflatex"):
        packages = r"\documentclass{article}\usepackage{booktabs,multirow,xcolor}"
        page = rf"{packages}\begin{{document}}{table}\end{{document}}"
        with tempfile.TemporaryDirectory() as folder:
            command = ["pdflatex", "-halt-on-error", "-output-directory", folder]
            done = subprocess.run(command, input=page, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout[-500:]


def test_means_and_deviations() -> None:
    cells = cells_of(learning_rates=[0.1], splits=[{"partition": "iid"}, {"partition": "dirichlet", "name": "a|b"}])
    runs = [run for cell in cells[:2] for run in [*cell.first(), *cell.later(0.1)]]
    values = [70.0, 72.0, 74.0, 80.0, 81.0]  # the last seed is missing
    finished = {run.id: summary(value) for run, value in zip(runs, values, strict=False)}
    (table,) = make_tables(gather(parse_spec(content(), "t"), cells, finished))
    lines = markdown(table).splitlines()
    assert lines[0] == "**CIFAR-100, ViT cut after block 2**"
    assert lines[2] == "| Model | Method | iid | a\\|b |"
    assert lines[4] == "| ViT | Gradient reuse (w/o comp.) | 72.0 ± 2.0 |  |"
    assert lines[5] == "| ViT | CoeF-D | 80.5 ± 0.7\\* |  |"  # the sample's: sqrt(0.5)
    compile_latex(latex(table))


def test_cuts_and_splits_become_columns() -> None:
    spec = load_spec(ROOT / "recipes/paper/hessian.yaml")
    (table,) = make_tables(gather(spec, expand(spec), {}))
    assert [c.label for c in table.columns] == [
        "cut 1, IID", "cut 1, non-IID", "cut 4, IID", "cut 4, non-IID", "cut 8, IID", "cut 8, non-IID",
    ]  # fmt: skip
    assert table.caption == "CIFAR-100, ViT-Tiny" and table.rows[0].name == "GGN"
    assert markdown(table).splitlines()[4] == "| ViT-Tiny | GGN | [84.8] | [46.3] | [84.5] | [19.4] | [83.0] | [7.8] |"
    compile_latex(latex(table))


def test_the_report(tmp_path: Path) -> None:
    spec = parse_spec(content(title="<b>ours</b>", learning_rates=[0.1, 0.2], seeds=[0]), "t")
    cells = expand(spec)
    finished = {run.id: summary(50.0 + i) for i, run in enumerate([*cells[0].first(), *cells[1].first()])}
    finished[cells[1].first()[1].id]["scores"]["accuracy"] = float("nan")
    probed = tmp_path / "runs" / cells[0].first()[1].id
    probed.mkdir(parents=True)
    point = {
        "round": 2,
        "update": 1,
        "displacement": 1.0,
        "best_lambda": None,
        "helped_share": None,
        "surrogate_above": True,
    }
    point |= {"stale_cosine": 0.5, "stale_error": 0.5, "compensated_cosine": 0.75, "compensated_error": 0.25}
    (probed / "staleness.json").write_text(json.dumps([point]))
    write_report(spec, cells, tmp_path, tmp_path / "runs", finished)
    rows = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [(row["method"], row["learning_rate"], row["chosen"]) for row in rows] == [
        ("reuse", 0.1, False), ("reuse", 0.2, True), ("coef_d", 0.1, True), ("coef_d", 0.2, False),
    ]  # fmt: skip
    assert [row["value"] for row in rows[:3]] == [50.0, 51.0, 52.0]
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert [s["scores"]["accuracy"]["mean"] for s in results["settings"]] == [51.0, 52.0]
    page = (tmp_path / "report.html").read_text()
    assert "<h1>&lt;b&gt;ours&lt;/b&gt;</h1>" in page and "<b>" not in page
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0], parse_constant=pytest.fail)
    assert [(chart["y"], next(iter(chart["lines"].values()))) for chart in data["charts"]] == [
        ("accuracy", [[2, 3.0, 51.0]]),
        ("cosine with the fresh gradient", [[2, None, 0.75]]),
        ("error relative to the fresh gradient", [[2, None, 0.25]]),
    ]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "cifar-100-vit-iid-cut-2-staleness.png", "cifar-100-vit-iid-cut-2.png",
    ]  # fmt: skip


def test_a_diverged_seed_does_not_break_the_report() -> None:
    score = Score("perplexity", (math.nan, 12.0), None)
    assert math.isnan(score.std or 0.0) and Score("accuracy", (1.0, 3.0), None).std == pytest.approx(2**0.5)


# ---- With the real worker ----


@pytest.mark.slow
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a run is, on a tiny model: what it leaves is what the report reads."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "model")
    pictures = [Picture.new("RGB", (8, 8), (85 * (i % 3), 0, 0)) for i in range(24)]
    features = Features({"img": Image(), "fine_label": ClassLabel(3)})
    rows = Dataset.from_dict({"img": pictures, "fine_label": [i % 3 for i in range(24)]}, features=features)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    settings = {"num_clients": 2, "participation": 0.5, "num_rounds": 2, "warmup_rounds": 0, "staleness_probe": 1}
    settings |= {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True}
    task = {"task": "cifar100", "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "data")}
    spec = content(settings=settings, tasks=[task | {"cut": 2}], methods=["coef_j"], learning_rates=[0.01], seeds=[0])
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert main(["compare", str(tmp_path / "spec.yaml"), "--output_dir", str(tmp_path / "out")]) == 0
    (setting,) = json.loads((tmp_path / "out/results.json").read_text())["settings"]
    assert setting["model"] == "model" and setting["complete"]
    accuracy = setting["scores"]["accuracy"]["mean"]
    assert accuracy * 24 / 100 == pytest.approx(round(accuracy * 24 / 100))  # of 24 pictures, in percent
    assert f"| model | CoeF-J | {accuracy:.1f} |" in capsys.readouterr().out
    data = re.findall(r'id="data">(.*?)</script>', (tmp_path / "out/report.html").read_text())[0]
    assert [[point[0] for point in chart["lines"]["CoeF-J"]] for chart in json.loads(data)["charts"]] == 3 * [[1, 2]]
