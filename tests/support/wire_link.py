"""A link whose messages go through bytes."""

from collections.abc import Sequence

from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.messages import Message, SmashedData


class WireLink(LocalLink):
    """Every message goes through bytes."""

    def upload(self, batches: Sequence[int] | None = None) -> list[SmashedData]:
        return [type(m).from_bytes(m.to_bytes()) for m in super().upload(batches)]

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        sent = None if messages is None else [type(m).from_bytes(m.to_bytes()) for m in messages]
        super().update(sent, batches)
