"""No client's update is much larger than that of the median client of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

import torch
from torch import Tensor

Parts = Mapping[str, slice]  # of a vector of weights, by name
Values = dict[str, float]  # of one client: the norms of the parts of its update, the size of its smashed data


def update_norms(vector: Tensor, initial: Tensor, parts: Parts) -> Values:
    """Return the norm of each part of an update; infinity for those that float32 cannot hold."""
    return {name: _norm(vector[part] - initial[part]) for name, part in parts.items()}


def _norm(t: Tensor) -> float:
    largest = float(t.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return 0.0 if largest == 0.0 else math.inf
    norm = largest * float((t / largest).norm())  # squares of large numbers would overflow
    return norm if norm <= torch.finfo(torch.float32).max else math.inf


def excesses(values: Mapping[int, Values], factor: float) -> dict[int, Values]:
    """Return, for each client with a value above `factor` times the median of the clients, what brings it down to that.

    The median is the lower one: of two clients it is the smaller value. Of one it is the client's own. Values of 0 do
    not count: who sends nothing new holds up nobody else.

    Example:
        >>> excesses({3: {"norm": 1.0}, 4: {"norm": 2.0}, 8: {"norm": 100.0}}, factor=5)
        {8: {'norm': 0.1}}
    """
    names = next(iter(values.values()), {})
    above = {name: [of[name] for of in values.values() if of[name] > 0] for name in names}
    limits = {name: factor * median_low(found) if found else 0.0 for name, found in above.items()}
    scales = {
        client: {name: limits[name] / value for name, value in of.items() if value > limits[name]}
        for client, of in values.items()
    }
    return {client: found for client, found in scales.items() if found}


@torch.no_grad()
def scale_update_(vector: Tensor, initial: Tensor, parts: Parts, scales: Mapping[str, float]) -> None:
    """Scale some parts of an update in place; the others keep their bits."""
    for name in parts.keys() & scales.keys():
        own, start = vector[parts[name]], initial[parts[name]]
        own.copy_(start + (own - start) * scales[name])
