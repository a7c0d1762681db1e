"""`bf16=True` on a CPU that kills whoever multiplies bfloat16 matrices; a child killed by SIGILL stands in for one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_coefsfl import _bfloat16
from hf_coefsfl._bfloat16 import REMEDY, VARIABLE, bfloat16_problem
from tests.support.federated import config, tiny_vit, trainer
from tests.support.paths import ROOT

ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Return a function that stands in for a machine: it takes the child's code, and returns the list of its starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    run = subprocess.run

    def as_machine(code: str) -> list[str]:
        starts: list[str] = []

        def start(command: list[str], **options: object) -> object:
            starts.append(os.environ.get(VARIABLE, ""))
            return run(command, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(_bfloat16, "CHILD", code)
        monkeypatch.setattr(_bfloat16.subprocess, "run", start)
        _bfloat16._try_product.cache_clear()
        return starts

    yield as_machine
    _bfloat16._try_product.cache_clear()


def test_bf16_is_refused(tmp_path: Path, machine: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    starts = machine(ILLEGAL)
    reason = rf"killed by SIGILL \({VARIABLE} is not set\). Set {VARIABLE}={REMEDY} .*before Python starts"
    for options in ({"bf16": True}, {"bf16_full_eval": True}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}=True needs bfloat16 products.*{reason}"):
            config(tmp_path, **options)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # by the launcher
    with pytest.raises(ValueError, match=reason):
        config(tmp_path)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with pytest.raises(ValueError, match=rf"A model with bfloat16 weights needs.*{reason}"):
        trainer(tmp_path, model=tiny_vit().to(torch.bfloat16))
    config(tmp_path, exchange_dtype="bfloat16")  # rounds, and multiplies nothing
    assert starts == [""]


def test_the_answer_is_remembered_for_each_setting(
    machine: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = machine(ILLEGAL)
    assert "SIGILL" in bfloat16_problem() and "SIGILL" in bfloat16_problem() and starts == [""]
    starts = machine("raise SystemExit('asked again')")  # another process: only the file knows
    assert "SIGILL" in bfloat16_problem() and not starts
    machine("pass")
    monkeypatch.setenv(VARIABLE, REMEDY)
    assert bfloat16_problem() == ""
    starts = machine(ILLEGAL)
    assert bfloat16_problem() == "" and not starts


def test_another_failure_is_told_and_not_remembered(
    machine: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("raise MemoryError('no room')")
    assert re.search(r"status 1 \(MemoryError: no room\)", bfloat16_problem())
    machine("import time; time.sleep(60)")
    with monkeypatch.context() as impatient:
        impatient.setattr(_bfloat16, "_TIME_LIMIT", 0.1)
        assert "did not end within 0.1 seconds" in bfloat16_problem()
    assert machine("pass") == [] and bfloat16_problem() == ""


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, machine: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    machine("pass")
    assert bfloat16_problem() == ""


def test_the_product_itself_and_without_loading_pytorch(tmp_path: Path) -> None:
    """As the tests ask at their start: PyTorch is loaded by the child only."""
    code = "import sys; from hf_coefsfl._bfloat16 import bfloat16_problem as p; print([p()], 'torch' in sys.modules)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[''] False\n"  # also on a machine that needs the variable: conftest.py has set it
    assert [path.read_text() for path in tmp_path.glob("hf_coefsfl/bfloat16-*.txt")] == [""]
