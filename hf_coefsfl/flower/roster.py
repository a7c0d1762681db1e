"""Which node is which client: asked, remembered, and who has a number that several nodes claim.

Flower gives a node a new id whenever it starts, unless its key is registered with the SuperLink: then the id is the
key's. A key that the operator has registered with `--name 3` is client 3 and no other, and no other node keeps that
number from it. Numbers without such a key belong to whoever comes first, until that node is gone or fails in a round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .transport import Courier, Deadline
from .wire import PROTOCOL, TransferError, header_of, integer, text

logger = logging.getLogger(__name__)
# Seconds: how long introductions are waited for at the start and when a client may be coming back, how long at other
# rounds, how long one may take, and when one that failed is asked for again.
_GRACE, _LATER, _PATIENCE, _AGAIN = 60.0, 5.0, 3600.0, 120.0
_MOST_CLIENTS = 10**6
_LONGEST_PAUSE = 6  # as a power of two, in rounds
_INTRODUCTION = ("client", "name", "num_samples", "version", "half")


class Taken(TransferError):
    """A number belongs to another node for now."""


@dataclass(frozen=True)
class Member:
    """A client that has introduced itself; `registered`: the operator has registered its key for this number."""

    node: int
    name: str
    num_samples: int
    registered: bool = False


class Roster:
    """The clients of a run, numbered from 0; a node is a client once it has said so and holds the right half.

    Args:
        courier: who carries the questions.
        half: the fingerprint of the client half.
        num_clients: how many clients the run has; None: as many as are there at the start.
        max_samples: that a client may have.
    """

    def __init__(self, courier: Courier, half: str, num_clients: int | None, max_samples: int):
        self.courier, self.half, self._num_clients, self.max_samples = courier, half, num_clients, max_samples
        self.members: dict[int, Member] = {}
        self._failed: set[int] = set()  # clients whose last round came to nothing
        self._failures: dict[int, int] = {}  # of clients: failures in a row
        self._pauses: dict[int, int] = {}  # of clients that failed again and again: rounds that go on without them
        self._begun = False
        self._claims: dict[int, dict[str, Any]] = {}  # what nodes say that wait for a number, in order of arrival
        self._refused: dict[int, float] = {}  # nodes, and when they are asked again
        self._reasons: dict[int, str] = {}  # why nodes were not taken on when they last asked
        self._asked: dict[int, float] = {}  # since when nodes are asked who they are
        self._met: set[int] = set()  # nodes that were asked before
        self._answers: dict[int, Any] = {}
        self._online: dict[int, str] = {}  # nodes, and the names that their keys are registered with

    def close(self) -> None:
        """Fix the number of clients if it was not given: as many as are there now. Higher numbers are not taken on."""
        self._begun, self._num_clients = True, len(self)
        self.members = {client: member for client, member in self.members.items() if client < len(self)}

    def __len__(self) -> int:
        """Return the number of clients of the run."""
        return len(self.members) if self._num_clients is None else self._num_clients

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

    def note(self, succeeded: Mapping[int, bool]) -> None:
        """Take note of a round. Who failed is asked again who it is, and loses its number to a node that claims it.

        Who fails n times in a row is left out of 2**(n - 1) - 1 rounds: a single failure costs nothing.
        """
        self._pauses = {client: rounds - 1 for client, rounds in self._pauses.items() if rounds > 1}
        for client, well in succeeded.items():
            if well:
                self._failed.discard(client)
                self._failures.pop(client, None)
                self._pauses.pop(client, None)
            else:
                self._failed.add(client)
                self._failures[client] = self._failures.get(client, 0) + 1
                self._pauses[client] = 2 ** min(self._failures[client] - 1, _LONGEST_PAUSE) - 1

    def ready(self, least: int) -> list[int]:
        """Return the clients that are there, without those that failed again and again if `least` others are there."""
        there = self.online()
        others = [client for client in there if not self._pauses.get(client)]
        return others if len(others) >= least else there

    def wait_for(self, least: int, seconds: float) -> bool:
        """Look for nodes until so many clients are there; return whether they are.

        Those who are asked for the first time get some time to answer, and are taken on later if they need more. They
        get more of it if a client has just failed for the first time, which may have been restarted.
        """
        grace = _GRACE if not self._begun or 1 in self._failures.values() else min(_GRACE, _LATER)
        end, logged = time.monotonic() + seconds, time.monotonic()
        enough = math.inf  # since when
        while True:
            self.refresh()
            there = len(self.online())
            now = time.monotonic()
            enough = min(enough, now) if there >= least else math.inf
            if now - enough > grace or (there >= least and all(now - t > grace for t in self._asked.values())):
                return True
            if now >= end:
                return there >= least
            if there < least and now - logged > 60:
                logged = now
                logger.warning("%d of at least %d clients are there; waiting for the others.", there, least)
            time.sleep(1.0 if there < least else 0.2)

    def refresh(self) -> None:
        """Look who is there, ask those who are new who they are, and take on those who have answered."""
        self._online = self.courier.nodes()
        now = time.monotonic()
        self._refused = {node: until for node, until in self._refused.items() if node in self._online and now < until}
        self._claims = {node: header for node, header in self._claims.items() if node in self._online}
        self._reasons = {node: reason for node, reason in self._reasons.items() if node in self._online}
        self._met &= self._online.keys()
        sound = {member.node for client, member in self.members.items() if client not in self._failed}
        known = sound | self._refused.keys() | self._asked.keys() | self._claims.keys()
        for node in sorted(self._online.keys() - known):
            self._asked[node] = -math.inf if node in self._met else now  # rounds wait for the first answer only
            self._met.add(node)
            threading.Thread(target=self._ask, args=(node,), daemon=True).start()
        answers = self._claims | {node: self._answers.pop(node) for node in sorted(self._answers)}
        for node, answer in answers.items():
            self._asked.pop(node, None)
            try:
                if isinstance(answer, Exception):
                    raise answer
                self._admit(node, answer)
                self._claims.pop(node, None)
                self._reasons.pop(node, None)
            except Taken as error:
                self._claims[node] = answer
                self._tell(node, error)
            except Exception as error:
                self._claims.pop(node, None)
                self._refused[node] = now + _AGAIN
                self._tell(node, error)

    def _tell(self, node: int, error: Exception) -> None:
        reason = one_line(error)
        if self._reasons.get(node) != reason:
            later = " for now" if isinstance(error, Taken) else ""
            logger.warning("Node %d is not taken on%s: %s.", node, later, reason)
        self._reasons[node] = reason

    def _ask(self, node: int) -> None:
        try:
            reply = self.courier.ask(node, "query.hello", {"protocol": PROTOCOL}, None, Deadline(_PATIENCE))
            header = header_of(reply)
            self._answers[node] = {name: header[name] for name in _INTRODUCTION if name in header}
        except BaseException as error:  # an answer, too: who waits for it must not wait for ever
            self._answers[node] = error if isinstance(error, Exception) else TransferError(repr(error))

    def _admit(self, node: int, header: dict[str, Any]) -> None:
        client, name, samples = integer(header, "client"), text(header, "name"), integer(header, "num_samples")
        if text(header, "version") != __version__:
            raise TransferError(f"it runs hf_coefsfl {header['version']!r}, the server {__version__}")
        number = self._online.get(node, "")
        registered = number.isascii() and number.isdecimal()
        if registered and int(number) != client:
            raise TransferError(f"it says it is client {client}, its key is registered as client {int(number)}")
        numbers = range(self._num_clients or _MOST_CLIENTS)
        if client not in numbers:
            raise TransferError(f"it says it is client {client}, the run has {self._num_clients}, numbered from 0")
        if not 1 <= samples <= self.max_samples:
            raise TransferError(f"it says it has {samples} samples, max_samples={self.max_samples} are allowed")
        if not _is_printable(name):
            raise TransferError("its name is empty, too long, or not printable")
        if name != str(client) and name.isdecimal() and int(name) in numbers:
            raise TransferError(f"it says it is called {name!r}, which another client is")
        if text(header, "half") != self.half:
            raise TransferError("its half of the model is not this run's: give it the folder of `coefsfl split`")
        present = self.members.get(client)
        if present is not None and present.node != node:
            if not self._gives_way(client, present, registered):
                raise Taken(f"it says it is client {client}, which is node {present.node}")
            logger.info("Client %d is node %d from now on. It was node %d.", client, node, present.node)
            if registered and not present.registered:  # what the other did does not count against the owner of the key
                self._failures.pop(client, None)
                self._pauses.pop(client, None)
        others = {c: member for c, member in self.members.items() if c != client and member.node != node}
        if any(member.name == name for member in others.values()):
            logger.warning(
                "Client %d says it is called %r, which another client is: it keeps its number.", client, name
            )
            name = str(client)
        self.members = others | {client: Member(node, name, samples, registered)}
        self._failed.discard(client)

    def _gives_way(self, client: int, present: Member, registered: bool) -> bool:
        """Whether a node loses its number to another that claims it, whose key is or is not registered for it."""
        if registered != present.registered:
            return registered
        return present.node not in self._online or client in self._failed


def one_line(error: BaseException) -> str:
    """Return what an error says, fit for a log: printable, on one line, not endless."""
    words = " ".join(str(error).split())
    return "".join(c if c.isprintable() else "?" for c in words)[:500].rstrip(".")


def _is_printable(name: str) -> bool:
    """Whether a name may stand in a log."""
    return 0 < len(name) <= 100 and name.isprintable()
