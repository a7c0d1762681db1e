"""Worker processes that fetch the data of clients."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hf_coefsfl.federation.batches import _own
from tests.support.federated import images, same, trainer, weights


class Lost(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, text: str):
        super().__init__(text)
        self.handle = lambda: text


class Noisy(Dataset):  # type: ignore[type-arg]
    """Images with random noise, one of which cannot be read where `broken` says so."""

    def __init__(self, broken: int | None = None, odd: bool = False, dies: bool = False):
        self.rows, self.broken, self.odd, self.dies = images(36), broken, odd, dies

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.broken and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if i == self.broken:
            raise Lost("this image is gone") if self.odd else OSError("this image is gone")
        row = self.rows[i]
        return {"pixel_values": row["pixel_values"] + torch.randn(1, 8, 8), "labels": row["labels"]}


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
        "RuntimeError: Lost: this image is gone" if odd else "OSError: this image is gone"
    ]


def test_a_dead_worker_does_not_end_the_run(tmp_path: Path) -> None:
    options = {"num_rounds": 2, "warmup_rounds": 0, "num_clients": 3, "participation": 1.0, "method": "reuse"}
    run = trainer(tmp_path, data=Noisy(5, dies=True), dataloader_num_workers=1, on_client_failure="skip", **options)
    run.train()
    failed = [[e["client"] for e in run.ledger.entries if "failure" in e and e["round"] == r] for r in (1, 2)]
    # The client whose data it was, and the one whose batches were asked for when the worker, ahead of it, died.
    assert all(1 <= len(clients) <= 2 for clients in failed)


def test_workers_leave_no_files_open() -> None:
    shared = torch.zeros(3).share_memory_()
    own = _own({"x": shared, "n": 3})
    assert not own["x"].is_shared() and torch.equal(own["x"], shared) and own["n"] == 3
