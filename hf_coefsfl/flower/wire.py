"""What goes into Flower's messages: a header, and a payload that is a file sent in chunks.

This module imports no PyTorch: a process that only passes on a chunk starts at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

PROTOCOL = 2  # what both sides must speak
_HEADER, _PAYLOAD, _CHUNK = "header", "payload", "chunk"


class TransferError(ValueError):
    """The other side sent something that is not what it should be."""


@dataclass(frozen=True)
class Manifest:
    """Of a payload: how many bytes it has, and their checksum."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, go_on: Callable[[], object] = lambda: None) -> Manifest:
        """Describe a file; `go_on` is called now and then, and raises if nobody waits for this any longer."""
        checksum = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                go_on()
                checksum.update(part)
        return cls(path.stat().st_size, checksum.hexdigest())

    def entries(self) -> dict[str, Any]:
        """Return the manifest as entries of a header."""
        return {"payload_size": self.size, "payload_sha256": self.sha256}

    @classmethod
    def read(cls, header: Mapping[str, Any], limit: int) -> Manifest | None:
        """Return the manifest of a header, if it announces a payload; one that exceeds the limit is refused."""
        if "payload_size" not in header:
            return None
        size, sha256 = integer(header, "payload_size"), text(header, "payload_sha256")
        if not 0 <= size <= limit:
            raise TransferError(f"a payload of {size} bytes is announced, at most {limit} are taken")
        return cls(size, sha256)


def content(header: Mapping[str, Any], chunk: bytes | None = None) -> RecordDict:
    """Return the content of a message."""
    records: dict[str, Any] = {_HEADER: ConfigRecord(dict(header))}
    if chunk is not None:
        records[_PAYLOAD] = ArrayRecord({_CHUNK: Array("uint8", (len(chunk),), "bytes", chunk)})
    return RecordDict(records)


def header_of(records: RecordDict) -> dict[str, Any]:
    """Return the header of a message; anything besides a header and a chunk is refused."""
    strange = set(records) - {_HEADER, _PAYLOAD}
    if strange or not isinstance(records.get(_HEADER), ConfigRecord):
        raise TransferError(f"the message has the records {', '.join(sorted(records)) or 'none'}")
    return dict(records[_HEADER])


def chunk_of(records: RecordDict, limit: int | None = None) -> bytes:
    """Return the chunk of a message, which may have so many bytes."""
    payload = records.get(_PAYLOAD)
    if not isinstance(payload, ArrayRecord) or list(payload) != [_CHUNK]:
        raise TransferError("the message has no chunk")
    array = payload[_CHUNK]
    if (array.dtype, array.stype, tuple(array.shape)) != ("uint8", "bytes", (len(array.data),)):
        raise TransferError(f"a chunk is declared as {array.stype}, {array.dtype}, {array.shape}")
    if limit is not None and len(array.data) > limit:
        raise TransferError(f"a chunk has {len(array.data)} bytes, {limit} were asked for")
    return bytes(array.data)


def read_chunk(path: Path, offset: int, size: int) -> bytes:
    """Return a part of a file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


class Incoming:
    """A payload that is being received into a file."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest

    def append(self, offset: int, chunk: bytes) -> int:
        """Append a chunk; return how many bytes there are now.

        The chunk before may come again, when its sender did not hear that it arrived.
        """
        there = self.path.stat().st_size if self.path.exists() else 0
        if offset + len(chunk) == there and offset < there:
            return there
        if offset != there or (not chunk and there < self.manifest.size):
            raise TransferError(f"a chunk for byte {offset} came, {there} bytes are there")
        if there + len(chunk) > self.manifest.size:
            raise TransferError(f"more than the announced {self.manifest.size} bytes came")
        with self.path.open("ab") as file:
            file.write(chunk)
        return there + len(chunk)

    def check(self, go_on: Callable[[], object] = lambda: None) -> Path:
        """Return the file if it is what was announced; `go_on` as in `Manifest.of`."""
        if Manifest.of(self.path, go_on) != self.manifest:
            raise TransferError("the checksum of a payload is wrong")
        return self.path


def integer(header: Mapping[str, Any], name: str) -> int:
    """Return an entry of a header that must be a whole number."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TransferError(f"the header has {name}={value!r}, a whole number was expected")
    return value


def text(header: Mapping[str, Any], name: str) -> str:
    """Return an entry of a header that must be a string."""
    value = header.get(name)
    if not isinstance(value, str):
        raise TransferError(f"the header has {name}={value!r}, a text was expected")
    return value
