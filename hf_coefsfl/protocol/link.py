"""How the server's round script reaches a client: what goes either way is packed and metered here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .adapters import sent_form
from .client_side import ClientSide
from .clock import Clock
from .context import Observations, RoundContext
from .messages import Message, SmashedData
from .meter import Meter
from .packing import Exchange, Places


class ClientHandlers(Protocol):
    """The client's part of a method: what a link calls there."""

    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Iterable[SmashedData]:
        """Return the smashed data of the whole round (None), or of some batches."""

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do local updates with what was sent down, if anything."""

    def federated(self) -> Mapping[str, Tensor]:
        """Return the weights that are averaged beside the adapter."""


def packed_upload(method: ClientHandlers, client: ClientSide, batches: Sequence[int] | None) -> Exchange[SmashedData]:
    """Run the method's upload on the client and return what it sends."""
    return client.pack(method.upload(client, batches), batches)


class ClientLink:
    """A client as the server sees it. A call that carries messages is one transfer over the cut.

    Subclasses reach the client, by `fetch`, `deliver` and `finish`.
    """

    def __init__(self, context: RoundContext):
        self.context, self.local_epochs = context, context.local_epochs
        self.meter = Meter()
        self.client_seconds = 0.0  # complete after `finish`
        self.observed = Observations()  # complete after `finish`, as is `kept`
        self.kept: dict[str, Tensor] = {}  # what the method keeps of the client's round
        self._places: dict[int, Places | None] = {}  # the token positions of each batch that were sent

    @property
    def num_batches(self) -> int:
        """How many batches the client has in this round."""
        raise NotImplementedError

    def upload(self, batches: Sequence[int] | None = None) -> Sequence[SmashedData]:
        """Ask for the smashed data of some batches, or of the whole round (None)."""
        sent = self.fetch(batches)
        self._places |= {b: sent.places(i) for i, b in enumerate(range(len(sent)) if batches is None else batches)}
        self.count("up", sent)
        return sent

    def stage(self, messages: Iterable[Message]) -> Sequence[Message]:
        """Make a message for each batch ready for a later `update`, one by one: they need not fit into memory."""
        return self._pack(messages, None)

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Have the client do its local updates with what is sent down, if anything.

        That of the whole round (None) is the last call, and need not be over when it returns: the server goes on with
        its own updates while the client trains.
        """
        packed = None if messages is None else self._pack(messages, batches)
        if packed is not None:
            self.count("down", packed)
        self.deliver(packed, batches)

    def count(self, way: str, sent: Exchange[Any]) -> None:
        """Meter a transfer, "up" or "down"."""
        self.meter.transfers += 1
        self.meter.count(getattr(self.meter, way), sent)

    def _pack(self, messages: Iterable[Message], batches: Sequence[int] | None) -> Exchange[Message]:
        numbers = range(self.num_batches) if batches is None else batches
        store = self.context.store
        return Exchange.of(messages, store, lambda i, _: self._places.get(numbers[i]), batches)

    def fetch(self, batches: Sequence[int] | None) -> Exchange[SmashedData]:
        """Return the client's upload."""
        raise NotImplementedError

    def deliver(self, messages: Exchange[Message] | None, batches: Sequence[int] | None) -> None:
        """Give the client what it is sent, and have it do its local updates."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the end of the client's round; meter the weights of federated averaging."""
        raise NotImplementedError


class LocalLink(ClientLink):
    """The client is an object in this process."""

    def __init__(self, method: ClientHandlers, client: ClientSide):
        super().__init__(client.context)
        self.method, self.client = method, client
        self.observed = client.observed
        self._clock = Clock(client.context.device)

    @property
    def num_batches(self) -> int:
        """How many batches the client has in this round."""
        return len(self.client.batches)

    def fetch(self, batches: Sequence[int] | None) -> Exchange[SmashedData]:
        """Run the method's upload on the client."""
        with self._clock.running():
            return packed_upload(self.method, self.client, batches)

    def deliver(self, messages: Exchange[Message] | None, batches: Sequence[int] | None) -> None:
        """Run the method's update on the client."""
        with self._clock.running():
            self.method.update(self.client, messages, batches)

    def finish(self) -> None:
        """Note whether the client's weights came out finite; meter the weights of federated averaging."""
        self.client.finish()
        self.client_seconds = self._clock.seconds()
        self.kept = self.client.kept
        adapters = {str(i): p for i, p in enumerate(self.client.trained)}
        codec = self.context.adapter_codec
        self.meter.federate(sent_form(codec, adapters), sent_form(codec, self.method.federated()))
