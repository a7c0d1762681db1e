"""Tables and the report of a comparison."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from hf_coefsfl.analysis.timing import Network
from hf_coefsfl.compare import Cell, expand, load_finished, load_spec, parse_spec, write_report
from hf_coefsfl.compare.paper import paper_results, paper_value
from hf_coefsfl.compare.render.table_formats import latex, markdown
from hf_coefsfl.compare.render.tables import make_tables, ranks
from hf_coefsfl.compare.results import Score, gather
from tests.support.comparisons import cells_of, content, probe_point, summary
from tests.support.paths import ROOT


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


def test_best_and_second_best() -> None:
    assert ranks({"a": 1.0, "b": 3.0, "c": 2.0}) == {"b": "best", "c": "second"}
    assert ranks({"a": 3.0, "b": 3.0, "c": 2.0}) == {"a": "best", "b": "best"}
    assert ranks({"a": 3.0, "b": 2.0, "c": 2.0}) == {"a": "best", "b": "second", "c": "second"}
    assert ranks({"a": 3.0}) == {}


def test_each_score_has_its_own_direction() -> None:
    cells = cells_of(learning_rates=[0.1], seeds=[0], methods=["coef_j", "coef_d"])
    mixed = {"higher_is_better": False, "lower_is_better": ["perplexity"]}
    finished = {
        cell.first()[0].id: summary(*scores, names=["perplexity", "EM"]) | mixed
        for cell, scores in zip(cells, ((8.0, 30.0), (9.0, 40.0)), strict=True)
    }
    (table,) = make_tables(gather(parse_spec(content(), "t"), cells, finished))
    assert [[cell.mark for cell in row.cells] for row in table.rows] == [["best", "second"], ["second", "best"]]


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


def test_a_table_of_one_task_tells_what_crossed_and_how_long_that_takes() -> None:
    cells = cells_of(learning_rates=[0.1], seeds=[0])
    measured = summary(80.0) | {"mib": 10.0, "transfers": 8, "num_clients": 10, "participation": 0.2}
    (table,) = make_tables(
        gather(parse_spec(content(), "t"), cells, {cells[0].first()[0].id: measured}), Network(8e6, 0.5)
    )
    lines = markdown(table).splitlines()
    assert lines[0] == "**CIFAR-100, ViT cut after block 2, IID**"
    assert lines[2] == "| Model | Method | accuracy | MiB | transfers | seconds |"
    seconds = 10 * 2**20 / 2 / 1e6 + 8 / 2 * 0.5  # two clients of a round send at the same time
    assert lines[4] == f"| ViT | Gradient reuse (w/o comp.) | 80.0 | 10.0 | 8 | {seconds:.1f} |"
    assert lines[5] == "| ViT | CoeF-D |  |  |  |  |" and "over 8 Mbit/s and 500 ms" in lines[-1]
    compile_latex(latex(table))


def test_the_servers_work_is_shown_if_it_was_counted(tmp_path: Path) -> None:
    """Over two seeds, beside a method whose second seed did not count."""
    spec = parse_spec(content(learning_rates=[0.1], seeds=[0, 1]), "t")
    cells = expand(spec)

    def counted(work: float | None) -> dict[str, Any]:
        found = summary(80.0) | {"server_gflops": work}
        found["curve"] = [{"round": r, "mib": float(r), "scores": {"accuracy": 10.0 * r}} for r in (1, 2)]
        for point in found["curve"]:
            point |= {} if work is None else {"server_gflops": work * point["round"] / 2}
        return found

    work = iter((8.0, 9.0, 5.0, None))
    finished = {run.id: counted(next(work)) for cell in cells for run in cell.runs.values()}
    text = write_report(spec, cells, tmp_path, finished, link=Network(8e6, 0.5))
    lines = text.splitlines()
    assert lines[2] == "| Model | Method | accuracy | MiB | transfers | seconds | server GFLOPs |"
    assert [line.rpartition("|")[0].rpartition("|")[2].strip() for line in lines[4:6]] == ["8.5", ""]
    assert "server GFLOPs: of a whole run" in text
    page = (tmp_path / "report.html").read_text()
    (chart,) = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])["charts"]
    assert list(chart["lines"].values()) == [
        [[1, 1.0, 10.0, 4.25], [2, 2.0, 20.0, 8.5]],
        [[1, 1.0, 10.0, None], [2, 2.0, 20.0, None]],
    ]
    assert "> GFLOPs of the server</label>" in page and page.count('<td class=number data-value="8.0">8.0</td>') == 1
    rows = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [row["server_gflops"] for row in rows] == [8.0, 9.0, 5.0, None]
    write_report(spec, cells, tmp_path, {run: summary(80.0) for run in finished}, link=Network(8e6, 0.5), plots=False)
    assert "GFLOPs of the server</label>" not in (tmp_path / "report.html").read_text()


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
    run = cells[0].first()[1]
    probed = tmp_path / "runs" / run.id
    probed.mkdir(parents=True)
    (probed / "summary.json").write_text(json.dumps(finished[run.id]))
    (probed / "staleness.json").write_text(json.dumps([probe_point(round=2)]))
    finished |= load_finished(cells, tmp_path / "runs")
    write_report(spec, cells, tmp_path, finished)
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
        ("accuracy", [[2, 3.0, 51.0, None]]),
        ("cosine with vanilla's gradient", [[2, None, 0.6]]),
        ("error relative to vanilla's gradient", [[2, None, 0.4]]),
    ]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "cifar-100-vit-iid-cut-2-staleness.png", "cifar-100-vit-iid-cut-2.png",
    ]  # fmt: skip


def test_the_page_tells_the_settings_of_rows_from_the_others(tmp_path: Path) -> None:
    central = {"method": "vanilla", "name": "Central", "settings": {"num_rounds": 9}}
    spec = parse_spec(content(methods=["reuse", central], learning_rates=[0.1], seeds=[0]), "t")
    write_report(spec, expand(spec), tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert "<h3>All other runs</h3>" in page and "<dt>num_rounds</dt><dd>4</dd>" in page
    assert "<h3>Rows with settings of their own</h3><dl>\n<dt>Central</dt><dd>num_rounds=9</dd>" in page


def test_a_diverged_seed_does_not_break_the_report() -> None:
    score = Score("perplexity", (math.nan, 12.0), None)
    assert math.isnan(score.std or 0.0) and Score("accuracy", (1.0, 3.0), None).std == pytest.approx(2**0.5)
