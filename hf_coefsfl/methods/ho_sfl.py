"""HO-SFL (Chen et al., 2026): the server backpropagates; clients estimate their gradients by forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.messages import Feedback, Message, SmashedData
from .base import above_zero, at_least, expect, option
from .parts.zeroth_order import Direction, two_point
from .reuse import GradientReuse


@dataclass
class HOSFL(GradientReuse):
    """θᶜ ← θᶜ − η mean(dₚ uₚ), dₚ = ⟨g₀, f(θᶜ + μuₚ) − f(θᶜ − μuₚ)⟩ / 2μ over P random directions. 2 transfers.

    As μ → 0, dₚ → ⟨Jᵀg₀, uₚ⟩ with the Jacobian J of the activations f(θᶜ): dₚ uₚ is an unbiased estimate of the
    gradient that a backward pass of g₀ would give. The client steps in plain SGD without weight decay, holds no graph
    and keeps no s₀. The server trains and answers as in gradient reuse.

    A difference of activations is divided by 2μ, and so is all noise in it. Both sides of a difference see the same
    dropout masks. In bf16 the rounding exceeds the difference.
    """

    name: ClassVar[str] = "ho_sfl"
    title: ClassVar[str] = "HO-SFL"
    table_position: ClassVar[int] = 103

    num_perturbations: int = option(5, "P, directions whose estimates are averaged")
    perturbation_scale: float = option(1e-3, "μ, length of a perturbation")
    learning_rate: float | None = option(None, "η of the client; None: the run's")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        super().__post_init__()
        at_least("num_perturbations", self.num_perturbations, 1)
        above_zero("perturbation_scale", self.perturbation_scale)
        above_zero("learning_rate", self.learning_rate)

    def can_be_probed(self) -> bool:
        """Return False: g₀ weights differences of activations and enters no backward pass."""
        return False

    @torch.no_grad()
    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Iterator[SmashedData]:
        """Yield s₀ of all batches, or of some. Runs on the client."""
        for batch in range(len(client.batches)) if batches is None else batches:
            yield client.smash(batch)

    @torch.no_grad()
    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Step along the mean of dₚ uₚ for each batch, epoch by epoch. Runs on the client."""
        feedback = expect(Feedback, messages)
        for epoch in range(client.context.local_epochs):
            for batch, message in enumerate(feedback):
                self._step(client, batch, message.gradient, epoch * len(feedback) + batch)

    def _step(self, client: ClientSide, batch: int, gradient: Tensor, walked: int) -> None:
        """Take one step; `walked` counts the batches over all epochs of the round."""
        weights = [weight for group in client.optimizer.param_groups for weight in group["params"]]
        rate = self.learning_rate or float(client.optimizer.param_groups[0]["lr"])
        with client.observed.summed("activations"):
            slopes = []
            for number in range(walked * self.num_perturbations, (walked + 1) * self.num_perturbations):
                direction = Direction(weights, client.context.generator("method", number))
                slopes.append((direction, self._slope(client, batch, gradient, direction)))
        for direction, slope in slopes:  # all slopes are those at θᶜ before the step
            direction.descend(slope, rate / self.num_perturbations, client.context.max_grad_norm)

    def _slope(self, client: ClientSide, batch: int, gradient: Tensor, direction: Direction) -> Tensor:
        """Return d, the change of ⟨g₀, s⟩ along u."""

        def activations() -> Tensor:
            return client.smash(batch).activations.float()

        moved, _ = two_point(direction, self.perturbation_scale, activations, activations)  # → J u
        return (gradient.float() * moved).sum()
