"""Gradient reuse: one exchange per round and the stale gradient at every local update (Section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback, Message, SmashedData
from ..protocol.server_side import ServerSide
from .base import Method, expect

PAPER_FACTOR = 3000.0  # λ of the compensation by gradient outer products


@dataclass
class GradientReuse(Method):
    """s₀ up once, g₀ = ∇ₛL(s₀; θˢ) down once, then local updates with g̃ = g₀. 2 transfers.

    The base of every method that compensates: override `compensate`, and `feedback` if the server
    has to send more than the gradient.
    """

    name: ClassVar[str] = "reuse"
    title: ClassVar[str] = "Gradient reuse (w/o comp.)"
    table_position: ClassVar[int] = 3
    is_reference: ClassVar[bool] = True

    @classmethod
    def can_be_probed(cls) -> bool:
        """Return whether the round is the one below."""
        return cls.round is GradientReuse.round

    def probed_factor(self) -> float:
        """Return the λ that the probe compares with the λ* of Proposition 1."""
        return PAPER_FACTOR

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once; all feedback is computed at the round-initial server weights."""
        smashed = client.upload()
        # Only the link holds the feedback, so that its memory is free when the server's own updates begin.
        client.update(client.stage(self.feedback(server, data, batch) for batch, data in enumerate(smashed)))
        server.local_updates(smashed)

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return what the server sends down for one batch."""
        return Feedback(server.gradient(smashed, batch))

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do the local updates with the compensated gradients. Runs on the client."""
        feedback = expect(Feedback, messages)
        for _ in range(client.context.local_epochs):
            for batch, message in enumerate(feedback):
                client.smash(batch)
                displacement = client.displacement(batch)
                gradient = self.compensate(message, displacement, client.output_blocks(batch))
                _observe(client, message.gradient, gradient, displacement)
                client.descend(gradient)

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g̃ from the stale feedback and δ = s − s₀. Without compensation: g₀."""
        return feedback.gradient


def _observe(client: ClientSide, stale: Tensor, compensated: Tensor, displacement: Tensor) -> None:
    """Log how far the activations moved, how large the correction is, and the predicted change of the loss."""
    stale, compensated, displacement = stale.float(), compensated.float(), displacement.float()
    correction = compensated - stale
    client.observed.add("displacement_norm", displacement.flatten(1).norm(dim=1).mean())
    ratio = correction.norm() / stale.norm()
    client.observed.add("correction_ratio", torch.where(stale.norm() > 0, ratio, torch.zeros_like(ratio)))
    # F̂(δ) − L(s₀) = ⟨g₀, δ⟩ + ½ ⟨B̂δ, δ⟩: the loss whose gradient the client descends.
    client.observed.add("loss_change", (displacement * (stale + correction / 2)).sum())
