"""The package on an emulated accelerator: placement, generators, copies and collectives, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loopback import free_port
from tests.support.accelerator import unavailable
from tests.support.accelerator.mutants import MUTANTS
from tests.support.paths import LIGHT, ROOT

REASON = unavailable()
needs_device = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def start(module: str, *arguments: str, **environment: str) -> Any:
    """Start a process with the device; it must not be registered in this one."""
    command = [sys.executable, "-m", f"tests.support.accelerator.{module}", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": LIGHT, **environment}
    output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=variables, **output)


def finish(*processes: Any) -> None:
    """Wait for processes and show what one that failed has said."""
    said = [process.communicate()[1] for process in processes]
    failed = [text[-3000:] for text, process in zip(said, processes, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize("group", ["methods", "options", "split", "sites", "counts", "memory"])
def test_all_cases(tmp_path: Path, group: str) -> None:
    """See `cases.py`, `counts.py`, `memory.py` and `sites.py` for what each case says."""
    finish(start("process", group, str(tmp_path)))
    results = json.loads((tmp_path / "results.json").read_text())
    wrong = {name: told for name, told in results.items() if told is not None}
    assert results and not wrong, "\n".join(f"{name}: {told}" for name, told in wrong.items())


@pytest.mark.slow
@needs_device
def test_two_processes_on_two_devices_equal_one(tmp_path: Path) -> None:
    """To the last bit; a collective that got a tensor of the CPU would have refused it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    finish(*(start("collective", two, RANK=rank, LOCAL_RANK=rank, **world) for rank in ("0", "1")))
    finish(start("collective", one))
    names = ("result.safetensors", "communication.json", "staleness.json")
    for case in sorted(path.name for path in Path(one).iterdir()):
        for file in (Path(one) / case / name for name in names):
            assert not file.exists() or file.read_bytes() == (Path(two) / case / file.name).read_bytes(), file
        logs = [json.loads((Path(folder) / case / "result.json").read_text())["logs"] for folder in (one, two)]
        assert logs[0] == logs[1], case


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_of_this_package(mutant: Any) -> None:
    assert mutant.source(ROOT).count(mutant.line) == 1
