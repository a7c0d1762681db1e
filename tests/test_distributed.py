"""Two processes give the bits of one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

TESTS = Path(__file__).parent


def launch(folder: Path, method: str, processes: int) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    search = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    done = subprocess.run([*command, str(TESTS / "launched.py"), str(folder), method], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert result.pop("world") == processes
    return result


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coef_j", "gas", "fsl_sage", "acc_sfl"])
def test_two_processes_equal_one(tmp_path: Path, method: str) -> None:
    one, two = (launch(tmp_path / str(n), method, n) for n in (1, 2))
    assert one == two
    single, double = (load_file(tmp_path / n / "weights.safetensors") for n in ("1", "2"))
    assert all((single[name] == double[name]).all() for name in single) and single.keys() == double.keys()
