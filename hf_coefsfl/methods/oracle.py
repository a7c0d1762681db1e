"""Perfect compensation: gradient reuse without staleness, at the price of an upload for each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocol.link import ClientLink
from ..protocol.messages import Feedback
from ..protocol.server_side import ServerSide
from .base import Method


@dataclass
class Oracle(Method):
    """g̃ = ∇ₛL(s; θˢ) at the present activations and the round-initial server weights. 2B + 1 transfers."""

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = "Gradient reuse (w/ perfect comp.)"
    table_position: ClassVar[int] = 2
    is_reference: ClassVar[bool] = True

    def exchanges_each_batch(self) -> bool:
        """Return True."""
        return True

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Serve every local update of the client before the server's own, so that θˢ stays round-initial."""
        initial = client.upload()
        for _ in range(client.local_epochs):
            for batch in range(client.num_batches):
                (fresh,) = client.upload([batch])
                client.update([Feedback(server.gradient(fresh, batch))], [batch])
        server.local_updates(initial)
