"""Which node is which client: asked once, remembered, and not to be taken over."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .transport import Courier, Deadline
from .wire import PROTOCOL, TransferError, header_of, integer, text

logger = logging.getLogger(__name__)
_MOST_SAMPLES = 2**40
# Seconds: how long rounds wait for an introduction, how long it may take, and when one that failed is asked for again.
_GRACE, _PATIENCE, _AGAIN = 60.0, 3600.0, 120.0
_MOST_CLIENTS = 10**6


@dataclass(frozen=True)
class Member:
    """A client that has introduced itself."""

    node: int
    name: str
    num_samples: int


class Roster:
    """The clients of a run, numbered from 0; a node is a client once it has said so and holds the right half.

    Args:
        courier: who carries the questions.
        half: the fingerprint of the client half.
        num_clients: how many clients the run has; None: as many as are there at the start.
    """

    def __init__(self, courier: Courier, half: str, num_clients: int | None):
        self.courier, self.half, self._num_clients = courier, half, num_clients
        self.members: dict[int, Member] = {}
        self._refused: dict[int, float] = {}  # nodes, and when they are asked again
        self._asked: dict[int, float] = {}  # since when nodes are asked who they are
        self._answers: dict[int, Any] = {}
        self._online: set[int] = set()

    def close(self) -> None:
        """Fix the number of clients if it was not given: as many as are there now."""
        self._num_clients = len(self)

    def __len__(self) -> int:
        """Return the number of clients of the run."""
        return self._num_clients or max(self.members, default=-1) + 1

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each client, 0 of those that were never there."""
        return [self.members[c].num_samples if c in self.members else 0 for c in range(len(self))]

    def name(self, client: int) -> str:
        """Return what a client is called."""
        return self.members[client].name if client in self.members else str(client)

    def online(self) -> list[int]:
        """Return the clients whose node was there at the last look."""
        return [client for client, member in sorted(self.members.items()) if member.node in self._online]

    def wait_for(self, least: int, seconds: float) -> bool:
        """Look for nodes until so many clients are there; return whether they are.

        Those who are being asked who they are get some time to answer, and are taken on later if they need more.
        """
        end, logged = time.monotonic() + seconds, time.monotonic()
        while True:
            self.refresh()
            there = len(self.online())
            now = time.monotonic()
            if there >= least and all(now - since > _GRACE for since in self._asked.values()):
                return True
            if now >= end:
                return there >= least
            if there < least and now - logged > 60:
                logged = now
                logger.warning("%d of at least %d clients are there; waiting for the others.", there, least)
            time.sleep(1.0 if there < least else 0.2)

    def refresh(self) -> None:
        """Look who is there, ask those who are new who they are, and take on those who have answered."""
        self._online = set(self.courier.nodes())
        self._refused = {
            node: until for node, until in self._refused.items() if node in self._online and time.monotonic() < until
        }
        known = {member.node for member in self.members.values()} | self._refused.keys() | self._asked.keys()
        for node in sorted(self._online - known):
            self._asked[node] = time.monotonic()
            threading.Thread(target=self._ask, args=(node,), daemon=True).start()
        for node in sorted(self._answers):
            answer = self._answers.pop(node)
            del self._asked[node]
            try:
                if isinstance(answer, Exception):
                    raise answer
                self._admit(node, answer)
            except Exception as error:
                # What it says of itself does not change while it is there; an error may pass.
                again = math.inf if isinstance(error, TransferError) else time.monotonic() + _AGAIN
                self._refused[node] = again
                logger.warning("Node %d is not taken on: %s.", node, one_line(error))

    def _ask(self, node: int) -> None:
        try:
            reply = self.courier.ask(node, "query.hello", {"protocol": PROTOCOL}, None, Deadline(_PATIENCE))
            self._answers[node] = header_of(reply)
        except Exception as error:
            self._answers[node] = error

    def _admit(self, node: int, header: dict[str, Any]) -> None:
        client, name, samples = integer(header, "client"), text(header, "name"), integer(header, "num_samples")
        if text(header, "version") != __version__:
            raise TransferError(f"it runs hf_coefsfl {header['version']!r}, the server {__version__}")
        if not 0 <= client < (self._num_clients or _MOST_CLIENTS):
            raise TransferError(f"it says it is client {client}, the run has {self._num_clients}")
        if not 1 <= samples <= _MOST_SAMPLES:
            raise TransferError(f"it says it has {samples} samples")
        if not _is_printable(name):
            raise TransferError("its name is empty, too long, or not printable")
        if text(header, "half") != self.half:
            raise TransferError("its half of the model is not this run's: give it the folder of `coefsfl split`")
        taken = {other: {member.name, str(other)} for other, member in self.members.items() if other != client}
        if any(name in names for names in taken.values()):
            raise TransferError(f"it says it is called {name!r}, which another client is")
        present = self.members.get(client)
        if present is not None and present.node in self._online:
            raise TransferError(f"it says it is client {client}, which is node {present.node}")
        self.members[client] = Member(node, name, samples)


def one_line(error: Exception) -> str:
    """Return what an error says, fit for a log: printable, on one line, not endless."""
    words = " ".join(str(error).split())
    return "".join(c if c.isprintable() else "?" for c in words)[:500].rstrip(".")


def _is_printable(name: str) -> bool:
    """Whether a name may stand in a log."""
    return 0 < len(name) <= 100 and name.isprintable()
