"""How a run may be launched: missing processes are told, what does not work is refused."""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hf_coefsfl.trainer.launching import _num_processes, asked_of_launcher, check_processes, launch_arguments
from tests.support.federated import config, rounds, same, trainer, weights
from tests.support.paths import ROOT

ASKED = ["--cpu", "--num_processes", "2", "script.py"]
WARNING = "was asked for 2 processes, but 1 is running"
WORKS = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "/venv/bin/accelerate", "launch", *ASKED], ASKED),
        (["/venv/bin/accelerate", "launch", *ASKED], ASKED),
        (["python", "/venv/bin/accelerate-launch", *ASKED], ASKED),
        (["python", "-m", "accelerate.commands.launch", *ASKED], ASKED),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", *ASKED], ASKED),
        (["python", "/venv/bin/accelerate", "test"], None),
        (["python", "-m", "pytest", "-n", "2", "accelerate", "launch"], None),
        (["bash"], None),
        ([], None),
    ],
    ids=str,
)
def test_the_command_line_of_accelerate_launch(command: list[str], found: list[str] | None) -> None:
    assert launch_arguments(command) == found


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_the_number_of_processes_asked_for(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
    settings |= {"use_cpu": True, "debug": False, "num_processes": 3}
    (tmp_path / name).write_text(json.dumps(settings))  # JSON is YAML
    config_args = "accelerate.commands.config.config_args.default_config_file"
    monkeypatch.setattr(config_args, str(tmp_path / "nowhere"))
    script = ["script.py", "--num_processes", "7", "--config_file", "another"]  # the script's own options
    assert _num_processes(["--num_processes", "2", *script], tmp_path) == 2
    assert _num_processes(["--config_file", name, *script], tmp_path) == 3  # seen from the launcher's folder
    assert _num_processes(["--config_file", str(tmp_path / name), "--num_processes=5", *script], tmp_path) == 5
    assert _num_processes(script, tmp_path) is None
    monkeypatch.setattr(config_args, str(tmp_path / name))
    assert _num_processes(script, tmp_path) == 3
    assert _num_processes(["--cpu", *script], tmp_path) is None  # with it the default file is not read


@pytest.mark.parametrize(
    "command", [["accelerate", "launch", "--num_processes", "many", "x.py"], psutil.AccessDenied()]
)
def test_a_command_line_that_cannot_be_read_is_no_error(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cmdline(self: psutil.Process) -> Any:
        if isinstance(command, Exception):
            raise command
        return command

    monkeypatch.setattr(psutil.Process, "cmdline", cmdline)
    assert asked_of_launcher.__wrapped__() is None


def test_as_many_as_asked_for_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("hf_coefsfl.trainer.launching.asked_of_launcher", lambda: 2)
    with caplog.at_level(logging.WARNING):
        check_processes(SimpleNamespace(world_size=2, process_index=0))  # type: ignore[arg-type]
        check_processes(SimpleNamespace(world_size=1, process_index=1))  # type: ignore[arg-type]
    assert not caplog.text


def test_processes_that_do_not_know_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --multi_gpu` and `torchrun` start them where there is no GPU."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone: Any = SimpleNamespace(world_size=1, process_index=0, output_dir="out")
    with pytest.raises(ValueError, match=rf"2 processes were started .* runs alone.* use_cpu=True, or .*{WORKS}"):
        check_processes(alone)


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ],
)
def test_sharding_by_the_launcher(tmp_path: Path, variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=rf"{variable}=true asks for {name}, .*: each process holds the whole model"):
        config(tmp_path)
    monkeypatch.setenv(variable, "false")
    config(tmp_path)


def test_deepspeed_by_the_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"deepspeed=.* does not work .*: each process holds the whole model"):
        config(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})


def test_bf16_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"num_rounds": 1, "warmup_rounds": 0}
    full, asked = trainer(tmp_path / "full", **options), trainer(tmp_path / "asked", bf16=True, **options)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    half = trainer(tmp_path / "half", **options)
    for run in (full, asked, half):
        run.train()
    assert same(weights(half), weights(asked)) and not same(weights(half), weights(full))
    assert rounds(half)[0]["loss"] == pytest.approx(rounds(full)[0]["loss"], rel=0.05)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run_script(tmp_path: Path, text: str, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(text)
    search = str(ROOT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, "HF_HOME": str(tmp_path), **env}
    command = [*command, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


BUILD = """
import sys
from pathlib import Path
from tests.support.federated import trainer
for name in ("first", "second"):
    run = trainer(Path(sys.argv[1]) / name, use_cpu=False)
(Path(sys.argv[1]) / f"process-{run.args.process_index}").write_text(str(run.args.world_size))
"""


@pytest.mark.slow
@pytest.mark.parametrize("works", [False, True])
def test_accelerate_launch(tmp_path: Path, works: bool) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
    if works:
        options = ["--multi_gpu", "--main_process_port", free_port()]
        done = run_script(tmp_path, BUILD, [*launch, *options], ACCELERATE_USE_CPU="true")
        assert WARNING not in done.stderr
    else:
        done = run_script(tmp_path, BUILD, [*launch, "--cpu"])
        assert done.stderr.count(WARNING) == 1 and WORKS in done.stderr
    worlds = {path.name: path.read_text() for path in tmp_path.glob("process-*")}
    assert worlds == ({"process-0": "2", "process-1": "2"} if works else {"process-0": "1"})


FUNCTIONS = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from accelerate import debug_launcher, notebook_launcher
from tests.support.federated import trainer, weights
from safetensors.torch import save_file

def train(name):
    run = trainer(Path(sys.argv[1]) / name, num_rounds=2)
    run.train()
    run.evaluate()
    result = weights(run) | {"world": torch.tensor(run.args.world_size)}
    save_file(result, Path(sys.argv[1]) / f"{name}-{run.args.process_index}.safetensors")

debug_launcher(train, ("debug",), 2)
notebook_launcher(train, ("notebook",), 2, use_port=sys.argv[2])
train("alone")
"""


@pytest.mark.slow
def test_launchers_of_functions(tmp_path: Path) -> None:
    """`accelerate.debug_launcher` and, as in a notebook, `accelerate.notebook_launcher`."""
    from safetensors.torch import load_file

    run_script(tmp_path, FUNCTIONS.replace("sys.argv[2]", repr(free_port())), [sys.executable])
    found = {path.stem: load_file(path) for path in tmp_path.glob("*.safetensors")}
    worlds = {name: int(result.pop("world")) for name, result in found.items()}
    assert worlds == {"debug-0": 2, "debug-1": 2, "notebook-0": 2, "notebook-1": 2, "alone-0": 1}
    assert all(same(result, found["alone-0"]) for result in found.values())
    assert all(torch.isfinite(tensor).all() for tensor in found["alone-0"].values())
