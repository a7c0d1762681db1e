"""One client's round as the server sees it: numbered steps, with payloads of any size in chunks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .courier import Courier, Deadline
from .wire import PROTOCOL, Incoming, Manifest, TransferError, chunk_of, header_of, read_chunk, whole


@dataclass
class Channel:
    """Steps with one client in one round.

    Attributes:
        courier: who carries the messages.
        node: Flower's number of the client's node.
        deadline: of the round.
        header: what every message of the round says.
        folder: where payloads are received.
        chunk_size: bytes of a payload in one message.
        max_payload: bytes that a payload may have.
        title: what progress bars say; None shows none.
    """

    courier: Courier
    node: int
    deadline: Deadline
    header: dict[str, Any]
    folder: Path
    chunk_size: int
    max_payload: int
    title: str | None = None
    sequence: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def file(self, kind: str) -> Path:
        """Return the place of a payload; no other round or client uses it."""
        return self.folder / f"{kind}-{self.header['client']}-{self.token}"

    def step(
        self, calls: list[dict[str, Any]], payload: Path | None, limit: int | None = None
    ) -> tuple[dict[str, Any], Path | None]:
        """Have the client do some calls; return the header of its answer and the file of its payload.

        The file of the payload that was sent is deleted. `limit` is what the answer's may have, if that is known.
        """
        header = self._header() | {"calls": json.dumps(calls), "max_payload": self.max_payload}
        chunk = None
        if payload is not None:
            manifest = Manifest.of(payload)
            if manifest.size <= self.chunk_size:
                chunk = payload.read_bytes()
            else:
                self._deliver(payload, manifest)
            payload.unlink()
            header |= manifest.entries()
        reply = self.courier.ask(self.node, "train.step", header | self.header, chunk, self.deadline)
        answer = header_of(reply)
        announced = Manifest.read(answer, min(limit or self.max_payload, self.max_payload))
        received = None
        if announced is not None:
            received = self._receive(announced, chunk_of(reply, self.chunk_size))
        self.sequence += 1
        return answer, received

    def _header(self) -> dict[str, Any]:
        return self.header | {
            "protocol": PROTOCOL,
            "token": self.token,
            "sequence": self.sequence,
            "chunk_size": self.chunk_size,
        }

    def _deliver(self, payload: Path, manifest: Manifest) -> None:
        header = self._header() | manifest.entries() | {"max_payload": self.max_payload}
        with self._progress("to", manifest.size) as bar:
            for offset in range(0, manifest.size, self.chunk_size):
                chunk = read_chunk(payload, offset, self.chunk_size)
                told = header | {"offset": offset}
                reply = self.courier.ask(self.node, "query.deliver", told, chunk, self.deadline)
                there = whole(header_of(reply), "received")
                if there != offset + len(chunk):
                    raise TransferError(f"the client has {there} bytes of a payload instead of {offset + len(chunk)}")
                bar(len(chunk))

    def _receive(self, manifest: Manifest, first: bytes) -> Path:
        path = self.file("from")
        path.unlink(missing_ok=True)
        incoming = Incoming(path, manifest)
        header = self._header() | {"payload_sha256": manifest.sha256}
        with self._progress("from", manifest.size) as bar:
            there = incoming.append(0, first)
            bar(there)
            while there < manifest.size:
                reply = self.courier.ask(self.node, "query.fetch", header | {"offset": there}, None, self.deadline)
                chunk = chunk_of(reply, self.chunk_size)
                there = incoming.append(there, chunk)
                bar(len(chunk))
        return incoming.check()

    def _progress(self, direction: str, size: int) -> _Bar:
        return _Bar(self.title if size > self.chunk_size else None, direction, size)


class _Bar:
    """A progress bar over bytes, or none."""

    def __init__(self, title: str | None, direction: str, size: int):
        self._bar = None
        if title is not None:
            self._bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"{direction} {title}", leave=False)

    def __enter__(self) -> Callable[[int], Any]:
        return self._bar.update if self._bar is not None else lambda _: None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
