"""Uploads that come in several chunks: when the chunks come, and what a hostile client makes of them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Message

from hf_coefsfl.flower.wire import chunk_of, content, header_of
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.deployed import LONG, LocalGrid, Site
from tests.support.forged import forged

FIRST = 100  # the node of client 0


def sends_upload(message: Message) -> bool:
    """Whether a message asks for an upload, or for more of one."""
    return (
        message.metadata.message_type in ("train.step", "query.fetch") and header_of(message.content)["sequence"] == 0
    )


def place(data: bytes, name: str) -> slice:
    """Return where a tensor lies in the beginning of a payload; nowhere near if its header is not whole."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        return slice(2**62, 2**62)
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return slice(8 + length + start, 8 + length + end)


class Held:
    """Holds back what follows the values of batch 0 in an upload until the server has computed with these."""

    def __init__(self, patch: pytest.MonkeyPatch, clients: int):
        self.began = [threading.Event() for _ in range(clients)]  # for each client
        self.chunks: list[dict[int, bytes]] = [{} for _ in range(clients)]  # of each upload, by offset
        self.held = 0
        forward = ServerSide.forward

        def noted(side: ServerSide, *args: Any) -> Any:
            output = forward(side, *args)
            self.began[side.context.client].set()
            return output

        patch.setattr(ServerSide, "forward", noted)

    def __call__(self, node: int, message: Message, reply: Message) -> Message:
        if sends_upload(message) and not reply.has_error():
            client, offset = node - FIRST, int(header_of(message.content).get("offset", 0))
            chunks = self.chunks[client]
            data = b"".join(chunks[start] for start in sorted(chunks))
            chunks[offset] = chunk_of(reply.content)
            if offset >= place(data, "0.activations").stop:
                self.held += 1
                assert self.began[client].wait(LONG)
        return reply


@dataclass
class Fault:
    """What a client does to its upload: to all of it before it is announced, and to a chunk when that is sent.

    `chunk(data, start, chunk)` returns what is sent of the data from a byte on; None sends nothing.
    """

    reason: str
    data: Callable[[bytearray], object] = lambda data: None
    chunk: Callable[[bytes, int, bytes], bytes | None] = lambda data, start, chunk: chunk


@dataclass
class Hostile:
    """Clients who spoil what they upload in chunks, by node. What they send is announced with its checksum."""

    grid: LocalGrid
    faults: dict[int, Fault]
    chunk_size: int
    data: dict[int, bytes] = field(default_factory=dict)

    def __call__(self, node: int, message: Message, reply: Message) -> Message | None:
        if node not in self.faults or not sends_upload(message):
            return reply
        header, fault = header_of(message.content), self.faults[node]
        answer = {name: header[name] for name in ("protocol", "client", "round", "token", "sequence")}
        if message.metadata.message_type == "train.step":
            data = bytearray(self._whole(node, header, reply))
            fault.data(data)
            self.data[node] = bytes(data)
            answer = header_of(reply.content) | {"payload_sha256": hashlib.sha256(data).hexdigest()}
        offset = int(header.get("offset", 0))
        chunk = fault.chunk(self.data[node], offset, self.data[node][offset : offset + self.chunk_size])
        return None if chunk is None else forged(message, reply, content(answer, chunk))

    def _whole(self, node: int, header: dict[str, Any], reply: Message) -> bytes:
        """Return all of an upload, asked for as the server does."""
        announced, data = header_of(reply.content), chunk_of(reply.content)
        while len(data) < announced["payload_size"]:
            more = header | {"payload_sha256": announced["payload_sha256"], "offset": len(data)}
            data += chunk_of(self.grid.ask(node, "query.fetch", content(more)))
        return data


def grid_of(site: Site, faults: dict[int, Fault], then: Any = None, **options: Any) -> tuple[LocalGrid, dict[str, Any]]:
    """Return a grid of a site's clients, some of whom are hostile, and the run config; `then` is a fault on top."""
    site.make_half()
    config = site.run_config(**options)
    grid = LocalGrid(config, [site.node_config(client) for client in range(len(site.sizes))])
    hostile = Hostile(grid, faults, options["chunk_size"])

    def fault(node: int, message: Message, reply: Message) -> Any:
        sent = hostile(node, message, reply)
        return sent if sent is None or then is None else then(node, message, sent)

    grid.fault = fault
    return grid, config
