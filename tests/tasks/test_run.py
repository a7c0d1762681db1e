"""Recipes from the command line to the files they leave."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from datasets import Dataset

from hf_coefsfl.compare.results import exchange_mib
from hf_coefsfl.federation.data_checks import DataError
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.interruption import resuming_command
from hf_coefsfl.tasks.options import make_parser, parse_options
from hf_coefsfl.tasks.run import paper_share, run
from tests.support.paths import LIGHT, ROOT
from tests.support.posts import make_posts, small

RECIPES = sorted((ROOT / "recipes").glob("*_coef[jw].py"))


@pytest.fixture
def posts(tmp_path: Path) -> dict[str, str]:
    return make_posts(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], task: str = "newsgroups") -> str:
    with pytest.raises(SystemExit) as left:
        run(task, argv=argv)
    assert left.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_thin_and_named_by_what_they_run(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 30
    (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    task, method = call.args[0].value, call.keywords[0].value.value  # type: ignore[attr-defined]
    assert path.stem == f"{task}_{method.replace('_', '')}"
    # Every option that the text names exists.
    known = {f"--{name}" for name in make_parser(TASKS[task]).options}
    assert set(re.findall(r"--[a-z_]{3,}", text)) - {"--help", "--config"} <= known


def test_the_recipes() -> None:
    assert [path.stem for path in RECIPES] == [
        "causal_lm_coefw", "cifar100_coefw", "food101_coefw", "mnli_coefj", "mnli_coefw", "newsgroups_coefw",
        "squad_v2_coefw", "tiny_imagenet_coefw",
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_machines == (2 if path.stem == "many_nodes" else 1)
    assert bool(config.use_cpu) is (path.stem == "cpu")


def test_run_leaves_all_files(posts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run("newsgroups", argv=small(posts))
    out = Path(posts["output_dir"])
    for name in ("adapter_model.safetensors", "client", "server", "communication.json", "training_args.json"):
        assert (out / name).exists()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["method"] == "coef_w" and summary["cut"] == 1 and summary["num_blocks"] == 3
    assert [point["round"] for point in summary["curve"]] == [2, 3]  # the last round is always evaluated
    assert summary["curve"][-1]["scores"] == summary["scores"]
    assert summary["server_gflops"] is None and "server_gflops" not in summary["curve"][-1]  # not counted
    ledger = json.loads((out / "communication.json").read_text())
    assert summary["transfers"] == ledger["total"]["transfers"] > 0
    assert summary["dataset"] == "data" and summary["model"] == "model"  # names, not where they lie
    card = (out / "README.md").read_text()
    assert "## Method: CoeF-W" in card and "trained on data" in card and "Weights: round 3 of 3." in card
    assert summary["weights"] == {"round": 3, "best": False, "mib": summary["mib"]}
    assert summary["mib"] > summary["exchange_mib"] == pytest.approx(exchange_mib({**summary, "exchange_mib": None}))
    assert summary["base"] == {"name_or_path": posts["model_name_or_path"], "dtype": "float32"}
    assert f"accuracy {summary['scores']['accuracy']:.1f}" in capsys.readouterr().out


def test_the_summary_tells_the_servers_work(posts: dict[str, str]) -> None:
    counted = {"count_flops": "true", "logging_steps": "2", "num_rounds": "4", "warmup_rounds": "2", "method": "coef_j"}
    run("newsgroups", argv=small(posts | counted | {"eval_on_start": "true"}))
    out = Path(posts["output_dir"])
    summary = json.loads((out / "summary.json").read_text())
    logs = json.loads((out / "trainer_state.json").read_text())["log_history"]
    warm_up, later = (entry["server_gflops_per_round"] for entry in logs if "server_gflops_per_round" in entry)
    assert 0 < later != warm_up > 0  # each a mean of two rounds
    points = {point["round"]: point["server_gflops"] for point in summary["curve"]}
    assert points == pytest.approx({0: 0.0, 2: 2 * warm_up, 4: 2 * warm_up + 2 * later})
    assert summary["server_gflops"] == points[4]


def test_the_rows_to_train_on_may_be_evaluated(posts: dict[str, str]) -> None:
    run("newsgroups", argv=small(posts | {"eval_split": "train", "max_eval_samples": "12", "num_rounds": "1"}))
    summary = json.loads((Path(posts["output_dir"]) / "summary.json").read_text())
    right = summary["scores"]["accuracy"] * 12 / 100
    assert 0 <= right <= 12 and right == pytest.approx(round(right))


def test_names_and_the_best_round(posts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Strings as labels become the names of the classes, wherever these are told."""
    texts = ["the cat sat", "a dog ran", "the mat", "far"] * 6
    rows = Dataset.from_dict({"body": texts, "label": ["spam", "ham", "spam", "ham"] * 6})
    for split in ("train", "test"):
        rows.to_parquet(str(Path(posts["dataset_name"]) / f"{split}.parquet"))
    best = {"load_best_model_at_end": "true", "metric_for_best_model": "eval_loss", "eval_steps": "1"}
    best |= {"save_strategy": "steps", "save_steps": "1", "num_rounds": "2", "learning_rate": "10.0"}  # ever worse
    run("newsgroups", argv=small(posts | best))
    out = Path(posts["output_dir"])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["id2label"] == {"0": "ham", "1": "spam"}
    logs = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = {entry["step"]: entry["eval_loss"] for entry in reversed(logs) if "eval_loss" in entry}
    assert summary["weights"]["round"] == min(losses, key=lambda step: losses[step]) and summary["weights"]["best"]
    assert [p["mib"] for p in summary["curve"] if p["round"] == summary["weights"]["round"]] == pytest.approx(
        [summary["weights"]["mib"]]
    )
    said = f"best, round {summary['weights']['round']} of 2"
    assert f"{said} ({summary['weights']['mib']:.1f} MiB until then): accuracy" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert f"Weights: {said}." in card and 'names = dict(enumerate(["ham", "spam"]))' in card
    for side in ("client", "server"):
        assert json.loads((out / side / "config.json").read_text())["id2label"] == summary["id2label"]


def test_rows_that_break_a_round_end_in_one_line(
    posts: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise DataError("Row 5 of client 1 cannot be read")

    monkeypatch.setattr("hf_coefsfl.tasks.run.complete", broken)
    assert refused(capsys, small(posts)).endswith("error: Row 5 of client 1 cannot be read")


def test_any_method_and_a_file_of_options(posts: dict[str, str], tmp_path: Path) -> None:
    options = {
        "method": "coef_d",
        "method_kwargs": {"compensation_factor": 10},
        "num_rounds": 5,
        "learning_rate": "1e-3",
    }
    for ending, dump in ((".yaml", yaml.safe_dump), (".json", json.dumps)):
        path = tmp_path / f"options{ending}"
        path.write_text(dump(options | {"columns": {"text": "body"}}))
        named = [str(path)] if ending == ".json" else ["--config", str(path)]
        _, arguments, config = parse_options(TASKS["newsgroups"], argv=[*named, "--num-rounds", "2"])
        assert config.method == "coef_d" and config.method_kwargs == {"compensation_factor": 10}
        assert config.num_rounds == 2 and config.learning_rate == 1e-3  # the command line overrules the file
        assert arguments.columns == ["text=body"] and config.output_dir == "outputs/newsgroups-coef_d"


def test_one_word_in_a_file_is_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("eval_split: test\ncolumns: text=body\noutput_dir:\n")
    _, arguments, config = parse_options(TASKS["newsgroups"], argv=[str(path)])
    assert arguments.eval_split == ["test"] and arguments.columns == ["text=body"]
    assert config.output_dir == "outputs/newsgroups-coef_w"  # an empty value is none


def test_best_model_is_no_round_of_the_curve(posts: dict[str, str]) -> None:
    best = {"load_best_model_at_end": "true", "metric_for_best_model": "accuracy", "eval_steps": "1", "save_steps": "1"}
    run("newsgroups", argv=small(posts | best))
    out = Path(posts["output_dir"])
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    evals = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    summary = json.loads((out / "summary.json").read_text())
    assert len(evals) == 4  # three rounds, then the best
    assert [point["scores"]["accuracy"] for point in summary["curve"]] == [100 * value for value in evals[:3]]
    assert summary["scores"]["accuracy"] == 100 * max(evals)


def test_partition_by_label(posts: dict[str, str]) -> None:
    run("newsgroups", argv=small(posts | {"partition": "dirichlet", "partition_column": "label", "num_rounds": "1"}))
    assert json.loads((Path(posts["output_dir"]) / "summary.json").read_text())["partition"] == "dirichlet"


def test_resumes_from_the_last_checkpoint(posts: dict[str, str]) -> None:
    options = small(posts | {"save_steps": "2", "resume_from_checkpoint": "last"})
    run("newsgroups", argv=options)  # there is none yet: starts
    out = Path(posts["output_dir"])
    first = (out / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").unlink()
    for folder in out.glob("checkpoint-3"):
        subprocess.run(["rm", "-r", str(folder)], check=True)
    run("newsgroups", argv=options)
    assert (out / "adapter_model.safetensors").read_bytes() == first


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_tells_how_to_go_on(
    posts: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("newsgroups", argv=small(posts | {"output_dir": posts["output_dir"] + "_whole"}))
    run_round, handler = Simulation.run_round, signal.getsignal(signal.SIGINT)

    def interrupted(self: Simulation, index: int, *args: Any) -> Any:
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return run_round(self, index, *args)

    monkeypatch.setattr(Simulation, "run_round", interrupted)
    argv = small(posts | {"save_steps": "1"})
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run("newsgroups", argv=argv, prog="coefsfl train newsgroups")
    assert left.value.code == 130 and signal.getsignal(signal.SIGINT) is handler
    line = capsys.readouterr().err.splitlines()[-1]
    told, _, command = line.partition(" To go on: ")
    assert told == f"Stopped in round 3 of 3. The last checkpoint is {posts['output_dir']}/checkpoint-2."
    assert shlex.split(command) == ["coefsfl", "train", "newsgroups", *argv, "--resume_from_checkpoint", "last"]
    monkeypatch.setattr(Simulation, "run_round", run_round)
    run("newsgroups", argv=shlex.split(command)[3:])
    adapters = [Path(posts["output_dir"] + end, "adapter_model.safetensors").read_bytes() for end in ("", "_whole")]
    assert adapters[0] == adapters[1]


def test_the_command_that_goes_on_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes/mnli_coefj.py", "--seed", "1"])
    last = " --resume_from_checkpoint last"
    assert resuming_command("mnli_coefj.py", None) == f"python recipes/mnli_coefj.py --seed 1{last}"
    secret = resuming_command("coefsfl train mnli", ["--hub_token", "hf_x", "--hub-token=hf_y", "--seed", "1"])
    assert secret == f"coefsfl train mnli --hub_token ... --hub-token=... --seed 1{last}"
    assert resuming_command("coefsfl train mnli", last.split()) == f"coefsfl train mnli{last}"
    overwriting = resuming_command("coefsfl train mnli", ["--overwrite_output_dir", "true"], overwrites=True)
    assert overwriting.endswith(f" true --overwrite_output_dir false{last}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    words = ["/usr/bin/python", "/usr/bin/accelerate", "launch", "recipes/mnli_coefj.py", "--seed", "1"]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: words)
    assert resuming_command("mnli_coefj.py", None) == f"accelerate launch recipes/mnli_coefj.py --seed 1{last}"
    words[1:3] = ["-m", "torch.distributed.run"]
    assert resuming_command("mnli_coefj.py", None).startswith("python -m torch.distributed.run recipes/mnli_coefj.py")
    words[1:] = ["-m", "pytest"]  # started by something else
    assert resuming_command("mnli_coefj.py", None).startswith("python recipes/mnli_coefj.py")


def test_help_is_grouped_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(option: str) -> str:
        with pytest.raises(SystemExit) as left:
            parse_options(TASKS["squad_v2"], argv=[option])
        assert left.value.code == 0
        return capsys.readouterr().out

    short, long = shown("--help"), shown("--help_all")
    titles = ["the task:", "the federation:", "training (an option that counts steps counts rounds):"]
    places = [short.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert places[0] < short.index("--stride N") < places[1] < short.index("--dirichlet_alpha X") < places[2]
    assert "rajpurkar/squad_v2" in short and "384" in short and "(default: None)" not in short
    assert "--adam_beta1" in long and "--adam_beta1" not in short and len(short.splitlines()) < 240


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_round", "3"], r"unrecognized arguments: --num_round\. Did you mean --num_rounds\?"),
        (["--method", "coef_k"], "coef_k"),
        (["--partition", "diriclet"], r"not allowed\. Did you mean dirichlet\? Choose one of: iid"),
        (["--participation", "2"], "participation=2.0 selects no client, or more than there are"),
        (["--columns", "text"], r"columns='text' is not role=column. The roles here are text, label"),
        (
            ["--num_train_epochs", "3"],
            "arguments: --num_train_epochs.* A run counts rounds: num_rounds sets them, local_ep",
        ),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere': there is no such folder"),
        (["nothing.txt"], "nothing.txt is not a .yaml or .json file of options"),
        (["missing.yaml"], "No such file.*missing.yaml"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert re.search(message, refused(capsys, argv))


def test_bad_option_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("num-round: 3\n")
    assert re.search(r"no option 'num_round'\. Did you mean num_rounds\?", refused(capsys, [str(path)]))


def test_a_file_sets_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COEFSFL_TEST", "no")
    path = tmp_path / "options.yaml"
    path.write_text("env:\n  COEFSFL_TEST: 1\nnum-rounds: 3\n")
    *_, config = parse_options(TASKS["newsgroups"], argv=["--config", str(path)])
    assert os.environ["COEFSFL_TEST"] == "1" and config.num_rounds == 3


def test_two_files_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert "both name a file of options" in refused(capsys, ["a.yaml", "--config", "b.yaml"])


def test_bad_data_is_refused_before_training(posts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def without(*names: str, **options: str) -> list[str]:
        return small({k: v for k, v in posts.items() if k not in names} | options)

    assert "no split 'all', only train, test" in refused(capsys, without(train_split="all"))
    assert "cannot be loaded of the folder" in refused(capsys, without(model_name_or_path=posts["dataset_name"]))
    assert "max_length=33" in refused(capsys, without(max_length="33"))
    assert "cut must be from 1 to 2" in refused(capsys, without(cut="3"))
    assert not list(Path(posts["output_dir"]).glob("*"))


@pytest.mark.slow
def test_hub_id_without_the_hub(tmp_path: Path) -> None:
    """In a process of its own, as a user sees it: one line, which option takes a local copy, status 2."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": LIGHT}
    command = [sys.executable, str(ROOT / "recipes" / "mnli_coefj.py"), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    last = done.stderr.strip().splitlines()[-1]
    assert "'nyu-mll/glue' cannot be loaded from the Hub" in last and "--dataset_name takes" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("blocks", "cut"), [(12, 4), (6, 2), (30, 10), (2, 1)])
def test_default_cut_is_the_papers_share(blocks: int, cut: int) -> None:
    assert paper_share(blocks) == cut


@pytest.mark.slow
def test_two_processes_equal_one(posts: dict[str, str], tmp_path: Path) -> None:
    one = tmp_path / "one"
    run("newsgroups", argv=small(posts | {"output_dir": str(one)}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": LIGHT}
    command = [*launcher, str(ROOT / "recipes" / "newsgroups_coefw.py"), *small(posts)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two = Path(posts["output_dir"])
    assert (two / "adapter_model.safetensors").read_bytes() == (one / "adapter_model.safetensors").read_bytes()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    for name in ("scores", "curve", "mib", "transfers"):
        assert summaries[0][name] == summaries[1][name]
    assert done.stdout.count("crossed the cut") == 1  # the main process alone speaks
    assert (two / "checkpoint-3" / "rng_state_1.pth").exists()  # there really were two
