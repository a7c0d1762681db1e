"""The quickstart runs from end to end, and its help helps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def run(*words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_methods_and_what_they_leave(tmp_path: Path) -> None:
    printed = run("--output_dir", str(tmp_path), "--num_rounds", "3", "--methods", "reuse", "coef_d")
    lines = printed.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert [name.strip() for name in lines[header].split("|")] == ["method", "accuracy", "MiB", "transfers", "seconds"]
    assert lines[header + 2].startswith("reuse") and lines[header + 3].startswith("coef_d")
    for name in ("accuracy.png", "partition.png", "transfers.png"):
        assert str(tmp_path / name) in printed and (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    for method in ("reuse", "coef_d"):
        for part in ("", "client", "server"):
            assert (tmp_path / method / part / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_help() -> None:
    printed = run("--help")
    assert "--num_rounds" in printed and "default: 15" in printed
