"""Hutchinson: a stochastic estimate of the diagonal of the activation-space Hessian (Appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback, SmashedData
from ..protocol.server_side import ServerSide
from .base import at_least, option
from .reuse import GradientReuse


@dataclass
class Hutchinson(GradientReuse):
    """g̃ = g₀ + h ⊙ δ with h = mean of z ⊙ Hz over random signs z; Hz by a central difference of gradients."""

    name: ClassVar[str] = "hutchinson"
    title: ClassVar[str] = "Diagonal (Hutchinson)"

    num_probes: int = option(8, "random sign vectors z")
    relative_step: float = option(1e-2, "step of the difference, as a share of ||s₀||")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        super().__post_init__()
        at_least("num_probes", self.num_probes, 1)
        if not 0 < self.relative_step < 1:
            raise ValueError(f"relative_step must lie between 0 and 1, got {self.relative_step}.")

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return g₀ and the estimated diagonal (b, *s)."""
        gradient = super().feedback(server, smashed, batch).gradient
        s = smashed.activations
        generator = server.context.generator("method", batch)
        diagonal = torch.zeros_like(s)
        for _ in range(self.num_probes):
            z = torch.randint(2, s.shape, generator=generator, device=s.device).to(s.dtype).mul_(2).sub_(1)
            # ||z|| is the square root of the number of entries; one step size for each sample
            step = self.relative_step * s.flatten(1).norm(dim=1) / s[0].numel() ** 0.5
            step = step.clamp(min=1e-12).view(-1, *[1] * (s.ndim - 1))
            ahead, behind = (
                server.gradient(replace(smashed, activations=s + sign * step * z), batch) for sign in (1, -1)
            )
            diagonal += z * (ahead - behind) / (2 * step * self.num_probes)
        return Feedback(gradient, diagonal)

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + h ⊙ δ."""
        assert feedback.curvature is not None
        return feedback.gradient + feedback.curvature * displacement
