"""The ClientApp. Flower starts a process for each message, so what a round needs again lies in files.

A message is one of: `query.hello` (who are you), `train.step` (some calls of the round script), `query.deliver` (a
chunk of a payload that is too large for a step) and `query.fetch` (a chunk of what a step has left to send). The last
two only copy bytes and load nothing of PyTorch. A client that cannot answer sends one of a few fixed texts
(`errors.py`): what went wrong is in its own log.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .audit import note
from .errors import Code, code_of, failing_as
from .lasting import private_folder
from .wire import (
    PROTOCOL,
    Incoming,
    Manifest,
    TransferError,
    chunk_of,
    content,
    has_chunk,
    header_of,
    integer,
    read_chunk,
    text,
)

if TYPE_CHECKING:
    from .client_node import ClientNode

logger = logging.getLogger(__name__)
client_app = ClientApp()
Handler = Callable[[Message, Context], Message]

# What has come for the next step, what the last one has left to send, and the checksum of that.
_INBOX, _OUTBOX, _CHECKSUM = "inbox", "outbox", "outbox.sha256"
_KEPT = 24 * 3600  # seconds
_LARGEST_PAYLOAD, _LARGEST_CHUNK = 16 * 2**30, 256 * 2**20  # bytes, whatever the server allows
_ECHOED = ("protocol", "client", "round", "token", "sequence")


def work_folder(context: Context) -> Path:
    """Return the folder of this node in this run, which only its user may read.

    HF_COEFSFL_WORK names its parent; by default that is the folder for temporary files.
    """
    parent = Path(os.environ.get("HF_COEFSFL_WORK") or tempfile.gettempdir())
    folder = parent / f"hf_coefsfl-{os.getuid()}" / f"{context.run_id}-{context.node_id}"
    private_folder(folder.parent)  # it lies where others may write
    return private_folder(folder)


def _guarded(handler: Handler) -> Handler:
    """Have what a handler answers noted before it leaves; what it raises is logged and answered with a fixed text.

    Flower itself would send an exception as it is.
    """

    @functools.wraps(handler)
    def answer(message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        try:
            reply = handler(message, context)
            note(reply, kind, context)
            return reply
        except (Exception, SystemExit) as error:
            code = code_of(error)
            logger.exception("%s failed; the server is told: %s", kind, code.value[1])
        reply = Message(code.error(), reply_to=message)
        try:
            note(reply, kind, context)
        except Exception:
            logger.exception("The audit log cannot be written")  # the fixed text may go: it says nothing
        return reply

    return answer


@client_app.query("hello")
@_guarded
def hello(message: Message, context: Context) -> Message:
    """Say which client this is, what it holds, and how much data it has."""
    header = header_of(message.content)
    if header.get("protocol") != PROTOCOL:
        raise TransferError(f"the server speaks protocol {header.get('protocol')}, this client {PROTOCOL}")
    _forget_old_rounds(work_folder(context))
    return Message(content(_node(context).introduce()), reply_to=message)


@client_app.query("deliver")
@_guarded
def deliver(message: Message, context: Context) -> Message:
    """Take a chunk of the payload of the next step."""
    header = header_of(message.content)
    offset = integer(header, "offset")
    folder = _round_folder(context, header, begins=offset == 0)
    manifest = Manifest.read(header, _most(header, folder))
    if manifest is None:
        raise TransferError("a chunk came without a manifest")
    if offset == 0:
        (folder / _INBOX).unlink(missing_ok=True)
    there = Incoming(folder / _INBOX, manifest).append(offset, chunk_of(message.content, _LARGEST_CHUNK))
    return Message(content(_echo(header) | {"received": there}), reply_to=message)


@client_app.query("fetch")
@_guarded
def fetch(message: Message, context: Context) -> Message:
    """Send a chunk of what the last step left; with the last chunk it is deleted."""
    header = header_of(message.content)
    folder = _round_folder(context, header)
    offset, size = integer(header, "offset"), _chunk_size(header)
    checksum = folder / _CHECKSUM
    if not checksum.exists() or text(header, "payload_sha256") != checksum.read_text():
        raise TransferError("there is no such payload here")
    chunk = read_chunk(folder / _OUTBOX, offset, size)
    if offset + len(chunk) == (folder / _OUTBOX).stat().st_size:
        (folder / _OUTBOX).unlink()
        checksum.unlink()
        _forget_if_over(folder)
    return Message(content(_echo(header), chunk), reply_to=message)


@client_app.train("step")
@_guarded
def step(message: Message, context: Context) -> Message:
    """Do some calls of the round script."""
    header = header_of(message.content)
    folder = _round_folder(context, header, begins=True)
    manifest = Manifest.read(header, _most(header, folder))
    payload = None
    if manifest is not None:
        incoming = Incoming(folder / _INBOX, manifest)
        if has_chunk(message.content):
            incoming.path.unlink(missing_ok=True)
            incoming.append(0, chunk_of(message.content, _LARGEST_CHUNK))
        payload = incoming.check()
    for name in (_OUTBOX, _CHECKSUM):
        (folder / name).unlink(missing_ok=True)
    from .client_round import ClientRound

    done = ClientRound(_node(context), folder, header).run(json.loads(text(header, "calls")), payload, folder / _OUTBOX)
    (folder / _INBOX).unlink(missing_ok=True)
    answer = _answer(_echo(header) | done, folder / _OUTBOX, _chunk_size(header))
    _forget_if_over(folder)
    return Message(answer, reply_to=message)


def _round_folder(context: Context, header: dict[str, Any], begins: bool = False) -> Path:
    """Return the folder of the round that a message belongs to. The first message of a round makes it.

    A step of an earlier round that still runs then finds its own folder gone, and leaves the new one alone.
    """
    parent = work_folder(context)
    folder = parent / hashlib.sha256(text(header, "token").encode()).hexdigest()
    if begins and integer(header, "sequence") == 0:
        for other in parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return private_folder(folder)
    if not folder.exists():
        raise TransferError("there is no such round here")
    return folder


def _forget_if_over(folder: Path) -> None:
    """Delete the folder of a round that has left nothing to send."""
    with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()


def _most(header: dict[str, Any], folder: Path) -> int:
    """Return how many bytes a payload may have: half of the disk stays free for others."""
    inbox = folder / _INBOX
    free = shutil.disk_usage(folder).free + (inbox.stat().st_size if inbox.exists() else 0)
    return min(integer(header, "max_payload"), _LARGEST_PAYLOAD, free // 2)


def _chunk_size(header: dict[str, Any]) -> int:
    """Return how many bytes a message of this client may carry."""
    size = integer(header, "chunk_size")
    if size < 1:
        raise TransferError(f"the header has chunk_size={size}")
    return min(size, _LARGEST_CHUNK)


def _node(context: Context) -> ClientNode:
    from .prepared import node_of

    with failing_as(Code.SETUP):
        return node_of(context.run_id, context.run_config, context.node_config)


def _answer(header: dict[str, Any], outbox: Path, chunk_size: int) -> Any:
    """Return what a step answers, with the beginning of its payload or all of it."""
    if not outbox.exists():
        return content(header)
    manifest = Manifest.of(outbox)
    chunk = read_chunk(outbox, 0, chunk_size)
    if manifest.size <= chunk_size:
        outbox.unlink()
    else:
        outbox.with_name(_CHECKSUM).write_text(manifest.sha256)
    return content(header | manifest.entries(), chunk)


def _echo(header: dict[str, Any]) -> dict[str, Any]:
    return {name: header[name] for name in _ECHOED if name in header}


def _forget_old_rounds(folder: Path) -> None:
    """Delete what rounds that never ended have left here a day ago or more: smashed data should not lie about."""
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # another node may be at it
            if time.time() - other.stat().st_mtime > _KEPT:
                shutil.rmtree(other)
