"""The client's list of every message that left it: a line of JSON each, on the disk before the message goes.

This module imports no PyTorch: a process that only passes on a chunk starts at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from .._io import sync
from .lasting import lasting_folder
from .wire import chunk_of, has_chunk, header_of

AUDIT_LOG = "audit.jsonl"


def note(reply: Message, kind: str, context: Context) -> None:
    """Add the line of a message that is about to leave."""
    line: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "run": context.run_id,
        "round": None,
        "kind": kind,
    }
    if reply.has_error():
        data = (reply.error.reason or "").encode()
        line |= _sums(data) | {"error": reply.error.code}
    else:
        index = header_of(reply.content).get("round")  # as the server said it
        line |= {"round": index if type(index) is int else None} | sums_of(reply.content)
    _append(lasting_folder(context.node_config) / AUDIT_LOG, json.dumps(line, default=repr) + "\n")


def sums_of(records: RecordDict) -> dict[str, Any]:
    """Return size and checksum of a message: of its header as JSON with sorted keys, followed by its chunk, if any."""
    header = json.dumps(header_of(records), sort_keys=True, default=repr).encode()
    return _sums(header, chunk_of(records) if has_chunk(records) else b"")


def _sums(*parts: bytes) -> dict[str, Any]:
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return {"bytes": sum(map(len, parts)), "sha256": checksum.hexdigest()}


def _append(path: Path, line: str) -> None:
    """Append in one write, as other processes of the client may, too; return when it is on the disk."""
    is_new = not path.exists()
    handle = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        data = line.encode()
        if os.write(handle, data) < len(data):
            raise OSError(f"{path} took only a part of a line: is the disk full?")
        os.fsync(handle)
    finally:
        os.close(handle)
    if is_new:
        sync(path.parent)
