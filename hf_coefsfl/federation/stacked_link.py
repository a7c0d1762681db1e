"""The link to clients that are stacked, which meters each of them as if it were alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..protocol.adapters import sent_form
from ..protocol.client_side import ClientSide
from ..protocol.link import ClientHandlers, LocalLink
from ..protocol.messages import SmashedData
from ..protocol.meter import Meter
from ..protocol.packing import Exchange
from .batches import Batches
from .ledger import ClientReport


class StackedLink(LocalLink):
    """Clients that are stacked, as the server sees them: one, whose bytes are metered for each.

    Args:
        method: what runs on the clients.
        client: all of them.
        alone: the batches of each.
        weights: what each trains, by name.
        shared: names of the tensors of smashed data that are no larger for more samples.
    """

    def __init__(
        self,
        method: ClientHandlers,
        client: ClientSide,
        alone: Sequence[Batches],
        weights: Mapping[str, Tensor],
        shared: Collection[str],
    ):
        super().__init__(method, client)
        self.meters = [Meter() for _ in client.context.stacked]
        self._shared, self._weights = shared, weights
        self._contexts = [
            [{name: t.nbytes for name, t in _context(client, batch).items()} for batch in batches] for batches in alone
        ]

    def count(self, way: str, sent: Exchange[Any]) -> None:
        """Meter a transfer of each client."""
        for part, (meter, contexts) in enumerate(zip(self.meters, self._contexts, strict=True)):
            meter.transfers += 1
            sizes: dict[str, int] = getattr(meter, way)
            for index, packed in enumerate(sent.packed):
                known = {name: t.nbytes for name, t in packed.rest.tensors().items() if name in self._shared}
                if isinstance(packed.rest, SmashedData):  # that of a shorter text is smaller
                    own = contexts[sent.batch(index) % len(contexts)]
                    names = (name for name in packed.rest.context if not name.startswith("block."))
                    known |= {f"context.{name}": own.get(name, 0) for name in names}
                for kind, size in packed.nbytes_of(part, len(self.meters), known).items():
                    sizes[kind] = sizes.get(kind, 0) + size

    def finish(self) -> None:
        """Note whether the clients' weights came out finite; meter the weights of federated averaging of each."""
        super().finish()
        codec = self.context.adapter_codec
        for meter in self.meters:
            meter.federate(
                sent_form(codec, {str(i): p for i, p in enumerate(self._weights.values())}),
                sent_form(codec, self.method.federated()),
            )

    def reports(self, together: ClientReport, sizes: Sequence[int]) -> dict[int, ClientReport]:
        """Return a report on each client. Bytes and transfers are its own, losses the clients' mean, seconds its share.

        Args:
            together: the report on all of them.
            sizes: the number of samples of each client of the federation.
        """
        share = 1 / len(self.meters)
        return {
            client: replace(
                together,
                num_samples=sizes[client],
                meter=meter,
                client_seconds=together.client_seconds * share,
                server_seconds=together.server_seconds * share,
            )
            for client, meter in zip(self.context.stacked, self.meters, strict=True)
        }


def _context(client: ClientSide, batch: dict[str, Any]) -> dict[str, Tensor]:
    half: Any = client.half
    context: dict[str, Tensor] = half.context(client.loss_spec.separate(batch)[0])
    return context
