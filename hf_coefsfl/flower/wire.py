"""What goes into Flower's messages: a header, and a payload that is a file sent in chunks.

A message is one record: each further object of Flower's would cost a request in each direction, more than a kilobyte.
This module imports no PyTorch: a process that only passes on a chunk starts at once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

PROTOCOL = 3  # what both sides must speak
_RECORD, _START, _CHUNK = "header", ".start", ".chunk"  # entries of a header have no dot
_LARGEST_START = 2**24  # bytes: the header of a safetensors file


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
    """Return the content of a message.

    A payload begins with the header of its safetensors file. It is sent compressed: names and shapes repeat, and of a
    small batch in few bits they are some percent.
    """
    record: dict[str, Any] = dict(header)
    if chunk is not None:
        start = 8 + int.from_bytes(chunk[:8], "little")
        if start > _LARGEST_START or chunk[8:9] != b"{":  # a chunk from the middle of a payload
            start = 0
        record |= {_START: zlib.compress(chunk[:start], 9), _CHUNK: chunk[start:]}
    return RecordDict({_RECORD: ConfigRecord(record)})


def header_of(records: RecordDict) -> dict[str, Any]:
    """Return the header of a message; anything besides one record is refused."""
    return {name: value for name, value in _record(records).items() if name not in (_START, _CHUNK)}


def has_chunk(records: RecordDict) -> bool:
    """Whether a message has a part of a payload."""
    return _CHUNK in _record(records)


def chunk_of(records: RecordDict, limit: int | None = None) -> bytes:
    """Return the chunk of a message, which may have so many bytes."""
    record = _record(records)
    start, rest = record.get(_START), record.get(_CHUNK)
    if not isinstance(start, bytes) or not isinstance(rest, bytes):
        raise TransferError("the message has no chunk")
    most = _LARGEST_START if limit is None else max(0, min(limit, _LARGEST_START))
    reader = zlib.decompressobj()
    try:
        inflated = reader.decompress(start, most + 1)  # no more memory than it may have
    except zlib.error as error:
        raise TransferError(f"the beginning of a chunk cannot be read: {error}") from error
    if limit is not None and len(inflated) + len(rest) > limit:
        raise TransferError(f"a chunk has more than the {limit} bytes that were asked for")
    if not reader.eof or reader.unused_data:
        raise TransferError("the beginning of a chunk is not whole")
    return inflated + rest


def _record(records: RecordDict) -> ConfigRecord:
    record = records.get(_RECORD)
    if len(records) != 1 or not isinstance(record, ConfigRecord):
        raise TransferError(f"the message has the records {', '.join(sorted(records)) or 'none'}")
    return record


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

    def check(self) -> Path:
        """Return the file if it is what was announced."""
        if Manifest.of(self.path) != self.manifest:
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
