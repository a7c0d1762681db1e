"""Two-point steps: descent along random directions, by differences of the loss instead of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Direction:
    """A random direction u ~ N(0, I) in the space of some weights, known by its seed.

    It is never stored: every use draws the same numbers again.
    """

    def __init__(self, weights: Sequence[Tensor], generator: torch.Generator):
        self._weights, self._generator, self._seed = weights, generator, generator.initial_seed()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the weights, each with its part of u."""
        generator = self._generator.manual_seed(self._seed)
        for weight in self._weights:
            yield weight, torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)

    def norm(self) -> Tensor:
        """Return ||u||."""
        return torch.stack([part.float().square().sum() for _, part in self]).sum().sqrt()

    @contextmanager
    def moved(self, scale: float) -> Iterator[None]:
        """Move the weights to θ + scale · u inside the context, and back to θ to the last bit."""
        # θ + μu − μu is not θ in floating point.
        initial = [weight.detach().clone() for weight in self._weights]
        try:
            with torch.no_grad():
                for weight, part in self:
                    weight.add_(part, alpha=scale)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self._weights), initial)

    @torch.no_grad()
    def descend(self, slope: Tensor, learning_rate: float, max_norm: float = 0.0) -> None:
        """θ ← θ − η d u, the step of plain SGD along the estimate d u of the gradient, clipped to `max_norm` if > 0."""
        if max_norm > 0:
            slope = slope * (max_norm / (slope.abs() * self.norm()).clamp(min=1e-30)).clamp(max=1.0)
        for weight, part in self:
            weight.sub_(learning_rate * slope.to(weight.dtype) * part)


@torch.no_grad()
def two_point(
    direction: Direction, scale: float, ahead: Callable[[], Tensor], behind: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return d = (L₊ − L₋) / 2μ, the slope of the loss along u, and the mean of the two losses.

    L₊ is `ahead()` at θ + μu and L₋ is `behind()` at θ − μu. As μ → 0 and for one and the same
    loss, d → ⟨∇L, u⟩, and d u is an unbiased estimate of ∇L. Of activations instead of a loss, d → J u.
    """
    with direction.moved(scale):
        plus = ahead()
    with direction.moved(-scale):
        minus = behind()
    return (plus - minus) / (2 * scale), (plus + minus) / 2
