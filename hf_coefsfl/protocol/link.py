"""How a round script reaches a client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .client_side import ClientSide
from .context import Observations
from .messages import Message, SmashedData
from .meter import Meter
from .packing import Exchange


class ClientLink(Protocol):
    """A client as the server sees it. A call that carries messages is one transfer over the cut."""

    local_epochs: int

    @property
    def num_batches(self) -> int:
        """How many batches the client has in this round."""

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Ask for the smashed data of some batches, or of the whole round (None)."""

    def stage(self, messages: Iterable[Message]) -> Sequence[Message]:
        """Make a message for each batch ready for a later `update`, one by one: they need not fit into memory."""

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Have the client do its local updates with what is sent down, if anything.

        That of the whole round (None) is the last call, and need not be over when it returns: the server goes on with
        its own updates while the client trains.
        """


class ClientHandlers(Protocol):
    """What a client does of a method's round: what a link calls there."""

    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Sequence[SmashedData]:
        """Return the smashed data of the whole round (None), or of some batches."""

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do local updates with what was sent down, if anything."""


class FinishedLink(Protocol):
    """What a link knows of the client once the round is over."""

    meter: Meter
    client_seconds: float
    observed: Observations

    @property
    def kept(self) -> dict[str, Tensor]:
        """What the method keeps of the client's round."""


class LocalLink:
    """The client is an object in this process."""

    def __init__(self, method: ClientHandlers, client: ClientSide):
        self.method, self.client = method, client
        self.num_batches = len(client.batches)
        self.local_epochs = client.context.local_epochs
        self.meter = Meter()
        self.client_seconds = 0.0
        self.observed: Observations = client.observed
        self._kept: dict[int, Tensor | None] = {}  # the token positions of each batch that hold anything

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Run the method's upload on the client and meter what it sends."""
        with self._clock():
            made = self.method.upload(self.client, batches)
            sent = made if isinstance(made, Exchange) else self.client.pack(made, lasting=batches is None)
        self._kept |= {b: sent.kept(i) for i, b in enumerate(batches if batches is not None else range(len(sent)))}
        self.meter.transfers += 1
        self.meter.count(self.meter.up, sent)
        return sent

    def stage(self, messages: Iterable[Message]) -> Exchange[Message]:
        """Pack messages for the whole round, one for each batch."""
        return self._pack(messages, None)

    def _pack(self, messages: Iterable[Message], batches: Sequence[int] | None) -> Exchange[Message]:
        places = range(self.num_batches) if batches is None else batches
        packed: Exchange[Message] = Exchange(self.client.context.store, lasting=batches is None)
        return packed.extend(messages, (self._kept.get(batch) for batch in places))

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Meter what is sent down and run the method's update on the client."""
        if messages is not None:
            messages = messages if isinstance(messages, Exchange) else self._pack(messages, batches)
            self.meter.transfers += 1
            self.meter.count(self.meter.down, messages)
        with self._clock():
            self.method.update(self.client, messages, batches)

    @property
    def kept(self) -> dict[str, Tensor]:
        """What the method keeps of the client's round."""
        return self.client.kept

    @contextmanager
    def _clock(self) -> Iterator[None]:
        synchronize(self.client.context.device)
        start = time.perf_counter()
        yield
        synchronize(self.client.context.device)
        self.client_seconds += time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator, so that clocks measure work and not its queueing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
