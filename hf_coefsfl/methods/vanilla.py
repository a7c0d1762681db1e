"""Vanilla SFL (Thapa et al., 2022): smashed data and gradients cross the cut at every batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocol.link import ClientLink
from ..protocol.messages import Feedback
from ..protocol.server_side import ServerSide
from .base import Method


@dataclass
class VanillaSFL(Method):
    """Per batch: s up, the server's step, its gradient down, the client's step. 2B transfers."""

    name: ClassVar[str] = "vanilla"
    title: ClassVar[str] = "Vanilla SFL"
    table_position: ClassVar[int] = 1
    is_reference: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    def exchanges_each_batch(self) -> bool:
        """Return True."""
        return True

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange every batch; each gradient belongs to the server weights before their step."""
        for _ in range(client.local_epochs):
            for batch in range(client.num_batches):
                (smashed,) = client.upload([batch])
                client.update([Feedback(server.train_step(smashed, batch))], [batch])
