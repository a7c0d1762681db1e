"""How a run may be launched: what does not work is refused."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from torch import distributed

from hf_coefsfl.trainer import launching
from hf_coefsfl.trainer.launching import at_work, check_processes, set_timeout
from tests.support.federated import config, rounds, same, trainer, weights
from tests.support.paths import LIGHT, ROOT

WORKS = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2"


@pytest.mark.parametrize("name", ["cpu", "one_gpu", "many_gpus", "many_nodes"])
def test_configs_of_accelerate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate knows every key, and the run every option that the comments name."""
    file = ROOT / "recipes" / "accelerate" / f"{name}.yaml"
    loaded: Any = load_config_from_file(str(file))
    assert loaded.use_cpu is (name == "cpu") and loaded.mixed_precision in ("no", "bf16")  # fp16 is refused
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)  # asks for a GPU
    options: dict[str, Any] = {k: yaml.safe_load(v) for k, v in re.findall(r"# +--(\w+) (\w+)  ", file.read_text())}
    assert options.keys() == (set() if name == "cpu" else {"tf32", "torch_compile", "dataloader_num_workers"})
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    made = config(tmp_path, **options)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert {k: getattr(made, k) for k in options} == options


def test_processes_that_do_not_know_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --multi_gpu` and `torchrun` start them on a machine without GPUs."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone: Any = SimpleNamespace(world_size=1, process_index=0, output_dir="out")
    with pytest.raises(ValueError, match=rf"2 processes were started .* runs alone.* use_cpu=True, or .*{WORKS}"):
        check_processes(alone)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    address = f"file://{tmp_path / 'group'}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield distributed.group.WORLD
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_the_timeout_holds_for_a_group_that_is_open(group: Any) -> None:
    def seconds() -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert seconds() == 60
    set_timeout(SimpleNamespace(ddp_timeout_delta=timedelta(seconds=7)))  # type: ignore[arg-type]
    assert seconds() == 7


@pytest.mark.parametrize(
    ("backend", "failed", "closed"),
    [("gloo", False, True), ("gloo", True, True), ("nccl", False, True), ("nccl", True, False)],
)
def test_a_group_is_closed_at_the_end(
    backend: str, failed: bool, closed: bool, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.delattr(sys, "last_value", raising=False)  # of an earlier test
    monkeypatch.setattr(launching, "_at_work", False)
    with suppress(OSError), at_work():
        if failed:
            raise OSError("no space is left")
    launching._leave_group()
    assert distributed.is_initialized() is not closed


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


def run_script(tmp_path: Path, text: str, command: list[str], **env: str) -> None:
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": LIGHT, "HF_HOME": str(tmp_path), **env}
    command = [*command, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


BUILD = """
import sys
from pathlib import Path
from tests.support.federated import trainer
run = trainer(Path(sys.argv[1]) / "out", use_cpu=False)
(Path(sys.argv[1]) / f"process-{run.args.process_index}").write_text(str(run.args.world_size))
"""


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
    options = ["--multi_gpu", "--main_process_port", free_port()]
    run_script(tmp_path, BUILD, [*launch, *options], ACCELERATE_USE_CPU="true")
    worlds = {path.name: path.read_text() for path in tmp_path.glob("process-*")}
    assert worlds == {"process-0": "2", "process-1": "2"}


FUNCTIONS = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from accelerate import debug_launcher, notebook_launcher
from safetensors.torch import save_file

def train(name):
    from tests.support.federated import trainer, weights  # not before: see docs/quantized.md
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

    script = FUNCTIONS.replace("sys.argv[2]", repr(free_port()))
    # Not `LIGHT`: notebook_launcher takes the name of bitsandbytes in sys.modules for the package.
    run_script(tmp_path, script, [sys.executable], PYTHONPATH=str(ROOT))
    found = {path.stem: load_file(path) for path in tmp_path.glob("*.safetensors")}
    worlds = {name: int(result.pop("world")) for name, result in found.items()}
    assert worlds == {"debug-0": 2, "debug-1": 2, "notebook-0": 2, "notebook-1": 2, "alone-0": 1}
    assert all(same(result, found["alone-0"]) for result in found.values())
    assert all(torch.isfinite(tensor).all() for tensor in found["alone-0"].values())
