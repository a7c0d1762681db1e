"""How the server talks to clients over Flower's grid: a courier asks single questions, a channel runs a round.

A question is answered once, in time, by the client that was asked. A round is a sequence of numbered steps, whose
payloads of any size travel in chunks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Waiting
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import http_grid
from tqdm.auto import tqdm

from .errors import told
from .growing import Growing
from .wire import PROTOCOL, Manifest, TransferError, chunk_of, content, header_of, integer, read_chunk

logger = logging.getLogger(__name__)
_POLL, _LONGEST_POLL, _GROWTH = 0.05, 0.5, 1.2  # seconds between two looks for an answer, and how they grow
# What Flower raises if the SuperLink cannot be reached or has ended the run. All else comes of reading a reply.
_TRANSPORT_ERRORS = (httpx.HTTPError, OSError, RunNotRunningException)


def look_often() -> None:
    """Have Flower take an answer that is still being sent when its last part has come.

    Flower itself looks for a part after 1, 2, 4, 8, 10, 10, ... seconds. A look does not leave the server.
    """
    soon = partial(pull_objects, initial_backoff=_POLL, backoff_cap=_LONGEST_POLL, max_tries_per_object=None)
    http_grid.pull_objects = soon


class Unanswered(Exception):
    """A client gave no answer: too late, gone, or an error of its own."""


class Cancelled(Exception):
    """The answer is no longer needed."""


class Deadline:
    """Until when an answer counts, and whether it is still wanted."""

    def __init__(self, seconds: float):
        self.seconds, self.end = seconds, time.monotonic() + seconds
        self.cancelled = threading.Event()

    def left(self) -> float:
        """Return the seconds that are left; raise if there are none, or if nobody waits any longer."""
        if self.cancelled.is_set():
            raise Cancelled
        left = self.end - time.monotonic()
        if left <= 0:
            raise Unanswered(f"no answer within {self.seconds:g} s")
        return left


class Courier:
    """Asks one node at a time in each thread; several threads may ask at once."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self.broken: BaseException | None = None  # an error of the transport: no client's fault

    def nodes(self) -> dict[int, str]:
        """Return the nodes that are there, and the names that the operator has registered their keys with, if any."""
        return {node.node_id: node.name for node in self.grid.get_nodes()}

    def ask(
        self, node: int, kind: str, header: Mapping[str, Any], chunk: bytes | None, deadline: Deadline
    ) -> RecordDict:
        """Send a message and return the content of its answer, which must echo who was asked for what."""
        left = deadline.left()
        group = str(header["round"] + 1) if "round" in header else ""
        message = Message(content(header, chunk), node, kind, ttl=left + 60, group_id=group)
        answered: Future[Message] = Future()
        # A thread of its own: Flower tries for long to reach the SuperLink, and waits for a payload that a lost client
        # may never finish.
        threading.Thread(target=self._carry, args=([message], answered, deadline), daemon=True).start()
        del message, chunk
        while not answered.done():
            with contextlib.suppress(Waiting):
                answered.exception(timeout=min(deadline.left(), 0.5))
        return self._checked(answered.result(), node, header)

    def _carry(self, messages: list[Message], answered: Future[Message], deadline: Deadline) -> None:
        pause = _POLL
        try:
            (number,) = self._tried(self.grid.push_messages, messages)
            messages.clear()
            if not number:
                raise Unanswered("Flower could not send the message")
            while deadline.left() > 0:
                answers = self._tried(self.grid.pull_messages, [number])
                if answers:
                    if len(answers) > 1:
                        logger.warning("%d answers came to one message; the first counts.", len(answers))
                    answered.set_result(answers[0])
                    return
                time.sleep(pause)
                pause = min(pause * _GROWTH, _LONGEST_POLL)
        except BaseException as error:  # of which some are Flower's, and nobody else sees this thread end
            plain = error if isinstance(error, Exception) else Unanswered(f"{type(error).__name__}: {error}")
            answered.set_exception(plain)

    def _tried(self, function: Callable[[Any], Iterable[Any]], argument: Any) -> list[Any]:
        """Call Flower for one message. An error of the transport ends the run, any other is this message's alone."""
        try:
            return list(function(argument))
        except _TRANSPORT_ERRORS as error:
            if not isinstance(error, httpx.HTTPStatusError) or not self._is_answering():
                self.broken = error
            raise

    def _is_answering(self) -> bool:
        """Whether the SuperLink, which has refused a message, still answers anything."""
        try:
            self.nodes()
        except BaseException:
            return False
        return True

    def _checked(self, reply: Message, node: int, header: Mapping[str, Any]) -> RecordDict:
        if reply.has_error():
            raise Unanswered(told(reply.error))
        if reply.metadata.src_node_id != node:
            raise TransferError(f"node {reply.metadata.src_node_id} answered for node {node}")
        answer = header_of(reply.content)
        for name in ("protocol", "client", "round", "token", "sequence"):
            if name in header and answer.get(name) != header[name]:
                raise TransferError(f"the answer is for {name}={answer.get(name)!r} instead of {header[name]!r}")
        return reply.content


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
    _coming: Growing | None = None  # the payload of the last answer

    def file(self, kind: str) -> Path:
        """Return the file of a payload; no other round or client uses it."""
        return self.folder / f"{kind}-{self.header['client']}-{self.token}"

    def step(
        self, calls: list[dict[str, Any]], payload: Path | None, limit: int | None = None
    ) -> tuple[dict[str, Any], Growing | None]:
        """Have the client do some calls; return the header of its answer and its payload.

        A payload of several chunks is still on its way then. The next step waits for its end, so no round is over
        before all that was sent in it is there and what was announced. The file of the payload that was sent is
        deleted. `limit` is what the answer's may have, if that is known.
        """
        if self._coming is not None:
            self._coming.whole()  # for its own sake, and the client forgets in a step what it had left to send
        header = self._header() | {"calls": json.dumps(calls), "max_payload": self.max_payload}
        chunk = None
        if payload is not None:
            manifest = Manifest.of(payload, self.deadline.left)
            if manifest.size <= self.chunk_size:
                chunk = payload.read_bytes()
            else:
                self._deliver(payload, manifest)
            payload.unlink()
            header |= manifest.entries()
        reply = self.courier.ask(self.node, "train.step", header | self.header, chunk, self.deadline)
        answer = header_of(reply)
        announced = Manifest.read(answer, min(limit or self.max_payload, self.max_payload))
        self._coming = None
        if announced is not None:
            self._coming = self._receive(announced, chunk_of(reply, self.chunk_size))
        self.sequence += 1
        return answer, self._coming

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
                numbered = header | {"offset": offset}
                reply = self.courier.ask(self.node, "query.deliver", numbered, chunk, self.deadline)
                there = integer(header_of(reply), "received")
                if there != offset + len(chunk):
                    raise TransferError(f"the client has {there} bytes of a payload instead of {offset + len(chunk)}")
                bar.update(len(chunk))

    def _receive(self, manifest: Manifest, first: bytes) -> Growing:
        """Return a payload that begins with this chunk. The others are asked for in the background."""
        payload = Growing(self.file("from"), manifest, self.deadline.left)
        header = self._header() | {"payload_sha256": manifest.sha256}
        if len(first) < manifest.size:
            threading.Thread(target=self._fill, args=(payload, header, first), daemon=True).start()
        else:
            self._fill(payload, header, first)
            payload.whole()
        return payload

    def _fill(self, payload: Growing, header: dict[str, Any], chunk: bytes) -> None:
        try:
            with self._progress("from", payload.size) as bar:
                while (there := payload.append(chunk)) < payload.size:
                    bar.update(len(chunk))
                    reply = self.courier.ask(self.node, "query.fetch", header | {"offset": there}, None, self.deadline)
                    chunk = chunk_of(reply, self.chunk_size)
                bar.update(len(chunk))
            payload.end()
        except BaseException as error:  # nobody else sees this thread end
            payload.end(error)

    def _progress(self, direction: str, size: int) -> tqdm[Any]:
        hidden = self.title is None or size <= self.chunk_size
        return tqdm(
            total=size, unit="B", unit_scale=True, desc=f"{direction} {self.title}", leave=False, disable=hidden
        )
