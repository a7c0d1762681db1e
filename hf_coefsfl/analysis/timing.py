"""How long a client's round takes over a connection, with devices of given speeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A client's connection: bits per second, the same in both directions, and seconds of latency."""

    bandwidth: float
    latency: float = 0.0

    def __str__(self) -> str:
        """Return "10 Mbit/s and 50 ms"."""
        return f"{self.bandwidth / 1e6:,g} Mbit/s and {1e3 * self.latency:g} ms"

    def seconds(self, num_bytes: float, transfers: float) -> float:
        """Return how long it takes to move `num_bytes` in a number of transfers, one after the other."""
        return 8 * num_bytes / self.bandwidth + transfers * self.latency


@dataclass(frozen=True)
class Devices:
    """Operations a second: of a client's device, and of what the server has for one client."""

    client: float
    server: float

    def seconds(self, work: RoundWork) -> float:
        """Return how long a round computes."""
        waited = (work.client - work.client_last) / self.client + (work.server - work.server_meanwhile) / self.server
        return waited + max(work.client_last / self.client, work.server_meanwhile / self.server)


@dataclass(frozen=True)
class RoundWork:
    """Operations of one client's round: of each side, and how many of them run at the same time as the other side's.

    While the client does its last local updates, those of a whole round, the server does what it has left. Everything
    else waits for the other side.
    """

    client: int
    server: int
    client_last: int = 0
    server_meanwhile: int = 0
