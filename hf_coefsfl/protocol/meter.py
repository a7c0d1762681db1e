"""The meter: bytes and transfers that cross the cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .messages import Message, Parameters
from .packing import Exchange


@dataclass
class Meter:
    """Bytes by ledger heading in each direction, and the number of transfers."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    transfers: int = 0

    def count(self, direction: dict[str, int], sent: Message | Exchange[Any]) -> None:
        """Count the bytes of what is sent."""
        for kind, size in sent.nbytes().items():
            direction[kind] = direction.get(kind, 0) + size

    def federate(self, adapters: Mapping[str, Tensor], auxiliary: Mapping[str, Tensor]) -> None:
        """Count the weights of federated averaging: down before the round, up after it.

        They do not count as transfers across the cut, and the paper's table leaves them out.
        """
        for direction in (self.down, self.up):
            self.count(direction, Parameters(dict(adapters), dict(auxiliary)))

    def add(self, other: Meter) -> None:
        """Add what another meter counted."""
        self.transfers += other.transfers
        for ours, theirs in ((self.up, other.up), (self.down, other.down)):
            for kind, size in theirs.items():
                ours[kind] = ours.get(kind, 0) + size
