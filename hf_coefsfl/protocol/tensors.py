"""Arithmetic on tensors that both sides and the server share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def over(leading: Tensor, full: Tensor) -> Tensor:
    """Return a tensor over the leading dimensions of `full`, such as a mask, so that it broadcasts over the others."""
    return leading.reshape(leading.shape + (1,) * (full.ndim - leading.ndim))


@torch.no_grad()
def weighted_mean(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σₖ wₖ tₖ / Σₖ wₖ, added up one by one in the given order.

    Floating-point addition is not associative: only a fixed order gives the same bits for any number of processes.
    """
    total = sum(weights)
    mean: Tensor | None = None
    for t, weight in zip(tensors, weights, strict=True):
        mean = torch.zeros_like(t) if mean is None else mean
        mean += t * (weight / total)
    if mean is None:
        raise ValueError("There is nothing to average.")
    return mean
