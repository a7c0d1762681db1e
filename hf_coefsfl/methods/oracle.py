"""Perfect compensation: gradient reuse without staleness, at the price of an upload for each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocol.link import ClientLink
from ..protocol.messages import Feedback
from ..protocol.server_side import ServerSide
from .reuse import AnsweringServer


@dataclass
class Oracle(AnsweringServer):
    """g̃ = ∇ₛL(s; θˢ) at the present activations and the round-initial server weights. 2B + 1 transfers.

    `feedback_at` as in gradient reuse: with "walk", θˢ is the server that has trained on the s₀ of the batches
    before; with "final", the one that has trained on all of them.
    """

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = "Gradient reuse (w/ perfect comp.)"
    table_position: ClassVar[int] = 2
    is_reference: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    def exchanges_each_batch(self) -> bool:
        """Return True."""
        return True

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Serve every local update of the client; the server's own come after, between or before them."""
        initial, epochs = client.upload(), client.local_epochs
        if self.feedback_at == "final":
            server.local_updates(initial, epochs)
        for _ in range(epochs):
            for batch in range(client.num_batches):
                (fresh,) = client.upload([batch])
                gradient = server.answer(fresh, batch)
                if self.feedback_at == "walk":  # before the client goes on: the step needs nothing from it
                    server.train_step(initial[batch], batch)
                client.update([Feedback(gradient)], [batch])
        if self.feedback_at == "initial":
            server.local_updates(initial, epochs)
