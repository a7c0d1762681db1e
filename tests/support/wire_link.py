"""A link whose messages go through files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.messages import Message, SmashedData
from hf_coefsfl.protocol.packing import Exchange
from hf_coefsfl.protocol.padding import kept_positions
from hf_coefsfl.protocol.wire import read_exchange, write_exchange


class WireLink(LocalLink):
    """Everything that crosses the cut is written to a file and read back, as over a network."""

    def fetch(self, batches: Sequence[int] | None) -> Exchange[SmashedData]:
        sent = super().fetch(batches)
        store, task = self.context.store, self.client.loss_spec
        return self._carried(sent, SmashedData, lambda _, data: store.places(kept_positions(data, task)), batches)

    def deliver(self, messages: Exchange[Message] | None, batches: Sequence[int] | None) -> None:
        if messages is not None:
            numbers = range(self.num_batches) if batches is None else batches
            messages = self._carried(messages, Message, lambda i, _: self._places.get(numbers[i]), batches)
        super().deliver(messages, batches)

    def _carried(
        self, sent: Exchange[Any], kind: type[Message], kept: Any, batches: Sequence[int] | None
    ) -> Exchange[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sent"
            write_exchange(sent, path)
            received = read_exchange(path, kind, self.context.store, kept, self.context.device, batches=batches)
        assert received.nbytes() == sent.nbytes()
        return received
