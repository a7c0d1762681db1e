"""A dataset that fails in several ways; as a script, a run whose data kills the worker that reads it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.support.federated import images, trainer


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


if __name__ == "__main__":
    options = {"num_rounds": 2, "warmup_rounds": 0, "num_clients": 3, "participation": 1.0, "method": "reuse"}
    data = Noisy(5, dies=True)
    run = trainer(Path(sys.argv[1]), data=data, dataloader_num_workers=1, on_client_failure="skip", **options)
    run.train()
    failed = [[e["client"] for e in run.ledger.entries if "failure" in e and e["round"] == r] for r in (1, 2)]
    print(json.dumps(failed))
