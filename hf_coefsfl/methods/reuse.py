"""Gradient reuse: one exchange per round and the stale gradient at every local update (Section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback, Message, SmashedData
from ..protocol.server_side import ServerSide
from .base import Method, at_least, expect, option

FEEDBACK_AT = ("initial", "walk", "final")
_LARGEST_RATIO = 1e12  # that is logged: a batch whose gradient has vanished has any


def paper_factor(batch_size: int) -> float:
    """Return λ of the compensation by gradient outer products: 3000 at the paper's batches of 32.

    The gradient of a mean over b samples is proportional to 1/b and the correction to its square. So λ ∝ b keeps the
    share of the correction.
    """
    return 3000 * batch_size / 32


@dataclass
class AnsweringServer(Method):
    """A method whose gradients can be taken at several server weights of the round."""

    feedback_at: str = option("initial", "server weights that the gradients are taken at", choices=FEEDBACK_AT)

    @property
    def full_title(self) -> str:
        """The title, with the weights that the gradients are taken at if they are not the method's own choice."""
        usual = type(self).feedback_at  # the default of the field
        return self.title if self.feedback_at == usual else f"{self.title}, {self.feedback_at}"


class ReusedFeedback(Method):
    """A client that receives feedback once a round and reuses it at every local update."""

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do the local updates with the compensated gradients. Runs on the client."""
        feedback = expect(Feedback, messages)
        for _ in range(client.context.local_epochs):
            for batch, message in enumerate(feedback):
                client.smash(batch)
                displacement = client.displacement(batch)
                gradient = self.entering(client, batch, message, displacement)
                _observe(client, message.gradient, gradient, displacement)
                client.descend(gradient)

    def entering(self, client: ClientSide, batch: int, feedback: Feedback, displacement: Tensor) -> Tensor:
        """Return the gradient that enters the client half at the batch last smashed. Runs on the client."""
        return self.compensate(feedback, displacement, client.output_blocks(batch))

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g̃ from the stale feedback and δ = s − s₀. Without compensation: g₀."""
        return feedback.gradient


@dataclass
class GradientReuse(AnsweringServer, ReusedFeedback):
    """s₀ up once, g₀ = ∇ₛL(s₀; θˢ) down once, then local updates with g̃ = g₀. 2 transfers.

    The base of every method that compensates: override `compensate`, and `feedback` if the server
    has to send more than the gradient.

    `feedback_at` chooses the server weights θˢ of g₀. The paper takes those of the round's start ("initial"). "walk"
    takes g₀ from the pass in which the server trains on the batch, so that the server passes over each batch once
    instead of twice; the first of several local epochs gives it. "final" takes g₀ after all of the server's local
    updates. The bytes are the same. The server trains on the smashed data `server_passes` times in each local epoch.
    """

    name: ClassVar[str] = "reuse"
    title: ClassVar[str] = "Gradient reuse (w/o comp.)"
    table_position: ClassVar[int] = 3
    is_reference: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    server_passes: int = option(1, "passes of the server over the smashed data in a local epoch")

    def __post_init__(self) -> None:
        """Check the range of the passes."""
        at_least("server_passes", self.server_passes, 1)

    @property
    def full_title(self) -> str:
        """The title, with what is not the usual choice."""
        usual = type(self).server_passes  # the default of the field
        passes = "" if self.server_passes == usual else f", {self.server_passes} pass{'es' * (self.server_passes > 1)}"
        return super().full_title + passes

    def probed_factor(self, batch_size: int) -> float | None:
        """Return the λ that the probe compares with the λ* of Proposition 1."""
        return paper_factor(batch_size)

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once; the server trains on what it received before, while or after it takes the gradients."""
        smashed = client.upload()
        epochs = self.server_passes * client.local_epochs
        if self.feedback_at == "final":
            server.local_updates(smashed, epochs)
        # Only the link holds the feedback, so that its memory is free when the server's own updates begin.
        if self.feedback_at == "walk":
            with server.training_on_feedback():
                client.update(client.stage(self._walk(server, smashed)))
            server.train_again(smashed, epochs - 1)
        else:
            client.update(client.stage(self.feedback(server, data, batch) for batch, data in enumerate(smashed)))
        if self.feedback_at == "initial":
            server.local_updates(smashed, epochs)

    def _walk(self, server: ServerSide, smashed: Sequence[SmashedData]) -> Iterator[Feedback]:
        """Yield the feedback of each batch, and take the server's step with the gradients of the same pass."""
        for batch, data in enumerate(smashed):
            feedback = self.feedback(server, data, batch)
            server.step()
            yield feedback

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return what the server sends down for one batch."""
        return Feedback(server.answer(smashed, batch))


def _observe(client: ClientSide, stale: Tensor, compensated: Tensor, displacement: Tensor) -> None:
    """Log how far the activations moved, how large the correction is, and the predicted change of the loss."""
    stale, compensated, displacement = stale.float(), compensated.float(), displacement.float()
    correction = compensated - stale
    client.observed.add("displacement_norm", displacement.flatten(1).norm(dim=1).mean())
    norm = client.context.norm(stale)
    ratio = (client.context.norm(correction) / norm).clamp(max=_LARGEST_RATIO)
    client.observed.add("correction_ratio", torch.where(norm > 0, ratio, torch.zeros_like(ratio)))
    # F̂(δ) − L(s₀) = ⟨g₀, δ⟩ + ½ ⟨B̂δ, δ⟩: the loss whose gradient the client descends. In place: nobody needs B̂δ now.
    client.observed.add("loss_change", correction.div_(2).add_(stale).mul_(displacement).sum())
