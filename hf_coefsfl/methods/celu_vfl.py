"""CELU-VFL (Fu et al., 2022): reused gradients, each sample's weighted by how far its statistics have turned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.loss import LossSpec
from ..protocol.messages import Feedback, SmashedData
from ..protocol.packing import Exchange
from ..protocol.padding import without_padding
from ..protocol.server_side import ServerSide, on_graph
from ..protocol.tensors import over
from .base import expect, option
from .reuse import GradientReuse


@dataclass
class CELUVFL(GradientReuse):
    """g̃ = w g₀ for each sample, w = cos(s, s₀), or 0 if the angle between s and s₀ exceeds ξ. 2 transfers.

    The server does likewise when it uses a batch again, from its second pass on. It weights the loss of a sample
    by the cosine of ∇ₛL(s₀) now and in its first training pass over the batch. Nothing beyond g₀ is sent.

    The cache (the paper's workset) is that of the round: all batches of the client.
    """

    name: ClassVar[str] = "celu_vfl"
    title: ClassVar[str] = "CELU-VFL"
    table_position: ClassVar[int] = 101

    max_angle: float | None = option(60.0, "ξ in degrees, beyond which a sample has no weight; None: weights of 1")

    def __post_init__(self) -> None:
        """Refuse angles under which a sample would be ascended."""
        super().__post_init__()
        if self.max_angle is not None and not 0 < self.max_angle <= 90:
            raise ValueError(
                f"max_angle (ξ) must be above 0 and at most 90 degrees or None, got {self.max_angle}. The authors' "
                "code has 60. None makes CELU-VFL gradient reuse."
            )

    def probed_factor(self, batch_size: int) -> None:
        """Return None: w g₀ is not the gradient of a surrogate."""

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Refuse a loss of which the part of a sample is not known."""
        if not loss_spec.has_known_curvature:
            raise ValueError(
                f"CELU-VFL weights the loss of each sample, and how a {loss_spec.loss_type} loss is made of samples is "
                "not known. It works for classification of sequences, tokens, images and audio, extractive question "
                "answering and language modelling; use another method for this model."
            )

    def entering(self, client: ClientSide, batch: int, feedback: Feedback, displacement: Tensor) -> Tensor:
        """Return w g₀. Padding has no part in the cosine."""
        if self.max_angle is None:
            return feedback.gradient
        pair = client.live.activations.detach(), client.initial[batch].activations
        now, then = (without_padding(t, client.unpadded(batch)) for t in pair)
        return feedback.gradient * over(instance_weights(now, then, self.max_angle), feedback.gradient)

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once, as gradient reuse; note the server's first gradient of each batch if it comes again."""
        epochs = self.server_passes * client.local_epochs
        if epochs == 1 or self.max_angle is None:
            super().round(client, server)
            return
        smashed = client.upload()
        first: Sequence[Feedback] | None = None
        if self.feedback_at == "final":
            self._train(server, smashed, epochs)
        if self.feedback_at == "walk":
            with server.training_on_feedback():
                first = expect(Feedback, client.stage(self._walk(server, smashed)))
            client.update(first)
        else:
            client.update(client.stage(self.feedback(server, data, batch) for batch, data in enumerate(smashed)))
        if self.feedback_at != "final":
            self._train(server, smashed, epochs, first)

    def _train(
        self, server: ServerSide, smashed: Sequence[SmashedData], epochs: int, first: Sequence[Feedback] | None = None
    ) -> None:
        """Pass over the batches `epochs` times. `first` holds the gradients of the first pass if that is done."""
        if first is None:
            passes = (Feedback(server.train_step(data, batch)) for batch, data in enumerate(smashed))
            first = Exchange.of(passes, server.context.store)
        for _ in range(epochs - 1):
            for batch, data in enumerate(smashed):
                self._train_again(server, data, batch, first[batch].gradient)

    def _train_again(self, server: ServerSide, smashed: SmashedData, batch: int, first: Tensor) -> None:
        """Step along Σᵢ wᵢ ∇Lᵢ, where L = Σᵢ Lᵢ is the loss of the batch."""
        assert self.max_angle is not None
        leaf = on_graph(smashed)
        output = server.forward(leaf, batch)
        blocks = server.loss_spec.output_blocks(smashed.labels, smashed.activations.shape[1])
        logits = [output[block.name] for block in blocks]
        present, *residuals = torch.autograd.grad(output.loss, [leaf.activations, *logits], retain_graph=True)
        weights = instance_weights(present, first, self.max_angle)
        server.observed.add("loss", output.loss)
        # ∂L/∂z of a sample's outputs z belongs to this sample alone: (w − 1) of it makes L to Σ wᵢ Lᵢ.
        changes = [(over(weights - 1, z) * r * z).sum() for z, r in zip(logits, residuals, strict=True)]
        server.backward(output.loss + torch.stack(changes).sum())
        server.step()


def instance_weights(now: Tensor, then: Tensor, max_angle: float) -> Tensor:
    """Return the cosine of each sample's two vectors (b,), 0 where their angle exceeds `max_angle` degrees."""
    cosine = cosine_similarity(now.flatten(1).float(), then.flatten(1).float(), dim=1)
    return torch.where(cosine >= math.cos(math.radians(max_angle)), cosine, torch.zeros_like(cosine))
