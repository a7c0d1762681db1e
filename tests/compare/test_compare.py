"""`coefsfl compare`: the order of runs, worker processes that are killed, and a real run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from pyarrow import parquet
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_coefsfl.cli import main
from hf_coefsfl.compare import Runner, runner, total
from hf_coefsfl.compare.grid import upcoming
from hf_coefsfl.compare.runner import worker_environment
from hf_coefsfl.trainer.output_folder import FolderLock
from tests.support.comparisons import cells_of, content, journal, summary

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
    mixed = {"higher_is_better": False, "lower_is_better": ["perplexity"]}
    language = {
        run.id: mixed | {"scores": {"perplexity": p, "EM": em}} for run, p, em in ((low, 8.0, 3.0), (high, 9.0, 1.0))
    }
    assert order(language) == [(0.1, 1), (0.1, 2)]  # by the first score, of which less is better
    assert order({low.id: done(50.0)}, [high.id]) == [(0.1, 1), (0.1, 2)]
    assert order({}, [low.id, high.id]) == []


def test_all_settings_get_their_first_seed_first() -> None:
    cells = cells_of(learning_rates=[0.1])
    finished = {cells[0].first()[0].id: {"scores": {"accuracy": 1.0}}}
    waiting = [(run.options["method"], run.options["seed"]) for run in upcoming(cells, finished, ())]
    assert waiting == [("coef_d", 0), ("reuse", 1), ("reuse", 2)]


def test_settings_with_equal_options_share_their_runs() -> None:
    assert total(cells_of(methods=["acc_sfl", {"method": "acc_sfl", "name": "FC"}])) == 4


def test_time_left_counts_whole_processes(tmp_path: Path) -> None:
    cells = cells_of(learning_rates=[0.1])  # two methods, three seeds
    done = [(cells[0].first()[0], 100.0), (cells[0].later(0.1)[0], 140.0)]
    for run, seconds in done:
        folder = tmp_path / run.id
        folder.mkdir()
        (folder / "options.json").write_text("{}")
        (folder / "summary.json").write_text(json.dumps(summary(50.0)))  # whose rounds took 2 seconds
        os.utime(folder / "options.json", (1000.0, 1000.0))
        os.utime(folder / "summary.json", (1000.0 + seconds, 1000.0 + seconds))
    assert Runner(cells, tmp_path).seconds_left() == pytest.approx(4 * 120)
    assert Runner(cells, tmp_path, jobs=2).seconds_left() == pytest.approx(2 * 120)
    os.utime(folder / "options.json", (5000.0, 5000.0))  # copied files tell no time
    assert Runner(cells, tmp_path).seconds_left() == pytest.approx(4 * (100 + 2) / 2)
    assert Runner(cells, tmp_path / "elsewhere").seconds_left() is None


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


def test_a_folder_of_another_run_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a summary that was put there by hand nor options that were edited stand for a run of the spec."""
    assert main(command) == 0
    run = next((tmp_path / "out/runs").glob("*-coef_d-*"))
    options, summary = run / "options.json", run / "summary.json"
    for path, change, reason in (
        (summary, {"method": "vanilla"}, "method='vanilla' instead of 'coef_d' as the spec says"),
        (options, {"num_rounds": 9}, "num_rounds=9 instead of 4"),
        (options, {"weight_decay": 0.5}, "weight_decay=0.5 instead of None"),
    ):
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(SystemExit) as left:
            main(command)
        assert left.value.code == 2 and reason in capsys.readouterr().err
        path.write_text(before)
    assert main(command) == 0 and set(journal(tmp_path / "out/runs").values()) == {1}


def test_a_second_comparison_is_refused(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FolderLock(tmp_path / "out"):
        with pytest.raises(SystemExit) as left:
            main(command)
        assert left.value.code == 2 and "Another process writes into" in capsys.readouterr().err
    assert not journal(tmp_path / "out/runs") and main(command) == 0


def compare(folder: Path, worker: tuple[str, ...], wait: Path | None) -> None:
    """Run a comparison of 16 runs in a process group of its own."""
    os.setsid()
    if wait is not None:
        os.environ["FAKE_WAIT"] = str(wait)
    runner._POLL, runner._POLL_OTHERS = 0.005, 0.05
    cells = cells_of(tasks=[{"task": "cifar100", "model": "ViT"}], cuts=[1, 2])
    Runner(cells, folder, jobs=2, worker=worker).run()


def started(folder: Path, worker: tuple[str, ...], wait: Path | None = None) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=compare, args=(folder, worker, wait))
    process.start()
    until(lambda: os.getpgid(process.pid or 0) == process.pid)
    return process


def at_work(folder: Path) -> int:
    """Return how many workers have begun."""
    return sum("working" in log.read_text() for log in folder.glob("*/log.txt"))


def until(condition: Callable[[], bool]) -> None:
    """Wait; pytest's own limit ends what never comes true."""
    while not condition():
        time.sleep(0.002)


def test_killed_at_any_point_it_finishes_every_run_once(tmp_path: Path, worker: tuple[str, ...]) -> None:
    """What a kill leaves half done is done again; what had left its summary is not."""
    draw, finished_before, hit_in_the_middle = random.Random(0), Counter[str](), False
    for _ in range(6):
        process = started(tmp_path / "runs", worker)
        goal = len(journal(tmp_path / "runs")) + draw.randint(0, 2)
        # On a fast machine the comparison may end before it is killed.
        until(lambda goal=goal, process=process: len(journal(tmp_path / "runs")) >= goal or not process.is_alive())
        time.sleep(draw.uniform(0.0, 0.05))  # any moment will do
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        done = {path.parent.name for path in tmp_path.glob("runs/*/summary.json")}
        hit_in_the_middle |= len(done) < 16
        assert all(journal(tmp_path / "runs")[name] == count for name, count in finished_before.items())
        finished_before = Counter({name: journal(tmp_path / "runs")[name] for name in done})
    process = started(tmp_path / "runs", worker)
    process.join()
    assert process.exitcode == 0
    after = journal(tmp_path / "runs")
    assert all(after[name] == count for name, count in finished_before.items())
    assert len(after) == 16 == len(list(tmp_path.glob("runs/*/summary.json")))  # 4 settings, 2 rates + 2 seeds
    assert hit_in_the_middle


def test_a_worker_that_survives_is_waited_for(tmp_path: Path, worker: tuple[str, ...]) -> None:
    first = started(tmp_path / "runs", worker, tmp_path / "go")
    until(lambda: at_work(tmp_path / "runs") == 2)
    os.kill(first.pid or 0, signal.SIGKILL)  # not its workers
    first.join()
    second = started(tmp_path / "runs", worker)
    until(lambda: len(journal(tmp_path / "runs")) > 0)  # the second comparison does what nobody holds
    (tmp_path / "go").touch()
    second.join()
    assert second.exitcode == 0
    assert len(journal(tmp_path / "runs")) == 16 and set(journal(tmp_path / "runs").values()) == {1}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_workers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setenv("FAKE_WAIT", str(tmp_path / "never"))
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        """Stand in for the pause between two looks at the workers."""
        sleep(seconds)
        if at_work(tmp_path / "out/runs") == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(runner.time, "sleep", interrupted)
    with pytest.raises(SystemExit) as left:
        main([*command, "--jobs", "2"])
    assert left.value.code == 130
    assert "0 of 4 runs are done. The same command continues" in capfd.readouterr().err
    assert len(list(tmp_path.glob("out/runs/*/log.txt"))) == 2 and not journal(tmp_path / "out/runs")
    monkeypatch.setattr(runner.time, "sleep", sleep)
    monkeypatch.delenv("FAKE_WAIT")
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
    settings |= {"count_flops": True}
    settings |= {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True}
    task = {"task": "cifar100", "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "data")}
    spec = content(settings=settings, tasks=[task | {"cut": 2}], methods=["coef_j"], learning_rates=[0.01], seeds=[0])
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = ["compare", str(tmp_path / "spec.yaml"), "--archive", str(tmp_path / "runs.parquet"), "--output_dir"]
    assert main([*command, str(tmp_path / "out")]) == 0
    (setting,) = json.loads((tmp_path / "out/results.json").read_text())["settings"]
    assert setting["model"] == "model" and setting["complete"]
    accuracy = setting["scores"]["accuracy"]["mean"]
    assert accuracy * 24 / 100 == pytest.approx(round(accuracy * 24 / 100))  # of 24 pictures, in percent
    assert f"| model | CoeF-J | {accuracy:.1f} |" in capsys.readouterr().out
    data = re.findall(r'id="data">(.*?)</script>', (tmp_path / "out/report.html").read_text())[0]
    assert [[point[0] for point in chart["lines"]["CoeF-J"]] for chart in json.loads(data)["charts"]] == 3 * [[1, 2]]
    first, last = json.loads(data)["charts"][0]["lines"]["CoeF-J"]
    assert 0 < first[3] < last[3]  # the server's work until then
    assert main([*command, str(tmp_path / "again"), "--report_only"]) == 0
    again = re.findall(r'id="data">(.*?)</script>', (tmp_path / "again/report.html").read_text())[0]
    assert json.loads(again) == json.loads(data)  # the archive alone gives the same curves
    kept = parquet.read_table(tmp_path / "runs.parquet").to_pylist()[0]
    assert str(tmp_path) not in kept["options"] + kept["summary"]
