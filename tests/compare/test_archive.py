"""The archive of finished runs: it stands for their folders, takes what is new, and loses nothing."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from hf_coefsfl.cli import main
from hf_coefsfl.compare import Archive, Run, load_finished
from tests.support.comparisons import cells_of, content, journal, probe_point, summary


def runs_of(**changes: Any) -> list[Run]:
    return [run for cell in cells_of(**changes) for run in cell.runs.values()]


def test_it_stands_for_the_folders(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = ["--archive", str(tmp_path / "kept/runs.parquet")]
    assert main([*command, *archive, "--dry_run"]) == 0
    assert "4 runs, 0 of them done." in capfd.readouterr().out and not (tmp_path / "kept").exists()
    assert main([*command, *archive]) == 0
    table = capfd.readouterr().out
    assert "| Gradient reuse (w/o comp.) | 15.5 ± 0.7 |" in table
    shutil.rmtree(tmp_path / "out")
    assert main([*command, *archive, "--dry_run"]) == 0
    assert "4 runs, 4 of them done." in capfd.readouterr().out
    assert main([*command, *archive, "--report_only"]) == 0
    assert main([*command, *archive]) == 0  # nothing is run again
    assert capfd.readouterr().out == 2 * table
    assert not (tmp_path / "out/runs").exists()


def test_it_takes_what_is_new(command: list[str], tmp_path: Path) -> None:
    """Runs that finished without an archive are added too, and a second spec runs only what the first did not."""
    path = tmp_path / "runs.parquet"
    assert main(command) == 0
    assert main([*command, "--archive", str(path)]) == 0
    assert len(parquet.read_table(path)) == 4
    shutil.rmtree(tmp_path / "out")
    more = content(learning_rates=[0.1], seeds=[0, 1], methods=["reuse", "coef_d", "coef_j"])
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(more))
    assert main([*command, "--archive", str(path)]) == 0
    assert sorted(name.split("-")[3] for name in journal(tmp_path / "out/runs")) == ["coef_j", "coef_j"]
    assert len(parquet.read_table(path)) == 6


def test_a_run_that_another_comparison_has_archived_meanwhile_is_not_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cells = tmp_path / "runs.parquet", cells_of(learning_rates=[0.1], seeds=[0, 1])
    later = cells[1].later(0.1)[0]
    add = Archive.add
    monkeypatch.setattr(Archive, "add", lambda self, finished: add(self, [*finished, (later, summary(12.5))]))
    assert main([*command, "--archive", str(path)]) == 0
    assert len(journal(tmp_path / "out/runs")) == 3 and later.id not in journal(tmp_path / "out/runs")


def add_all(path: Path, numbers: range) -> None:
    archive, runs = Archive(path), runs_of(seeds=list(range(20)), methods=["reuse"])
    for number in numbers:
        archive.add([(runs[number], summary(float(number)))])


def test_comparisons_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path, fork = tmp_path / "runs.parquet", multiprocessing.get_context("fork")
    processes = [fork.Process(target=add_all, args=(path, range(i, 40, 3))) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    runs, archive = runs_of(seeds=list(range(20)), methods=["reuse"]), Archive(path)
    assert [archive.summary(run) for run in runs] == [summary(float(number)) for number in range(40)]
    one = tmp_path / "one.parquet"
    add_all(one, range(40))
    assert one.read_bytes() == path.read_bytes()  # whoever added what, and when


def test_a_run_that_is_there_stays(tmp_path: Path) -> None:
    run, archive = runs_of()[0], Archive(tmp_path / "runs.parquet")
    archive.add([(run, summary(1.0))])
    before = archive.path.stat()
    archive.add([(run, summary(2.0))])
    assert archive.summary(run) == summary(1.0) and archive.path.stat() == before


def test_paths_of_the_machine_stay_out(tmp_path: Path) -> None:
    place = {"task": "cifar100", "model_name_or_path": str(tmp_path / "vit"), "dataset_name": "../data", "cut": 2}
    run = runs_of(tasks=[place])[0]
    measured = summary(50.0, names=["a/b"]) | {"base": {"name_or_path": str(tmp_path / "vit"), "dtype": "float32"}}
    archive = Archive(tmp_path / "runs.parquet")
    archive.add([(run, measured | {"list": ["C:\\Users\\me\\vit", "~/vit", float("nan")]})])
    (row,) = parquet.read_table(archive.path).to_pylist()
    assert str(tmp_path) not in row["options"] + row["summary"] and "Users" not in row["summary"]
    assert json.loads(row["options"])["dataset_name"] == "../data"
    found = archive.summary(run)  # which is checked, although its options have another path now
    assert found == measured | {"base": {"name_or_path": "vit", "dtype": "float32"}, "list": ["vit", "vit", None]}


def test_what_the_probe_measured_goes_along(tmp_path: Path) -> None:
    cells = cells_of(learning_rates=[0.1], seeds=[0], methods=["reuse"])
    run = cells[0].first()[0]
    folder = tmp_path / "runs" / run.id
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary(50.0)))
    moved = probe_point(round=2) | {"used_error": 0.8, "norm": float("nan")}
    (folder / "staleness.json").write_text(json.dumps([probe_point(round=4), probe_point(round=2), moved]))
    (found,) = load_finished(cells, tmp_path / "runs").values()
    assert [entry["round"] for entry in found["staleness"]] == [2, 4]
    assert [entry["probe_used_error"] for entry in found["staleness"]] == pytest.approx([0.6, 0.4])
    assert ["probe_norm" in entry for entry in found["staleness"]] == [False, True]
    archive = Archive(tmp_path / "runs.parquet")
    archive.add([(run, found)])
    assert load_finished(cells, tmp_path / "elsewhere", archive) == {run.id: found}


def test_hundreds_of_runs_are_small(tmp_path: Path) -> None:
    runs = runs_of(seeds=list(range(75)))  # 300
    curve = [{"round": r, "mib": 1.1**r, "scores": {"accuracy": 100 * (1 - 0.97**r)}} for r in range(1, 51)]
    measured = summary(50.0) | {"id2label": {str(i): f"class {i}" for i in range(100)}, "curve": curve}
    archive = Archive(tmp_path / "runs.parquet")
    archive.add((run, measured | {"mib": 1 / (i + 3), "seconds": 1 / (i + 7)}) for i, run in enumerate(runs))
    assert len(runs) == 300 and archive.path.stat().st_size < 100_000


def write(path: Path, **columns: str) -> None:
    parquet.write_table(pyarrow.table({name: [text] for name, text in columns.items()}), path)


def test_foreign_and_damaged_files_are_one_error(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "runs.parquet", runs_of(learning_rates=[0.1], seeds=[0, 1])[0]
    Archive(path).add([(run, summary(1.0))])
    whole = path.read_bytes()
    (row,) = parquet.read_table(path).to_pylist()
    foreign = f"{path} is not an archive of runs: "
    other = json.dumps(run.options | {"num_rounds": 9})
    files: dict[str, Callable[[], object]] = {
        f"{foreign}it is not a Parquet file, or a damaged one. Give": lambda: path.write_bytes(whole[:-9]),
        f"{foreign}its columns are run, value, not run, task, opt": lambda: write(path, run="a", value="b"),
        f"{foreign}{run.id} has no options or no scores": lambda: write(path, **row | {"summary": "{}"}),
        f"{foreign}Expecting value": lambda: write(path, **row | {"options": ""}),
        f"{path} holds {run.id} with num_rounds=9 instead of 4": lambda: write(path, **row | {"options": other}),
        f"{path} holds {run.id} with task='mnli' instead of 'cif": lambda: write(path, **row | {"task": "mnli"}),
    }
    for message, make in files.items():
        make()
        for extra in ([], ["--report_only"], ["--dry_run"]):
            with pytest.raises(SystemExit) as left:
                main([*command, "--archive", str(path), *extra])
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
            assert left.value.code == 2 and message in line
    assert not journal(tmp_path / "out/runs")
    with pytest.raises(SystemExit):
        main([*command, "--archive", str(tmp_path)])
    assert "is not an archive of runs: [Errno 21] Is a directory" in capsys.readouterr().err
