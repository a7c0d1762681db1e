"""CoeF-D: the diagonal gradient outer product as curvature, Eq. (coefd)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback
from .reuse import GradientReuse


@dataclass
class CoeFD(GradientReuse):
    """g̃ = g₀ + λ g₀ ⊙ g₀ ⊙ δ, elementwise. Nothing beyond g₀ is sent.

    g₀ belongs to the batch-mean loss and so carries w = 1/b: the correction scales with w², and a
    last partial batch, whose w is larger, gets a stronger one (`dataloader_drop_last` avoids it).
    """

    name: ClassVar[str] = "coef_d"
    title: ClassVar[str] = "CoeF-D"

    compensation_factor: float = 3000.0  # λ

    def __post_init__(self) -> None:
        """Refuse a factor under which the correction would push away from s₀."""
        if not 0 <= self.compensation_factor < float("inf"):
            raise ValueError(
                f"compensation_factor (λ) must be a finite number >= 0, got {self.compensation_factor}. The paper uses "
                "3000; 0 turns CoeF-D into gradient reuse."
            )

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + λ diag(g₀ ⊙ g₀) δ."""
        g, delta = feedback.gradient, displacement
        return g + self.compensation_factor * g * g * delta
