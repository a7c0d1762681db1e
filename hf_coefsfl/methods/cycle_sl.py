"""CycleSL (Wang et al., 2025): the server trains on resampled smashed data first, then answers with what it learned."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.devices import to_device
from ..protocol.link import ClientLink
from ..protocol.masks import joined, rows_of
from ..protocol.messages import Feedback, SmashedData
from ..protocol.server_side import ServerSide
from .base import at_least, option
from .reuse import ReusedFeedback


@dataclass
class CycleSL(ReusedFeedback):
    """θˢ ← θˢ − η ∇L over batches resampled from all s₀; then g̃ = ∇ₛL(s₀; θˢ) at the trained θˢ. 2 transfers.

    This is one cycle of block coordinate descent. The server takes the smashed data for a dataset of its own. It deals
    the samples of all batches out anew in each of its epochs. Then it computes the gradients of the client's own
    batches, with which the client does its local updates.

    SplitFed V1 keeps one server side for each client, so the dataset is one client's. Samples move between batches that
    differ in nothing but the number of samples, so not between texts of different padded lengths.
    """

    name: ClassVar[str] = "cycle_sl"
    title: ClassVar[str] = "CycleSL"
    table_position: ClassVar[int] = 102

    server_epochs: int | None = option(None, "epochs of the server over the resampled batches; None: the run's")

    def __post_init__(self) -> None:
        """Check the range of the option."""
        if self.server_epochs is not None:
            at_least("server_epochs", self.server_epochs, 1)

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once, with the server's training in between."""
        smashed = client.upload()
        groups = alike_batches(smashed)
        for epoch in range(self.server_epochs or client.local_epochs):
            generator = torch.Generator().manual_seed(server.context.derive_seed("method", epoch))
            for batch, data in enumerate(resampled(smashed, groups, generator)):
                server.train_step(data, batch)
        client.update(client.stage(Feedback(server.answer(data, batch)) for batch, data in enumerate(smashed)))


def alike_batches(smashed: Sequence[SmashedData]) -> list[dict[int, int]]:
    """Return the batches, together those whose samples can be mixed: their numbers, with their numbers of samples."""
    groups: dict[Hashable, dict[int, int]] = {}
    for number, data in enumerate(smashed):
        groups.setdefault(_form(data), {})[number] = len(data.activations)
    return list(groups.values())


def resampled(
    smashed: Sequence[SmashedData], groups: Sequence[dict[int, int]], generator: torch.Generator
) -> Iterator[SmashedData]:
    """Yield batches of the same sizes in random order, each with random samples of all batches that are alike."""
    dealt: list[list[tuple[int, int]]] = []  # for each new batch the samples in it: their batch, and row in that
    for sizes in groups:
        samples = [(number, row) for number, size in sizes.items() for row in range(size)]
        order = iter(torch.randperm(len(samples), generator=generator).tolist())
        dealt += [[samples[next(order)] for _ in range(size)] for size in sizes.values()]
    for place in torch.randperm(len(dealt), generator=generator).tolist():
        yield _gathered(smashed, dealt[place])


def _gathered(smashed: Sequence[SmashedData], samples: Sequence[tuple[int, int]]) -> SmashedData:
    """Return a batch of some samples; what does not belong to a sample is that of the last batch they come from."""
    columns: dict[str, list[Tensor]] = {}
    for number in sorted({number for number, _ in samples}):
        data = smashed[number]
        rows = torch.tensor([row for n, row in samples if n == number])
        there = to_device(rows, data.activations.device)
        for name, t in data.tensors().items():
            if _is_by_sample(name, t, data):
                columns.setdefault(name, []).append(rows_of(t, rows, there))
    whole = {name: joined(pieces) for name, pieces in columns.items()}
    size = len(data.activations)
    return replace(
        data,
        activations=whole["activations"],
        context={name: whole.get(f"context.{name}", t) for name, t in data.context.items()},
        labels={name: whole.get(f"labels.{name}", t) for name, t in data.labels.items()},
        shapes={n: (len(samples), *dims[1:]) if dims[:1] == (size,) else dims for n, dims in data.shapes.items()},
    )


def _form(smashed: SmashedData) -> Hashable:
    """Return what batches must have in common for their samples to be mixed: all but the number of samples."""
    parts: list[Hashable] = [(name, dims[1:]) for name, dims in smashed.shapes.items()]
    for name, t in smashed.tensors().items():
        if _is_by_sample(name, t, smashed):
            parts.append((name, t.dtype, t.shape[1:]))
        else:
            values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            parts.append((name, t.dtype, t.shape, blake2b(values).digest()))
    return tuple(parts)


def _is_by_sample(name: str, t: Tensor, smashed: SmashedData) -> bool:
    """Return whether the rows of a tensor are the samples of the batch: not those of a flag, or of positions."""
    size, length = smashed.activations.shape[:2]
    if t.ndim == 0 or len(t) != size:
        return False
    # As many samples as positions: a tensor over positions alone would look like one over samples.
    return size != length or not name.startswith("context.") or t.shape[:2] == (size, length)
