"""Worker processes that fetch the data of clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_coefsfl.federation.batches import _own
from tests.support.federated import same, trainer, weights
from tests.support.noisy import Noisy
from tests.support.paths import LIGHT, SUPPORT


def test_workers_change_no_bit(tmp_path: Path) -> None:
    options = {"num_rounds": 2, "warmup_rounds": 0, "num_clients": 3, "participation": 1.0, "method": "reuse"}
    runs = [trainer(tmp_path / str(n), data=Noisy(), dataloader_num_workers=n, **options) for n in (0, 2)]
    for run in runs:
        run.train()
    assert same(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("odd", [False, True])
def test_what_a_worker_meets_is_the_clients_failure(tmp_path: Path, odd: bool) -> None:
    options = {"num_rounds": 1, "warmup_rounds": 0, "num_clients": 3, "participation": 1.0, "method": "reuse"}
    run = trainer(tmp_path, data=Noisy(5, odd), dataloader_num_workers=1, on_client_failure="skip", **options)
    run.train()
    assert [e["failure"] for e in run.ledger.entries if "failure" in e] == [
        f"DataError: Row 5 of client 1 cannot be read ({'Lost' if odd else 'OSError'}: this image is gone). Repair it, "
        "or leave the row out (dataset.filter)"
    ]


def test_a_dead_worker_does_not_end_the_run(tmp_path: Path) -> None:
    """In a process of its own: PyTorch raises there at any moment, which may leave locks behind for other tests."""
    command = [sys.executable, str(SUPPORT / "noisy.py"), str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": LIGHT}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    # The client whose data it was, and the one whose batches were asked for when the worker, ahead of it, died.
    assert all(1 <= len(clients) <= 2 for clients in json.loads(ended.stdout.splitlines()[-1]))


def test_workers_leave_no_files_open() -> None:
    shared = torch.zeros(3).share_memory_()
    own = _own({"x": shared, "n": 3})
    assert not own["x"].is_shared() and torch.equal(own["x"], shared) and own["n"] == 3
