"""CoeF-D: the diagonal gradient outer product as curvature (Section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback
from .base import option
from .reuse import GradientReuse, paper_factor


@dataclass
class CoeFD(GradientReuse):
    """g̃ = g₀ + λ g₀ ⊙ g₀ ⊙ δ, elementwise. Nothing beyond g₀ is sent.

    g₀ belongs to the batch-mean loss and carries w = 1/b, so the correction scales with w². By default
    λ = 3000 b/32 makes up for it: the paper's λ at its batches of 32, and the same share of g₀ at any
    other size, a last partial batch included. A given λ is taken as it is.
    """

    name: ClassVar[str] = "coef_d"
    title: ClassVar[str] = "CoeF-D"
    table_position: ClassVar[int] = 8
    stackable: ClassVar[bool] = True

    compensation_factor: float | None = option(None, "λ, strength of the correction; None: 3000 b/32 for b samples")

    def __post_init__(self) -> None:
        """Refuse a factor under which the correction would push away from s₀."""
        super().__post_init__()
        if self.compensation_factor is not None and not 0 <= self.compensation_factor < float("inf"):
            raise ValueError(
                f"compensation_factor (λ) must be a finite number >= 0 or None, got {self.compensation_factor}. None "
                f"is 3000 for batches of 32, as the paper, and follows their size. 0 makes {self.title} gradient reuse."
            )

    def probed_factor(self, batch_size: int) -> float:
        """Return λ."""
        return paper_factor(batch_size) if self.compensation_factor is None else self.compensation_factor

    def defaults_of_run(self, batch_size: int) -> str | None:
        """Tell λ unless it was given."""
        if self.compensation_factor is not None:
            return None
        return f"{self.title}: λ = 3000 b/32 = {paper_factor(batch_size):g} for batches of b = {batch_size}."

    def entering(self, client: ClientSide, batch: int, feedback: Feedback, displacement: Tensor) -> Tensor:
        """Return g̃. Clients that are stacked have a batch each, whose size λ follows."""
        return self._corrected(feedback.gradient, displacement, len(feedback.gradient) // client.context.num_stacked)

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + λ diag(g₀ ⊙ g₀) δ."""
        return self._corrected(feedback.gradient, displacement, len(feedback.gradient))

    def _corrected(self, g: Tensor, delta: Tensor, batch_size: int) -> Tensor:
        return g + self.probed_factor(batch_size) * g * g * delta
