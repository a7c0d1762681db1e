"""CoeF-P: gradients of the server that trains, held by the curvature of Polyak's step. Ours, beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback, SmashedData
from ..protocol.padding import without_padding
from ..protocol.server_side import ServerSide, on_graph
from ..protocol.tensors import over
from .base import option
from .reuse import FEEDBACK_AT, GradientReuse


@dataclass
class CoeFP(GradientReuse):
    """g̃ = g₀ + κ δ with κ = ‖g₀‖² / 2L for each batch, L its loss at s₀. 2 transfers.

    κ makes 0 the least value of the model L + ⟨g₀, δ⟩ + κ/2 ‖δ‖²: a loss cannot fall below it. So the client is drawn
    towards δ = −(2L/‖g₀‖²) g₀, twice Polyak's step, and not beyond. There is nothing to tune, for any model or batch
    size. The server sends L beside g₀, one number for each batch.

    g₀ comes from the pass in which the server trains on the batch (`feedback_at="walk"`). The pass that this saves
    is spent on training: the server goes over the smashed data `server_passes` times in each local epoch.
    """

    name: ClassVar[str] = "coef_p"
    title: ClassVar[str] = "CoeF-P"
    table_position: ClassVar[int] = 11
    stackable: ClassVar[bool] = True

    feedback_at: str = option("walk", "server weights that the gradients are taken at", choices=FEEDBACK_AT)
    server_passes: int = option(2, "passes of the server over the smashed data in a local epoch")

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return g₀ and the loss of the batch (1,), of each client if they are stacked."""
        leaf = on_graph(smashed)
        output = server.forward(leaf, batch)
        scalars = server.losses(output, smashed)
        return Feedback(server.feedback_gradient(output.loss, leaf), scalars=scalars)

    def entering(self, client: ClientSide, batch: int, feedback: Feedback, displacement: Tensor) -> Tensor:
        """Return g̃. Padding moves freely, also if it is sent: no loss depends on it."""
        displacement = without_padding(displacement, client.unpadded(batch))
        clients = client.context.num_stacked
        if clients == 1:
            return self.compensate(feedback, displacement, ())
        assert feedback.scalars is not None
        squares = feedback.gradient.float().square().reshape(clients, -1).sum(1)
        curvature = _curvature(squares, feedback.scalars).repeat_interleave(len(displacement) // clients)
        return feedback.gradient + over(curvature.to(displacement.dtype), displacement) * displacement

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + κ δ."""
        if feedback.scalars is None or feedback.scalars.numel() != 1:
            raise ValueError("CoeF-P expected the loss of the batch beside its gradient, one number.")
        g, loss = feedback.gradient, feedback.scalars.reshape(())
        return g + _curvature(g.float().square().sum(), loss).to(g.dtype) * displacement


def _curvature(squares: Tensor, loss: Tensor) -> Tensor:
    """Return κ = ‖g₀‖² / 2L, 0 for a loss that is next to nothing."""
    return torch.where(loss > 0, squares / (2 * loss), 0.0).nan_to_num(0.0, posinf=0.0)
