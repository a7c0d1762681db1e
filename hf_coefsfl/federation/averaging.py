"""Federated averaging, in an order that no number of processes can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from ..protocol.tensors import weighted_mean


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as one float32 vector."""
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


@torch.no_grad()
def unflatten_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a vector made by `flatten` back into the tensors."""
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


def federated_average(
    mine: Mapping[int, Tensor],
    weights: Mapping[int, float],
    owners: Mapping[int, int],
    length: int,
    accelerator: Accelerator,
) -> Tensor:
    """Return Σₖ wₖ vₖ / Σₖ wₖ over the vectors vₖ (of `length` entries) of the clients that `weights` names.

    `mine` holds the vectors of the clients that this process trained; `owners` says which process
    trained a client. One vector of another process is in memory at a time.
    """
    clients = sorted(weights)

    def vector(client: int) -> Tensor:
        own = mine[client] if client in mine else torch.empty(length, device=accelerator.device)
        return own if accelerator.num_processes == 1 else broadcast(own, from_process=owners[client])

    return weighted_mean(map(vector, clients), [weights[client] for client in clients])
