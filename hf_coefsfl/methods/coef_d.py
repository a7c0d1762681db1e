"""CoeF-D: the diagonal gradient outer product as curvature (Section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback
from .base import option
from .reuse import PAPER_FACTOR, GradientReuse


@dataclass
class CoeFD(GradientReuse):
    """g̃ = g₀ + λ g₀ ⊙ g₀ ⊙ δ, elementwise. Nothing beyond g₀ is sent.

    g₀ belongs to the batch-mean loss and carries w = 1/b, so the correction scales with w². A last
    partial batch has a larger w and gets a stronger correction (`dataloader_drop_last` avoids it).
    """

    name: ClassVar[str] = "coef_d"
    title: ClassVar[str] = "CoeF-D"
    table_position: ClassVar[int] = 8

    compensation_factor: float = option(PAPER_FACTOR, "λ, strength of the correction; 3000 suits batches of 32")

    def __post_init__(self) -> None:
        """Refuse a factor under which the correction would push away from s₀."""
        if not 0 <= self.compensation_factor < float("inf"):
            raise ValueError(
                f"compensation_factor (λ) must be a finite number >= 0, got {self.compensation_factor}. The paper uses "
                "3000; 0 turns CoeF-D into gradient reuse."
            )

    def probed_factor(self) -> float:
        """Return λ."""
        return self.compensation_factor

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + λ diag(g₀ ⊙ g₀) δ."""
        g, delta = feedback.gradient, displacement
        return g + self.compensation_factor * g * g * delta
