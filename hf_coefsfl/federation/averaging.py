"""How the weights of clients become one: the mean and robust rules, with the same bits for any number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from ..protocol.tensors import weighted_mean

_BLOCK = 2**24  # entries of all clients together that a robust rule looks at in one go: 64 MiB


@torch.no_grad()
def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as one float32 vector."""
    return torch.cat([t.reshape(-1) for t in tensors]).float()


@torch.no_grad()
def unflatten_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a vector made by `flatten` back into the tensors, by few kernels if the device has them for lists."""
    parts = flat.split([t.numel() for t in tensors])
    if not parts:
        return
    torch._foreach_copy_(list(tensors), [part.view_as(t) for t, part in zip(tensors, parts, strict=True)])


def fewest_clients(rule: str, hostile: int) -> int:
    """Return how many clients a rule needs to withstand so many hostile ones."""
    return {"trimmed_mean": 2 * hostile + 1, "krum": 2 * hostile + 3}.get(rule, 1)


def federated_average(
    mine: Mapping[int, Tensor],
    weights: Mapping[int, float],
    owners: Mapping[int, int],
    length: int,
    accelerator: Accelerator,
    rule: str = "mean",
    hostile: int = 1,
) -> Tensor:
    """Return what a rule makes of the vectors vₖ (of `length` entries) of the clients that `weights` names.

    "mean" is Σₖ wₖ vₖ / Σₖ wₖ. The robust rules give all clients the same weight, because a client says itself how
    many samples it has. "trimmed_mean" leaves out the `hostile` largest and smallest values of each entry (Yin et al.,
    2018), "median" all but the middle one or two. "krum" is the mean of the K - f - 2 vectors that lie closest to
    their K - f - 2 nearest ones, for K clients of which f are hostile (Multi-Krum of Blanchard et al., 2017).

    `mine` holds the vectors of the clients that this process trained; `owners` says which process trained a client. One
    vector of another process is in memory at a time, or a block of entries of all of them.
    """
    clients = sorted(weights)
    size = length if rule == "mean" else max(_BLOCK // len(clients), 1)
    blocks = [slice(start, min(start + size, length)) for start in range(0, length, size)]

    def part(client: int, block: slice) -> Tensor:
        length = block.stop - block.start
        own = mine[client][block] if client in mine else torch.empty(length, device=accelerator.device)
        return own if accelerator.num_processes == 1 else broadcast(own, from_process=owners[client])

    if rule in ("trimmed_mean", "median"):
        trim = hostile if rule == "trimmed_mean" else (len(clients) - 1) // 2
        return torch.cat([_trimmed_mean(torch.stack([part(c, b) for c in clients]), trim) for b in blocks])
    if rule == "krum":
        distances = [_squared_distances(torch.stack([part(c, b) for c in clients])) for b in blocks]
        clients = [clients[row] for row in _closest(torch.stack(distances).sum(0), hostile)]
        weights = dict.fromkeys(clients, 1.0)
    means = [weighted_mean((part(c, b) for c in clients), [weights[c] for c in clients]) for b in blocks]
    return means[0] if len(means) == 1 else torch.cat(means)


def _trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of each column (K, n) -> (n,) without its `trim` largest and smallest entries."""
    middle = rows.sort(0).values[trim : len(rows) - trim]
    return weighted_mean(middle, [1.0] * len(middle))


def _squared_distances(rows: Tensor) -> Tensor:
    """Return ‖vᵢ - vⱼ‖² of all pairs of rows (K, n) -> (K, K). What overflows is infinite, and so is never close."""
    return torch.stack([(rows - row).square().sum(1) for row in rows])


def _closest(distances: Tensor, hostile: int) -> list[int]:
    """Return the rows that Krum chooses, in order, by their squared distances (K, K)."""
    near = len(distances) - hostile - 2
    scores = distances.sort(1).values[:, 1 : near + 1].sum(1)  # the nearest is the row itself
    return sorted(scores.argsort(stable=True)[:near].tolist())
