"""Questions to clients over Flower's grid, each answered once, in time, by the one who was asked."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Waiting
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .wire import TransferError, content, header_of

logger = logging.getLogger(__name__)
_POLL, _LONGEST_POLL = 0.05, 1.0  # seconds between two looks for an answer


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
        self.broken: Exception | None = None  # what Flower itself raised: no client's fault

    def nodes(self) -> list[int]:
        """Return the nodes that are there."""
        return list(self.grid.get_node_ids())

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
                found = self._tried(self.grid.pull_messages, [number])
                if found:
                    if len(found) > 1:
                        logger.warning("%d answers came to one message; the first counts.", len(found))
                    answered.set_result(found[0])
                    return
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_POLL)
        except Exception as error:
            answered.set_exception(error)

    def _tried(self, function: Callable[[Any], Iterable[Any]], argument: Any) -> list[Any]:
        """Call Flower; what it raises ends the run, as it would for every client."""
        try:
            return list(function(argument))
        except Exception as error:
            self.broken = error
            raise

    def _checked(self, reply: Message, node: int, header: Mapping[str, Any]) -> RecordDict:
        if reply.has_error():
            raise Unanswered(reply.error.reason or f"Flower reports error {reply.error.code}")
        if reply.metadata.src_node_id != node:
            raise TransferError(f"node {reply.metadata.src_node_id} answered for node {node}")
        answer = header_of(reply.content)
        for name in ("protocol", "client", "round", "token", "sequence"):
            if name in header and answer.get(name) != header[name]:
                raise TransferError(f"the answer is for {name}={answer.get(name)!r} instead of {header[name]!r}")
        return reply.content
