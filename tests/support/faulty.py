"""Clients whose data fails."""

from typing import Any

import torch


class Faulty(torch.utils.data.Dataset):
    """A client's images, of which one cannot be read ("raises") or is not a number ("nan")."""

    def __init__(self, rows: Any, fault: str | None):
        self.rows, self.fault = rows, fault

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {"pixel_values": self.rows[i]["pixel_values"].clone(), "labels": self.rows[i]["labels"]}
        if self.fault == "raises" and i == 3:
            raise OSError("the disk of this client is gone")
        if self.fault == "nan" and i == 3:
            row["pixel_values"] = row["pixel_values"] * float("nan")
        return row
